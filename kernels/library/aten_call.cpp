#include "kernels/library/aten_call.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "csrc/base/check.h"
#include "csrc/base/stats.h"
#include "lazy/graph/words.h"

namespace acc::library {
namespace {

using graph::Tag;

void keep(void*) {}

double from_bits(int64_t bits) { return std::bit_cast<double>(bits); }

// A CPU tensor of no dimension: what a Python number or a 0-d CPU operand was when it was recorded.
at::Tensor make_number(int64_t tag) {
  at::Tensor tensor = at::detail::empty_cpu({}, static_cast<c10::ScalarType>(graph::dtype_of(tag)));
  if (graph::flags_of(tag) & graph::kWrappedFlag) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

// Writes the payload `words` of a number.
void set_number(const at::Tensor& tensor, const int64_t* words) {
  void* data = tensor.mutable_data_ptr();
  const auto put = [&](auto value) { *static_cast<decltype(value)*>(data) = value; };
  switch (tensor.scalar_type()) {
    case c10::kDouble:
      put(from_bits(words[0]));
      break;
    case c10::kFloat:
      put(static_cast<float>(from_bits(words[0])));
      break;
    case c10::kHalf:
      put(static_cast<c10::Half>(from_bits(words[0])));
      break;
    case c10::kBFloat16:
      put(static_cast<c10::BFloat16>(from_bits(words[0])));
      break;
    case c10::kLong:
      put(words[0]);
      break;
    case c10::kInt:
      put(static_cast<int32_t>(words[0]));
      break;
    case c10::kShort:
      put(static_cast<int16_t>(words[0]));
      break;
    case c10::kChar:
      put(static_cast<int8_t>(words[0]));
      break;
    case c10::kByte:
      put(static_cast<uint8_t>(words[0]));
      break;
    case c10::kBool:
      put(words[0] != 0);
      break;
    case c10::ScalarType::UInt16:
      put(static_cast<uint16_t>(words[0]));
      break;
    case c10::ScalarType::UInt32:
      put(static_cast<uint32_t>(words[0]));
      break;
    case c10::ScalarType::UInt64:
      put(static_cast<uint64_t>(words[0]));
      break;
    case c10::kComplexHalf:
      put(c10::complex<c10::Half>(static_cast<float>(from_bits(words[0])),
                                  static_cast<float>(from_bits(words[1]))));
      break;
    case c10::kComplexFloat:
      put(c10::complex<float>(static_cast<float>(from_bits(words[0])),
                              static_cast<float>(from_bits(words[1]))));
      break;
    case c10::kComplexDouble:
      put(c10::complex<double>(from_bits(words[0]), from_bits(words[1])));
      break;
    default:
      ACC_FAIL();
  }
}

// Writes those of the `tensors` that are numbers in the list `word`.
void set_numbers(const int64_t* word, const std::vector<at::Tensor>& tensors,
                 const int64_t* values) {
  ++word;
  for (const at::Tensor& tensor : tensors) {
    if (graph::tag_of(*word) == Tag::kNumber) set_number(tensor, values);
    values += graph::item_values(word);
    word += graph::item_words(word);
  }
}

// The tag of a wrapped double as that of a wrapped float32; others are unchanged.
int64_t as_float(int64_t tag) {
  const bool wrapped = (graph::flags_of(tag) & graph::kWrappedFlag) != 0;
  if (!wrapped || graph::dtype_of(tag) != static_cast<uint8_t>(c10::kDouble)) return tag;
  return graph::make_tag(Tag::kNumber, static_cast<uint8_t>(c10::kFloat), graph::flags_of(tag));
}

// Whether the numbers of a call may be float32 at once, which spares the kernel a cast per call.
bool float32_throughout(const graph::Graph& graph, const graph::Node& node) {
  bool tensors = false;
  for (auto rest = graph.arguments(node); !rest.empty();
       rest = rest.subspan(graph::item_words(rest.data()))) {
    if (graph::tag_of(rest[0]) != Tag::kTensor) continue;
    if (graph::dtype_of(rest[0]) != static_cast<uint8_t>(c10::kFloat)) return false;
    tensors = true;
  }
  return tensors;
}

// Turns items into IValues. `values` runs through the value block.
class Decoder {
 public:
  Decoder(const std::vector<Slot>* slots, c10::Device device, const int64_t* values,
          bool cast_numbers = false)
      : slots_(slots), device_(device), values_(values), cast_numbers_(cast_numbers) {}

  const int64_t* values() const { return values_; }

  c10::IValue item(const int64_t* word, graph::ListOf list) {
    const Tag tag = graph::tag_of(*word);
    const bool slot = (graph::flags_of(*word) & graph::kValueFlag) != 0;
    const int64_t* payload = slot ? values_ : word + 1;
    if (slot) values_ += graph::item_values(word);
    switch (tag) {
      case Tag::kNone:
        return {};
      case Tag::kUndefined:
        return at::Tensor();
      case Tag::kDevice:
        return device_;
      case Tag::kTensor:
        return operand(word);
      case Tag::kNumber: {
        at::Tensor number = make_number(cast_numbers_ ? as_float(*word) : *word);
        set_number(number, payload);
        return number;
      }
      case Tag::kInt:
        return payload[0];
      case Tag::kFloat:
        return from_bits(payload[0]);
      case Tag::kBool:
        return payload[0] != 0;
      case Tag::kComplex:
        return c10::complex<double>(from_bits(payload[0]), from_bits(payload[1]));
      case Tag::kString:
        return std::string(reinterpret_cast<const char*>(word + 1), graph::count_of(*word));
      case Tag::kList:
        return items(word, list);
      default:
        ACC_FAIL();
    }
  }

 private:
  // A tensor that is passed twice is one object: some kernels ask (attention of a sequence to
  // itself).
  at::Tensor operand(const int64_t* word) {
    const uint32_t words = graph::item_words(word);
    for (const auto& [other, tensor] : operands_) {
      if (graph::item_words(other) == words && std::equal(word, word + words, other)) return tensor;
    }
    at::Tensor made = alias(word, (*slots_)[static_cast<size_t>(word[1])]);
    // Empty tensors overlap with nothing, but each does with itself.
    if (made.numel() > 0) operands_.emplace_back(word, made);
    return made;
  }

  template <class T, class Convert>
  c10::IValue fill(const int64_t* word, const Convert& convert) {
    c10::List<T> list;
    const uint32_t n = graph::count_of(*word++);
    list.reserve(n);
    for (uint32_t i = 0; i < n; ++i) {
      list.push_back(convert(item(word, graph::ListOf::kNone)));
      word += graph::item_words(word);
    }
    return list;
  }

  c10::IValue items(const int64_t* word, graph::ListOf list) {
    using c10::IValue;
    switch (list) {
      case graph::ListOf::kTensor:
        return fill<at::Tensor>(word, [](const IValue& v) { return v.toTensor(); });
      case graph::ListOf::kOptionalTensor:
        return fill<std::optional<at::Tensor>>(word, [](const IValue& v) {
          return v.isNone() ? std::optional<at::Tensor>() : std::optional(v.toTensor());
        });
      case graph::ListOf::kInt:
        return fill<int64_t>(word, [](const IValue& v) { return v.toInt(); });
      case graph::ListOf::kFloat:
        return fill<double>(word, [](const IValue& v) { return v.toDouble(); });
      case graph::ListOf::kBool:
        return fill<bool>(word, [](const IValue& v) { return v.toBool(); });
      case graph::ListOf::kString:
        return fill<std::string>(word, [](const IValue& v) { return v.toStringRef(); });
      case graph::ListOf::kScalar: {
        c10::List<at::Scalar> scalars;
        const uint32_t n = graph::count_of(*word++);
        for (uint32_t i = 0; i < n; ++i) {
          scalars.push_back(item(word, graph::ListOf::kNone).toScalar());
          word += graph::item_words(word);
        }
        return scalars;
      }
      case graph::ListOf::kNone:
        break;
    }
    ACC_FAIL();
  }

  const std::vector<Slot>* slots_;
  c10::Device device_;
  const int64_t* values_;
  std::vector<std::pair<const int64_t*, at::Tensor>> operands_;
  const bool cast_numbers_;
};

bool has_lazy_bits(const int64_t* word) {
  if (graph::tag_of(*word) == Tag::kTensor) {
    return (graph::flags_of(*word) & (graph::kConjFlag | graph::kNegFlag)) != 0;
  }
  if (graph::tag_of(*word) != Tag::kList) return false;
  const uint32_t n = graph::count_of(*word++);
  for (uint32_t i = 0; i < n; ++i, word += graph::item_words(word)) {
    if (has_lazy_bits(word)) return true;
  }
  return false;
}

bool has_moved(const at::Tensor& tensor, const at::Tensor& place) {
  return tensor.storage().unsafeGetStorageImpl() != place.storage().unsafeGetStorageImpl() ||
         tensor.storage_offset() != place.storage_offset() || tensor.sizes() != place.sizes() ||
         tensor.strides() != place.strides() || tensor.dtype() != place.dtype() ||
         tensor.is_conj() != place.is_conj() || tensor.is_neg() != place.is_neg();
}

void put_back(const at::Tensor& tensor, const at::Tensor& place) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(place.getIntrusivePtr());
}

const c10::OperatorHandle& handle_of(const void* handle) {
  return *static_cast<const c10::OperatorHandle*>(handle);
}

}  // namespace

Slot make_slot(c10::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(0),
                                               c10::DataPtr(nullptr, device), nullptr, false);
}

