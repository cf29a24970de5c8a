"""The decorator `tiacc_init`, with which programs of TI-ACC's second generation begin."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_FRAMEWORK = "training_framework"


def tiacc_init(params: Mapping[str, Any] | None = None) -> Callable[[Function], Function]:
    """A decorator for the function that is the program: `@tiacc_init(params={...})`.

    When the function is called, before its body, the device acc is registered, what the program
    says of CUDA acts on acc from then on, devices too (`torchacc.patch(devices=True)`), and
    DistributedDataParallel follows TI-ACC's switches (`init_tiacc_training()`). That is what
    `python -m torchacc run` does for a script, and is taken back when the process ends, too. To
    decorate a function does nothing yet.

    Args:
        params: {"training_framework": "pytorch"}, which is also meant without them.

    Raises:
        ValueError: another framework, or a name that TI-ACC's documents do not have.
        TypeError: `params` is no dictionary.
    """
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(
            f"[tiacc_init] params is {params!r}, and should be a dictionary: "
            f"@tiacc_init(params={{'{_FRAMEWORK}': 'pytorch'}})."
        )
    given = {_FRAMEWORK: "pytorch", **(params or {})}
    framework = given.pop(_FRAMEWORK)
    if given:
        raise ValueError(
            f"[tiacc_init] params has {', '.join(map(repr, given))}, and only {_FRAMEWORK!r} is "
            "known. Leave it out."
        )
    if framework != "pytorch":
        raise ValueError(
            f"[tiacc_init] {_FRAMEWORK} is {framework!r}; only 'pytorch' is offered here."
        )

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def begin(*args: Any, **kwargs: Any) -> Any:
            _begin()
            return function(*args, **kwargs)

        return begin  # type: ignore[return-value]

    return decorate


def _begin() -> None:
    # Not before the program asks for it: the import registers the device.
    import torchacc
    from tiacc_training.torch.distributed import init_tiacc_training
    from torchacc_device import _patches

    atexit.unregister(_patches.undo_as_cuda)  # of a call before
    atexit.register(_patches.undo_as_cuda)
    torchacc.patch(devices=True)
    init_tiacc_training()
