#include "csrc/runtime/address_space.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "csrc/base/check.h"
#include "csrc/runtime/fork.h"

namespace acc::runtime {
namespace {

// 16 TiB of a 128 TiB address space: a training step that makes 10 GB of tensors comes round after
// 1,600 steps. The smallest range still tells 2 M storages apart.
constexpr int kLargestPower = 44;
constexpr int kSmallestPower = 30;
// What allocators align to, so that an address has no more trailing zeros than a real one.
constexpr size_t kAlignment = 512;
// One storage takes at most this part of the range: it keeps addresses unique when the range is
// small. A read beyond it still hits the address of another pending storage, which faults too.
constexpr size_t kLargestShare = 16;

std::atomic<char*> range_begin{nullptr};
std::atomic<size_t> range_bytes{0};
std::atomic<size_t> next_offset{0};

void make_range() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (range_begin.load(std::memory_order_acquire) != nullptr) return;
  for (int power = kLargestPower; power >= kSmallestPower; --power) {
    const size_t bytes = size_t{1} << power;
    void* begin =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) continue;
    madvise(begin, bytes, MADV_DONTDUMP);
    if (power != kLargestPower) {
      TORCH_WARN("[acc] the system granted 2^", power, " instead of 2^", kLargestPower,
                 " bytes of address space for tensors that are not computed yet. Addresses repeat "
                 "sooner; raise the limit on virtual memory (ulimit -v) to avoid it.");
    }
    range_bytes.store(bytes, std::memory_order_relaxed);
    range_begin.store(static_cast<char*>(begin), std::memory_order_release);
    return;
  }
  ACC_FAIL("[acc] cannot reserve 2^", kSmallestPower,
           " bytes of address space: ", std::strerror(errno),
           ". Raise the limit on virtual memory (ulimit -v).");
}

}  // namespace

void* reserve(size_t nbytes) {
  if (nbytes == 0) return nullptr;
  note_use();
  char* begin = range_begin.load(std::memory_order_acquire);
  if (begin == nullptr) [[unlikely]] {
    make_range();
    begin = range_begin.load(std::memory_order_acquire);
  }
  const size_t capacity = range_bytes.load(std::memory_order_relaxed);
  const size_t share = capacity / kLargestShare;
  const size_t step = nbytes >= share ? share : (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  size_t offset = next_offset.load(std::memory_order_relaxed);
  size_t start;
  do {
    start = offset + step <= capacity ? offset : 0;
  } while (!next_offset.compare_exchange_weak(offset, start + step, std::memory_order_relaxed));
  return begin + start;
}

bool reserved(const void* address) noexcept {
  const char* begin = range_begin.load(std::memory_order_acquire);
  const char* at = static_cast<const char*>(address);
  return begin != nullptr && at >= begin &&
         at < begin + range_bytes.load(std::memory_order_relaxed);
}

}  // namespace acc::runtime
