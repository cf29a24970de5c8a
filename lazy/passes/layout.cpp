#include "lazy/passes/layout.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "lazy/graph/dtype.h"
#include "lazy/graph/words.h"
#include "lazy/passes/conversions.h"
#include "lazy/passes/elementwise.h"
#include "lazy/passes/min_cut.h"

namespace acc::passes {
namespace {

using graph::Graph;
using graph::Node;
using graph::Tag;
using graph::TensorWords;

// Prices of a host are picoseconds, measured with one thread of a server processor (AVX-512); what
// counts is how they compare. docs/performance.md has the measurements.

// What a copy from one layout to the other takes, per element.
constexpr int64_t kCopy = 700;

// What channels last spares a convolution: per element of its images, which oneDNN otherwise
// reorders into blocks of channels and back; and, where images are not tiny, per floating-point
// operation, since it comes to other kernels. What it costs: per element of the weights, which take
// longer to reorder, and whose gradient ATen copies once more. Kernels of one pixel spare nothing.
struct ConvolutionPrices {
  int64_t per_image_element;
  double per_operation;
  int64_t per_weight;
};
constexpr ConvolutionPrices kForward{500, 0.3, 400};
constexpr ConvolutionPrices kBackward{800, 0.3, 1000};
constexpr int64_t kTinyImage = 64;  // pixels

// Prices of a GPU are bytes that are copied. Its tensor cores multiply what is channels last: cuDNN
// copies what is not into that layout, and results out of it, at each call. That is what channels
// last spares a convolution of a half type whose numbers of channels suit tensor cores; with others
// it takes either layout. Float32 stays as it is, and so does what makes far fewer channels than it
// takes. docs/performance.md says why.
constexpr int64_t kTensorCoreChannels = 8;

// An operator that takes and makes either layout, and what channels last spares per element of its
// first tensor on a host.
struct Rule {
  std::string_view op;
  int64_t spares;
};
constexpr std::array kRules{
    Rule{"aten::native_batch_norm", 0},
    Rule{"aten::native_batch_norm_backward", 0},
    Rule{"aten::max_pool2d_with_indices", 6000},  // scalar loops where channels are not innermost
    Rule{"aten::max_pool2d_with_indices_backward", 0},
    Rule{"aten::avg_pool2d", 0},
    Rule{"aten::avg_pool2d_backward", 0},
    Rule{"aten::_adaptive_avg_pool2d", 0},
    Rule{"aten::_adaptive_avg_pool2d_backward", 0},
    Rule{"aten::upsample_nearest2d", 0},
    Rule{"aten::upsample_nearest2d_backward", 0},
    Rule{"aten::upsample_bilinear2d", 0},
    Rule{"aten::upsample_bilinear2d_backward", 0},
    Rule{"aten::cat", 0},
    Rule{"aten::mean.dim", 0},
};

constexpr size_t kDims = 4;
using Strides = std::array<int64_t, kDims>;

Strides channels_first(const TensorWords& t) {
  return {t.sizes[1] * t.sizes[2] * t.sizes[3], t.sizes[2] * t.sizes[3], t.sizes[3], 1};
}
Strides channels_last(const TensorWords& t) {
  return {t.sizes[1] * t.sizes[2] * t.sizes[3], 1, t.sizes[3] * t.sizes[1], t.sizes[1]};
}

int64_t elements(const TensorWords& t) { return t.sizes[0] * t.sizes[1] * t.sizes[2] * t.sizes[3]; }

// A tensor that a node names.
struct Mention {
  uint32_t at = 0;        // where its words begin
  uint32_t argument = 0;  // in the schema; of results: after the last argument
  bool written = false;   // in place
  bool fresh = false;
};

// A node that can compute in either layout.
struct Choice {
  std::vector<Mention> images;  // in the layout of the node
  std::vector<Mention> others;  // in the layout that they have
  int64_t spares = 0;           // what channels last spares
};

class Layouts {
 public:
  Layouts(const Graph& graph, const std::vector<bool>& outputs, bool on_gpu)
      : graph_(graph), outputs_(outputs), on_gpu_(on_gpu) {}

