"""One sample of one operator, run on the CPU and on the device under test, and compared.

A check returns pairs of category and text, none when all is well. Categories:

raises          the device raised where the CPU gave a result
accepts         the CPU raised and the device gave a result
late            the CPU raised in the call, the device when the result was waited for
message         both raised, with different types of exception or (error inputs) another message
type            another kind or number of results
device          a result that is not on the device under test
dtype, shape, stride, layout   the result's metadata differ
value           values differ; close: they differ by rounding only
input           an argument was changed that the CPU leaves alone, or changed otherwise
alias           a result shares memory with an argument on one side only, or is another view of it
distribution    draws of a random operator that do not look like the CPU's
not_recorded    nothing was recorded, and the operator is not on a list that explains why
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests import helpers
from tests.opinfo import exceptions
from tests.opinfo.compare import (
    Arguments,
    arguments,
    cotangent,
    distributions,
    neutral,
    of_channels_last,
    of_cpu,
    of_mixed_types,
    sharing,
    writable,
)

Failure = tuple[str, str]

# In this mode nothing is recorded by design; the values are compared all the same.
RUNS_EVERYTHING_AT_ONCE = os.environ.get("ACC_MODE", "").lower() == "eager"

# The operator on contiguous arguments; its gradient; its in-place form; operator and in-place
# form on non-contiguous views; its out= form; arguments that it must refuse; operator and gradient
# on tensors of two types, and on images with their channels last; its second gradient.
FORWARD, GRADIENT, INPLACE, VIEW, INPLACE_VIEW, OUT, ERROR, MIXED, CHANNELS_LAST, DOUBLE = (
    "forward",
    "gradient",
    "inplace",
    "view",
    "inplace_view",
    "out",
    "error",
    "mixed",
    "channels_last",
    "double",
)
# With generated kernels, within tolerances (close.py): operator and gradient in float32, and the
# operator in half types.
FUSED, HALF = "fused", "half"
VARIANTS = (FORWARD, GRADIENT, INPLACE, VIEW, INPLACE_VIEW, OUT, ERROR, MIXED, CHANNELS_LAST)
ALL_VARIANTS = (*VARIANTS, DOUBLE)
CLOSE = (FUSED, HALF)
HALVES = (torch.float16, torch.bfloat16)


def full_name(op: OpInfo) -> str:
    """The operator's name with its variant, as the lists of exceptions name it."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def supports(op: OpInfo, variant: str, dtype: torch.dtype) -> bool:
    """Whether PyTorch's database says that the CPU can run this variant; of `HALF`, CPU or CUDA."""
    if variant == HALF:
        return dtype in HALVES and any(dtype in op.supported_dtypes(d) for d in ("cpu", "cuda"))
    if dtype not in op.supported_dtypes("cpu"):
        return False
    if variant in (GRADIENT, DOUBLE):
        if not op.supports_autograd or (variant == DOUBLE and not op.supports_gradgrad):
            return False
        return dtype in op.supported_backward_dtypes("cpu")
    if variant in (INPLACE, INPLACE_VIEW):
        return op.inplace_variant is not None
    if variant == OUT:
        return op.supports_out
    if variant == ERROR:
        return op.error_inputs_func is not None and dtype == torch.float32
    if variant == MIXED:
        return dtype.is_floating_point
    return True


def samples(op: OpInfo, variant: str, dtype: torch.dtype) -> Iterator[Any]:
    """The database's samples for a variant, on the CPU."""
    if variant == ERROR and helpers.on_cuda():
        # A kernel that meets an index out of bounds ends the CUDA context. The database knows which
        # errors CUDA tells in the call, and makes their tensors there.
        return map(of_cpu, op.error_inputs("cuda"))
    if variant == ERROR:
        return iter(op.error_inputs("cpu"))
    if variant in (MIXED, CHANNELS_LAST, FUSED):
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        given = op.sample_inputs("cpu", dtype, grad)
        if variant == FUSED:
            return iter(given)
        changed = (
            of_mixed_types(s, dtype) if variant == MIXED else of_channels_last(s) for s in given
        )
        return (sample for sample in changed if sample is not None)
    return iter(op.sample_inputs("cpu", dtype, requires_grad=variant in (GRADIENT, DOUBLE)))


def seed(number: int) -> None:
    """`torch.manual_seed` for the CPU and the device under test.

    For every device that is not there it formats a stack trace: a millisecond.
    """
    torch.default_generator.manual_seed(number)
    if helpers.ON_ACC:
        torch.acc.manual_seed_all(number)


@dataclass
class Outcome:
    """What a call gave: a result, or an exception."""

    value: Any = None
    error: BaseException | None = None
    random: bool = False


