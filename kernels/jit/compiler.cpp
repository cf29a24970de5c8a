#include "kernels/jit/compiler.h"

#include <sys/stat.h>
#include <unistd.h>

#include "csrc/base/check.h"
#include "kernels/jit/library.h"

namespace acc::jit {
namespace {

// No value of a kernel may depend on which compiler contracts a multiplication and an addition.
// Warnings are for people, and nobody reads these texts.
constexpr const char* kOptions[] = {"-x",
                                    "c++",
                                    "-std=c++17",
                                    "-O3",
                                    "-fno-math-errno",
                                    "-fno-trapping-math",
                                    "-ffp-contract=off",
                                    "-fPIC",
                                    "-shared",
                                    "-fno-exceptions",
                                    "-fno-rtti",
                                    "-fvisibility=hidden",
                                    "-w"};
// The first that the compiler takes. Some know this processor by one of these names only.
constexpr const char* kProcessor[] = {"-march=native", "-mcpu=native", ""};
// Saves a sixth of g++'s time and a third of clang's. What the kernels call is named instead: libm,
// which brings libmvec where there is one, and the compiler's own helpers.
constexpr const char* kFewLibraries[] = {"-nostdlib", "-lm", "-lgcc"};

// Directories of PATH that are no absolute path would mean another compiler in each directory.
std::optional<Compiler> find_in_path(const std::string& name, std::string_view search_path) {
  while (!search_path.empty()) {
    const size_t end = search_path.find(':');
    const std::string_view folder = search_path.substr(0, end);
    search_path.remove_prefix(end == std::string_view::npos ? search_path.size() : end + 1);
    if (!folder.starts_with('/')) continue;
    const std::string path = base::concat(folder, "/", name);
    if (const auto identity = identity_of(path)) return Compiler{path, *identity};
  }
  return std::nullopt;
}

// The environment of the host program, with temporary files below `temporary` and messages that
// do not depend on the user's language.
std::vector<std::string> environment_for(const Settings& settings, const std::string& temporary) {
  std::vector<std::string> environment;
  for (const std::string& entry : settings.environment) {
    if (!entry.starts_with("TMPDIR=") && !entry.starts_with("LC_ALL=")) {
      environment.push_back(entry);
    }
  }
  environment.emplace_back("LC_ALL=C");
  if (!temporary.empty()) environment.push_back("TMPDIR=" + temporary);
  return environment;
}

// Compilers may write anything, and a message is text within a sentence.
std::string printable(std::string text) {
  for (char& c : text) {
    if ((c < ' ' || c > '~') && c != '\n' && c != '\t') c = '?';
  }
  while (text.ends_with('\n') || text.ends_with('.')) text.pop_back();
  return text;
}

void erase_all(std::string& text, const std::string& what) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at)) {
    text.erase(at, what.size());
  }
}

}  // namespace

std::optional<FileIdentity> identity_of(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
  if (access(path.c_str(), X_OK) != 0) return std::nullopt;
  constexpr int64_t kNanoseconds = 1'000'000'000;
  return FileIdentity{status.st_ino, static_cast<uint64_t>(status.st_size),
                      status.st_mtim.tv_sec * kNanoseconds + status.st_mtim.tv_nsec};
}

void compiler_failed(const Compiler& compiler, const std::string& what, const std::string& output) {
  const std::string text = printable(output);
  ACC_FAIL("[jit] the compiler ", compiler.path, " ", what, text.empty() ? "" : ": ", text,
           ". Its kernels run unfused. ",
           compiler.ours ? "Report this." : "Set ACC_CXX to another compiler, or report this.");
}

Outcome run_compiler(const Compiler& compiler, const std::vector<std::string>& arguments,
                     const Settings& settings, const Workspace* workspace) {
  Command command{{compiler.path},
                  environment_for(settings, workspace == nullptr ? "" : workspace->path()),
                  settings.time_limit};
  command.arguments.insert(command.arguments.end(), arguments.begin(), arguments.end());
  Outcome outcome = run(command);
  // Each time another one: the same failure shall have the same text, which is told once.
  if (workspace != nullptr) erase_all(outcome.output, workspace->path() + "/");
  return outcome;
}

