"""The base of what `accelerate` returns when several processes train a model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from torchacc.dist.norms import scale_gradients_, total_norm

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.mesh import Mesh

# What belongs to the wrapper itself; every other attribute is the model's.
_OWN = frozenset(("_inner", "training"))


class ParallelModule(nn.Module):
    """A model that is trained by several processes, which looks as it does in one.

    Attributes are read from the model and written to it, `state_dict()` and the names of parameters
    are those of the model. Unless the model has them itself there are `config`, `mesh`, and
    `model`, the next wrapper inside or the model.

    A function of the model that calls its own `forward` goes past the wrapper, as with torch's
    DistributedDataParallel: call the object itself.

    Args:
        model: a model, or a ParallelModule to be wrapped once more.
        config: the options.
    """

    # Found by __getattr__.
    config: Config
    mesh: Mesh
    model: nn.Module

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__()
        self.training = model.training
        self._inner = model
        # In the dictionary and not through __setattr__: the model is registered once, in `_inner`.
        # `_user` has the attributes, `_names` the names of parameters.
        self.__dict__.update(_user=model, _names=model, _config=config, _mesh=config.get_mesh())

    def _wrap(self, inner: nn.Module, names: nn.Module | None = None) -> None:
        """From now on `inner` runs in forward, and `names` says what the parameters are called."""
        self._modules["_inner"] = inner
        if names is not None:
            self.__dict__["_names"] = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def forward_backward(
        self, *args: Any, output_fn: Callable[[Any], Tensor] | None = None, **kwargs: Any
    ) -> Tensor | None:
        """One step of a pipeline: the loss, averaged over the micro batches."""
        raise NotImplementedError(
            "[forward_backward] the model is not split into stages: set dist.pp.size, or call the "
            "model and loss.backward()."
        )

    def clip_grad_norm_(self, max_grad_norm: float) -> Tensor:
        """Scales the gradients so that their norm over all is at most `max_grad_norm`.

        Returns the norm that they had.
        """
        if isinstance(self._inner, ParallelModule):
            return self._inner.clip_grad_norm_(max_grad_norm)
        norm = total_norm(p.grad for p in self.parameters() if p.grad is not None)
        scale_gradients_(self.parameters(), max_grad_norm, norm)
        return norm

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients of steps add up without an exchange, where there is one to leave out.

        The first backward outside of it exchanges what has been added up.
        """
        inner = self._inner
        return inner.no_sync() if hasattr(inner, "no_sync") else nullcontext()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        inner = self._modules["_inner"]
        return inner.device if isinstance(inner, ParallelModule) else self._user.device

    # --- the model's attributes -------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Called only for what the class and the instance's dictionary have not.
        if name == "_inner":
            return super().__getattr__(name)
        if "_user" not in self.__dict__:  # it is being copied or unpickled
            raise AttributeError(name)
        user = self.__dict__["_user"]
        if name in ("config", "mesh", "model") and not hasattr(user, name):
            return self._modules["_inner"] if name == "model" else self.__dict__[f"_{name}"]
        try:
            return getattr(user, name)
        except AttributeError:
            inner = self._modules["_inner"]
            if inner is user or not hasattr(inner, name):
                raise AttributeError(
                    f"{type(user).__name__!r} object, trained by several processes, has no "
                    f"attribute {name!r}"
                ) from None
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or "_user" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._user, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._user, name)

    # Python looks for these in the class: a Sequential or a ModuleList has its items.

    def __getitem__(self, index: Any) -> Any:
        return self._user[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._user)

    def __len__(self) -> int:
        return len(self._user)

    def __contains__(self, item: Any) -> bool:
        return item in self._user

    def __bool__(self) -> bool:
        return bool(self._user)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._user)})

    # --- what nn.Module does with a tree of modules, done with the model's ------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._names.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self._names.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        return self._names.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._names.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self._names.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._names.named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> ParallelModule:
        self._names.apply(fn)
        return self

    def train(self, mode: bool = True) -> ParallelModule:
        self.training = mode
        self._inner.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        self._inner._apply(fn, recurse)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"
