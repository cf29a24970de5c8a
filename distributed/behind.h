#pragma once

#include <chrono>
#include <string>

// Sends, barriers and the end of a group first finish the collectives that this process has
// recorded before. Where other ranks come to those only behind what they do with this one, all of
// them wait, until the timeout: the warnings here say so earlier.
namespace acc::distributed {

// While it lives, the calling thread waits for collectives on behalf of `what`, of a text such as
// "send to rank 1", called where the program is now. Of two, the first counts.
class Behind {
 public:
  explicit Behind(const std::string& what);
  ~Behind();
  Behind(const Behind&) = delete;
  Behind& operator=(const Behind&) = delete;

 private:
  const bool first_;
};

// Whether the calling thread waits on behalf of something, and has for so long that it is told.
bool waits_too_long(std::chrono::steady_clock::time_point since);
// Warns, once for each two places, that it waits for `collective`, a text with its line.
void tell_of_wait(const std::string& collective);

// For tests: how long is too long, instead of ten seconds.
void tell_of_waits_after(std::chrono::milliseconds time);

}  // namespace acc::distributed
