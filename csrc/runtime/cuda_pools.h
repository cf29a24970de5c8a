#pragma once

#include <c10/core/Allocator.h>

#include <functional>
#include <memory>
#include <utility>

// Pools of torch's allocators that captured work has its memory from.
namespace acc::runtime {

// The pool of one id in one of torch's allocators, which counts who holds it: each `begin` does,
// until a `release`.
class AllocatorPool {
 public:
  virtual ~AllocatorPool() = default;
  // From here to `end` the allocator serves from it. Both are errors out of turn.
  virtual void begin() = 0;
  virtual void end() = 0;
  virtual void release() = 0;
};

// That of pinned memory. It serves nothing until a capture begins it in its own way.
std::unique_ptr<AllocatorPool> pinned_pool(c10::MempoolId_t id);

// A graph holds a pool of the device and one of pinned memory, both of the id that it was captured
// with. Torch 2.11 takes it for an error when a pool that nobody holds any more begins again, and
// this one is to be there for captures without a graph, too: so it holds both, from the first time
// that it is opened. Its allocators forget a pool when nobody holds it and nothing is left in it.
class PrivatePool {
 public:
  PrivatePool(std::unique_ptr<AllocatorPool> device, std::unique_ptr<AllocatorPool> pinned)
      : device_(std::move(device)), pinned_(std::move(pinned)) {}
  virtual ~PrivatePool();
  PrivatePool(const PrivatePool&) = delete;
  PrivatePool& operator=(const PrivatePool&) = delete;

  void open();
  void close() { device_->end(); }
  // After a capture that failed, which has no graph that would release anything, up to torch 2.13.
  // `begun`: the allocators have begun for it, and torch 2.13 has ended that, while 2.11 and 2.12
  // have not. Else it failed on the way there, and what has begun has not been ended.
  void take_back(bool begun) noexcept;

 private:
  const std::unique_ptr<AllocatorPool> device_;
  const std::unique_ptr<AllocatorPool> pinned_;
  bool held_ = false;
};

// A private pool that is open for a thread, until it is closed. Torch empties the caches of all its
// devices at once, and takes it for an error while any of them allocates from a private pool. So
// these are counted, and with them captures, which have the pool lent to them.
class OpenPool {
 public:
  explicit OpenPool(std::shared_ptr<PrivatePool> pool) : pool_(std::move(pool)) { open(); }
  ~OpenPool() { close(); }
  OpenPool(const OpenPool&) = delete;
  OpenPool& operator=(const OpenPool&) = delete;

  void open();
  void close();
  // To a capture, which opens it in its own way: until it is opened again, or closed.
  void lend();
  void take_back(bool begun) noexcept { pool_->take_back(begun); }

  // Does it while none is open, and none is opened; else does nothing.
  static void when_none(const std::function<void()>& work);

 private:
  const std::shared_ptr<PrivatePool> pool_;
  bool open_ = false;
  bool counted_ = false;
};

}  // namespace acc::runtime