  Graph run() {
    const auto convolution =
        std::ranges::find_if(graph_.nodes, [](const Node& node) { return node.op->convolves; });
    if (convolution == graph_.nodes.end()) return graph_;
    copy_ = convolution->op->copy;
    find_free();
    for (const Node& node : graph_.nodes) choices_.push_back(choice(node));
    choose();
    if (std::ranges::find(last_, true) == last_.end()) return graph_;
    return rewrite();
  }

 private:
  TensorWords tensor(uint32_t at) const { return graph::read_tensor(graph_.words.data() + at); }

  std::vector<Mention> mentions(const Node& node) const {
    std::vector<Mention> found;
    uint32_t argument = 0;
    for (const int64_t* item : graph::items(graph_.arguments(node))) {
      add_mentions(item, {0, argument, node.op->arguments[argument].writes, false}, &found);
      ++argument;
    }
    for (const int64_t* item : graph::items(graph_.results(node))) {
      add_mentions(item, {0, argument++, false, true}, &found);
    }
    return found;
  }

  void add_mentions(const int64_t* item, Mention mention, std::vector<Mention>* found) const {
    if (graph::tag_of(*item) == Tag::kTensor) {
      mention.at = static_cast<uint32_t>(item - graph_.words.data());
      found->push_back(mention);
    } else if (graph::tag_of(*item) == Tag::kList) {
      const int64_t* inner = item + 1;
      for (uint32_t i = 0; i < graph::count_of(*item); ++i, inner += graph::item_words(inner)) {
        add_mentions(inner, mention, found);
      }
    }
  }

  // Whether the two layouts of the tensor differ in memory.
  static bool has_layout(const TensorWords& t) {
    return t.sizes.size() == kDims && t.sizes[1] > 1 && t.sizes[2] * t.sizes[3] > 1 &&
           elements(t) > 0;
  }

  static bool is_channels_first(const TensorWords& t) {
    return has_layout(t) && t.flags == 0 && std::ranges::equal(t.strides, channels_first(t));
  }

  // A buffer may be laid out anew if the step makes it, nobody sees it, and all take it for one and
  // the same tensor.
  void find_free() {
    const auto& buffers = graph_.buffers;
    std::vector<uint32_t> seen(buffers.size(), 0);  // where it was first named; 0: nowhere
    free_.resize(buffers.size());
    for (uint32_t i = 0; i < buffers.size(); ++i) {
      free_[i] = buffers[i].kind == graph::BufferKind::kFresh && !outputs_[i];
    }
    for (uint32_t i = 0; i < buffers.size(); ++i) {
      if (buffers[i].group != i) free_[i] = free_[buffers[i].group] = false;
    }
    for (const Node& node : graph_.nodes) {
      for (const Mention& mention : mentions(node)) {
        const TensorWords t = tensor(mention.at);
        if (!is_channels_first(t) || t.offset != 0 ||
            static_cast<uint64_t>(elements(t)) * graph::element_bytes(t.dtype) !=
                buffers[t.buffer].nbytes) {
          free_[t.buffer] = false;
        } else if (seen[t.buffer] == 0) {
          seen[t.buffer] = mention.at + 1;
        } else {
          const TensorWords first = tensor(seen[t.buffer] - 1);
          if (first.dtype != t.dtype || !std::ranges::equal(first.sizes, t.sizes)) {
            free_[t.buffer] = false;
          }
        }
      }
    }
    for (uint32_t i = 0; i < buffers.size(); ++i) {
      if (seen[i] == 0) free_[i] = false;
    }
  }

  std::optional<Choice> choice(const Node& node) const {
    if (node.op->convolves) return convolution(node);
    const auto rule = std::ranges::find(kRules, node.op->name, &Rule::op);
    if (rule != kRules.end()) return by_rule(node, *rule);
    return elementwise(node);
  }

  std::optional<Choice> by_rule(const Node& node, const Rule& rule) const {
    Choice made;
    for (const Mention& mention : mentions(node)) {
      const TensorWords t = tensor(mention.at);
      if (!has_layout(t)) continue;
      if (!is_channels_first(t)) return std::nullopt;
      if (made.images.empty() && !on_gpu_) made.spares = rule.spares * elements(t);
      made.images.push_back(mention);
    }
    if (made.images.empty()) return std::nullopt;
    // Generated kernels are as fast in either layout.
    if (as_elementwise(graph_, node).has_value()) made.spares = 0;
    return made;
  }

