#include "lazy/exec/run.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/env.h"
#include "csrc/base/stats.h"
#include "csrc/runtime/backend.h"
#include "csrc/runtime/memory.h"
#include "lazy/exec/kernels.h"
#include "lazy/graph/words.h"

namespace acc::exec {
namespace {

using base::count;
using base::Counter;
using plan::Place;

// One arena per device, shared by all plans, as large as the largest has needed.
struct Arena {
  c10::DataPtr memory;
  uint64_t bytes = 0;
};
// Each is guarded by the mutex of its device.
Arena& arena_of(c10::DeviceIndex device) {
  static auto& arenas = *new std::array<Arena, base::env::kMaxHostDevices>;
  return arenas.at(static_cast<size_t>(device));
}

// Slots are pointed at memory that others own, so they are the ones without an allocator and with a
// deleter that does nothing.
bool is_slot(const c10::Storage& storage) {
  return storage.allocator() == nullptr && !storage.resizable();
}

}  // namespace

std::vector<Result> results_of(const graph::Graph& graph, const graph::Node& node) {
  std::vector<Result> results;
  const int64_t* word = graph.words.data() + node.outputs;
  uint32_t position = 0;
  const auto add = [&](int32_t item) {
    if (graph::tag_of(*word) == graph::Tag::kTensor) results.push_back({position, item, word});
    word += graph::item_words(word);
  };
  for (const graph::Return& result : node.op->returns) {
    if (result.alias < 0 && result.list) {
      const auto items = static_cast<int32_t>(graph::count_of(*word++));
      for (int32_t i = 0; i < items; ++i) add(i);
    } else if (result.alias < 0) {
      add(-1);
    }
    ++position;
  }
  return results;
}

const at::Tensor& Result::of(const torch::jit::Stack& results) const {
  const c10::IValue& value = results[stack];
  return item < 0 ? value.toTensor() : value.toListRef()[static_cast<size_t>(item)].toTensor();
}

void Prepared::point(uint32_t buffer, void* data, size_t nbytes) {
  library::point(slots[buffer], data, nbytes);
  if (!fixed.empty()) library::point(fixed[buffer], data, nbytes);
}

c10::Device alias_device(c10::DeviceIndex index) {
  const c10::DeviceType type = runtime::backend().alias_type();
  return {type, type == c10::kCPU ? c10::DeviceIndex(-1) : index};
}

c10::Storage allocate(uint64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(bytes)),
                      runtime::backend().allocator(), true);
}

std::unique_ptr<Prepared> prepare(const plan::Plan& plan, const plan::Schedule& schedule,
                                  c10::DeviceIndex index, const std::vector<bool>& captured) {
  const c10::Device device = alias_device(index);
  auto prepared = std::make_unique<Prepared>(index);
  for (const graph::Buffer& buffer : plan.program.buffers) {
    const auto make = [&] {
      const bool host = buffer.kind == graph::BufferKind::kHost;
      return library::make_slot(host ? c10::Device(c10::kCPU) : device);
    };
    prepared->slots.push_back(make());
    if (!captured.empty()) prepared->fixed.push_back(make());
  }
  prepared->steps.reserve(schedule.steps.size());
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const plan::Step& step = schedule.steps[i];
    PreparedStep& made = prepared->steps.emplace_back();
    if (step.kernel != plan::kNoKernel) {
      made.kernel = make_kernel_call(plan, step, function_of(plan, step.kernel), prepared->slots,
                                     prepared->table, index);
      continue;
    }
    const graph::Node& node = plan.program.nodes[step.nodes[0]];
    std::vector<Result> results = results_of(plan.program, node);
    const bool into = results.size() == 1 && node.op->out_handle != nullptr &&
                      schedule.places[static_cast<size_t>(results[0].word[1])] != Place::kAdopted;
    if (!into) made.results = std::move(results);
    const bool fixed = !captured.empty() && captured[i];
    made.call.emplace(plan.program, node, fixed ? prepared->fixed : prepared->slots, device, into);
  }
  prepared->table.allocate();
  return prepared;
}

bool may_repeat(const plan::Plan& plan, const plan::Step& step) {
  return step.reuse.empty() && std::ranges::all_of(step.nodes, [&](uint32_t node) {
           const graph::Op& op = *plan.program.nodes[node].op;
           return !op.writes && op.removable;
         });
}

// The stride of a dimension of one element does not matter. Some operators leave a number on the
// CPU: the efficient attention its seed, unless it is captured.
bool as_promised(const at::Tensor& tensor, const graph::TensorWords& promised) {
  if (tensor.device().type() != runtime::backend().alias_type()) return false;
  if (tensor.storage_offset() != 0 || tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.sizes().size() != promised.strides.size()) return false;
  for (size_t d = 0; d < promised.strides.size(); ++d) {
    if (tensor.sizes()[d] != 1 && tensor.strides()[d] != promised.strides[d]) return false;
  }
  return true;
}

