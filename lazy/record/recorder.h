#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/runtime/gil.h"
#include "lazy/graph/graph.h"
#include "lazy/record/call.h"
#include "lazy/record/storage.h"

// The trace of one device: what was called since the last flush, by all threads, in program order.
namespace acc::record {

struct Inference;

// A buffer of the trace. The storage is known weakly: a node never keeps a tensor alive, and
// whether the user still does is asked at the flush.
struct Entry {
  // Empty for snapshots and after a resize.
  c10::weak_intrusive_ptr<LazyStorage> storage{c10::intrusive_ptr<LazyStorage>()};
  c10::Storage memory;      // of inputs and snapshots: keeps the contents until they were read
  int64_t byte_offset = 0;  // of inputs: where the views of this entry begin
  uint64_t nbytes = 0;
  graph::BufferKind kind = graph::BufferKind::kFresh;
  bool written = false;  // kept at the group's first entry
  uint32_t group = 0;
  uint32_t next = 0;  // next entry of the same storage; 0: none
};

// What a flush takes away.
struct Trace {
  uint64_t number = 0;  // the storages in it know it by this
  graph::Graph graph;   // empty when `followed` says which one it equals
  const graph::Graph* followed = nullptr;
  std::vector<Entry> entries;
  std::vector<int64_t> values;
  std::vector<uint32_t> places;  // per recorded node, for profilers and captures; may be shorter
};

// What became of a call: `kSuspended` is to be asked again once the recorder is not, `kInterrupted`
// once Ctrl-C was handled, which came while another thread had the recorder and had to give up work
// that the call may read; `kNo` has to run at once.
enum class Recorded { kYes, kNo, kSuspended, kInterrupted };

class Recorder {
 public:
  explicit Recorder(c10::DeviceIndex device);

  // Records one call and replaces the arguments on the stack by its results, or leaves the stack
  // untouched. Throws for wrong arguments. Takes the lock.
  Recorded record(const graph::Op& op, const c10::OperatorHandle& handle, torch::jit::Stack* stack);

  // Guards the trace and the plans of the device: no method but those that say so may be called
  // without it. Throws while this thread runs a plan. Only a kernel written in Python comes here
  // then, and a step cannot wait for itself, nor its device for another one.
  runtime::LockWithoutGil lock();

  // Whether `storage` occurs in the trace.
  bool knows(const LazyStorage& storage) const { return storage.trace == number_; }

  // Whether the trace is a prefix of an expected step so far. Without the lock.
  bool following() const { return following_.load(std::memory_order_relaxed); }

  // Begins with the `pending` operators that the trace has.
  const graph::Graph& recorded() const { return expected_ != nullptr ? *expected_ : graph_; }

  // Gives a storage up: what was recorded keeps the old contents, later calls see a new storage of
  // `nbytes` without contents. Not while suspended.
  void detach(LazyStorage& storage, size_t nbytes);

  // Takes the trace; recording starts afresh.
  Trace take();

  // Takes the room of a trace that was dealt with, so that a steady state allocates none, and its
  // weak references to inputs, so that it counts none either.
  void recycle(Trace&& trace);

  // The step that is expected next; valid until the next `expect`. Null: none.
  void expect(const graph::Graph* graph);

  // Ends the comparison with the expected step, whose graph is about to go.
  void stop_expecting() { stop_following(); }

  // While a trace that was taken cannot be finished, for want of memory or since others have not
  // come to what it `communicates`, nothing is recorded and `knows` speaks of that trace. Nothing
  // was recorded since `take`. Another thread may suspend it whenever the lock is free: one submits
  // what is idle.
  void suspend(const Trace& trace, bool communicates);
  void unsuspend();
  bool suspended() const { return suspended_.load(std::memory_order_relaxed); }

  // This thread runs a plan of the device from here to there.
  void begin_run();
  void end_run();

  // Whether this thread runs a plan, of whatever device.
  static bool runs_here();

  // Read without the lock, as hints.
  bool running() const { return running_.load(std::memory_order_acquire); }
  size_t pending() const { return n_nodes_.load(std::memory_order_relaxed); }
  bool communicates() const { return communicates_.load(std::memory_order_relaxed); }
  c10::DeviceIndex device() const { return device_; }

 private:
  bool follow(const graph::Op& op, uint64_t ambient, torch::jit::Stack* stack);
  bool follow_tensor(const at::Tensor& tensor, const int64_t* word);
  bool follow_value(const c10::IValue& value, const graph::Argument& argument,
                    const int64_t*& word);
  void stop_following();
  uint32_t entry_of(const at::TensorBase& tensor, bool writes, int64_t* offset);
  uint32_t add_entry(LazyStorage* storage, int64_t byte_offset);
  uint32_t add_host_entry(const at::Tensor& tensor);
  void append(const graph::Op& op, Call& call, const Inference& inference, uint32_t source);
  Recorded take_call(const graph::Op& op, const c10::OperatorHandle& handle,
                     torch::jit::Stack* stack, uint32_t place);
  void note_place(uint32_t place);
  // How far the trace has come, and back to there: a call that fails leaves nothing behind.
  struct Mark {
    size_t nodes;
    size_t recorded;
    size_t words;
    size_t values;
    size_t entries;
  };
  Mark mark() const;
  void go_back(const Mark& mark);
  void drop_entries(size_t first);
  void begin(uint64_t number);
  void push_results(const graph::Op& op, const int64_t* word, torch::jit::Stack* stack);

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  uint64_t number_;
  graph::Graph graph_;
  std::vector<Entry> entries_;
  // Of the trace before, the weak references to inputs that this one has not taken over.
  std::vector<Entry> before_;
  std::vector<int64_t> values_;
  std::vector<uint32_t> places_;       // see Trace; shorter than the trace is fine
  std::atomic<bool> profiled_{false};  // a profiler wants to know them for this trace
  std::atomic<bool> watched_{false};   // a capture does
  std::atomic<size_t> n_nodes_{0};
  std::atomic<bool> communicates_{false};  // a node of the trace does, be it suspended
  std::atomic<bool> suspended_{false};
  std::atomic<bool> running_{false};
  const graph::Graph* expected_ = nullptr;  // while following: the trace is a prefix of it
  std::atomic<bool> following_{false};      // that there is one
  bool views_differ_ = false;               // while following a call: it has views of one input
  Kinds kinds_;                             // and of which types its tensors are
};

// The recorder of a device. Throws for an index that is not there.
Recorder& recorder(c10::DeviceIndex device);

// Where the user's program is, as numbers of lazy/record/source.h; 0: unknown. Installed by the
// bindings; called without any lock of acc held.
struct Locator {
  uint32_t (*here)() = nullptr;
  // For each operator that is recorded anew. `differentiable`: it has a node of autograd.
  uint32_t (*of_operator)(const graph::Op& op, bool differentiable) = nullptr;
  // While a profiler wants to know: for every operator, followed ones too.
  bool (*profiled)() = nullptr;
  uint32_t (*of_profiled)(const graph::Op& op, bool differentiable) = nullptr;
  // For a view that needs a gradient, while operators are recorded anew.
  void (*note_view)() = nullptr;
};
void install_locator(const Locator& locator);

// Tells it of a view on a device, which nobody records.
void note_view(c10::DeviceIndex device);

}  // namespace acc::record
