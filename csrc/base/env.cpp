#include "csrc/base/env.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>

#include "csrc/base/check.h"

namespace acc::base::env {
namespace {

// Every value is kept as a number; a choice as the index of its word, which is its enumerator. A
// string is kept beside it, and its number only says whether it was read.
using Value = int64_t;

enum class Type : uint8_t { Choice, Integer, Flag, String };

constexpr size_t kMaxChoices = 4;

struct Entry {
  const char* name;
  Type type;
  Value default_value;
  // A choice: its words in the order of the enumerators. An empty word is the unset value.
  std::array<const char*, kMaxChoices> choices;
  // An integer: the closed range.
  Value min;
  Value max;
  const char* doc;
};

constexpr Entry choice(const char* name, Value default_value,
                       std::array<const char*, kMaxChoices> choices, const char* doc) {
  return {name, Type::Choice, default_value, choices, 0, 0, doc};
}
constexpr Entry integer(const char* name, Value default_value, Value min, Value max,
                        const char* doc) {
  return {name, Type::Integer, default_value, {}, min, max, doc};
}
constexpr Entry flag(const char* name, bool default_value, const char* doc) {
  return {name, Type::Flag, default_value, {}, 0, 1, doc};
}
// Any text; the default is the empty one.
constexpr Entry string(const char* name, const char* doc) {
  return {name, Type::String, 0, {}, 0, 0, doc};
}

// The order of kEntries.
enum Id : size_t {
  kMode,
  kExecutor,
  kHostGraphs,
  kHostDevices,
  kLogLevel,
  kPlanCacheMb,
  kMaxPending,
  kMaxPendingMb,
  kMaxInflight,
  kSourceLines,
  kDump,
  kSkipPasses,
  kExact,
  kDeterministic,
  kStrict,
  kCxx,
  kCompileTimeoutS,
  kCacheDir,
  kCacheMb,
  kKernelTexts,
  kCount,
};

constexpr Entry kEntries[] = {
    choice("ACC_MODE", static_cast<Value>(Mode::Full), {"eager", "nofuse", "nograph", "full"},
           "How operators run: eager runs each at once, nofuse replays plans of single operators, "
           "nograph fuses without capture, full does everything."),
    choice("ACC_EXECUTOR", static_cast<Value>(Executor::Auto), {"auto", "cuda", "host"},
           "Where operators run: auto takes CUDA when the build has it and a GPU is usable, else "
           "the host."),
    flag("ACC_HOST_GRAPHS", false,
         "1: the host executor captures plans that repeat, as a GPU does with CUDA graphs. There "
         "they are lists of calls, which saves nothing: for tests."),
    integer("ACC_HOST_DEVICES", 1, 1, kMaxHostDevices,
            "Number of devices of the host executor; at least LOCAL_WORLD_SIZE are present."),
    choice("ACC_LOG_LEVEL", static_cast<Value>(LogLevel::Info),
           {"debug", "info", "warning", "error"}, "Level of the logger TorchAcc."),
    integer("ACC_PLAN_CACHE_MB", 256, 1, 1 << 20,
            "Host memory for cached plans in MiB; the least recently used plans go first."),
    integer("ACC_MAX_PENDING", 20'000, 1, 10'000'000,
            "Recorded operators after which the pending work is submitted without being asked."),
    integer("ACC_MAX_PENDING_MB", 2048, 1, 1 << 30,
            "Memory in MiB that only pending work still holds, after which it is submitted."),
    integer(
        "ACC_MAX_INFLIGHT", 1, 0, 64,
        "Steps that may run while the next is recorded; 0 waits for each step. On the host a step "
        "is done when it was submitted."),
    flag("ACC_SOURCE_LINES", true,
         "1: every recorded operator remembers its Python line, for errors and reports."),
    choice("ACC_DUMP", static_cast<Value>(Dump::None), {"", "graph", "plan", "passes"},
           "Prints each new graph, each new plan, or the graph before and after each pass, to "
           "standard error."),
    string("ACC_SKIP_PASSES",
           "Passes that are left out, separated by commas, to find out which one a fault comes "
           "from: dce, lists, split, cse, copies, rows, widen, layout, products, accumulate, "
           "epilogues, transfers, fuse, recompute, batch, order, alias."),
    flag("ACC_EXACT", false,
         "1: generated kernels round to half types after each operator, as eager does; 0: where a "
         "value is stored or cast."),
    flag("ACC_DETERMINISTIC", false,
         "1: nothing that changes bits depends on time, so that two runs agree bit by bit: kernels "
         "are waited for, and none is replaced because it is slow. Of several processes: of which "
         "none pauses."),
    flag("ACC_STRICT", false,
         "1: after three training steps an operator that cannot be recorded, a read in the middle "
         "of a step and a new plan are errors that name the line; see torchacc.strict."),
    string("ACC_CXX",
           "The C++ compiler for generated kernels, a path or a name; unset takes the first of "
           "g++, clang++ and c++ in PATH."),
    integer("ACC_COMPILE_TIMEOUT_S", 60, 1, 3600,
            "Seconds after which a compiler is ended; its kernels then run unfused."),
    string("ACC_CACHE_DIR",
           "Where generated kernels are kept between runs; unset takes torchacc/kernels in "
           "XDG_CACHE_HOME or in ~/.cache."),
    integer("ACC_CACHE_MB", 256, 1, 1 << 20,
            "Size of that directory in MiB; the least recently used kernels go first."),
    string("ACC_KERNEL_TEXTS",
           "A directory that is given the CUDA text of each generated kernel, on the host too, as "
           "it stands behind the preamble of a program; unset writes none."),
};
static_assert(std::size(kEntries) == kCount);

// Read by the build (CUDA; SAN is an option of CMake) and by the tests, never by the library.
constexpr const char* kUsedElsewhere[] = {"ACC_CUDA", "ACC_SAN", "ACC_SEEDS_DIR"};
constexpr std::string_view kTestPrefix = "ACC_TEST_";
// The variables of the OpenACC standard, which share the prefix: not a spelling mistake of ours.
constexpr const char* kOpenAcc[] = {"ACC_DEVICE_TYPE", "ACC_DEVICE_NUM", "ACC_PROFLIB"};

constexpr Value kUnread = std::numeric_limits<Value>::min();

struct Slot {
  std::atomic<Value> value{kUnread};
};
Slot slots[kCount];

// The values of the strings. Written and read under the mutex.
std::mutex strings_mutex;
std::string strings[kCount];

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

std::optional<Value> parse_integer(std::string_view text, Value min, Value max) {
  Value value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < min || value > max) return std::nullopt;
  return value;
}

std::string allowed(const Entry& entry) {
  if (entry.type == Type::String) return "any";
  if (entry.type != Type::Choice) {
    return entry.type == Type::Flag ? "0, 1" : concat(entry.min, "..", entry.max);
  }
  std::string words;
  for (const char* word : entry.choices) {
    if (word == nullptr || *word == '\0') continue;
    if (!words.empty()) words += ", ";
    words += word;
  }
  return words;
}

std::string text_of(const Entry& entry, Value value) {
  if (entry.type == Type::String) return "";
  if (entry.type == Type::Choice) return entry.choices[static_cast<size_t>(value)];
  return std::to_string(value);
}

std::optional<Value> parse(const Entry& entry, std::string_view text) {
  if (entry.type != Type::Choice) return parse_integer(text, entry.min, entry.max);
  const std::string word = lower(text);
  for (size_t i = 0; i < kMaxChoices; ++i) {
    if (entry.choices[i] != nullptr && word == entry.choices[i]) return static_cast<Value>(i);
  }
  return std::nullopt;
}

// Two threads that come here at once read the same text and store the same value.
[[gnu::noinline]] Value read(Id id) {
  const Entry& entry = kEntries[id];
  Value value = entry.default_value;
  const char* text = std::getenv(entry.name);
  if (text != nullptr && *text != '\0') {
    const std::optional<Value> parsed = parse(entry, text);
    const std::string standard = text_of(entry, entry.default_value);
    ACC_CHECK(parsed.has_value(), "[env] ", entry.name, "=", text, " is not allowed. Set it to ",
              entry.type == Type::Integer ? "a whole number in " : "one of: ", allowed(entry),
              ", or unset it", standard.empty() ? "." : concat(" (", standard, ")."));
    value = *parsed;
  }
  slots[id].value.store(value, std::memory_order_relaxed);
  return value;
}

Value get(Id id) {
  const Value value = slots[id].value.load(std::memory_order_relaxed);
  return value != kUnread ? value : read(id);
}

std::string get_string(Id id) {
  const std::lock_guard lock(strings_mutex);
  if (slots[id].value.load(std::memory_order_relaxed) == kUnread) {
    strings[id] = foreign(kEntries[id].name);
    slots[id].value.store(0, std::memory_order_relaxed);
  }
  return strings[id];
}

const char* word(Id id, size_t index) { return kEntries[id].choices[index]; }

int local_world_size() {
  const char* text = std::getenv("LOCAL_WORLD_SIZE");
  if (text == nullptr || *text == '\0') return 1;
  const std::optional<Value> size = parse_integer(text, 1, kMaxHostDevices);
  ACC_CHECK(size.has_value(), "[env] LOCAL_WORLD_SIZE=", text,
            " asks for one host device per local process, and there can be 1..", kMaxHostDevices,
            ". Start at most ", kMaxHostDevices, " processes per machine, or correct the value.");
  return static_cast<int>(*size);
}

// The effective number of devices; it has no slot in the table because it comes from two variables.
std::atomic<int> effective_host_devices{0};

}  // namespace