  // Operands that are broadcast or strided otherwise are read as they lie.
  std::optional<Choice> elementwise(const Node& node) const {
    const auto known = as_elementwise(graph_, node);
    if (!known.has_value() || known->nest.reduces() || !known->formula->along.empty()) {
      return std::nullopt;
    }
    const std::vector<Mention> all = mentions(node);
    const auto result = std::ranges::find_if(
        all, [](const Mention& mention) { return mention.fresh || mention.written; });
    if (result == all.end() || !is_channels_first(tensor(result->at))) return std::nullopt;
    Choice made;
    for (const Mention& mention : all) {
      const TensorWords t = tensor(mention.at);
      const bool image = is_channels_first(t) &&
                         std::ranges::equal(t.sizes, tensor(result->at).sizes) &&
                         !is_brought(node, mention);
      (image ? made.images : made.others).push_back(mention);
    }
    return made;
  }

  // Whether it is what the step is given and a GPU copies or converts, as autocast has weights and
  // images: in one pass over memory, which can as well write the other layout.
  bool is_brought(const Node& node, const Mention& mention) const {
    return on_gpu_ && node.op == copy_ && !mention.written &&
           shares_copies(tensor(mention.at).buffer);
  }

  // (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups), or
  // (grad_output, input, weight, bias_sizes, and the rest)
  std::optional<Choice> convolution(const Node& node) const {
    const auto items = graph::items(graph_.arguments(node));
    const bool backward = !graph_.results(node).empty() && items.size() > 9;
    const uint32_t shift = backward ? 1 : 0;
    const int64_t* weight = items[1 + shift];
    const int64_t* transposed = items[6 + shift];
    const int64_t* groups = items[8 + shift];
    if (graph::count_of(*weight) != kDims || !may_gain(graph::read_tensor(weight)) ||
        transposed[1] != 0 || groups[1] != 1) {
      return std::nullopt;
    }
    Choice made;
    for (const Mention& mention : mentions(node)) {
      const TensorWords t = tensor(mention.at);
      if (t.sizes.size() != kDims) continue;
      // A kernel of one pixel has the same memory in both layouts.
      if (is_weight(node, mention) && t.sizes[2] * t.sizes[3] == 1) continue;
      // By the layout of the images ATen tells which one is meant.
      if (!is_channels_first(t)) return std::nullopt;
      made.images.push_back(mention);
    }
    if (on_gpu_) {
      made.spares = spared_copies(made, graph::read_tensor(weight));
      return made;
    }
    const TensorWords in = graph::read_tensor(items[shift]);
    const TensorWords out = graph::read_tensor(backward ? items[0] : graph_.results(node).data());
    made.spares = spared(backward ? kBackward : kForward, in, out, graph::read_tensor(weight));
    return made;
  }

  bool may_gain(const TensorWords& weight) const {
    if (!on_gpu_) return weight.dtype == graph::dtype::kF32;
    const auto& sizes = weight.sizes;
    const bool narrows = 2 * sizes[0] <= sizes[1] && sizes[2] * sizes[3] > 1;
    return graph::dtype::is_half(weight.dtype) && !narrows;
  }

  int64_t spared_copies(const Choice& convolution, const TensorWords& weight) const {
    if (weight.sizes[0] % kTensorCoreChannels != 0 || weight.sizes[1] % kTensorCoreChannels != 0) {
      return 0;
    }
    int64_t spares = 0;
    for (const Mention& mention : convolution.images) spares += copy_price(tensor(mention.at));
    return spares;
  }

  static int64_t spared(const ConvolutionPrices& prices, const TensorWords& in,
                        const TensorWords& out, const TensorWords& weight) {
    if (weight.sizes[2] * weight.sizes[3] == 1) return 0;
    const int64_t spares = prices.per_image_element * (elements(in) + elements(out)) -
                           prices.per_weight * elements(weight);
    const int64_t pixels = out.sizes[2] * out.sizes[3];
    if (pixels < kTinyImage) return spares;
    const double operations =
        2.0 * static_cast<double>(out.sizes[0] * pixels) * static_cast<double>(elements(weight));
    return spares + static_cast<int64_t>(prices.per_operation * operations);
  }

