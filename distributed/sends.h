#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

namespace c10d {
class Work;
}

namespace acc::distributed {

// Sends of CPU memory of one group that the program does not wait for, so that two ranks may send
// to each other before they receive: the memory is theirs, and they are over when the other process
// has taken it.
class Sends : public std::enable_shared_from_this<Sends> {
 public:
  // Waits while as much is under way as may be. Throws where the user asks to stop meanwhile, and
  // what an earlier send has failed with, once.
  void make_room(size_t bytes);
  void keep(c10::intrusive_ptr<c10d::Work> work, at::Tensor memory);
  // Waits until all of them are over. Throws where that takes longer than `limit` or the user asks
  // to stop meanwhile, and what one has failed with, once.
  void wait(std::chrono::milliseconds limit);

 private:
  void end(c10d::Work& work, size_t bytes);
  void throw_failure();  // with the mutex

  std::mutex mutex_;
  std::condition_variable taken_;
  size_t count_ = 0;
  size_t bytes_ = 0;
  std::string failure_;
};

}  // namespace acc::distributed
