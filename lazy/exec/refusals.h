#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// For tests: the host captures as a GPU does. Work that is captured has not been done until its
// capture ends, and some operators refuse to be captured.
namespace acc::exec {

// From now on these refuse: names of operators; "late" and a name for one that says nothing, but
// the one behind it cannot be captured any more; "begin" and "end" for whole captures, "begin
// later" for a capture of later steps; all apart by commas; "nothing" for none of them. Empty: the
// host captures as a host does.
void refuse_captures(const std::string& names);
bool like_a_gpu();

// Throws where `name` is one of them, or one before it has refused late.
void refuse(std::string_view name);
// A capture begins with step `begin`: throws where it is refused.
void refuse_begin(size_t begin);
// Throws where the operator before has refused late.
void check_refused();

// The contents of memory, for who forgets what was done since.
class Contents {
 public:
  using Blocks = std::vector<std::pair<void*, size_t>>;
  explicit Contents(Blocks blocks);
  void restore() const;

 private:
  const Blocks blocks_;
  std::vector<std::string> bytes_;
};

}  // namespace acc::exec
