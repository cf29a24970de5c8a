#include "distributed/described.h"

#include <c10/core/ScalarType.h>

#include <string_view>
#include <utility>

#include "csrc/base/check.h"
#include "csrc/base/hash.h"

namespace acc::distributed {
namespace {

// What each rank has in the call, which all of them must agree on; null where they need not.
const std::vector<at::Tensor>* tensors_in_common(Collective collective,
                                                 const std::vector<at::Tensor>& outputs,
                                                 const std::vector<at::Tensor>& inputs) {
  switch (collective) {
    case Collective::kGather:
    case Collective::kAllGather:
    case Collective::kAllGatherInto:
      return &inputs;
    case Collective::kAllToAll:
    case Collective::kAllToAllSingle:
      return nullptr;
    default:
      return &outputs;
  }
}

// "4 + 6", or of many "1000 in 50 tensors".
std::string sizes_of(const std::vector<at::Tensor>& tensors) {
  constexpr size_t kFew = 8;
  std::string each;
  int64_t all = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensors.size() <= kFew) each += base::concat(each.empty() ? "" : " + ", tensor.numel());
    all += tensor.numel();
  }
  return each.empty() ? base::concat(all, " in ", tensors.size(), " tensors") : each;
}

// Those that all ranks pass alike. Of a reduction that is what the program asked for, which stands
// last, and not what the transport makes of it.
at::IntArrayRef options_in_common(Collective collective, at::IntArrayRef options) {
  switch (collective) {
    case Collective::kAllToAllSingle:
      return {};
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kReduceScatter:
    case Collective::kReduceScatterInto:
      return options.slice(1);
    default:
      return options;
  }
}

}  // namespace

Described described(Collective collective, const std::vector<at::Tensor>& outputs,
                    const std::vector<at::Tensor>& inputs, at::IntArrayRef options) {
  base::Hasher hasher;
  const std::string type = c10::toString((outputs.empty() ? inputs : outputs)[0].scalar_type());
  hasher.add(std::string_view(name(collective)));
  hasher.add(std::string_view(type));
  std::string text = name(collective);
  if (const auto* tensors = tensors_in_common(collective, outputs, inputs)) {
    text += base::concat(" of ", sizes_of(*tensors), " ", type);
    for (const at::Tensor& tensor : *tensors) {
      hasher.add(tensor.numel());
      hasher.add(static_cast<int64_t>(tensor.scalar_type()));
    }
  }
  const at::IntArrayRef common = options_in_common(collective, options);
  hasher.add(static_cast<int64_t>(common.size()));
  for (size_t i = 0; i < common.size(); ++i) {
    hasher.add(common[i]);
    text += base::concat(i == 0 ? " (" : ", ", common[i], i + 1 == common.size() ? ")" : "");
  }
  return {hasher.finish().lo, std::move(text)};
}

}  // namespace acc::distributed
