"""What a benchmark case is. Without torch: the driving process needs none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """How far a mode that is not bit-equal by contract may be from eager.

    `first` bounds the relative difference of the value that step 1 returns, `later` that of the
    following steps, `outputs` the difference of each output's norm and projection, relative to
    the norm. Training amplifies rounding differences, hence the wider bounds after step 1.
    """

    first: float = 1e-4
    later: float = 2e-2
    outputs: float = 2e-2


@dataclass(frozen=True)
class Case:
    """One benchmark case.

    `compile_variants` are the forms of torch.compile that make sense for it on the host, in the
    order in which they are tried; `must` holds the required speed of mode acc on the host, with one
    thread, against another mode (1.0 = as fast as), `goal` the speed against eager that is aimed
    at; `gpu_must` and `gpu_goal` are those of a GPU; `memory_must` bounds its peak on the host over
    eager's; `compile_timeout_s` the first 20 steps of a variant. `precision` is that of autocast
    (see programs.Setting). `gpu_tolerance` is that of a GPU, where cuDNN rounds to TF32 by default.
    `hand_captured`: it is a training step, which users capture by hand as a CUDA graph. `program`
    is of a case for GPUs only, the function of trainings.py that builds it and its arguments; on
    the host such a case is measured when it is named, and is then small: it shows that it runs.
    `period`: so many steps in a row have all sizes of input, and windows are whole periods.
    `reads`: each loss is read, on a GPU, too. `large`: it takes more than about 10 GB. A GPU has no
    memory for seven processes of it, so there modes are measured one after another.
    """

    name: str
    title: str
    convolutional: bool = False
    has_optimizer: bool = True
    hand_captured: bool = True
    precision: str = "float32"
    compile_variants: tuple[str, ...] = ("model", "step", "max-autotune")
    must: dict[str, float] = field(default_factory=dict)
    goal: float | None = None
    gpu_must: dict[str, float] = field(default_factory=dict)
    gpu_goal: float | None = None
    memory_must: float = 1.05
    compile_timeout_s: float = 600.0
    tolerance: Tolerance = Tolerance()
    gpu_tolerance: Tolerance | None = None
    period: int = 1
    reads: bool = False
    large: bool = False
    program: tuple[Any, ...] = ()

    @property
    def gpu_only(self) -> bool:
        """Whether it is for GPUs only."""
        return bool(self.program)


# Half precision and TF32, where two ways to compute the same differ so much.
LESS_PRECISE = Tolerance(1e-2, 5e-2, 0.1)
