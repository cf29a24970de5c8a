#include "lazy/passes/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <string>
#include <vector>

#include "lazy/graph/dtype.h"
#include "lazy/graph/print.h"
#include "lazy/graph/words.h"

namespace acc {
namespace {

using graph::BufferKind;
using graph::Tag;

using Sizes = std::array<int64_t, 4>;

// Images of four dimensions, laid out channels first, and operators on them.
struct Program {
  graph::Graph graph;
  std::vector<bool> outputs;
  uint8_t dtype = graph::dtype::kF32;  // of the buffers to come
  bool on_gpu = false;

  uint32_t buffer(BufferKind kind, const Sizes& sizes, bool seen = false) {
    const auto index = static_cast<uint32_t>(graph.buffers.size());
    const auto bytes = static_cast<uint64_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]) *
                       graph::element_bytes(dtype);
    graph.buffers.push_back({kind, kind == BufferKind::kFresh ? bytes : 0, index, 0, false});
    outputs.push_back(seen);
    sizes_.push_back(sizes);
    dtypes_.push_back(dtype);
    return index;
  }
  uint32_t input(const Sizes& sizes) { return buffer(BufferKind::kInput, sizes); }
  uint32_t fresh(const Sizes& sizes) { return buffer(BufferKind::kFresh, sizes); }
  uint32_t output(const Sizes& sizes) { return buffer(BufferKind::kFresh, sizes, true); }

  void convolution(uint32_t in, uint32_t weight, uint32_t out, int64_t groups = 1) {
    begin("aten::convolution", 9);
    image(in);
    image(weight);
    undefined();
    pair(1), pair(1), pair(1);
    truth(false);
    pair(0);
    number(groups);
    results();
    image(out);
    end();
  }

  void convolution_backward(uint32_t grad, uint32_t in, uint32_t weight, uint32_t grad_in,
                            uint32_t grad_weight) {
    begin("aten::convolution_backward", 11, 3);
    image(grad), image(in), image(weight);
    pair(0), pair(1), pair(1), pair(1);
    truth(false);
    pair(0);
    number(1);
    truth(true);
    results();
    image(grad_in), image(grad_weight);
    undefined();
    end();
  }

  void relu(uint32_t in, uint32_t out) { unary("aten::relu", in, out); }

  void unary(const char* op, uint32_t in, uint32_t out) {
    begin(op, 1);
    image(in);
    results();
    image(out);
    end();
  }

  void copy(uint32_t to, uint32_t from) {
    begin("aten::copy_", 3);
    graph.nodes.back().op = &copy_;
    image(to), image(from);
    truth(false);
    results();
    end();
  }

  void multiply(uint32_t a, uint32_t b, uint32_t out) {
    begin("aten::mul.Tensor", 2).arguments[1].name = "other";
    image(a), image(b);
    results();
    image(out);
    end();
  }

  void relu_in_place(uint32_t at) {
    graph::Op& op = begin("aten::relu_", 1);
    op.writes = op.arguments[0].writes = true;
    op.returns[0].alias = 0;
    graph.buffers[at].written = true;
    image(at);
    results();
    end();
  }

  // An operator that nobody knows.
  void other(uint32_t in, uint32_t out, bool as_matrix = false) {
    begin("test::other", 1);
    if (as_matrix) {
      const Sizes& s = sizes_[in];
      push({graph::make_tag(Tag::kTensor, dtypes_[in], 0, 2), in, 0, s[0], s[1] * s[2] * s[3],
            s[1] * s[2] * s[3], 1});
    } else {
      image(in);
    }
    results();
    image(out);
    end();
  }

  // The program as text after the pass, without what is the same in all lines.
  std::vector<std::string> run() {
    out = passes::choose_layouts(graph, outputs, on_gpu);
    std::vector<std::string> lines;
    for (const graph::Node& node : out.nodes) {
      std::string line = graph::print(out, node);
      for (const char* drop :
           {"aten::", "test::", "f32", "f16", ", undefined", "[1, 1], ", "[0, 0], "}) {
        for (size_t at; (at = line.find(drop)) != std::string::npos;) {
          line.erase(at, std::string(drop).size());
        }
      }
      lines.push_back(line);
    }
    return lines;
  }
  graph::Graph out;

