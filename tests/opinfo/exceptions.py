"""The one list of what the operator tests do not ask for, with a reason on every line.

Operators are named as `check.full_name` does: `name` or `name.variant_test_name`. `UNINITIALISED`
and `RANDOM` name operators for all their variants.
"""

from __future__ import annotations

from dataclasses import dataclass

# Results have no defined values: type, dtype, shape and strides are compared, values are not.
UNINITIALISED: dict[str, str] = {
    "empty": "uninitialised memory",
    "empty_like": "uninitialised memory",
    "empty_permuted": "uninitialised memory",
    "empty_strided": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "new_empty_strided": "uninitialised memory",
}

# Operators that draw: the device has its own generator (Philox), so values are compared by
# distribution only. Found by a change of the CPU generator's state; a test compares with this list.
RANDOM: dict[str, str] = {
    "bernoulli": "draws",
    "cauchy": "draws",
    "exponential": "draws",
    "geometric": "draws",
    "log_normal": "draws",
    "multinomial": "draws",
    "nn.functional.alpha_dropout": "draws a mask",
    "nn.functional.dropout": "draws a mask",
    "nn.functional.dropout2d": "draws a mask",
    "nn.functional.dropout3d": "draws a mask",
    "nn.functional.feature_alpha_dropout.with_train": "draws a mask",
    "nn.functional.fractional_max_pool2d": "draws the regions when the sample gives none",
    "nn.functional.fractional_max_pool3d": "draws the regions when the sample gives none",
    "nn.functional.multi_head_attention_forward": "samples with dropout",
    "nn.functional.rrelu": "draws slopes in training",
    "nn.functional.scaled_dot_product_attention": "samples with dropout",
    "normal": "draws",
    "normal.in_place": "draws",
    "normal.number_mean": "draws",
    "pca_lowrank": "draws the subspace it starts from",
    "rand_like": "draws",
    "randint": "draws",
    "randint_like": "draws",
    "randn": "draws",
    "randn_like": "draws",
    "svd_lowrank": "draws the subspace it starts from",
    "uniform": "draws",
}

# Of those, the ones that draw once per channel: all elements of a channel share the draw.
DRAWS_CHANNELS: dict[str, str] = {
    "nn.functional.dropout2d": "drops whole channels",
    "nn.functional.dropout3d": "drops whole channels",
    "nn.functional.feature_alpha_dropout.with_train": "drops whole channels",
}

# Operators whose arguments after the first have to be on the CPU, whatever the device.
CPU_ARGUMENTS: dict[str, str] = {
    "tensor_split": "the indices are read on the host; every device refuses others",
}

_CONJUGATED = "the result may be lazily conjugated, which only a direct call tells"
_HISTOGRAM = "the range is that of the data, or the bins are checked on the host"

# Operators that run at once instead of being recorded: the shape of the result, or the way through
# the operator, depends on data, or a host value is returned.
RUN_AT_ONCE: dict[str, str] = {
    "__getitem__": "a boolean mask: as many rows as it has ones",
    "argwhere": "as many rows as there are elements other than zero",
    "bincount": "as many elements as the largest value says",
    "geqrf": "PyTorch has no Meta kernel for it",
    "histogram": _HISTOGRAM,
    "histogramdd": _HISTOGRAM,
    "linalg.lu_solve": _CONJUGATED,
    "linalg.lstsq": "the rank decides the shape of the residuals",
    "linalg.lstsq.grad_oriented": "the rank decides the shape of the residuals",
    "masked_select": "as many elements as the mask has ones",
    "nn.functional.ctc_loss": "lengths are read on the host",
    "nonzero": "as many rows as there are elements other than zero",
    "tril_indices": "made on the host: PyTorch has no Meta kernel for it",
    "triu_indices": "made on the host: PyTorch has no Meta kernel for it",
    "unique": "as many elements as there are different ones",
    "unique_consecutive": "as many elements as there are runs",
}

_BOUNDS = "the bounds of the samples are tensors, which is another overload"
_OTHER_VALUES = "not with the arguments of the first sample"
_BACKWARD = "the formula is its gradient's"

# Operators named like one with a formula, of whose first samples no kernel is generated.
WITHOUT_KERNEL: dict[str, str] = {
    "bernoulli": "the probabilities are a tensor, which is another overload",
    "clamp": _BOUNDS,
    "clamp_max": _BOUNDS,
    "clamp_min": _BOUNDS,
    "div.floor_rounding": "the rounding is another overload",
    "div.trunc_rounding": "the rounding is another overload",
    "fill": "the formula is of the form that writes",
    "linalg.vector_norm": _OTHER_VALUES,
    "log_softmax.with_dtype": "it is computed in float64",
    "nn.functional.dropout": _OTHER_VALUES,
    "nn.functional.hardtanh": _BACKWARD,
    "nn.functional.nll_loss": _BACKWARD,
    "round.decimals_0": "rounding to decimals is another overload",
    "round.decimals_3": "rounding to decimals is another overload",
    "round.decimals_neg_3": "rounding to decimals is another overload",
    "signal.windows.exponential": _OTHER_VALUES,
    "softmax.with_dtype": "it is computed in float64",
}