def attempt(fn: Callable[[], Any]) -> Outcome:
    """Calls `fn`; an exception (not an interrupt) is part of the outcome."""
    try:
        return Outcome(value=fn())
    except Exception as error:  # every failure of an operator is a finding
        return Outcome(error=error)


def first_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def on_both(run: Callable[[str], Any]) -> list[str] | None:
    """What differs between `run` on the CPU and on the device under test, in words.

    When one raises the other has to raise the same type, with the same words; None then.
    """
    expected = attempt(lambda: run("cpu"))
    actual = attempt(lambda: run(helpers.DEVICE))
    late = attempt(helpers.synchronize)
    if expected.error is not None or actual.error is not None:
        same_type = type(expected.error) is type(actual.error)
        if same_type and str(expected.error).strip().partition("\n")[0] in str(actual.error):
            return None
        told = [first_line(e) if e else "no error" for e in (actual.error, expected.error)]
        return [f"{told[0]} instead of {told[1]}"]
    if late.error is not None:
        return [f"late: {first_line(late.error)}"]
    return [f"{kind}: {text}" for kind, text in helpers.differences(actual.value, expected.value)]


@dataclass
class Recorded:
    """What the device counted while the operator ran."""

    nodes: int = 0
    run_now: int = 0
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def fallbacks(self) -> list[str]:
        """The operators that went through the fallback."""
        old, new = helpers.fallback_keys(self.before), helpers.fallback_keys(self.after)
        return sorted(name for name, count in new.items() if count != old.get(name, 0))