Held::Held(c10::DeviceIndex device, size_t buffers)
    : device_(device), bytes_(runtime::on_host() ? buffers + 1 : 0) {}

Held::~Held() {
  for (size_t i = 0; i < bytes_.size(); ++i) give(i);
}

void Held::take(size_t buffer, size_t bytes) {
  if (bytes_.empty() || bytes == 0) return;
  give(buffer);
  runtime::note_alloc(device_, bytes);
  bytes_[buffer] = bytes;
}

void Held::give(size_t buffer) {
  if (bytes_.empty() || bytes_[buffer] == 0) return;
  runtime::note_free(device_, std::exchange(bytes_[buffer], 0));
}

Run::Run(const plan::Plan& plan, const plan::Schedule& schedule, Prepared& prepared,
         c10::DeviceIndex index, std::vector<Given>& given, bool is_captured)
    : plan_(plan),
      schedule_(schedule),
      prepared_(prepared),
      is_captured_(is_captured),
      memory_(plan.program.buffers.size()),
      held_(index, plan.program.buffers.size()) {
  place_arena(index);
  for (uint32_t i = 0; i < given.size(); ++i) {
    if (!given[i].memory) continue;
    memory_[i] = std::move(given[i].memory);
    const auto offset = static_cast<size_t>(given[i].byte_offset);
    prepared_.point(i, static_cast<char*>(memory_[i].mutable_data()) + offset,
                    memory_[i].nbytes() - std::min(offset, memory_[i].nbytes()));
  }
}

void Run::prepare(size_t index, std::span<const int64_t> values) {
  const plan::Step& step = schedule_.steps[index];
  for (const uint32_t buffer : step.allocate) make(buffer);
  for (const plan::Reuse& reuse : step.reuse) take_over(reuse);
  if (KernelCall* kernel = prepared_.steps[index].kernel.get()) kernel->set(values);
}

void Run::upload(size_t index) {
  if (KernelCall* kernel = prepared_.steps[index].kernel.get()) kernel->upload();
}

void Run::call(size_t index, std::span<const int64_t> values, bool* called) {
  const PreparedStep& prepared = prepared_.steps[index];
  *called = true;
  if (prepared.kernel != nullptr) {
    count(Counter::KernelLaunches, prepared.kernel->launches());
    prepared.kernel->launch();
  } else {
    call_operator(prepared, values);
  }
  for (const uint32_t buffer : schedule_.steps[index].release) release(buffer);
}

void Run::step(size_t index, std::span<const int64_t> values, bool* called) {
  prepare(index, values);
  upload(index);
  call(index, values, called);
}

const torch::jit::Stack* Run::arguments(size_t index) const {
  const PreparedStep& step = prepared_.steps[index];
  return step.call.has_value() ? &step.call->arguments() : nullptr;
}

void Run::leave_out(size_t index, const std::vector<bool>& touched) {
  const plan::Step& step = schedule_.steps[index];
  for (const uint32_t buffer : step.allocate) {
    if (touched[buffer]) make(buffer);
  }
  for (const plan::Reuse& reuse : step.reuse) {
    if (touched[reuse.buffer]) make(reuse.buffer);
  }
  // A kernel that makes something else, too, reads what this operator would have made.
  for (const Result& result : prepared_.steps[index].results) {
    const auto buffer = static_cast<uint32_t>(result.word[1]);
    if (touched[buffer]) make(buffer);
  }
  for (const uint32_t buffer : step.release) release(buffer);
}

std::vector<Output> Run::outputs() const {
  std::vector<Output> outputs;
  for (uint32_t i = 0; i < memory_.size(); ++i) {
    if (plan_.outputs[i] && memory_[i]) outputs.push_back({i, memory_[i]});
  }
  return outputs;
}

std::vector<Output> Run::take_outputs() {
  std::vector<Output> outputs = this->outputs();
  for (const Output& output : outputs) {
    memory_[output.buffer] = c10::Storage();
    held_.give(output.buffer);  // who takes it counts it
  }
  return outputs;
}

std::vector<std::pair<void*, size_t>> Run::blocks() const {
  std::vector<std::pair<void*, size_t>> found;
  for (const c10::Storage& memory : memory_) {
    if (memory) found.emplace_back(const_cast<void*>(memory.data()), memory.nbytes());
  }
  if (schedule_.arena_bytes > 0) found.emplace_back(prepared_.arena, schedule_.arena_bytes);
  return found;
}

