#pragma once

#include <pthread.h>
#include <signal.h>

namespace acc::base {

// Lets this thread take no signals but those of its own faults, and returns what it let before.
inline sigset_t block_signals() {
  sigset_t blocked;
  sigset_t before;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
    sigdelset(&blocked, fault);
  }
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  return before;
}

// While it lives its thread takes no signals. They wait, or go to other threads. Threads that are
// started meanwhile never take any.
class SignalsBlocked {
 public:
  SignalsBlocked() : before_(block_signals()) {}
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  const sigset_t before_;
};

}  // namespace acc::base
