#pragma once

#include <cstdint>
#include <mutex>

// Settings that change what an operator computes, as one word: default dtype, number of threads,
// deterministic algorithms, cuDNN and oneDNN switches, reduced-precision reductions,
// flush-denormal, and, for operators that multiply, the precision of float32 products and grad
// mode: oneDNN's recurrent layers keep what their backward needs only with it.
//
// An operator runs after the `with` block that set them may have ended, so each node carries the
// word that was in force when it was recorded, and the executor restores it. Autocast,
// inference mode and the choice between attention kernels act above the recorder and are not in it.
namespace acc::runtime {

// `products`: also read what only operators that multiply depend on, which costs several look-ups.
uint64_t ambient_word(bool products);

// Brings the settings of a word into force while it lives. `set` does nothing when they are. Most
// belong to the process, so that another thread which looks at them while a plan runs that was
// recorded under others sees those; what it sets stays. One scope is alive at a time: another
// thread waits for it, so do not hold the interpreter lock when making one.
class AmbientScope {
 public:
  AmbientScope();
  ~AmbientScope();
  AmbientScope(const AmbientScope&) = delete;
  AmbientScope& operator=(const AmbientScope&) = delete;
  void set(uint64_t word);

 private:
  const std::lock_guard<std::mutex> alone_;
  const uint64_t initial_;
  uint64_t current_;
};

}  // namespace acc::runtime