 private:
  graph::Op& begin(const std::string& name, size_t arguments, size_t returns = 1) {
    graph::Op& op = ops_.emplace_back();
    op.name = name;
    op.arguments.resize(arguments);
    op.arguments[0].name = "self";
    op.returns.resize(returns);
    if (name.starts_with("aten::convolution")) {
      copy_.name = "aten::copy_";
      copy_.arguments.resize(3);
      copy_.arguments[0].name = "self", copy_.arguments[1].name = "src";
      copy_.writes = copy_.arguments[0].writes = true;
      copy_.returns.resize(1);
      copy_.returns[0].alias = 0;
      op.copy = &copy_;
      op.convolves = true;
    }
    graph::Node node;
    node.op = &op;
    node.words = static_cast<uint32_t>(graph.words.size());
    graph.nodes.push_back(node);
    return op;
  }
  void push(std::initializer_list<int64_t> words) {
    graph.words.insert(graph.words.end(), words.begin(), words.end());
  }
  void image(uint32_t buffer) {
    const Sizes& s = sizes_[buffer];
    push({graph::make_tag(Tag::kTensor, dtypes_[buffer], 0, 4), buffer, 0, s[0], s[1], s[2], s[3],
          s[1] * s[2] * s[3], s[2] * s[3], s[3], 1});
  }
  void undefined() { push({graph::make_tag(Tag::kUndefined)}); }
  void number(int64_t value) { push({graph::make_tag(Tag::kInt), value}); }
  void truth(bool value) { push({graph::make_tag(Tag::kBool), value ? 1 : 0}); }
  void pair(int64_t value) {
    push({graph::make_tag(Tag::kList, 0, 0, 2)});
    number(value);
    number(value);
  }
  void results() { graph.nodes.back().outputs = static_cast<uint32_t>(graph.words.size()); }
  void end() { graph.nodes.back().end = static_cast<uint32_t>(graph.words.size()); }

  std::deque<graph::Op> ops_;
  graph::Op copy_;
  std::vector<Sizes> sizes_;
  std::vector<uint8_t> dtypes_;
};

using Lines = std::vector<std::string>;

// Large images and small kernels: convolutions gain from channels last.
constexpr Sizes kImage{8, 4, 32, 32};
constexpr Sizes kKernel{4, 4, 3, 3};

TEST(Layout, WhatIsBetweenConvolutionsIsChannelsLast) {
  Program p;
  const uint32_t image = p.input(kImage), a = p.input(kKernel), b = p.input(kKernel);
  const uint32_t first = p.fresh(kImage), active = p.fresh(kImage), last = p.output(kImage);
  p.convolution(image, a, first);
  p.relu(first, active);
  p.convolution(active, b, last);
  EXPECT_EQ(p.run(),
            (Lines{"copy_(%6:[8,4,32,32]/[4096,1,128,4], %0:[8,4,32,32], False)",
                   "copy_(%7:[4,4,3,3]/[36,1,12,4], %1:[4,4,3,3], False)",
                   "%3:[8,4,32,32]/[4096,1,128,4] = convolution(%6:[8,4,32,32]/[4096,1,128,4], "
                   "%7:[4,4,3,3]/[36,1,12,4], False, 1)",
                   "%4:[8,4,32,32]/[4096,1,128,4] = relu(%3:[8,4,32,32]/[4096,1,128,4])",
                   "copy_(%8:[4,4,3,3]/[36,1,12,4], %2:[4,4,3,3], False)",
                   "%9:[8,4,32,32]/[4096,1,128,4] = convolution(%4:[8,4,32,32]/[4096,1,128,4], "
                   "%8:[4,4,3,3]/[36,1,12,4], False, 1)",
                   "copy_(%5:[8,4,32,32], %9:[8,4,32,32]/[4096,1,128,4], False)"}));
  ASSERT_EQ(p.out.buffers.size(), 10U);
  EXPECT_EQ(p.out.buffers[9].nbytes, p.graph.buffers[5].nbytes);
  EXPECT_TRUE(p.out.buffers[5].written);
}

// Whether some tensor of the buffer is channels last after the pass.
bool is_last(Program& p, uint32_t buffer) {
  const std::string name = "%" + std::to_string(buffer) + ":";
  for (const std::string& line : p.run()) {
    for (size_t at = line.find(name); at != std::string::npos; at = line.find(name, at + 1)) {
      const size_t sizes_end = line.find(']', at);
      if (line.compare(sizes_end, 3, "]/[") == 0) return true;
    }
  }
  return false;
}

// A convolution, ReLU in place, and what `use` does with the result.
template <class Use>
bool stays_last(const Use& use) {
  Program p;
  const uint32_t made = p.fresh(kImage);
  p.convolution(p.input(kImage), p.input(kKernel), made);
  p.relu_in_place(made);
  p.convolution(made, p.input(kKernel), p.output(kImage));
  use(p, made);
  return is_last(p, made);
}

