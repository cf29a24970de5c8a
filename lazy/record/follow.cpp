#include <cstring>
#include <string_view>

#include "csrc/base/stats.h"
#include "lazy/graph/words.h"
#include "lazy/record/call.h"
#include "lazy/record/numbers.h"
#include "lazy/record/recorder.h"

// The steady state: a call is compared with the next node of the step that is expected. Where all
// is equal nothing is hashed or written in words: numbers go to the block of values, results are
// made.
namespace acc::record {

using base::count;
using base::Counter;
using graph::Tag;

void Recorder::expect(const graph::Graph* graph) {
  if (n_nodes_ > 0 || !entries_.empty()) return;
  expected_ = graph;
  following_ = graph != nullptr;
}

bool Recorder::follow_tensor(const at::Tensor& tensor, const int64_t* word) {
  if (!tensor.defined()) return graph::tag_of(*word) == Tag::kUndefined;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!on_acc(impl)) {
    if (graph::tag_of(*word) == Tag::kNumber && impl->device_type() == c10::DeviceType::CPU &&
        impl->dim() == 0 && number_tag(tensor) == *word) {
      append_number(tensor, &values_);
      return true;
    }
    return false;
  }
  const auto dims = static_cast<size_t>(impl->dim());
  if (*word != graph::make_tag(Tag::kTensor,
                               static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype())),
                               lazy_bits(impl), dims) ||
      impl->device().index() != device_ ||
      std::memcmp(impl->sizes().data(), word + 3, dims * sizeof(int64_t)) != 0 ||
      std::memcmp(impl->strides().data(), word + 3 + dims, dims * sizeof(int64_t)) != 0) {
    return false;
  }
  kinds_.add(impl);
  LazyStorage* storage = storage_of(tensor);
  if (storage->observed) return false;
  const auto expected = static_cast<uint32_t>(word[1]);
  if (storage->trace == number_ && entries_[storage->entry].kind != graph::BufferKind::kInput) {
    return storage->entry == expected && word[2] == impl->storage_offset();
  }
  const size_t known = entries_.size();
  int64_t offset = 0;
  // Whether it is written is known from the expected graph once the whole step was followed.
  const uint32_t entry = entry_of(tensor, false, &offset);
  if (entry != expected || offset != word[2]) return false;
  views_differ_ |= entries_[entry].group != entry || entries_[entry].next != 0;
  if (entries_.size() == known) return true;
  const graph::Buffer& buffer = expected_->buffers[expected];
  return buffer.kind == entries_[entry].kind && buffer.nbytes == entries_[entry].nbytes &&
         buffer.group == entries_[entry].group;
}

bool Recorder::follow_value(const c10::IValue& value, const graph::Argument& argument,
                            const int64_t*& word) {
  if (value.isTensor()) {
    if (!follow_tensor(value.toTensor(), word)) return false;
    word += graph::item_words(word);
    return true;
  }
  const auto scalar = [&](Tag tag, int64_t bits) {
    const bool slot = is_slot(value, argument, kinds_);
    if (*word++ != graph::make_tag(tag, 0, slot ? graph::kValueFlag : 0)) return false;
    if (!slot) return *word++ == bits;
    values_.push_back(bits);
    return true;
  };
  if (value.isInt()) return scalar(Tag::kInt, value.toInt());
  if (value.isDouble()) return scalar(Tag::kFloat, to_bits(value.toDouble()));
  if (value.isBool()) return scalar(Tag::kBool, value.toBool() ? 1 : 0);
  if (value.isNone()) return *word++ == graph::make_tag(Tag::kNone);
  if (value.isDevice()) return *word++ == graph::make_tag(Tag::kDevice);
  if (value.isList()) {
    const auto items = value.toListRef();
    if (*word++ != graph::make_tag(Tag::kList, 0, 0, items.size())) return false;
    for (const c10::IValue& item : items) {
      if (!follow_value(item, argument, word)) return false;
    }
    return true;
  }
  if (value.isString()) {
    const std::string_view text = value.toStringView();
    if (*word != graph::make_tag(Tag::kString, 0, 0, text.size()) ||
        std::memcmp(word + 1, text.data(), text.size()) != 0) {
      return false;
    }
    word += graph::item_words(word);
    return true;
  }
  return false;  // complex numbers and what cannot be recorded take the slow way
}

// Compares the call with the next node of the expected step. On success the trace is one node
// longer; on failure it is unchanged.
bool Recorder::follow(const graph::Op& op, uint64_t ambient, torch::jit::Stack* stack) {
  if (n_nodes_ >= expected_->nodes.size()) return false;
  const graph::Node& node = expected_->nodes[n_nodes_];
  if (node.op != &op || node.ambient != ambient) return false;
  const Mark before = mark();
  const size_t base = stack->size() - op.arguments.size();
  const int64_t* word = expected_->words.data() + node.words;
  bool equal = true;
  views_differ_ = false;
  kinds_ = {};
  try {
    for (size_t i = 0; equal && i < op.arguments.size(); ++i) {
      equal = follow_value((*stack)[base + i], op.arguments[i], word);
    }
    // Where views of one input begin is an address; whether they overlap is asked at each call.
    if (equal && op.writes && views_differ_ && !op.communicates) equal = !overlap(op, *stack);
    if (equal) {
      ++n_nodes_;
      if (op.communicates) communicates_ = true;
      push_results(op, expected_->words.data() + node.outputs, stack);
      count(Counter::NodesFollowed);
      return true;
    }
  } catch (...) {
    go_back(before);
    throw;
  }
  go_back(before);
  return false;
}

// The step is no longer the expected one: what was followed so far becomes a recorded prefix.
void Recorder::stop_following() {
  if (expected_ != nullptr && n_nodes_ > 0) {
    graph_.nodes.assign(expected_->nodes.begin(),
                        expected_->nodes.begin() + static_cast<int64_t>(n_nodes_));
    graph_.words.assign(expected_->words.begin(),
                        expected_->words.begin() + graph_.nodes.back().end);
    for (const graph::Node& node : graph_.nodes) {
      for (const graph::Use& use : graph::uses(graph_, node)) {
        if (use.writes) entries_[entries_[use.buffer].group].written = true;
      }
    }
  }
  expected_ = nullptr;
  following_ = false;
}

}  // namespace acc::record