Mode mode() { return static_cast<Mode>(get(kMode)); }
bool fuses() { return mode() == Mode::Full || mode() == Mode::NoGraph; }
Executor executor() { return static_cast<Executor>(get(kExecutor)); }
bool host_graphs() { return get(kHostGraphs) != 0; }
LogLevel log_level() { return static_cast<LogLevel>(get(kLogLevel)); }
uint64_t plan_cache_bytes() { return static_cast<uint64_t>(get(kPlanCacheMb)) << 20; }
int64_t max_pending() { return get(kMaxPending); }
uint64_t max_pending_bytes() { return static_cast<uint64_t>(get(kMaxPendingMb)) << 20; }
int max_inflight() { return static_cast<int>(get(kMaxInflight)); }
bool source_lines() { return get(kSourceLines) != 0; }
Dump dump() { return static_cast<Dump>(get(kDump)); }
std::string skip_passes() { return get_string(kSkipPasses); }
bool exact() { return get(kExact) != 0; }
bool deterministic() { return get(kDeterministic) != 0; }
bool strict() { return get(kStrict) != 0; }
std::string cxx() { return get_string(kCxx); }
int compile_timeout_s() { return static_cast<int>(get(kCompileTimeoutS)); }
std::string cache_dir() { return get_string(kCacheDir); }
std::string kernel_texts() { return get_string(kKernelTexts); }
uint64_t cache_bytes() { return static_cast<uint64_t>(get(kCacheMb)) << 20; }