TEST(Layout, WhatTheUserSeesKeepsItsLayout) {
  EXPECT_TRUE(stays_last([](Program&, uint32_t) {}));
  EXPECT_FALSE(stays_last([](Program& p, uint32_t made) { p.outputs[made] = true; }));
}

TEST(Layout, AnOperatorThatIsNotKnownReadsACopy) {
  Program p;
  const uint32_t made = p.fresh(kImage), other = p.output(kImage), next = p.fresh(kImage);
  p.convolution(p.input(kImage), p.input(kKernel), made);
  p.convolution(made, p.input(kKernel), next);
  p.convolution(next, p.input(kKernel), p.output(kImage));
  p.other(made, other);
  const Lines lines = p.run();
  EXPECT_TRUE(is_last(p, made));
  EXPECT_EQ(lines[lines.size() - 2],
            "copy_(%13:[8,4,32,32], %0:[8,4,32,32]/[4096,1,128,4], False)");
  EXPECT_EQ(lines.back(), "%1:[8,4,32,32] = other(%13:[8,4,32,32])");
}

TEST(Layout, ABroadcastOperandIsReadAsItLies) {
  size_t read_last = 0;
  for (const Sizes& sizes : {Sizes{1, 4, 32, 32}, Sizes{8, 4, 32, 1}}) {
    Program p;
    const uint32_t image = p.input(kImage), out = p.output(kImage);
    const uint32_t before = p.fresh(sizes), made = p.fresh(sizes);
    p.convolution(p.input(sizes), p.input({4, 4, 5, 5}), before);
    p.convolution(before, p.input({4, 4, 5, 5}), made);
    p.multiply(image, made, out);
    EXPECT_TRUE(is_last(p, before));
    const std::string line = p.run().back();
    const bool last = is_last(p, made);
    read_last += last ? 1 : 0;
    EXPECT_EQ(line.find("]/[") != std::string::npos, last) << line;
    EXPECT_TRUE(line.starts_with("%1:[8,4,32,32] = mul.Tensor(%0:[8,4,32,32], %3:")) << line;
  }
  EXPECT_GT(read_last, 0U);
}

TEST(Layout, ABufferThatIsViewedOtherwiseKeepsItsLayout) {
  EXPECT_FALSE(
      stays_last([](Program& p, uint32_t made) { p.other(made, p.output({8, 1, 1, 1}), true); }));
  EXPECT_FALSE(stays_last([](Program& p, uint32_t made) {
    const uint32_t view = p.buffer(BufferKind::kFresh, kImage);
    p.graph.buffers[view].group = made;
  }));
}

TEST(Layout, WhatAnUnknownOperatorMakesKeepsItsLayout) {
  Program p;
  const uint32_t made = p.fresh(kImage);
  p.other(p.input(kImage), made);
  p.convolution(made, p.input(kKernel), p.output(kImage));
  EXPECT_FALSE(is_last(p, made));
}

TEST(Layout, HeavyWeightsAndSmallImagesStay) {
  Program p;
  const Sizes image{8, 512, 4, 4}, kernel{512, 512, 3, 3};
  const uint32_t made = p.fresh(image);
  p.convolution(p.input(image), p.input(kernel), made);
  p.convolution(made, p.input(kernel), p.output(image));
  EXPECT_FALSE(is_last(p, made));
  EXPECT_EQ(p.out.nodes.size(), p.graph.nodes.size());
}

TEST(Layout, GroupsAndSingleChannelsStay) {
  for (const Sizes& image : {Sizes{8, 4, 32, 32}, Sizes{8, 1, 32, 32}, Sizes{512, 64, 1, 1}}) {
    Program p;
    const uint32_t made = p.fresh(image);
    const int64_t channels = image[1];
    p.convolution(p.input(image), p.input({channels, channels == 4 ? 1 : channels, 3, 3}), made,
                  channels == 4 ? 4 : 1);
    p.relu(made, p.output(image));
    EXPECT_FALSE(is_last(p, made));
  }
}

TEST(Layout, GradientsOfWeightsComeBackInTheirLayout) {
  Program p;
  const uint32_t image = p.input(kImage), weight = p.input(kKernel);
  const uint32_t made = p.fresh(kImage), active = p.fresh(kImage);
  const uint32_t grad = p.fresh(kImage), grad_image = p.fresh(kImage);
  const uint32_t grad_weight = p.output(kKernel);
  p.convolution(image, weight, made);
  p.relu(made, active);
  p.relu(active, grad);
  p.convolution_backward(grad, image, weight, grad_image, grad_weight);
  const Lines lines = p.run();
  ASSERT_EQ(lines.size(), 7U);  // image and weight are copied once for both
  EXPECT_EQ(lines.back(), "copy_(%6:[4,4,3,3], %9:[4,4,3,3]/[36,1,12,4], False)");
}

