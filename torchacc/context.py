"""What this process trains with: the options of its last `accelerate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchacc.config import Config

if TYPE_CHECKING:
    from torchacc.dist.mesh import Mesh


class GlobalContext:
    """The options that `torchacc.accelerate` was given last, in `config`, and their mesh."""

    config: Config

    def __init__(self) -> None:
        self.config = Config()

    @property
    def mesh(self) -> Mesh:
        """`config.get_mesh()`: all processes have to ask for it, and the group has to be there."""
        return self.config.get_mesh()


_context = GlobalContext()


def get_global_context() -> GlobalContext:
    """The one context of this process. Before `accelerate` its `config` has the defaults."""
    return _context
