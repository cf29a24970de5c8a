#pragma once

#include <cstdint>

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

// Brings the settings of a word into force while it lives, and then back what was in force. `set`
// does nothing when they are.
//
// Most settings belong to the process. Threads that want the same ones run side by side; one that
// wants others waits until the rest are done, so do not hold the interpreter lock around it. A
// thread that only looks at the settings meanwhile sees those of the plans that run; what it sets
// stays. Scopes of one thread may nest: a kernel written in Python may flush.
class AmbientScope {
 public:
  AmbientScope();
  ~AmbientScope();
  AmbientScope(const AmbientScope&) = delete;
  AmbientScope& operator=(const AmbientScope&) = delete;
  void set(uint64_t word);

 private:
  void bring(uint64_t word);

  const uint64_t initial_;
  uint64_t current_;
  bool relies_ = false;  // on what the process has in force
};

}  // namespace acc::runtime