TEST(Layout, ACopyOfAnInputIsNotUsedAfterTheInputIsWritten) {
  Program p;
  const uint32_t image = p.input(kImage), weight = p.input(kKernel);
  const uint32_t made = p.fresh(kImage);
  p.convolution(image, weight, made);
  p.relu_in_place(weight);
  p.convolution(made, weight, p.output(kImage));
  size_t copies = 0;
  for (const std::string& line : p.run()) copies += line.find(" %1:") != std::string::npos ? 1 : 0;
  EXPECT_TRUE(is_last(p, made));
  EXPECT_EQ(copies, 2U);
}

TEST(Layout, KernelsOfOnePixelAreNotCopied) {
  Program p;
  const Sizes pixel{4, 4, 1, 1};
  const uint32_t image = p.input(kImage), weight = p.input(kKernel), small = p.input(pixel);
  const uint32_t made = p.fresh(kImage), next = p.fresh(kImage), grad = p.fresh(kImage);
  const uint32_t grad_made = p.fresh(kImage), grad_small = p.output(pixel);
  p.convolution(image, weight, made);
  p.convolution(made, small, next);
  p.relu(next, grad);
  p.convolution_backward(grad, made, small, grad_made, grad_small);
  p.convolution_backward(grad_made, image, weight, p.fresh(kImage), p.output(kKernel));
  for (const std::string& line : p.run()) {
    if (line.starts_with("copy_")) {
      EXPECT_EQ(line.find("[4,4,1,1]"), std::string::npos) << line;
    }
  }
  EXPECT_TRUE(is_last(p, made));
  EXPECT_TRUE(is_last(p, grad_made));
}

struct HalfOnGpu : Program {
  HalfOnGpu() {
    dtype = graph::dtype::kF16;
    on_gpu = true;
  }
};

// Of numbers of channels that suit tensor cores.
constexpr Sizes kWide{8, 16, 32, 32};
constexpr Sizes kWideKernel{16, 16, 3, 3};

// A convolution, ReLU and another one, of which the user sees the result; whether the layout of
// what is between them was changed.
bool goes_last(Program& p, const Sizes& image = kWide, const Sizes& kernel = kWideKernel) {
  const uint32_t made = p.fresh(image), active = p.fresh(image);
  p.convolution(p.input(image), p.input(kernel), made);
  p.relu(made, active);
  p.convolution(active, p.input(kernel), p.output(image));
  const bool last = is_last(p, made);
  EXPECT_EQ(is_last(p, active), last);
  EXPECT_EQ(p.out.nodes.size() > p.graph.nodes.size(), last);  // there are copies, or none
  return last;
}

TEST(Layout, HalfTypesOnAGpuAndFloatsOnAHostAreChannelsLast) {
  for (const uint8_t dtype :
       {graph::dtype::kF16, graph::dtype::kBF16, graph::dtype::kF32, graph::dtype::kF64}) {
    for (const bool on_gpu : {false, true}) {
      Program p;
      p.dtype = dtype;
      p.on_gpu = on_gpu;
      EXPECT_EQ(goes_last(p), on_gpu ? graph::dtype::is_half(dtype) : dtype == graph::dtype::kF32)
          << int{dtype} << on_gpu;
    }
  }
}

TEST(Layout, OnAGpuChannelsHaveToSuitTensorCores) {
  for (const int64_t channels : {3, 4, 12, 1024}) {
    HalfOnGpu p;
    EXPECT_EQ(goes_last(p, {8, channels, 16, 16}, {channels, channels, 3, 3}), channels == 1024);
  }
}

TEST(Layout, OnAGpuHeavyWeightsAndSmallImagesGainToo) {
  HalfOnGpu p;
  EXPECT_TRUE(goes_last(p, {8, 512, 4, 4}, {512, 512, 3, 3}));
}

TEST(Layout, OnAGpuKernelsOfOnePixelGainAndAreNotCopied) {
  HalfOnGpu p;
  EXPECT_TRUE(goes_last(p, kWide, {16, 16, 1, 1}));
  for (const std::string& line : p.run()) {
    if (line.starts_with("copy_")) {
      EXPECT_EQ(line.find("[16,16,1,1]"), std::string::npos) << line;
    }
  }
}

