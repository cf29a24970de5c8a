#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/runtime/gil.h"

// Settings that change what an operator computes, as one word: default dtype, number of threads,
// deterministic algorithms, cuDNN and oneDNN switches, reduced-precision reductions,
// flush-denormal, and, for operators that multiply, the precision of float32 products and grad
// mode: oneDNN's recurrent layers keep what their backward needs only with it.
//
// An operator runs after the `with` block that set them may have ended, so each node carries the
// word that was in force when it was recorded, and the executor restores it. Autocast,
// inference mode and the choice between attention kernels act above the recorder and are not in it.
namespace acc::runtime {

// The settings that the user's program has in force. `products`: also read what only operators that
// multiply depend on, which costs several look-ups.
//
// Most settings belong to the process, so what a running plan has brought into force is seen by
// threads without the interpreter lock; here it is told from what the program asked for.
uint64_t ambient_word(bool products);

// Whether `word` asks for deterministic algorithms.
bool is_deterministic(uint64_t word);

// Whether gradients were wanted when an operator that multiplies was recorded; nothing for others.
std::optional<bool> gradients_of(uint64_t word);

// A setting in which two words differ, for people.
struct ChangedSetting {
  std::string name;
  std::string before;
  std::string after;
};
std::vector<ChangedSetting> changed_settings(uint64_t before, uint64_t after);

// Changes when a plan begins or ends to have settings of its own in force; odd while one has. What
// was learnt between two equal even answers was learnt under the settings of the program.
uint64_t ambient_epoch();

// Waits, without the interpreter lock, until no plan of another thread has settings of its own in
// force. The next may begin at once.
void await_program_settings();

// Lets a plan's operators run under the settings they were recorded with, and brings back what was
// in force when it ends.
//
// Plans that find what they want in force run side by side. One that wants something else runs
// alone from there on, and holds the interpreter lock: no Python of another thread sees its
// settings, saves them or changes them. So nothing here may be waited for with that lock held, and
// a kernel must not wait for a thread that needs it. A kernel written in Python may let other
// threads run: what these change to another value than the plan's stays. One thread has one scope
// at a time.
class AmbientScope {
 public:
  AmbientScope();
  ~AmbientScope();
  AmbientScope(const AmbientScope&) = delete;
  AmbientScope& operator=(const AmbientScope&) = delete;

  // What the next operator wants.
  void set(uint64_t word);

 private:
  void go_alone();

  const uint64_t initial_;
  bool alone_ = false;
  std::optional<GilHold> gil_;
};

// Several processes train together and must all choose the same: nothing may depend on time. So it
// is from the start in one of WORLD_SIZE processes, and from `choose_alike` on, which returns false
// where it was so already.
bool chooses_alike();
bool choose_alike();

}  // namespace acc::runtime