void Run::go_back(std::vector<c10::Storage> memory) {
  for (uint32_t i = 0; i < memory.size(); ++i) {
    if (memory[i].unsafeGetStorageImpl() == memory_[i].unsafeGetStorageImpl()) continue;
    release(i);
    const bool given = plan_.program.buffers[i].kind != graph::BufferKind::kFresh;
    if (memory[i] && !given) own(i, memory[i]);
    if (given) memory_[i] = std::move(memory[i]);  // its slot still points there
  }
}

void Run::call_operator(const PreparedStep& prepared, std::span<const int64_t> values) {
  const torch::jit::Stack results = prepared.call->run(values);
  for (const Result& result : prepared.results) adopt(result, result.of(results));
}

void Run::place_arena(c10::DeviceIndex index) {
  if (schedule_.arena_bytes == 0) return;
  held_.take_arena(schedule_.arena_bytes);
  if (is_captured_) {
    arena_ = runtime::backend().allocator()->allocate(schedule_.arena_bytes);
    return point_arena(arena_.get());
  }
  Arena& arena = arena_of(index);
  if (arena.bytes < schedule_.arena_bytes) {
    arena.memory.clear();
    arena.bytes = 0;
    arena.memory = runtime::backend().allocator()->allocate(schedule_.arena_bytes);
    arena.bytes = schedule_.arena_bytes;
  }
  if (prepared_.arena != arena.memory.get()) point_arena(arena.memory.get());
}

void Run::point_arena(void* arena) {
  prepared_.arena = arena;
  for (uint32_t i = 0; i < schedule_.places.size(); ++i) {
    if (schedule_.places[i] != Place::kArena) continue;
    prepared_.point(i, static_cast<char*>(arena) + schedule_.offsets[i],
                    plan_.program.buffers[i].nbytes);
  }
}

void Run::own(uint32_t buffer, c10::Storage memory) {
  prepared_.point(buffer, memory.mutable_data(), memory.nbytes());
  held_.take(buffer, memory.nbytes());
  memory_[buffer] = std::move(memory);
}

// A step that found no memory is tried again, and has what it got the first time.
void Run::make(uint32_t buffer) {
  if (!memory_[buffer]) own(buffer, allocate(plan_.program.buffers[buffer].nbytes));
}

// What an operator returned may be another size than it promised, or known to somebody else.
void Run::take_over(const plan::Reuse& reuse) {
  if (memory_[reuse.buffer]) return;
  const c10::Storage& memory = memory_[reuse.of];
  if (memory.use_count() != 1 || memory.nbytes() != plan_.program.buffers[reuse.buffer].nbytes) {
    return make(reuse.buffer);
  }
  held_.give(reuse.of);
  own(reuse.buffer, memory);
}

void Run::release(uint32_t buffer) {
  memory_[buffer] = c10::Storage();
  held_.give(buffer);
}

// The operator's memory becomes the buffer's, unless its layout or its device is another one than
// the user was told, or it is the memory of an operand.
void Run::adopt(const Result& result, const at::Tensor& tensor) {
  const graph::TensorWords promised = graph::read_tensor(result.word);
  const uint32_t buffer = promised.buffer;
  if (!tensor.defined()) {
    ACC_CHECK(plan_.program.buffers[buffer].nbytes == 0 || !plan_.outputs[buffer]);
    return;
  }
  const c10::IntArrayRef sizes(promised.sizes.data(), promised.sizes.size());
  // A workspace is promised empty: only its kernel knows how large it is.
  const bool workspace = c10::multiply_integers(sizes) == 0;
  library::check_promise(tensor, static_cast<c10::ScalarType>(promised.dtype),
                         workspace ? tensor.sizes() : sizes);
  if (as_promised(tensor, promised) && !is_slot(tensor.storage())) {
    own(buffer, tensor.storage());
    return;
  }
  count(Counter::StrideCopies);
  own(buffer, allocate(plan_.program.buffers[buffer].nbytes));
  // What is on the CPU CUDA has read when this returns, without a wait; but in captured work it
  // would read it again at each launch, when it is gone: there the wait is refused.
  library::alias(result.word, prepared_.slots[buffer])
      .copy_(tensor, /*non_blocking=*/!is_captured_);
}

void keep_for_ever(Run& run, c10::DeviceIndex device) {
  struct Kept {
    std::vector<c10::Storage> memory;
    Arena arena;
    c10::DataPtr own_arena;
  };
  static auto& kept = *new std::vector<Kept>;
  kept.push_back({run.memory(), std::exchange(arena_of(device), Arena()), run.take_own_arena()});
}

void release_arena(c10::DeviceIndex device) { arena_of(device) = Arena(); }

}  // namespace acc::exec