int host_devices() {
  int devices = effective_host_devices.load(std::memory_order_relaxed);
  if (devices == 0) {
    devices = std::max(static_cast<int>(get(kHostDevices)), local_world_size());
    effective_host_devices.store(devices, std::memory_order_relaxed);
  }
  return devices;
}

const char* name(Mode value) { return word(kMode, static_cast<size_t>(value)); }
const char* name(Executor value) { return word(kExecutor, static_cast<size_t>(value)); }
const char* name(Dump value) { return word(kDump, static_cast<size_t>(value)); }
const char* name(LogLevel value) { return word(kLogLevel, static_cast<size_t>(value)); }

std::vector<Variable> table() {
  std::vector<Variable> variables;
  variables.reserve(kCount);
  for (const Entry& entry : kEntries) {
    const char* type = entry.type == Type::Choice    ? "choice"
                       : entry.type == Type::Integer ? "integer"
                       : entry.type == Type::Flag    ? "flag"
                                                     : "string";
    variables.push_back(
        {entry.name, type, allowed(entry), text_of(entry, entry.default_value), entry.doc});
  }
  return variables;
}

void validate() {
  for (size_t id = 0; id < kCount; ++id) {
    if (kEntries[id].type != Type::String) get(static_cast<Id>(id));
  }
  host_devices();
}

std::vector<std::string> unknown() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view name = text.substr(0, text.find('='));
    const auto same = [name](const char* other) { return name == other; };
    if (!name.starts_with("ACC_") || name.starts_with(kTestPrefix)) continue;
    if (std::any_of(std::begin(kUsedElsewhere), std::end(kUsedElsewhere), same)) continue;
    if (std::any_of(std::begin(kOpenAcc), std::end(kOpenAcc), same)) continue;
    if (std::any_of(std::begin(kEntries), std::end(kEntries),
                    [name](const Entry& known) { return name == known.name; })) {
      continue;
    }
    names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string foreign(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

std::vector<std::string> all() {
  std::vector<std::string> entries;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    entries.emplace_back(*entry);
  }
  return entries;
}

void forget_for_testing() {
  for (Slot& slot : slots) slot.value.store(kUnread, std::memory_order_relaxed);
  effective_host_devices.store(0, std::memory_order_relaxed);
}

}  // namespace acc::base::env
