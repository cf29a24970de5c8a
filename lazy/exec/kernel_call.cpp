#include "lazy/exec/kernel_call.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "kernels/codegen/cuda_launch.h"
#include "kernels/codegen/kernel_spec.h"
#include "kernels/device/device_kernels.h"

namespace acc::exec {
namespace {

using base::count_keyed;

// Threads get whole blocks, so that their vectors begin where cache lines do. Where vectors go
// along a reduced loop, a kept element is a block.
constexpr int64_t kBlock = 64;
bool goes_by_rows(const codegen::KernelSpec& kernel) {
  return kernel.reduced > 0 && !kernel.columns;
}

// Elements below which a second thread costs more than it brings, as in ATen
// (at::internal::GRAIN_SIZE), for kernels of one operation; they get fewer as operations get more.
constexpr int64_t kGrain = 32768;

// A function of this process, by as many threads as ATen's kernels take.
class HostCall final : public KernelCall {
 public:
  HostCall(const plan::Plan& plan, const plan::Step& step, void* function,
           const std::vector<library::Slot>& slots, ArgumentTable& table)
      : KernelCall(plan, step, slots, table),
        function_(reinterpret_cast<codegen::HostFunction>(function)),
        block_(goes_by_rows(kernel_) ? 1 : kBlock) {
    for (const passes::Launch& launch : step.launches) {
      const size_t at = add(codegen::argument_words(kernel_));
      place(launch, at);
      launches_.push_back({launch.elements, at, blocks_});
      blocks_ += (launch.elements + block_ - 1) / block_;
    }
    const auto operations = static_cast<int64_t>(kernel_.instructions.size());
    grain_ = std::max(int64_t{1}, kGrain / block_ / step.launches.front().turns /
                                      std::max(int64_t{1}, operations / 4));
  }

  void launch() const override {
    if (blocks_ <= grain_) return run_blocks(0, blocks_);
    at::parallel_for(0, blocks_, grain_,
                     [this](int64_t begin, int64_t end) { run_blocks(begin, end); });
  }
  size_t launches() const override { return launches_.size(); }

 private:
  struct Launch {
    int64_t elements;
    size_t at;            // in the table
    int64_t first_block;  // of all launches' blocks in a row
  };

  void run_blocks(int64_t begin, int64_t end) const {
    auto launch = std::ranges::upper_bound(launches_, begin, {}, &Launch::first_block) - 1;
    for (; launch != launches_.end() && launch->first_block < end; ++launch) {
      const int64_t first = std::max(int64_t{0}, (begin - launch->first_block) * block_);
      const int64_t last = std::min(launch->elements, (end - launch->first_block) * block_);
      const int64_t* arguments = table_.on_device(launch->at);
      const size_t numbers = codegen::argument_words(kernel_) - kernel_.scalars.size();
      function_(reinterpret_cast<char* const*>(arguments), arguments + kernel_.operands.size(),
                arguments + numbers, first, last);
    }
  }

  const codegen::HostFunction function_;
  const int64_t block_;  // elements of a block
  std::vector<Launch> launches_;
  int64_t blocks_ = 0;
  int64_t grain_ = 1;
};

// A kernel of a GPU.
class DeviceCall final : public KernelCall {
 public:
  DeviceCall(const plan::Plan& plan, const plan::Step& step, void* function,
             const std::vector<library::Slot>& slots, ArgumentTable& table,
             const device::DeviceKernels& kernels)
      : KernelCall(plan, step, slots, table), function_(function), kernels_(kernels) {
    kernels_.prepare(function);
    count_keyed("kernels", "prepared for a device");
    std::vector<std::span<const int64_t>> sizes;
    for (const passes::Launch& launch : step.launches) {
      sizes.emplace_back(launch.geometry.data(), kernel_.loops);
    }
    for (const codegen::CudaCalls& made :
         codegen::cuda_launches(kernel_, sizes, kernels.multiprocessors())) {
      const size_t words = codegen::cuda_argument_words(kernel_);
      const size_t at = add(made.first_blocks.size() + made.calls.size() * words);
      std::ranges::copy(made.first_blocks, table.words(at));
      size_t next = at + made.first_blocks.size();
      for (size_t i = 0; i < made.calls.size(); ++i, next += words) {
        place(step.launches[made.calls[i]], next);
        if (made.stages == 0) continue;
        const codegen::CudaParts parts = made.parts[i];
        const size_t where = next + codegen::argument_words(kernel_);
        table.add_work(where, codegen::cuda_work_words(kernel_, sizes[made.calls[i]], parts));
        table.words(where)[1] = parts.outer;
        table.words(where)[2] = parts.inner;
      }
      const auto calls = static_cast<int>(made.calls.size());
      if (made.stages == 0) launches_.push_back({made.launch, at, calls, codegen::kAtOnce});
      if (made.stages > 0) count_keyed("kernels", "prepared in stages");
      for (int stage = 0; stage < made.stages; ++stage) {
        launches_.push_back({made.launch, at, calls, stage});
      }
    }
  }

