#pragma once

#include <exception>
#include <mutex>
#include <string>

// Python's interpreter lock and its signals, known here through functions that the extension module
// installs: nothing below the bindings includes Python.
namespace acc::runtime {

struct Gil {
  bool (*held)() = nullptr;
  void* (*release)() = nullptr;  // the token that `acquire` takes back
  void (*acquire)(void*) = nullptr;
  // Takes it in a thread that may hold it already, or be unknown to Python. Null: Python is gone.
  void* (*hold)() = nullptr;
  void (*let_go)(void*) = nullptr;  // of what `hold` returned
  // Whether a caught exception is Python's KeyboardInterrupt.
  bool (*is_interrupt)(const std::exception&) = nullptr;
  // Adds a note (PEP 678) to a caught exception if it is one of Python's own; false: it is not.
  bool (*add_note)(const std::exception&, const std::string& note) = nullptr;
  // Whether Ctrl-C came, which Python's main thread, and no other, is told when it goes on.
  bool (*interrupted)() = nullptr;
  // Lets the handlers of signals run, in Python's main thread; throws what they raise.
  void (*handle_signals)() = nullptr;
};
void install_gil(const Gil& gil);

// Whether the user asked to stop: whoever catches everything lets this one through.
bool is_interrupt(const std::exception& error);

// Adds a note to a caught exception of Python's, to be thrown as it is; false for others.
bool add_note(const std::exception& error, const std::string& note);

// Whether this thread should not wait any longer, since Ctrl-C came. Its handler runs as soon as
// Python goes on. Python's main thread is the one that is told; where it waits for a mutex, so are
// those that may have it.
bool interrupted();

// What Python would do next: raises KeyboardInterrupt, unless the program handles Ctrl-C otherwise.
// The caller holds no lock.
void handle_signals();

// Gives the interpreter lock away while it lives, if this thread holds it.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  void* token_ = nullptr;
};

// Has the interpreter lock while it lives, as long as there is an interpreter.
class GilHold {
 public:
  GilHold();
  ~GilHold();
  GilHold(const GilHold&) = delete;
  GilHold& operator=(const GilHold&) = delete;

 private:
  void* const token_;
};

// Locks a mutex by one rule: nobody waits for it while holding the interpreter lock. A thread that
// owns the mutex may therefore take the interpreter lock (a Python object dies, a Python kernel
// runs) without a deadlock. Unlocks before it takes the interpreter lock back.
class LockWithoutGil {
 public:
  explicit LockWithoutGil(std::mutex& mutex);
  ~LockWithoutGil();
  LockWithoutGil(const LockWithoutGil&) = delete;
  LockWithoutGil& operator=(const LockWithoutGil&) = delete;

  // Whether Ctrl-C came meanwhile, and whoever had the mutex was told to give up for it.
  bool was_interrupted() const { return kept_; }

 private:
  std::mutex& mutex_;
  void* token_ = nullptr;
  bool kept_ = false;
};

}  // namespace acc::runtime