std::string compiler_version(const Compiler& compiler, const std::vector<std::string>& arguments,
                             const Settings& settings) {
  std::vector<std::string> all = arguments;
  all.emplace_back("--version");
  const Outcome outcome = run_compiler(compiler, all, settings, nullptr);
  const std::string line = outcome.output.substr(0, outcome.output.find('\n'));
  if (!outcome.success) {
    compiler_failed(compiler, outcome.problem + " when asked for its version", line);
  }
  if (line.empty()) compiler_failed(compiler, "says nothing when asked for its version", "");
  return line;
}

Built files_for(const Workspace& workspace, const char* source, const char* result,
                std::string_view text) {
  Built built;
  built.source = base::concat(workspace.path(), "/", source);
  built.path = base::concat(workspace.path(), "/", result);
  ACC_CHECK(write_file(built.source, text), "[jit] could not write a file below ",
            workspace.parent(), ": ", error_text(errno),
            ". Kernels run unfused. Make room there, or set TMPDIR to a directory with room.");
  return built;
}

void take_result(const Compiler& compiler, const Outcome& outcome, Built& built) {
  built.same_compiler = identity_of(compiler.path) == compiler.identity;
  if (!read_file(built.path, built.bytes)) {
    compiler_failed(compiler, "succeeded without a result", outcome.output);
  }
}

Compiler find_compiler(const Settings& settings) {
  const std::string& wish = settings.compiler;
  if (wish.find('/') != std::string::npos) {
    const auto identity = identity_of(wish);
    ACC_CHECK(identity.has_value(), "[jit] ACC_CXX=", wish,
              " is not an executable file. Kernels run unfused. Set it to the path of a C++ "
              "compiler without arguments, or unset it.");
    return {wish, *identity};
  }
  const std::vector<std::string> names =
      wish.empty() ? std::vector<std::string>{"g++", "clang++", "c++"} : std::vector{wish};
  for (const std::string& name : names) {
    if (const auto compiler = find_in_path(name, settings.search_path)) return *compiler;
  }
  ACC_CHECK(wish.empty(), "[jit] ACC_CXX=", wish,
            " is not a program in PATH. Kernels run unfused. Set it to the name or the path of a "
            "C++ compiler without arguments, or unset it.");
  ACC_FAIL(
      "[jit] there is no C++ compiler (g++, clang++ or c++ in PATH). Kernels run unfused. Install "
      "one, or set ACC_CXX to one.");
}

std::string compiler_options() {
  std::string text;
  for (const char* option : kOptions) text += base::concat(option, " ");
  for (const char* option : kProcessor) text += base::concat(option, " ");
  for (const char* option : kFewLibraries) text += base::concat(option, " ");
  return text;
}

Built build(const Compiler& compiler, const Settings& settings, const Workspace& workspace,
            std::string_view text) {
  Built built = files_for(workspace, "kernels.cpp", "kernels.so", text);
  size_t processor = 0;
  bool few_libraries = true;
  Outcome outcome;
  for (;;) {
    std::vector<std::string> arguments(std::begin(kOptions), std::end(kOptions));
    if (*kProcessor[processor] != '\0') arguments.emplace_back(kProcessor[processor]);
    arguments.insert(arguments.end(), {built.source, "-o", built.path});
    if (few_libraries) {
      arguments.insert(arguments.end(), std::begin(kFewLibraries), std::end(kFewLibraries));
    }
    outcome = run_compiler(compiler, arguments, settings, &workspace);
    if (outcome.success) break;
    const auto blames = [&](const char* option) {
      return outcome.output.find(option) != std::string::npos;
    };
    if (*kProcessor[processor] != '\0' && blames("native")) {
      ++processor;
    } else if (few_libraries && blames("-lgcc")) {
      few_libraries = false;
    } else {
      compiler_failed(compiler, outcome.problem, outcome.output);
    }
  }
  take_result(compiler, outcome, built);
  if (!is_whole_library(built.bytes)) {
    compiler_failed(compiler, "wrote something that is no whole library", outcome.output);
  }
  return built;
}

}  // namespace acc::jit