  void launch() const override {
    for (const Launch& each : launches_) {
      kernels_.launch(function_, each.launch, table_.on_device(each.at), each.calls, each.stage);
    }
  }
  size_t launches() const override { return launches_.size(); }

 private:
  struct Launch {
    codegen::CudaLaunch launch;
    size_t at;  // in the table
    int calls;
    int stage;
  };

  void* const function_;
  const device::DeviceKernels& kernels_;
  std::vector<Launch> launches_;
};

}  // namespace

size_t ArgumentTable::add(size_t words) {
  ACC_CHECK(!memory_);
  const size_t at = words_.size();
  words_.resize(at + words);
  return at;
}

void ArgumentTable::add_work(size_t at, size_t words) {
  ACC_CHECK(!memory_);
  work_.push_back({at, work_words_});
  work_words_ += words;
}

void ArgumentTable::allocate() {
  if (words_.empty()) return;
  const size_t words = words_.size() + work_words_;
  memory_ = runtime::backend().allocator()->allocate(words * sizeof(int64_t));
  for (const Work& work : work_) {
    words_[work.at] = reinterpret_cast<int64_t>(on_device(words_.size() + work.begin));
  }
}

void ArgumentTable::upload(size_t begin, size_t end) {
  if (begin == end) return;
  ACC_CHECK(memory_);
  base::count(base::Counter::ArgumentWords, end - begin);
  runtime::backend().upload(static_cast<int64_t*>(memory_.get()) + begin, words_.data() + begin,
                            (end - begin) * sizeof(int64_t), device_);
}

void ArgumentTable::upload_changed() {
  if (changed_begin_ >= changed_end_) return;
  upload(changed_begin_, changed_end_);
  changed_begin_ = SIZE_MAX;
  changed_end_ = 0;
}

KernelCall::KernelCall(const plan::Plan& plan, const plan::Step& step,
                       const std::vector<library::Slot>& slots, ArgumentTable& table)
    : kernel_(plan.kernels[step.kernel]),
      table_(table),
      slots_(slots),
      begin_(table.add(0)),
      end_(begin_) {}

void KernelCall::place(const passes::Launch& launch, size_t at) {
  places_.push_back({&launch, at, memory_.size()});
  for (const passes::Launch::Operand& operand : launch.operands) {
    memory_.push_back(slots_[operand.buffer].get());
  }
  std::ranges::copy(launch.geometry, table_.words(at + launch.operands.size()));
}

void KernelCall::set(std::span<const int64_t> values) {
  for (const Place& place : places_) {
    const passes::Launch& launch = *place.launch;
    int64_t* words = table_.words(place.at);
    for (size_t i = 0; i < launch.operands.size(); ++i) {
      const auto base = reinterpret_cast<int64_t>(memory_[place.memory + i]->data());
      *words++ = base + static_cast<int64_t>(launch.operands[i].byte_offset);
    }
    words += launch.geometry.size();
    for (const passes::Number& number : launch.numbers) {
      *words++ = number.immediate ? number.bits : values[static_cast<size_t>(number.bits)];
    }
  }
}

void KernelCall::list(std::vector<TableWord>* addresses, std::vector<TableWord>* numbers) const {
  for (const Place& place : places_) {
    const passes::Launch& launch = *place.launch;
    size_t at = place.at;
    for (const passes::Launch::Operand& operand : launch.operands) {
      addresses->push_back({operand.buffer, at++, operand.byte_offset});
    }
    at += launch.geometry.size();
    for (const passes::Number& number : launch.numbers) {
      if (!number.immediate) numbers->push_back({static_cast<uint32_t>(number.bits), at});
      ++at;
    }
  }
}

std::unique_ptr<KernelCall> make_kernel_call(const plan::Plan& plan, const plan::Step& step,
                                             void* function,
                                             const std::vector<library::Slot>& slots,
                                             ArgumentTable& table, c10::DeviceIndex device) {
  const device::DeviceKernels* kernels = device::device_kernels(device);
  if (kernels == nullptr) return std::make_unique<HostCall>(plan, step, function, slots, table);
  return std::make_unique<DeviceCall>(plan, step, function, slots, table, *kernels);
}

}  // namespace acc::exec
