#include "csrc/runtime/errors.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <set>

namespace acc::runtime {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

void warn_once(const std::string& what) {
  static std::mutex mutex;
  static auto& told = *new std::set<std::string>;
  {
    const std::lock_guard lock(mutex);
    if (what.empty() || !told.insert(what).second) return;
  }
  TORCH_WARN(what);
}

}  // namespace acc::runtime