class Checker:
    """Runs samples of one operator and dtype in one variant. Not thread safe."""

    def __init__(self, op: OpInfo, variant: str, dtype: torch.dtype) -> None:
        self.op = op
        self.name = full_name(op)
        self.variant = variant
        self.dtype = dtype
        self.random_seen = False
        # Samples in whose calls, and in whose gradients, generated kernels ran.
        self.fused = self.fused_gradients = 0
        self.uninitialised = op.name in exceptions.UNINITIALISED

    def check(self, sample: Any, index: int) -> list[Failure]:
        """Runs one sample on both sides; returns what differs."""
        seed(1000 + index)
        if self.variant == ERROR:
            return self._check_error(sample)
        if self.variant in (GRADIENT, DOUBLE):
            return self._check_gradient(sample, index)
        found = self._check_forward(sample, index)
        if self.with_gradient(sample):
            found += self._check_gradient(sample, index)
        return found

    def with_gradient(self, sample: Any) -> bool:
        """Whether a sample's gradient is checked besides its result."""
        return self.variant in (MIXED, CHANNELS_LAST, FUSED) and any(
            t.requires_grad for t in helpers.tensors(sample.input)
        )

    # --- forward, in-place, view, out ---------------------------------------------------------

    def _check_forward(self, sample: SampleInput, index: int) -> list[Failure]:
        spread = self.variant in (VIEW, INPLACE_VIEW)
        expected_args = arguments(sample, "cpu", spread)
        state = torch.get_rng_state()
        expected = attempt(lambda: self._call(expected_args))
        random = not torch.equal(state, torch.get_rng_state())
        self.random_seen |= random
        if expected.error is not None and self.variant != FORWARD:
            # Not every sample has an in-place or out form; the CPU's refusal decides.
            actual_args = self._arguments(sample, spread)
            return self._both_raise(expected, attempt(lambda: self._call(actual_args)))
        made = attempt(lambda: self._arguments(sample, spread))
        if made.error is not None:
            return [("raises", f"copying the sample: {first_line(made.error)}")]
        actual_args: Arguments = made.value
        seed(1000 + index)
        before = self._counters()
        actual = attempt(lambda: self._call(actual_args))
        recorded = self._recorded(before)
        if expected.error is not None:
            return self._both_raise(expected, actual)
        if actual.error is not None:
            return [("raises", first_line(actual.error))]
        found = self._not_recorded(recorded, actual.value, actual_args)
        if found and self.variant in (INPLACE, INPLACE_VIEW):
            # One that leaves its argument as it was (dropout with p = 0) need not be recorded.
            now, then = expected_args.input, arguments(sample, "cpu", spread).input
            if now.shape == then.shape and not helpers.tensor_differences(now, then):
                found = []
        done = attempt(lambda: self._compare(actual, actual_args, expected, expected_args, random))
        if done.error is not None:
            return [*found, ("raises", f"reading the result: {first_line(done.error)}")]
        return found + done.value

    def _arguments(self, sample: SampleInput, spread: bool = False) -> Arguments:
        input_only = self.name in exceptions.CPU_ARGUMENTS
        return arguments(sample, helpers.DEVICE, spread, input_only)

    def _call(self, a: Arguments) -> Any:
        if self.variant in (INPLACE, INPLACE_VIEW):
            return self.op.inplace_variant(a.input, *a.args, **a.kwargs)
        if self.variant == OUT:
            # Results with a known geometry and values that must not survive, beside the arguments.
            template = self._templates
            made = helpers.tree_map(
                lambda t: torch.full(t.shape, 7, dtype=t.dtype, device=self._device(a)), template
            )
            kwargs = {k: v for k, v in a.kwargs.items() if k not in ("dtype", "device")}
            if "dtype" in a.kwargs:
                kwargs["dtype"] = a.kwargs["dtype"]
            result = self.op.op(a.input, *a.args, **kwargs, out=made)
            return made, result
        return self.op.op(a.input, *a.args, **a.kwargs)

    @staticmethod
    def _device(a: Arguments) -> torch.device:
        for t in a.tensors():
            if t.device.type != "cpu":
                return t.device
        given = a.kwargs.get("device")
        return torch.device(given) if given is not None else torch.device("cpu")

    _templates: Any = None

    def prepare_out(self, sample: SampleInput) -> bool:
        """Finds the geometry of the results for an out= call; False when the sample has none."""
        a = arguments(sample, "cpu")
        result = attempt(lambda: self.op.op(a.input, *a.args, **a.kwargs))
        if result.error is not None or not helpers.tensors(result.value):
            return False
        if len(helpers.tensors(result.value)) != len(helpers.leaves(result.value)):
            return False
        self._templates = helpers.tree_map(
            lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), result.value
        )
        if isinstance(self._templates, (list, tuple)):
            self._templates = tuple(self._templates)
        return True

    def _compare(
        self,
        actual: Outcome,
        actual_args: Arguments,
        expected: Outcome,
        expected_args: Arguments,
        random: bool,
    ) -> list[Failure]:
        values = not random and not self.uninitialised
        found = self._differences(actual.value, expected.value, values)
        found += self._devices(actual.value, expected.value, expected_args)
        if random and not found and not self.uninitialised:
            together = 2 if self.name in exceptions.DRAWS_CHANNELS else None
            found += distributions(actual.value, expected.value, together)
        if self.variant in (INPLACE, INPLACE_VIEW) and (actual.value is actual_args.input) != (
            expected.value is expected_args.input
        ):
            found.append(("alias", "the in-place operator does not return its argument"))
        changed = self._changes(actual_args.tensors(), expected_args.tensors(), values)
        found += [("input", text) for kind, text in changed if kind != "type"]
        if self.variant in (FORWARD, VIEW, *CLOSE):
            found += self._aliases(actual, actual_args, expected, expected_args, values)
        return found

    def _differences(self, actual: Any, expected: Any, values: bool) -> list[Failure]:
        return helpers.differences(actual, expected, values=values)

    def _changes(self, actual: Any, expected: Any, values: bool) -> list[Failure]:
        """How arguments differ after the call."""
        return helpers.differences(actual, expected, values=values)

    @staticmethod
    def _devices(actual: Any, expected: Any, expected_args: Arguments) -> list[Failure]:
        """Results must live on the device under test unless the sample asks for another one."""
        if not helpers.ON_ACC or not expected_args.tensors():
            return []
        for t in helpers.tensors(actual):
            if t.device.type != helpers.DEVICE:
                return [("device", f"a result is on {t.device}")]
        return []

    def _aliases(
        self,
        actual: Outcome,
        actual_args: Arguments,
        expected: Outcome,
        expected_args: Arguments,
        values: bool,
    ) -> list[Failure]:
        theirs = sharing(expected.value, expected_args)
        mine = sharing(actual.value, actual_args)
        if mine != theirs:
            return [("alias", f"{mine} instead of {theirs} (result, argument, offset)")]
        if not theirs or not values:
            return []
        # A write through a result that is a view must be seen in the argument.
        for outcome in (actual, expected):
            result = helpers.tensors(outcome.value)[theirs[0][0]]
            if not writable(result):
                return []
            with torch.no_grad():
                result.fill_(3)
        changed = helpers.differences(actual_args.tensors(), expected_args.tensors())
        return [("alias", f"after a write through the result: {text}") for _, text in changed]

    # --- gradient -----------------------------------------------------------------------------

    def _check_gradient(self, sample: SampleInput, index: int) -> list[Failure]:
        expected_args = arguments(sample, "cpu")
        state = torch.get_rng_state()
        expected = attempt(lambda: self._gradients(sample, expected_args))
        random = not torch.equal(state, torch.get_rng_state())
        self.random_seen |= random
        made = attempt(lambda: self._arguments(sample))
        if made.error is not None:
            return [("raises", f"copying the sample: {first_line(made.error)}")]
        seed(1000 + index)
        actual = attempt(lambda: self._gradients(sample, made.value))
        if expected.error is not None:
            return self._both_raise(expected, actual)
        if actual.error is not None:
            return [("raises", first_line(actual.error))]
        values = not random and not self.uninitialised

        def compare() -> list[Failure]:
            found = self._differences(actual.value, expected.value, values)
            return found + self._devices(actual.value, expected.value, expected_args)

        done = attempt(compare)
        if done.error is not None:
            return [("raises", f"reading the gradient: {first_line(done.error)}")]
        return done.value

    def _gradients(self, sample: SampleInput, a: Arguments) -> list[Any]:
        inputs = [t for t in a.tensors() if t.requires_grad]
        result = self.op.gradcheck_wrapper(self.op.op, a.input, *a.args, **a.kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        outputs = [t for t in helpers.tensors(result) if t.requires_grad]
        if not inputs or not outputs:
            return []
        create = self.variant == DOUBLE
        made = torch.autograd.grad(
            outputs,
            inputs,
            [self._cotangent(t, i) for i, t in enumerate(outputs)],
            allow_unused=True,
            create_graph=create,
        )
        if not create:
            return list(made)
        second = [g for g in made if g is not None and g.requires_grad]
        if not second:
            return list(made)
        twice = torch.autograd.grad(
            second,
            inputs,
            [cotangent(t, i + 10) for i, t in enumerate(second)],
            allow_unused=True,
        )
        return [g.detach() if g is not None else None for g in (*made, *twice)]

    def _cotangent(self, t: torch.Tensor, seed: int) -> torch.Tensor:
        return cotangent(t, seed)

    # --- error inputs -------------------------------------------------------------------------

    def _check_error(self, error_input: Any) -> list[Failure]:
        sample = error_input.sample_input
        expected_args = arguments(sample, "cpu")
        expected = attempt(lambda: self._call(expected_args))
        if expected.error is None:
            return []  # the database expects an error that this version does not raise
        made = attempt(lambda: self._arguments(sample))
        if made.error is not None:
            return [("raises", f"copying the sample: {first_line(made.error)}")]
        # The error must come from the call itself, not from a later read.
        actual = attempt(lambda: self._call(made.value))
        return self._both_raise(expected, actual, messages=True)

    @staticmethod
    def _both_raise(expected: Outcome, actual: Outcome, messages: bool = False) -> list[Failure]:
        assert expected.error is not None
        if actual.error is None:
            # What runs late may raise late.
            late = attempt(helpers.synchronize)
            raised = f"the CPU raises {first_line(expected.error)}"
            if late.error is not None:
                return [("late", f"{raised}, the device later {first_line(late.error)}")]
            return [("accepts", raised)]
        theirs, mine = first_line(expected.error), first_line(actual.error)
        if type(actual.error) is not type(expected.error):
            return [("message", f"{mine} instead of {theirs}")]
        if messages and neutral(mine) != neutral(theirs):
            return [("message", f"{mine} instead of {theirs}")]
        return []

    # --- counters -----------------------------------------------------------------------------

    @staticmethod
    def _counters() -> dict[str, int]:
        """The counters, brought up to date: nodes are counted when they are submitted."""
        if helpers.ON_ACC:
            attempt(helpers.flush)  # what fails here is told by the read of the result
        return helpers.stats()

    def _recorded(self, before: dict[str, int]) -> Recorded:
        after = self._counters()
        if not after:
            return Recorded()
        return Recorded(
            # Where a step follows the plan that was expected, its nodes are counted apart.
            nodes=sum(after[k] - before[k] for k in ("nodes", "nodes_followed")),
            run_now=after["run_now"] - before["run_now"],
            before=before,
            after=after,
        )

    def _not_recorded(self, recorded: Recorded, result: Any, a: Arguments) -> list[Failure]:
        if not helpers.ON_ACC or RUNS_EVERYTHING_AT_ONCE or recorded.nodes > 0:
            return []
        if self.name in exceptions.RUN_AT_ONCE and (recorded.run_now or recorded.fallbacks()):
            return []
        made = [t for t in helpers.tensors(result) if t.device.type == helpers.DEVICE]
        if all(t.numel() == 0 for t in made):
            return []  # nothing to compute
        if self.name in exceptions.METADATA_ONLY or self.uninitialised:
            return []
        views = self.variant in (FORWARD, VIEW, MIXED, CHANNELS_LAST, *CLOSE)
        if (
            views
            and len(sharing(made, a)) == len([t for t in made if t.numel()])
            and not recorded.run_now
        ):
            return []  # every result is a view of an argument
        how = f"{recorded.run_now} run at once"
        if fallbacks := recorded.fallbacks():
            how += f", fallbacks: {', '.join(fallbacks)}"
        return [("not_recorded", f"no node recorded ({how})")]