  // The weights, or their gradient.
  static bool is_weight(const Node& node, const Mention& mention) {
    const auto arguments = static_cast<uint32_t>(node.op->arguments.size());
    const bool backward = node.op->returns.size() > 1;
    return mention.argument == (backward ? 2U : 1U) || mention.argument == arguments + 1;
  }

  int64_t copy_price(const TensorWords& t) const { return copy_price(elements(t), t.dtype); }
  int64_t copy_price(int64_t elements, uint8_t dtype) const {
    return elements * (on_gpu_ ? static_cast<int64_t>(graph::element_bytes(dtype)) : kCopy);
  }

  // The memory of a tensor that is laid out channels first: two equal ones may share a copy.
  using Region = std::tuple<uint32_t, int64_t, std::array<int64_t, kDims>, uint8_t>;
  static Region region(const TensorWords& t) {
    return {t.buffer, t.offset, {t.sizes[0], t.sizes[1], t.sizes[2], t.sizes[3]}, t.dtype};
  }

  bool shares_copies(uint32_t buffer) const {
    return graph_.buffers[buffer].kind == graph::BufferKind::kInput;
  }

  // Things of the cut: nodes, then buffers, then copies of inputs. On the right is channels last.
  void choose() {
    const auto nodes = static_cast<uint32_t>(graph_.nodes.size());
    const auto first_copy = static_cast<uint32_t>(nodes + graph_.buffers.size());
    std::map<Region, uint32_t> copies;
    for (uint32_t i = 0; i < nodes; ++i) {
      if (!choices_[i].has_value()) continue;
      for (const Mention& mention : choices_[i]->images) {
        const TensorWords t = tensor(mention.at);
        if (shares_copies(t.buffer)) {
          copies.try_emplace(region(t), static_cast<uint32_t>(first_copy + copies.size()));
        }
      }
    }
    MinCut cut(static_cast<uint32_t>(first_copy + copies.size()));
    for (const auto& [memory, copy] : copies) {
      const auto& [buffer, offset, sizes, dtype] = memory;
      cut.price_right(copy, copy_price(sizes[0] * sizes[1] * sizes[2] * sizes[3], dtype));
    }
    for (uint32_t i = 0; i < nodes; ++i) {
      if (!choices_[i].has_value()) {
        stay(graph_.nodes[i], nodes, &cut);
        continue;
      }
      const int64_t spares = choices_[i]->spares;
      if (spares > 0) cut.price_left(i, spares);
      if (spares < 0) cut.price_right(i, -spares);
      for (const Mention& mention : choices_[i]->images) {
        const TensorWords t = tensor(mention.at);
        const int64_t price = mention.written ? MinCut::kNever : copy_price(t);
        if (free_[t.buffer]) {
          cut.price_apart(i, nodes + t.buffer, price);
        } else if (shares_copies(t.buffer) && !mention.written) {
          cut.require(i, copies.at(region(t)));
        } else {
          cut.price_right(i, price);
        }
      }
    }
    last_ = cut.run();
  }

  // A node that knows only the layout that was recorded.
  void stay(const Node& node, uint32_t nodes, MinCut* cut) const {
    for (const Mention& mention : mentions(node)) {
      const TensorWords t = tensor(mention.at);
      if (!free_[t.buffer]) continue;
      const bool reads = !mention.written && !mention.fresh;
      cut->price_right(nodes + t.buffer, reads ? copy_price(t) : MinCut::kNever);
    }
  }

  bool buffer_is_last(uint32_t buffer) const {
    return free_[buffer] && last_[graph_.nodes.size() + buffer];
  }