void point(const Slot& slot, void* data, size_t nbytes) {
  slot->set_data_ptr_noswap({data, nullptr, &keep, slot->device()});
  slot->set_nbytes(nbytes);
}

at::Tensor alias(const int64_t* word, c10::Storage storage) {
  const graph::TensorWords words = graph::read_tensor(word);
  const auto backend = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  at::Tensor tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(backend),
      c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(words.dtype)));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(words.offset);
  impl->set_sizes_and_strides({words.sizes.data(), words.sizes.size()},
                              {words.strides.data(), words.strides.size()});
  if (words.flags & graph::kConjFlag) impl->_set_conj(true);
  if (words.flags & graph::kNegFlag) impl->_set_neg(true);
  return tensor;
}

AtenCall::AtenCall(const graph::Graph& graph, const graph::Node& node,
                   const std::vector<Slot>& slots, c10::Device device, bool into)
    : handle_(handle_of(into ? node.op->out_handle : node.op->handle)),
      keys_(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA) {
  const std::vector<int64_t> zeros(node.n_values, 0);
  Decoder decoder(&slots, device, zeros.data(),
                  node.op->casts_numbers && float32_throughout(graph, node));
  const auto place = [&](const int64_t* tensor) {
    return alias(tensor, slots[static_cast<size_t>(tensor[1])]);
  };
  const int64_t* word = graph.words.data() + node.words;
  for (uint32_t i = 0; i < node.op->arguments.size(); ++i) {
    if (graph::item_values(word) > 0) {
      const auto value = static_cast<uint32_t>(node.values + (decoder.values() - zeros.data()));
      patches_.push_back({i, value, word});
    }
    arguments_.push_back(decoder.item(word, node.op->arguments[i].list));
    lazy_bits_ |= has_lazy_bits(word);
    if (node.op->arguments[i].writes && graph::tag_of(*word) == Tag::kTensor) {
      written_.push_back({arguments_.back().toTensor(), place(word)});
    }
    word += graph::item_words(word);
  }
  if (into) {
    arguments_.emplace_back(place(word));
    written_.push_back({arguments_.back().toTensor(), place(word)});
  }
}

