#include "kernels/jit/process.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>

#include "csrc/base/check.h"
#include "kernels/jit/files.h"

namespace acc::jit {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kKeptOutput = 4096;
// How long a killed program may take to go, for example out of a file system that hangs.
constexpr milliseconds kGrace{2000};

std::atomic<bool> stopped{false};
// Guards `running`, and is held while a program starts: one that starts is seen by stop_processes.
std::mutex programs;
// The leaders of the groups. Never destroyed: threads may still use it when the process ends.
std::vector<pid_t>& running = *new std::vector<pid_t>;

// The child of a fork is not the parent of these.
void guard_programs_over_fork() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { programs.lock(); }, [] { programs.unlock(); },
                   [] {
                     running.clear();
                     programs.unlock();
                   });
  });
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

// 0, or the number of the error. The caller holds `programs`.
int spawn(const Command& command, int output, pid_t& pid) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, output, STDERR_FILENO);

  // The thread blocks all signals, and the host program may ignore some: the compiler shall not.
  sigset_t none;
  sigemptyset(&none);
  sigset_t usual;
  sigemptyset(&usual);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGCHLD, SIGXFSZ}) {
    sigaddset(&usual, signal);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &usual);

  const std::vector<char*> arguments = pointers(command.arguments);
  const std::vector<char*> environment = pointers(command.environment);
  const int error =
      posix_spawn(&pid, arguments[0], &files, &attributes, arguments.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return error;
}

// Takes what there is without waiting. False at the end of the pipe.
bool drain(int pipe, std::string& output) {
  char buffer[4096];
  for (;;) {
    const ssize_t n = read(pipe, buffer, sizeof buffer);
    if (n == 0) return false;
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    const size_t room = kKeptOutput - output.size();
    output.append(buffer, std::min(room, static_cast<size_t>(n)));
  }
}

enum class End { Ended, TimedOut, Unknown };

// Until the program ended; it stays a zombie, so that its number names no other group.
End wait_for_end(pid_t pid, int pipe, Clock::time_point deadline, std::string& output) {
  bool open = true;
  for (;;) {
    open = open && drain(pipe, output);
    siginfo_t info{};
    if (waitid(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
      if (errno != EINTR) return End::Unknown;
    } else if (info.si_pid == pid) {
      if (open) drain(pipe, output);
      return End::Ended;
    }
    if (Clock::now() >= deadline) return End::TimedOut;
    // The pipe wakes us when the program ends. Once that has been seen, or while a child of it
    // holds the pipe open, its end is looked for.
    pollfd wanted{pipe, POLLIN, 0};
    poll(open ? &wanted : nullptr, open ? 1 : 0, open ? 20 : 1);
  }
}

// Collects a program that has ended or was killed. False when its status is not to be had.
bool collect(pid_t pid, int& status) {
  const Clock::time_point deadline = Clock::now() + kGrace;
  for (;;) {
    const pid_t got = waitpid(pid, &status, WNOHANG);
    if (got == pid) return true;
    if ((got < 0 && errno != EINTR) || Clock::now() >= deadline) return false;
    poll(nullptr, 0, 1);
  }
}

}  // namespace

Outcome run(const Command& command) {
  guard_programs_over_fork();
  Outcome outcome;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
    outcome.problem = "could not be started: " + error_text(errno);
    return outcome;
  }
  const Descriptor reading(ends[0]);
  Descriptor writing(ends[1]);
  pid_t pid = 0;
  {
    const std::lock_guard lock(programs);
    const int error = stopped ? ECANCELED : spawn(command, writing.get(), pid);
    if (error != 0) {
      outcome.problem = stopped ? "was not started: the process ends"
                                : "could not be started: " + error_text(error);
      return outcome;
    }
    running.push_back(pid);
  }
  writing.close();

  const End end = wait_for_end(pid, reading.get(), Clock::now() + command.limit, outcome.output);
  int status = 0;
  {
    const std::lock_guard lock(programs);
    if (end != End::Unknown) kill(-pid, SIGKILL);
    std::erase(running, pid);
  }
  const bool known = collect(pid, status);
  if (end == End::TimedOut) {
    outcome.problem = base::concat("took longer than ", command.limit.count() / 1000.0, " s");
  } else if (!known || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
    outcome.success = true;
  } else if (WIFEXITED(status)) {
    outcome.problem = base::concat("ended with status ", WEXITSTATUS(status));
  } else {
    outcome.problem = base::concat("was ended by signal ", WTERMSIG(status));
  }
  return outcome;
}

void stop_processes() {
  stopped = true;
  const std::lock_guard lock(programs);
  for (const pid_t pid : running) kill(-pid, SIGKILL);
}

bool processes_stopped() { return stopped; }

}  // namespace acc::jit
