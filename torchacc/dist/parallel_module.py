"""The base of what `accelerate` returns when several processes train a model together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from torchacc.dist.norms import scale_gradients_, total_norm

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.dist.mesh import Mesh

# What belongs to the wrapper itself begins so, since every other attribute is the model's; besides
# there is what nn.Module keeps of an object that is called.
_PREFIX = "_acc_"
_OWN = frozenset(("training", "_compiled_call_impl", "_is_full_backward_hook"))


class ParallelModule(nn.Module):
    """A model that is trained by several processes, which looks as it does in one.

    Attributes are read from the model and written to it, `state_dict()` and the names of parameters
    are those of the model, also as a part of another module. Unless the model has them itself there
    are `config`, `mesh`, and `model`, the next wrapper inside or the model.

    A function of the model that calls its own `forward` goes past the wrapper, as with torch's
    DistributedDataParallel: call the object itself. Its hooks of calls are the wrapper's. Those of
    states get the module whose state it is: the model, or what torch has made of it.

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
        self._acc_inner: Any = model
        self._acc_names: Any = model  # has the names of parameters
        self._acc_config = config
        self._acc_mesh = config.get_mesh()
        # The last: from here on attributes are its.
        self._acc_user: Any = model

    def _acc_wrap(self, inner: nn.Module, names: nn.Module | None = None) -> None:
        """From now on `inner` runs in forward, and `names` says what the parameters are called."""
        self._acc_inner = inner
        if names is not None:
            self._acc_names = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._acc_inner(*args, **kwargs)

    def forward_backward(
        self, *args: Any, output_fn: Callable[[Any], Tensor] | None = None, **kwargs: Any
    ) -> Tensor | None:
        """One step of a pipeline: the loss, averaged over the micro batches.

        Raises:
            NotImplementedError: the model is not split into stages.
        """
        raise NotImplementedError(
            "[forward_backward] the model is not split into stages: set dist.pp.size, or call the "
            "model and loss.backward()."
        )

    def clip_grad_norm_(self, max_grad_norm: float) -> Tensor:
        """Scales the gradients so that their norm over all is at most `max_grad_norm`.

        Returns the norm that they had.
        """
        if isinstance(self._acc_inner, ParallelModule):
            return self._acc_inner.clip_grad_norm_(max_grad_norm)
        norm = total_norm(p.grad for p in self.parameters() if p.grad is not None)
        scale_gradients_(self.parameters(), max_grad_norm, norm)
        return norm

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients of steps add up without an exchange, where there is one to leave out.

        The first backward outside of it exchanges what has been added up.
        """
        inner = self._acc_inner
        return inner.no_sync() if hasattr(inner, "no_sync") else nullcontext()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        inner = self._acc_inner
        return inner.device if isinstance(inner, ParallelModule) else self._acc_user.device

    # --- the model's attributes -------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Called only for what the class and the instance's dictionary have not.
        if name.startswith(_PREFIX) or "_acc_user" not in self.__dict__:  # copied or unpickled
            raise AttributeError(name)
        user = self._acc_user
        if name in ("config", "mesh", "model") and not hasattr(user, name):
            return self._acc_inner if name == "model" else self.__dict__[f"{_PREFIX}{name}"]
        try:
            return getattr(user, name)
        except AttributeError:
            inner = self._acc_inner
            if inner is user or not hasattr(inner, name):
                raise AttributeError(
                    f"{type(user).__name__!r} object, trained by several processes, has no "
                    f"attribute {name!r}"
                ) from None
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(_PREFIX):
            # No module is registered: what looks for the children of the wrapper finds the model's.
            self.__dict__[name] = value
        elif name in _OWN or "_acc_user" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._acc_user, name, value)

    def __delattr__(self, name: str) -> None:
        if name.startswith(_PREFIX) or name in _OWN:
            super().__delattr__(name)
        else:
            delattr(self._acc_user, name)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._acc_user.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self._acc_user.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:  # `register_module` calls it
        self._acc_user.add_module(*args, **kwargs)

    # Python looks for these in the class: a Sequential or a ModuleList has its items.

    def __getitem__(self, index: Any) -> Any:
        return self._acc_user[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._acc_user)

    def __len__(self) -> int:
        return len(self._acc_user)

    def __contains__(self, item: Any) -> bool:
        return item in self._acc_user

    def __bool__(self) -> bool:
        return bool(self._acc_user)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._acc_user)})

    # --- what nn.Module does with a tree of modules, done with the model's ------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._acc_names.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self._acc_names.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """What `load_state_dict` of a module around this one calls: all of the model, here.

        Of the versions that such a state has, torch hands on that of the model itself.
        """
        part = OrderedDict(
            (name.removeprefix(prefix), value)
            for name, value in state_dict.items()
            if name.startswith(prefix)
        )
        part._metadata = {"": local_metadata}  # type: ignore[attr-defined]
        assign = {"assign": True} if local_metadata.get("assign_to_params_buffers") else {}
        try:
            found = self.load_state_dict(part, strict=False, **assign)
        except RuntimeError as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
            return
        if strict:
            missing_keys += [prefix + name for name in found.missing_keys]
            unexpected_keys += [prefix + name for name in found.unexpected_keys]

    def _register_state_dict_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._acc_names._register_state_dict_hook(hook)

    def register_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._acc_names.register_state_dict_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._acc_names.register_state_dict_pre_hook(hook)

    # `register_load_state_dict_pre_hook` calls it.
    def _register_load_state_dict_pre_hook(
        self, hook: Callable[..., Any], with_module: bool = False
    ) -> RemovableHandle:
        return self._acc_names._register_load_state_dict_pre_hook(hook, with_module)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._acc_names.register_load_state_dict_post_hook(hook)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        return self._acc_names.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._acc_names.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self._acc_names.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._acc_names.named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> ParallelModule:
        self._acc_names.apply(fn)
        return self

    def train(self, mode: bool = True) -> ParallelModule:
        self.training = mode
        self._acc_inner.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        self._acc_inner._apply(fn, recurse)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._acc_inner!r})"


def with_versions(made: OrderedDict[str, Any], state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """`made` of `state`, with what torch keeps beside a state: the versions of its modules."""
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]
    return made
