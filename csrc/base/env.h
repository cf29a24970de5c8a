#pragma once

#include <cstdint>
#include <string>
#include <vector>

// Every ACC_* environment variable. The table in env.cpp is the only place that names them and the
// only place that reads the environment; the documentation is generated from `table()`.
//
// A variable is read once, at the first call of its getter; an unset or empty one has its default.
// The case of letters does not matter in words. A value that is not allowed throws base::Error,
// which names the variable, the value and what is allowed; the getter reads and throws again at
// later calls.
namespace acc::base::env {

enum class Mode : uint8_t { Eager, NoFuse, NoGraph, Full };
enum class Executor : uint8_t { Auto, Cuda, Host };
enum class Dump : uint8_t { None, Graph, Plan, Passes };
enum class LogLevel : uint8_t { Debug, Info, Warning, Error };

// Device indices of the host executor are 0..kMaxHostDevices-1. Torch's own index is a signed byte;
// half of it leaves room for every table that is indexed by device.
inline constexpr int kMaxHostDevices = 64;

Mode mode();
// Whether plans have generated kernels in that mode.
bool fuses();
Executor executor();
bool host_graphs();
// The larger of ACC_HOST_DEVICES and LOCAL_WORLD_SIZE (torchrun's): each local rank has a device.
// Throws base::Error when LOCAL_WORLD_SIZE is no number or above kMaxHostDevices.
int host_devices();
LogLevel log_level();
uint64_t plan_cache_bytes();
// Pending nodes after which the recorder flushes on its own.
int64_t max_pending();
// The same for bytes that nothing but pending nodes holds.
uint64_t max_pending_bytes();
// Steps in flight beyond the one being recorded.
int max_inflight();
// Whether nodes remember the Python line that recorded them.
bool source_lines();
Dump dump();
// Names of passes, separated by commas.
std::string skip_passes();
// Whether generated kernels round to half types after each operator.
bool exact();
// Whether nothing that changes bits may depend on time.
bool deterministic();
// Whether threads begin in strict mode (lazy/session/strict.h).
bool strict();
// The C++ compiler for generated kernels, a path or a name; "" for the first that PATH has.
std::string cxx();
// Seconds after which a compiler is ended.
int compile_timeout_s();
// Where generated kernels are kept on disk; "" for the user's cache directory.
std::string cache_dir();
// The size on disk above which the oldest of them go.
uint64_t cache_bytes();
// Where the CUDA text of generated kernels is written; "" for nowhere.
std::string kernel_texts();

// As they are written in the environment.
const char* name(Mode value);
const char* name(Executor value);
const char* name(Dump value);
const char* name(LogLevel value);

struct Variable {
  std::string name;
  std::string type;           // "choice", "integer", "flag" or "string"
  std::string allowed;        // "eager, nofuse, nograph, full" or "1..64"; a string: "any"
  std::string default_value;  // "" where unset means off
  std::string doc;            // one line
};

// All variables, in the order of the table.
std::vector<Variable> table();

// Reads every variable; throws base::Error for the first bad one. For the start of the process, so
// that a bad value is told before any work is done.
void validate();

// Names in the environment that begin with ACC_ and are neither in the table nor used by the build,
// by the tests or by OpenACC. Sorted.
std::vector<std::string> unknown();

// A variable that is not ours (HOME, PATH, TMPDIR), as it is now; "" when it is not set.
std::string foreign(const char* name);

// The whole environment as NAME=value, for a process to be started. Not for use while another
// thread changes the environment.
std::vector<std::string> all();

// Forgets what was read, so that a test can change the environment. Not for use while other threads
// call getters.
void forget_for_testing();

}  // namespace acc::base::env
