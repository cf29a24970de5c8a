#pragma once

#include <exception>
#include <string>

// What caught exceptions say, and warnings that must not repeat.
namespace acc::runtime {

// Without the backtrace that PyTorch's errors carry.
std::string text_of(const std::exception_ptr& error);

// Warns with `what` unless it was said before or is empty. Thread safe.
void warn_once(const std::string& what);

}  // namespace acc::runtime