# Operators that change or return metadata only: there is nothing to record.
METADATA_ONLY: dict[str, str] = {
    "as_strided": "sizes, strides and offset in place",
    "as_strided.partial_views": "sizes, strides and offset in place",
    "resize_": "sizes and the end of the storage",
    "resize_as_": "sizes and the end of the storage",
    "squeeze": "sizes in place",
    "squeeze.multiple": "sizes in place",
    "t": "strides in place",
    "transpose": "strides in place",
    "unsqueeze": "sizes in place",
}


@dataclass(frozen=True)
class Excepted:
    """One category of failure of one operator in one variant that is accepted, and why."""

    op: str
    variant: str
    category: str
    reason: str
    # Names of dtypes for which it is accepted; all when empty.
    dtypes: tuple[str, ...] = ()
    # For what does not happen in every run; otherwise a line that is not needed fails a test.
    sometimes: bool = False
    # For what the host alone is asked.
    on_host: bool = False


Rows = tuple[Excepted, ...]

_LSTSQ = "LAPACK's last bits depend on the alignment of its buffers: the CPU differs from itself"
_SPARSE = "acc has no sparse tensors and says so"
_RESIZED = "eager gives the tensor that it writes another shape, which no Meta kernel tells"
_PROMOTES = "what eager makes of two types is not what PyTorch's Meta kernel says"
_HOST_KERNELS = "CUDA has kernels of this half type, the host's ATen has none"
_ROUNDED_ONCE = (
    "a kernel rounds once where ATen rounds what each operator makes: no element is further from "
    "float64's than the tolerance, as ATen's are, but one rounding of large ones outweighs the rest"
)
_TWO_UNITS = (
    "a single number, rounded at other places: two units of the last place, ATen's within one"
)
_DATA = "whether it is wrong depends on data, which is known when the step runs"


def _each(ops: tuple[str, ...], variants: tuple[str, ...], category: str, reason: str) -> Rows:
    return tuple(Excepted(op, v, category, reason) for op in ops for v in variants)


def _close(loss: str, reason: str, *dtypes: str) -> Excepted:
    return Excepted(f"nn.functional.{loss}", "half", "close", reason, dtypes, sometimes=True)


EXCEPTED: Rows = (
    Excepted("linalg.lstsq", "forward", "close", _LSTSQ, sometimes=True),
    Excepted("linalg.lstsq", "view", "close", _LSTSQ, sometimes=True),
    Excepted("linalg.lstsq", "channels_last", "close", _LSTSQ, sometimes=True),
    Excepted("linalg.lstsq.grad_oriented", "channels_last", "close", _LSTSQ, sometimes=True),
    Excepted("linalg.lstsq.grad_oriented", "forward", "close", _LSTSQ, sometimes=True),
    Excepted("linalg.lstsq.grad_oriented", "gradient", "close", _LSTSQ, sometimes=True),
    Excepted("linalg.lstsq.grad_oriented", "view", "close", _LSTSQ, sometimes=True),
    *_each(
        ("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"),
        ("forward", "gradient", "view"),
        "raises",
        _SPARSE,
    ),
    *_each(("sparse.sampled_addmm", "to_sparse"), ("double",), "raises", _SPARSE),
    Excepted("sparse.sampled_addmm", "out", "message", _SPARSE),
    *_each(("sparse.sampled_addmm", "sparse.mm.reduce"), ("mixed",), "message", _SPARSE),
    *_each(
        (
            "addmv",
            "addr",
            "nn.functional.binary_cross_entropy_with_logits",
            "nn.functional.huber_loss",
            "nn.functional.soft_margin_loss",
        ),
        ("mixed",),
        "not_recorded",
        _PROMOTES,
    ),
    Excepted("vdot", "forward", "not_recorded", _CONJUGATED, ("complex64", "complex128")),
    *_each(("addbmm",), ("inplace", "inplace_view"), "not_recorded", _RESIZED),
    *_each(("sparse.mm.reduce", "to_sparse"), ("half", "fused"), "raises", _SPARSE),
    Excepted("sparse.sampled_addmm", "fused", "raises", _SPARSE),
    *_each(
        (
            "_upsample_bilinear2d_aa",
            "nn.functional.avg_pool3d",
            "nn.functional.multi_margin_loss",
            "nn.functional.multilabel_margin_loss",
            "trace",
            *(
                f"fft.{inverse}{kind}fft{dims}"
                for inverse in ("", "i")
                for kind in ("", "h", "r")
                for dims in ("", "2", "n")
            ),
        ),
        ("half",),
        "raises",
        _HOST_KERNELS,
    ),
    Excepted("ldexp", "half", "not_recorded", _PROMOTES),
    _close("gaussian_nll_loss", _ROUNDED_ONCE, "float16"),
    _close("poisson_nll_loss", _ROUNDED_ONCE, "float16", "bfloat16"),
    _close("triplet_margin_loss", _TWO_UNITS, "float16"),
    _close("triplet_margin_with_distance_loss", _TWO_UNITS, "float16"),
    *(
        Excepted(op, "error", "late", _DATA, on_host=True)
        for op in ("gather", "scatter", "scatter_add", "multinomial")
    ),
)
