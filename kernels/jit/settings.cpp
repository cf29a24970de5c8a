#include "kernels/jit/settings.h"

#include "csrc/base/env.h"

namespace acc::jit {
namespace {

bool is_absolute(const std::string& path) { return path.starts_with('/'); }

std::string find_cache_directory() {
  if (const std::string ours = base::env::cache_dir(); !ours.empty()) return ours;
  // a relative one is to be ignored, says the specification of the base directories
  if (const std::string xdg = base::env::foreign("XDG_CACHE_HOME"); is_absolute(xdg)) {
    return xdg + "/torchacc/kernels";
  }
  const std::string home = base::env::foreign("HOME");
  return is_absolute(home) ? home + "/.cache/torchacc/kernels" : "";
}

}  // namespace

Settings Settings::read() {
  Settings settings;
  settings.compiler = base::env::cxx();
  settings.search_path = base::env::foreign("PATH");
  settings.cache_directory = find_cache_directory();
  settings.cache_bytes = base::env::cache_bytes();
  settings.time_limit = std::chrono::seconds(base::env::compile_timeout_s());
  const std::string wish = base::env::foreign("TMPDIR");
  if (is_absolute(wish)) settings.temporary.push_back(wish);
  // the second is memory: there is room when the disk is full
  settings.temporary.insert(settings.temporary.end(), {"/tmp", "/dev/shm"});
  settings.environment = base::env::all();
  return settings;
}

}  // namespace acc::jit
