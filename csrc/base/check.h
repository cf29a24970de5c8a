#pragma once

#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

// The one error type of everything below the dispatcher edge, and the macros that throw it.
//
// A message reads `[where] what happened, with the values. What to do.` The arguments of the macros
// are streamed one after the other; they are evaluated only when the check fails.
namespace acc::base {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Streams `args` one after the other, in the classic locale: a message never depends on the
// locale that the host program has set.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << args);
  return out.str();
}

namespace detail {

// Cold and never inlined: the caller's fast path holds one branch and one call.
template <class... Args>
[[noreturn, gnu::cold, gnu::noinline]] void fail(const char* file, int line, const char* expression,
                                                 const Args&... args) {
  if constexpr (sizeof...(Args) == 0) {
    throw Error(concat("[", file, ":", line, "] internal check failed: ", expression,
                       ". This is a bug in acc; please report it with this line."));
  } else {
    (void)file;
    (void)line;
    (void)expression;
    throw Error(concat(args...));
  }
}

}  // namespace detail
}  // namespace acc::base

// Throws acc::base::Error when `condition` is false. With no further argument the message names the
// expression, the file and the line, and calls it a bug; use that form for invariants only.
#define ACC_CHECK(condition, ...)                                                           \
  do {                                                                                      \
    if (!(condition)) [[unlikely]] {                                                        \
      ::acc::base::detail::fail(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
    }                                                                                       \
  } while (false)

// Throws acc::base::Error unconditionally.
#define ACC_FAIL(...) \
  ::acc::base::detail::fail(__FILE__, __LINE__, "unreachable" __VA_OPT__(, ) __VA_ARGS__)
