#pragma once

#include <exception>
#include <string>

// What caught exceptions say, and warnings that must not repeat.
namespace acc::runtime {

// Without the backtrace that PyTorch's errors carry.
std::string text_of(const std::exception_ptr& error);

// Whether an error of CUDA's, by its number, is one after which the process gets nothing done on a
// GPU any more: the device is gone, or what ran on it went wrong.
bool ends_the_device(int cuda_error);

// Warns with `what` unless it was said before or is empty. Thread safe.
void warn_once(const std::string& what);

}  // namespace acc::runtime
