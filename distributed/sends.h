#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace c10d {
class Work;
}

namespace acc::distributed {

// Sends of CPU memory of one group that the program does not wait for, so that two ranks may send
// to each other before they receive: the memory is theirs, and they are over when the other process
// has taken it.
class Sends : public std::enable_shared_from_this<Sends> {
 public:
  // Returns its number. Throws what an earlier send has failed with, once each; then `begin`, which
  // makes the transport's work, was not called. Waits only where a thousand are under way, each of
  // which has a thread that waits for it. `timeout`: how long the other process may take.
  uint64_t add(const std::function<c10::intrusive_ptr<c10d::Work>()>& begin, at::Tensor memory,
               std::chrono::milliseconds timeout);
  // The program has heard that it is over.
  void note_awaited(uint64_t number);
  // Waits while more is under way than may be and that send is, but not for longer than `limit`,
  // unless that is kNoTimeout. Not before the send has begun: the others may receive first what
  // comes behind it. Throws where it takes longer or the user asks to stop meanwhile, and what this
  // send has failed with.
  void make_room(uint64_t number, std::chrono::milliseconds limit);
  // Waits until all of them are over, or those that are awaited; throws as above, and what any has
  // failed with.
  void wait(std::chrono::milliseconds limit);
  void wait_for_awaited(std::chrono::milliseconds limit);

 private:
  void end(c10d::Work& work, std::chrono::milliseconds timeout, uint64_t number);
  void wait_for(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached,
                std::chrono::milliseconds limit);
  void throw_failure(const uint64_t* of);  // null: of any; with the mutex

  std::mutex mutex_;
  std::condition_variable taken_;
  struct Send {
    size_t bytes;
    bool awaited = false;
  };
  std::unordered_map<uint64_t, Send> under_way_;
  uint64_t next_ = 0;
  size_t bytes_ = 0;
  std::map<uint64_t, std::string> failures_;  // that nobody has heard of
};

// Waits until the others have received what any group of this process has sent and the program has
// waited for, each group at most as long as its timeout. Throws what one failed with.
void wait_for_sends();

}  // namespace acc::distributed
