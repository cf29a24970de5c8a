#include "lazy/graph/op_table.h"

#include <algorithm>
#include <array>

namespace acc::graph::table {
namespace {

using Name = std::string_view;

template <size_t N>
bool contains(const std::array<Name, N>& names, Name name) {
  return std::ranges::find(names, name) != names.end();
}

struct ArgumentOf {
  Name op;
  Name argument;
};

template <size_t N>
bool contains(const std::array<ArgumentOf, N>& rows, Name op, Name argument) {
  return std::ranges::any_of(
      rows, [&](const ArgumentOf& row) { return row.op == op && row.argument == argument; });
}

// Host decisions and metadata.
constexpr std::array kHost{
    Name("aten::item"),
    Name("aten::equal"),
    Name("aten::is_pinned"),
    Name("aten::_pin_memory"),
    Name("aten::record_stream"),
    Name("aten::is_set_to"),
    Name("aten::_local_scalar_dense"),
    Name("aten::_has_compatible_shallow_copy_type"),
    Name("aten::is_coalesced"),
    Name("aten::_is_all_true"),
    Name("aten::_is_any_true"),
};
// The shape of the result depends on data, or (histogramdd) its Meta kernel reads data.
constexpr std::array kDataDependent{
    Name("aten::nonzero"),
    Name("aten::nonzero_numpy"),
    Name("aten::masked_select"),
    Name("aten::_unique"),
    Name("aten::_unique2"),
    Name("aten::unique_dim"),
    Name("aten::unique_consecutive"),
    Name("aten::unique_dim_consecutive"),
    Name("aten::bincount"),
    Name("aten::argwhere"),
    Name("aten::_ctc_loss"),
    Name("aten::histogramdd"),
    Name("aten::_histogramdd_bin_edges"),
    Name("aten::_histogramdd_from_bin_cts"),
    Name("aten::_histogramdd_from_bin_tensors"),
    Name("aten::to_sparse"),
    Name("aten::_to_sparse"),
    Name("aten::repeat_interleave"),
    Name("aten::_nested_tensor_from_mask"),
    Name("aten::_pack_padded_sequence"),
};
// PyTorch's own decomposition ends in our hand-written kernels.
constexpr std::array kDecomposed{
    Name("aten::_to_copy"),
    Name("aten::copy_"),
    Name("aten::_foreach_copy_"),
    Name("aten::contiguous"),
    Name("aten::clone"),
    Name("aten::lift"),
    Name("aten::lift_fresh"),
    Name("aten::detach"),
    Name("aten::detach_"),
    Name("aten::set_"),
    Name("aten::resize_"),
    Name("aten::resize_as_"),
    Name("aten::_resize_output_"),
    Name("aten::empty_like"),
    Name("aten::new_empty"),
    Name("aten::new_empty_strided"),
    Name("aten::zeros_like"),
    Name("aten::ones_like"),
    Name("aten::full_like"),
    Name("aten::rand_like"),
    Name("aten::randn_like"),
    Name("aten::randint_like"),
    Name("aten::new_zeros"),
    Name("aten::new_ones"),
    Name("aten::new_full"),
    Name("aten::_reshape_alias"),
    Name("aten::_unsafe_view"),
    Name("aten::_lazy_clone"),
    Name("aten::as_strided_"),
    Name("aten::as_strided_copy"),
    Name("aten::as_strided_scatter"),
    Name("aten::view_copy"),
    Name("aten::unsafe_split"),
    Name("aten::unsafe_split_with_sizes"),
    Name("aten::t_"),
    Name("aten::transpose_"),
    Name("aten::squeeze_"),
    Name("aten::unsqueeze_"),
    Name("aten::swapaxes_"),
    Name("aten::swapdims_"),
    Name("aten::rename_"),
    Name("aten::_copy_from"),
    Name("aten::_copy_from_and_resize"),
    Name("aten::bernoulli"),
    Name("aten::dropout"),
    Name("aten::_conj_physical"),
};

// The batch-norm family updates the running statistics it is given; the cuDNN RNN its dropout
// state.
constexpr std::array kUndeclaredWrites{
    ArgumentOf{"aten::native_batch_norm", "running_mean"},
    ArgumentOf{"aten::native_batch_norm", "running_var"},
    ArgumentOf{"aten::cudnn_batch_norm", "running_mean"},
    ArgumentOf{"aten::cudnn_batch_norm", "running_var"},
    ArgumentOf{"aten::miopen_batch_norm", "running_mean"},
    ArgumentOf{"aten::miopen_batch_norm", "running_var"},
    ArgumentOf{"aten::batch_norm_update_stats", "running_mean"},
    ArgumentOf{"aten::batch_norm_update_stats", "running_var"},
    ArgumentOf{"aten::batch_norm_gather_stats", "running_mean"},
    ArgumentOf{"aten::batch_norm_gather_stats", "running_var"},
    ArgumentOf{"aten::batch_norm_gather_stats_with_counts", "running_mean"},
    ArgumentOf{"aten::batch_norm_gather_stats_with_counts", "running_var"},
    ArgumentOf{"aten::_cudnn_rnn", "dropout_state"},
};

// Bounds and steps decide a length; orders, exponents and scale factors decide a kernel.
constexpr std::array kStructureOps{
    Name("aten::arange"),
    Name("aten::range"),
    Name("aten::linspace"),
    Name("aten::logspace"),
    Name("aten::norm"),
    Name("aten::linalg_vector_norm"),
    Name("aten::renorm"),
    Name("aten::_cdist_forward"),
    Name("aten::_cdist_backward"),
    Name("aten::_pdist_forward"),
    Name("aten::_pdist_backward"),
    Name("aten::_foreach_norm"),
    Name("aten::_foreach_powsum"),
    Name("aten::native_norm"),
    Name("aten::histc"),
    Name("aten::histogram"),
    Name("aten::addmm"),
    Name("aten::addbmm"),
    Name("aten::baddbmm"),
    Name("aten::addmv"),
    Name("aten::addr"),
    Name("aten::_addmm_activation"),
    Name("aten::addmm_"),
    Name("aten::addbmm_"),
    Name("aten::baddbmm_"),
    Name("aten::addmv_"),
    Name("aten::addr_"),
};
constexpr std::array kStructureArguments{
    ArgumentOf{"aten::pow", "exponent"},
    ArgumentOf{"aten::pow_", "exponent"},
    ArgumentOf{"aten::_foreach_pow", "exponent"},
    ArgumentOf{"aten::_foreach_pow_", "exponent"},
    ArgumentOf{"aten::float_power", "exponent"},
    // Their values are checked with the call.
    ArgumentOf{"aten::elu_backward", "alpha"},
    ArgumentOf{"aten::leaky_relu_backward", "negative_slope"},
    ArgumentOf{"aten::huber_loss", "delta"},
    ArgumentOf{"aten::huber_loss_backward", "delta"},
    ArgumentOf{"aten::smooth_l1_loss", "beta"},
    ArgumentOf{"aten::smooth_l1_loss_backward", "beta"},
    ArgumentOf{"aten::multi_margin_loss", "p"},
    ArgumentOf{"aten::multi_margin_loss_backward", "p"},
};

constexpr std::array kTakeCpu{
    ArgumentOf{"aten::index", "indices"},
    ArgumentOf{"aten::index_put", "indices"},
    ArgumentOf{"aten::index_put_", "indices"},
    ArgumentOf{"aten::_index_put_impl_", "indices"},
    ArgumentOf{"aten::_index_put_impl", "indices"},
    ArgumentOf{"aten::_unsafe_index", "indices"},
    ArgumentOf{"aten::_unsafe_index_put", "indices"},
    ArgumentOf{"aten::_unsafe_masked_index", "indices"},
};

// Read on the CPU, and before the operator begins.
constexpr std::array kReadOnCpu{
    ArgumentOf{"aten::_foreach_addcmul", "scalars"},
    ArgumentOf{"aten::_foreach_addcmul_", "scalars"},
    ArgumentOf{"aten::_foreach_addcdiv", "scalars"},
    ArgumentOf{"aten::_foreach_addcdiv_", "scalars"},
    ArgumentOf{"aten::_pack_padded_sequence", "lengths"},
    ArgumentOf{"aten::_ctc_loss", "input_lengths"},
    ArgumentOf{"aten::_ctc_loss", "target_lengths"},
    ArgumentOf{"aten::_ctc_loss_backward", "input_lengths"},
    ArgumentOf{"aten::_ctc_loss_backward", "target_lengths"},
};

// Numbers that kernels convert to the type of the tensor, or of half types to float32, which
// c10::Scalar refuses where that cannot hold them.
constexpr std::array kMustFit{
    ArgumentOf{"aten::fill_", "value"},
    ArgumentOf{"aten::masked_fill", "value"},
    ArgumentOf{"aten::masked_fill_", "value"},
    ArgumentOf{"aten::index_fill", "value"},
    ArgumentOf{"aten::index_fill_", "value"},
    ArgumentOf{"aten::clamp", "min"},
    ArgumentOf{"aten::clamp", "max"},
    ArgumentOf{"aten::clamp_", "min"},
    ArgumentOf{"aten::clamp_", "max"},
    ArgumentOf{"aten::clamp_min", "min"},
    ArgumentOf{"aten::clamp_min_", "min"},
    ArgumentOf{"aten::clamp_max", "max"},
    ArgumentOf{"aten::clamp_max_", "max"},
    ArgumentOf{"aten::threshold", "threshold"},
    ArgumentOf{"aten::threshold", "value"},
    ArgumentOf{"aten::threshold_", "threshold"},
    ArgumentOf{"aten::threshold_", "value"},
    ArgumentOf{"aten::_foreach_clamp_min", "scalar"},
    ArgumentOf{"aten::_foreach_clamp_min_", "scalar"},
    ArgumentOf{"aten::_foreach_clamp_max", "scalar"},
    ArgumentOf{"aten::_foreach_clamp_max_", "scalar"},
    ArgumentOf{"aten::add", "alpha"},
    ArgumentOf{"aten::add_", "alpha"},
    ArgumentOf{"aten::sub", "alpha"},
    ArgumentOf{"aten::sub_", "alpha"},
    ArgumentOf{"aten::rsub", "alpha"},
    ArgumentOf{"aten::addcmul", "value"},
    ArgumentOf{"aten::addcmul_", "value"},
    ArgumentOf{"aten::addcdiv", "value"},
    ArgumentOf{"aten::addcdiv_", "value"},
    ArgumentOf{"aten::lerp", "weight"},
    ArgumentOf{"aten::lerp_", "weight"},
    ArgumentOf{"aten::leaky_relu", "negative_slope"},
    ArgumentOf{"aten::leaky_relu_", "negative_slope"},
    ArgumentOf{"aten::elu", "alpha"},
    ArgumentOf{"aten::elu_", "alpha"},
    ArgumentOf{"aten::elu", "scale"},
    ArgumentOf{"aten::elu_", "scale"},
    ArgumentOf{"aten::elu", "input_scale"},
    ArgumentOf{"aten::elu_", "input_scale"},
    ArgumentOf{"aten::elu_backward", "scale"},
    ArgumentOf{"aten::elu_backward", "input_scale"},
    ArgumentOf{"aten::softplus", "beta"},
    ArgumentOf{"aten::softplus", "threshold"},
    ArgumentOf{"aten::softplus_backward", "beta"},
    ArgumentOf{"aten::softplus_backward", "threshold"},
    ArgumentOf{"aten::hardtanh_backward", "min_val"},
    ArgumentOf{"aten::hardtanh_backward", "max_val"},
};

constexpr Name kAwait = "acc::await_";

constexpr std::array kMustRun{
    Name("aten::_assert_async"),
    Name("aten::_functional_assert_async"),
    Name("aten::_assert_scalar"),
    Name("aten::_assert_tensor_metadata"),
};

// With other processes (distributed/collectives.cpp).
constexpr std::array kCommunicate{
    Name("acc::all_reduce_"), Name("acc::broadcast_"),         Name("acc::reduce_"),
    Name("acc::all_gather_"), Name("acc::all_gather_into_"),   Name("acc::gather_"),
    Name("acc::scatter_"),    Name("acc::reduce_scatter_"),    Name("acc::reduce_scatter_into_"),
    Name("acc::all_to_all_"), Name("acc::all_to_all_single_"),
};

// Products whose operands and results can be converted (lazy/passes/layout.h, widen.h).
constexpr std::array kConverted{
    Name("aten::mm"),
    Name("aten::bmm"),
    Name("aten::addmm"),
    Name("aten::addmm_"),
    Name("aten::baddbmm"),
    Name("aten::baddbmm_"),
    Name("aten::addbmm"),
    Name("aten::addbmm_"),
    Name("aten::addmv"),
    Name("aten::addmv_"),
    Name("aten::mv"),
    Name("aten::dot"),
    Name("aten::_addmm_activation"),
    Name("aten::linear"),
    Name("aten::convolution"),
    Name("aten::convolution_backward"),
    Name("aten::_scaled_dot_product_flash_attention_for_cpu"),
    Name("aten::_scaled_dot_product_flash_attention_for_cpu_backward"),
};

constexpr std::array kOtherProducts{
    Name("aten::vdot"),
    Name("aten::linear_backward"),
    Name("aten::matmul"),
    Name("aten::matmul_backward"),
    Name("acc::attention"),
    Name("acc::attention_backward"),
    Name("acc::cudnn_rnn"),
    Name("acc::cudnn_rnn_backward"),
    Name("aten::mkldnn_rnn_layer"),
    Name("aten::mkldnn_rnn_layer_backward"),
    Name("aten::_scaled_dot_product_flash_attention"),
    Name("aten::_scaled_dot_product_flash_attention_backward"),
    Name("aten::_scaled_dot_product_efficient_attention"),
    Name("aten::_scaled_dot_product_efficient_attention_backward"),
    Name("aten::_scaled_dot_product_cudnn_attention"),
    Name("aten::_scaled_dot_product_cudnn_attention_backward"),
    Name("aten::_cdist_forward"),
    Name("aten::_trilinear"),
};

// What optimizers do to lists of tensors.
constexpr std::array kItemOperators{
    Name("abs"),       Name("add"),  Name("addcdiv"), Name("addcmul"), Name("clamp_max"),
    Name("clamp_min"), Name("div"),  Name("exp"),     Name("lerp"),    Name("maximum"),
    Name("minimum"),   Name("mul"),  Name("neg"),     Name("pow"),     Name("reciprocal"),
    Name("rsqrt"),     Name("sign"), Name("sqrt"),    Name("sub"),     Name("where"),
    Name("zero"),
};

constexpr std::array kCastsNumbers{
    Name("aten::add"), Name("aten::add_"), Name("aten::sub"), Name("aten::sub_"),
    Name("aten::mul"), Name("aten::mul_"), Name("aten::div"), Name("aten::div_"),
};

// Their `.out` kernels do more work than the functional ones (they compute and then copy), or
// choose another layout.
constexpr std::array kAvoidOut{
    Name("aten::native_layer_norm"),
    Name("aten::native_batch_norm"),
    Name("aten::convolution"),
};

}  // namespace

bool runs_directly(Name name) {
  return contains(kHost, name) || contains(kDataDependent, name) || contains(kDecomposed, name);
}

bool writes_undeclared(Name name, Name argument) {
  return contains(kUndeclaredWrites, name, argument);
}

bool is_structure(Name name, Name argument) {
  return contains(kStructureOps, name) || contains(kStructureArguments, name, argument) ||
         name.starts_with("aten::upsample_") || name.starts_with("aten::_upsample_");
}

bool takes_cpu_tensor(Name name, Name argument) { return contains(kTakeCpu, name, argument); }
bool reads_on_cpu(Name name, Name argument) { return contains(kReadOnCpu, name, argument); }

bool needs_integers(Name name, Name argument) {
  return name.starts_with("aten::bitwise_") || name.starts_with("aten::__") ||
         name.starts_with("aten::gcd") || name.starts_with("aten::lcm") ||
         (name.starts_with("aten::embedding") && argument == "indices");
}

bool must_fit(Name name, Name argument) { return contains(kMustFit, name, argument); }

bool must_run(Name name) {
  return contains(kMustRun, name) || communicates(name) || name == kAwait;
}

bool communicates(Name name) { return contains(kCommunicate, name); }

bool converts(Name name) { return contains(kConverted, name); }

bool multiplies(Name name) { return contains(kConverted, name) || contains(kOtherProducts, name); }

bool returns_to_cpu(Name name, size_t result) {
  return name == "aten::_pack_padded_sequence" && result == 1;
}

std::string plus_operator(Name name) {
  if (name == "aten::mm") return "aten::addmm";
  if (name == "aten::bmm") return "aten::baddbmm";
  return "";
}

bool multiplies_matrices(Name name) { return name == "aten::mm" || name == "aten::addmm"; }

bool is_convolution(Name name) {
  return name == "aten::convolution" || name == "aten::convolution_backward";
}

std::string item_operator(Name name) {
  constexpr Name kPrefix = "_foreach_";
  const size_t library = name.find("::") + 2;
  if (!name.substr(library).starts_with(kPrefix)) return "";
  const Name item = name.substr(library + kPrefix.size());
  if (item == "norm") return "aten::linalg_vector_norm";
  const bool in_place = item.ends_with('_');
  if (!contains(kItemOperators, in_place ? item.substr(0, item.size() - 1) : item)) return "";
  return std::string(name.substr(0, library)) + std::string(item);
}

bool casts_numbers(Name name) { return contains(kCastsNumbers, name); }

bool avoid_out(Name name) { return contains(kAvoidOut, name); }

}  // namespace acc::graph::table