TEST(Layout, OnAGpuConvolutionsToHalfAsManyChannelsStay) {
  for (const int64_t kernel : {1, 3}) {
    for (const int64_t channels : {16, 24}) {
      HalfOnGpu p;
      const Sizes wide{8, 32, 32, 32}, narrow{8, channels, 32, 32};
      const uint32_t made = p.fresh(wide), next = p.fresh(narrow);
      p.convolution(p.input(wide), p.input({32, 32, 3, 3}), made);
      p.convolution(made, p.input({channels, 32, kernel, kernel}), next);
      p.convolution(next, p.input({channels, channels, 3, 3}), p.output(narrow));
      EXPECT_EQ(is_last(p, next), kernel == 1 || channels == 24);
    }
  }
}

// The copies are those that cuDNN would make.
TEST(Layout, OnAGpuAConvolutionAloneStays) {
  HalfOnGpu p;
  p.convolution(p.input(kWide), p.input(kWideKernel), p.output(kWide));
  p.run();
  EXPECT_EQ(p.out.nodes.size(), p.graph.nodes.size());
}

TEST(Layout, OnAGpuImagesOfThreeChannelsAreCopiedRatherThanWhatIsMadeOfThem) {
  HalfOnGpu p;
  const Sizes rgb{8, 3, 32, 32}, first{16, 3, 3, 3};
  const uint32_t made = p.fresh(kWide), active = p.fresh(kWide);
  const uint32_t weight = p.input(first), image = p.input(rgb);
  p.convolution(image, weight, made);
  p.relu(made, active);
  p.convolution(active, p.input(kWideKernel), p.output(kWide));
  EXPECT_EQ(p.run().front(), "copy_(%6:[8,3,32,32]/[3072,1,96,3], %3:[8,3,32,32], False)");
  EXPECT_TRUE(is_last(p, made));
}

// Two halves weigh as much as what they are of, which would be copied once for both.
TEST(Layout, OnAGpuPricesAreBytes) {
  HalfOnGpu p;
  p.dtype = graph::dtype::kF32;
  const uint32_t image = p.input(kWide);
  p.dtype = graph::dtype::kF16;
  for (int i = 0; i < 2; ++i) {
    const uint32_t half = p.fresh(kWide), next = p.fresh(kWide);
    p.unary("aten::_to_copy", image, half);
    p.convolution(half, p.input(kWideKernel), next);
    p.convolution(next, p.input(kWideKernel), p.output(kWide));
    EXPECT_TRUE(is_last(p, next));
  }
  for (const std::string& line : p.run()) {
    if (line.find("_to_copy") != std::string::npos) {
      EXPECT_EQ(line.find("]/["), std::string::npos) << line;
    }
  }
}

TEST(Layout, OnlyOnAHostAPoolGains) {
  for (const bool on_gpu : {false, true}) {
    Program p;
    p.dtype = on_gpu ? graph::dtype::kF16 : graph::dtype::kF32;
    p.on_gpu = on_gpu;
    const uint32_t made = p.fresh(kImage);
    p.convolution(p.input(kImage), p.input({4, 4, 1, 1}), made);
    p.unary("aten::max_pool2d_with_indices", made, p.output(kImage));
    p.run();
    EXPECT_EQ(p.out.nodes.size() > p.graph.nodes.size(), !on_gpu);  // with copies around it
  }
}

// As autocast has weights and images.
TEST(Layout, OnAGpuWhatConvertsInputsWritesTheOtherLayout) {
  HalfOnGpu p;
  p.dtype = graph::dtype::kF32;
  const uint32_t weight = p.input(kWideKernel), image = p.input(kWide);
  p.dtype = graph::dtype::kF16;
  const uint32_t half_weight = p.fresh(kWideKernel), half_image = p.fresh(kWide);
  p.copy(half_weight, weight);
  p.copy(half_image, image);
  p.convolution(half_image, half_weight, p.output(kWide));
  EXPECT_EQ(p.run(),
            (Lines{"copy_(%2:[16,16,3,3]/[144,1,48,16], %0:[16,16,3,3], False)",
                   "copy_(%3:[8,16,32,32]/[16384,1,512,16], %1:[8,16,32,32], False)",
                   "%5:[8,16,32,32]/[16384,1,512,16] = convolution("
                   "%3:[8,16,32,32]/[16384,1,512,16], %2:[16,16,3,3]/[144,1,48,16], False, 1)",
                   "copy_(%4:[8,16,32,32], %5:[8,16,32,32]/[16384,1,512,16], False)"}));
}

}  // namespace
}  // namespace acc