  Graph rewrite() {
    out_.buffers = graph_.buffers;
    for (uint32_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      std::vector<int64_t> words(graph_.words.begin() + node.words,
                                 graph_.words.begin() + node.end);
      std::vector<std::pair<Mention, uint32_t>> made;  // results to copy, and where they are
      const bool last = choices_[i].has_value() && last_[i];
      for (const Mention& mention : touched(i)) {
        const TensorWords t = tensor(mention.at);
        int64_t* at = words.data() + (mention.at - node.words);
        if (last != buffer_is_last(t.buffer)) {
          at[1] = mention.fresh ? new_buffer(t) : copy_of(node, t, last);
          at[2] = 0;
          if (mention.fresh) made.emplace_back(mention, static_cast<uint32_t>(at[1]));
        }
        std::ranges::copy(last ? channels_last(t) : channels_first(t), at + 3 + kDims);
      }
      for (const Mention& mention : others(i)) {
        const TensorWords t = tensor(mention.at);
        if (!buffer_is_last(t.buffer)) continue;
        std::ranges::copy(channels_last(t), words.data() + (mention.at - node.words) + 3 + kDims);
      }
      put(node, words);
      for (const auto& [mention, buffer] : made) {
        const TensorWords t = tensor(mention.at);
        copy(node, t, t.buffer, t.offset, !last, buffer, 0, last);
      }
      forget_written(node);
    }
    return std::move(out_);
  }

  // The tensors of a node that have a layout to be set.
  std::vector<Mention> touched(uint32_t index) const {
    if (choices_[index].has_value()) return choices_[index]->images;
    std::vector<Mention> found;
    for (const Mention& mention : mentions(graph_.nodes[index])) {
      if (buffer_is_last(tensor(mention.at).buffer)) found.push_back(mention);
    }
    return found;
  }

  std::vector<Mention> others(uint32_t index) const {
    return choices_[index].has_value() ? choices_[index]->others : std::vector<Mention>();
  }

  uint32_t new_buffer(const TensorWords& t) {
    const auto bytes = static_cast<uint64_t>(elements(t)) * graph::element_bytes(t.dtype);
    return add_buffer(&out_, bytes);
  }

  // A buffer that holds `t` in the given layout, made before the node. Inputs are copied once:
  // weights and images come again in backward. Copies of intermediates would cost memory until
  // then.
  uint32_t copy_of(const Node& node, const TensorWords& t, bool last) {
    const bool shares = shares_copies(t.buffer);
    if (shares) {
      if (const auto found = copies_.find(region(t)); found != copies_.end()) return found->second;
    }
    const uint32_t made = new_buffer(t);
    copy(node, t, made, 0, last, t.buffer, t.offset, !last);
    if (shares) copies_.emplace(region(t), made);
    return made;
  }

  void forget_written(const Node& node) {
    for (const graph::Use& use : graph::uses(graph_, node)) {
      if (!use.writes) continue;
      const uint32_t group = graph_.buffers[use.buffer].group;
      std::erase_if(copies_, [&](const auto& entry) {
        return graph_.buffers[std::get<0>(entry.first)].group == group;
      });
    }
  }

  void put(Node node, const std::vector<int64_t>& words) {
    node.outputs -= node.words;
    node.end -= node.words;
    node.words = 0;
    out_.append(node, words);
  }

  void copy(const Node& by, const TensorWords& t, uint32_t to, int64_t to_offset, bool to_last,
            uint32_t from, int64_t from_offset, bool from_last) {
    const auto words = [&](uint32_t buffer, int64_t offset, bool last) {
      std::vector<int64_t> made{graph::make_tag(Tag::kTensor, t.dtype, 0, kDims), buffer, offset};
      made.insert(made.end(), t.sizes.begin(), t.sizes.end());
      const Strides strides = last ? channels_last(t) : channels_first(t);
      made.insert(made.end(), strides.begin(), strides.end());
      return made;
    };
    put_copy(&out_, copy_, by, words(to, to_offset, to_last), words(from, from_offset, from_last));
  }

  const Graph& graph_;
  const std::vector<bool>& outputs_;
  const bool on_gpu_;
  const graph::Op* copy_ = nullptr;
  std::vector<bool> free_;                      // per buffer: may have another layout
  std::vector<std::optional<Choice>> choices_;  // per node
  std::vector<bool> last_;                      // per thing of the cut: is channels last
  Graph out_;
  std::map<Region, uint32_t> copies_;  // of inputs, as long as nobody writes these
};

}  // namespace

Graph choose_layouts(const Graph& graph, const std::vector<bool>& outputs, bool on_gpu) {
  return Layouts(graph, outputs, on_gpu).run();
}

}  // namespace acc::passes