torch::jit::Stack AtenCall::run(std::span<const int64_t> values) const {
  torch::jit::Stack stack = arguments_;
  for (const Patch& patch : patches_) {
    Decoder decoder(nullptr, c10::kCPU, values.data() + patch.value);
    const Tag tag = graph::tag_of(*patch.word);
    if (tag == Tag::kNumber) {
      set_number(stack[patch.argument].toTensor(), values.data() + patch.value);
    } else if (tag == Tag::kList) {
      const c10::IValue& list = stack[patch.argument];
      if (list.isTensorList()) {
        set_numbers(patch.word, list.toTensorVector(), values.data() + patch.value);
        continue;
      }
      // Others with values are lists of numbers; tell their type from the prepared argument.
      const bool floats = list.isDoubleList();
      stack[patch.argument] =
          decoder.item(patch.word, floats ? graph::ListOf::kFloat : graph::ListOf::kScalar);
    } else {
      stack[patch.argument] = decoder.item(patch.word, graph::ListOf::kNone);
    }
  }
  try {
    call(stack);
    for (const Written& written : written_) {
      if (has_moved(written.tensor, written.place)) keep_place(written);
    }
  } catch (...) {
    for (const Written& written : written_) put_back(written.tensor, written.place);
    throw;
  }
  return stack;
}

// Goes to the backend's kernel directly, where the dispatcher would find it too: there is no other
// key between. The dispatcher would also tell profilers of the call under the name under which it
// told them when the program made it, so that all calls, and their operations, counted twice.
void AtenCall::call(torch::jit::Stack& stack) const {
  if (lazy_bits_) return handle_.callBoxed(stack);
  handle_.redispatchBoxed(keys_, &stack);
}

// The kernel has given what it wrote another layout than the user was told, or other memory.
void AtenCall::keep_place(const Written& written) {
  check_promise(written.tensor, written.place.scalar_type(), written.place.sizes());
  base::count(base::Counter::StrideCopies);
  const at::Tensor made = written.tensor.clone();
  put_back(written.tensor, written.place);
  written.tensor.copy_(made);
}

void check_promise(const at::Tensor& result, c10::ScalarType dtype, c10::IntArrayRef sizes) {
  ACC_CHECK(result.sizes() == sizes && result.scalar_type() == dtype,
            "the kernel gave a result of ", result.scalar_type(), " and shape ", result.sizes(),
            " where acc had promised ", dtype, " and ", sizes,
            ". Please report the operator as a fault of acc; ACC_MODE=eager avoids it.");
}

}  // namespace acc::library
