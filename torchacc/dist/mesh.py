"""How processes are arranged: one dimension for each way of training in parallel."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchacc.config_dist import DIMENSIONS, check_topology
from torchacc.device import device_type
from torchacc.dist.agree import check_same_options
from torchacc.launched import is_launched
from torchacc_device._distributed import default_timeout


class Mesh:
    """The processes as an array with the dimensions of `topology`, the widest stride first.

    Ranks that are neighbours differ in the last dimension, which so lies within a machine where
    possible. The groups of dimensions larger than one are those of a `DeviceMesh`, which is in
    `device_mesh`; one of size one has a group of the process alone, made when it is asked for. All
    have the timeout that the default group has when they are made.

    Args:
        dp_num, pp_num, tp_num, fsdp_num, sp_num: the sizes; their product is the number of
            processes.
        topology: the dimensions, the widest stride first; None is dp, fsdp, pp, tp. `sp` comes last
            unless it is named.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not make the number of processes, or the topology is none.
    """

    def __init__(
        self,
        dp_num: int = 1,
        pp_num: int = 1,
        tp_num: int = 1,
        fsdp_num: int = 1,
        sp_num: int = 1,
        topology: list[str] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "[Mesh] there is no process group. Call torchacc.accelerate, or "
                "torch.distributed.init_process_group, first."
            )
        order = list(DIMENSIONS) if topology is None else list(topology)
        check_topology(order)
        if "sp" not in order:
            order.append("sp")
        given = {"dp": dp_num, "pp": pp_num, "tp": tp_num, "fsdp": fsdp_num, "sp": sp_num}
        for name, size in given.items():
            if size < 1:
                raise ValueError(f"[Mesh] {name}_num = {size}: should be at least 1.")
        self._sizes = {name: given[name] for name in order}
        self._world = dist.get_world_size()
        self._rank = dist.get_rank()
        if math.prod(self._sizes.values()) != self._world:
            sizes = " x ".join(f"{name} {size}" for name, size in self._sizes.items())
            raise ValueError(
                f"[Mesh] {sizes} make {math.prod(self._sizes.values())} processes, and there are "
                f"{self._world}. Start as many, or change the sizes."
            )
        self._ranks = torch.arange(self._world).view(tuple(self._sizes.values()))
        if not is_launched():
            # A DeviceMesh would choose a device by the rank where none was used yet.
            torch.get_device_module(device_type()).init()
        wide = [name for name, size in self._sizes.items() if size > 1] or ["dp"]
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type(), tuple(self._sizes[name] for name in wide), mesh_dim_names=tuple(wide)
        )
        for group in self.device_mesh.get_all_groups():
            _set_default_timeout(group)
        self._alone: ProcessGroup | None = None
        self._joint: dict[tuple[str, ...], ProcessGroup] = {}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}_num={size}" for name, size in self._sizes.items())
        return f"Mesh({sizes}, rank={self._rank})"

    # --- any dimension ----------------------------------------------------------------------------

    def num(self, name: str) -> int:
        """The size of the dimension `name`."""
        return self._sizes[name]

    def coordinate(self, name: str) -> int:
        """Where this process is in the dimension `name`."""
        return self._place()[name]

    def group(self, name: str) -> ProcessGroup:
        """The processes that differ from this one in the dimension `name` only, and this one."""
        return self.device_mesh.get_group(name) if self._sizes[name] > 1 else self.own_group()

    def own_group(self) -> ProcessGroup:
        """The group of this process alone."""
        if self._alone is None:
            # Only its member makes it; the others need not be here.
            self._alone = dist.new_group(
                [self._rank], timeout=default_timeout(), use_local_synchronization=True
            )
        return self._alone

    def rank_groups(self, name: str) -> list[list[int]]:
        """The ranks of every group of the dimension `name`."""
        dim = list(self._sizes).index(name)
        return self._ranks.movedim(dim, -1).reshape(-1, self._sizes[name]).tolist()

    def joint_num(self, *names: str) -> int:
        """How many processes the group of several dimensions together has."""
        return math.prod(self._sizes[name] for name in names)

    def joint_group(self, *names: str) -> ProcessGroup:
        """The processes that differ from this one in the dimensions `names` only.

        All processes have to ask for it.
        """
        wide = tuple(name for name in self._sizes if name in names and self._sizes[name] > 1)
        if len(wide) < 2:
            return self.group(wide[0] if wide else names[0])
        if wide not in self._joint:
            self._joint[wide] = self.device_mesh[wide]._flatten().get_group()
            _set_default_timeout(self._joint[wide])
        return self._joint[wide]

    def joint_ranks(self, *names: str) -> list[int]:
        """The ranks of `joint_group`, in its order; no other process has to ask."""
        place = self._place()
        at = tuple(slice(None) if name in names else place[name] for name in self._sizes)
        return self._ranks[at].flatten().tolist()

    def joint_array(self, *parts: tuple[str, ...]) -> torch.Tensor:
        """The ranks that differ from this one in the dimensions of `parts` only.

        Each part, whose dimensions count together, is one dimension of the result.
        """
        place = self._place()
        wanted = {name for part in parts for name in part}
        at = tuple(slice(None) if name in wanted else place[name] for name in self._sizes)
        kept = [name for name in self._sizes if name in wanted]
        order = [kept.index(name) for part in parts for name in kept if name in part]
        sizes = [self.joint_num(*part) for part in parts]
        return self._ranks[at].permute(order).reshape(sizes)

    def joint_coordinate(self, *names: str) -> int:
        """Where this process is in the group of several dimensions together."""
        place, found = self._place(), 0
        for name in self._sizes:
            if name in names:
                found = found * self._sizes[name] + place[name]
        return found

    def _place(self) -> dict[str, int]:
        rest, found = self._rank, {}
        for name in reversed(self._sizes):
            rest, found[name] = divmod(rest, self._sizes[name])
        return found

    # --- the names of TorchAcc --------------------------------------------------------------------

    def get_dp_rank(self) -> int:
        return self.coordinate("dp")

    def get_dp_num(self) -> int:
        return self.num("dp")

    def get_dp_proc_group(self) -> ProcessGroup:
        return self.group("dp")

    def get_dp_rank_groups(self) -> list[list[int]]:
        return self.rank_groups("dp")

    def get_pp_rank(self) -> int:
        return self.coordinate("pp")

    def get_pp_num(self) -> int:
        return self.num("pp")

    def get_pp_proc_group(self) -> ProcessGroup:
        return self.group("pp")

    def get_pp_rank_groups(self) -> list[list[int]]:
        return self.rank_groups("pp")

    def get_tp_rank(self) -> int:
        return self.coordinate("tp")

    def get_tp_num(self) -> int:
        return self.num("tp")

    def get_tp_proc_group(self) -> ProcessGroup:
        return self.group("tp")

    def get_tp_rank_groups(self) -> list[list[int]]:
        return self.rank_groups("tp")

    def get_fsdp_rank(self) -> int:
        return self.coordinate("fsdp")

    def get_fsdp_num(self) -> int:
        return self.num("fsdp")

    def get_fsdp_proc_group(self) -> ProcessGroup:
        return self.group("fsdp")

    def get_fsdp_rank_groups(self) -> list[list[int]]:
        return self.rank_groups("fsdp")

    def get_sp_rank(self) -> int:
        return self.coordinate("sp")

    def get_sp_num(self) -> int:
        return self.num("sp")

    def get_sp_proc_group(self) -> ProcessGroup:
        return self.group("sp")

    def get_sp_rank_groups(self) -> list[list[int]]:
        return self.rank_groups("sp")

    def get_stage_id(self) -> int:
        """The stage of the pipeline that this process computes."""
        return self.coordinate("pp")

    def is_first_stage(self) -> bool:
        return self.get_stage_id() == 0

    def is_last_stage(self) -> bool:
        return self.get_stage_id() == self.num("pp") - 1

    def stage_to_global(self, stage_id: int) -> int:
        """The rank that computes stage `stage_id` for the same data as this process.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage_id < self.num("pp"):
            raise ValueError(f"[Mesh] stage {stage_id}: there are {self.num('pp')} stages.")
        place = {**self._place(), "pp": stage_id}
        return int(self._ranks[tuple(place[name] for name in self._sizes)])

    def get_global_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._world


def _set_default_timeout(group: ProcessGroup) -> None:
    """torch takes none for the groups of a DeviceMesh, and gives them its own of 30 minutes."""
    timeout = default_timeout()
    if timeout is not None and group is not dist.group.WORLD:
        group.set_timeout(timeout)


# The meshes of the present default group, by their sizes and topology: a group costs connections.
_made: dict[tuple[object, ...], Mesh] = {}
_made_for: ProcessGroup | None = None


def mesh_of_sizes(sizes: dict[str, int], topology: tuple[str, ...]) -> Mesh:
    """The mesh of these sizes; one that was made before for the same processes is used again."""
    _forget_others()
    key = (tuple(sorted(sizes.items())), topology)
    if key not in _made:
        asked = {f"dist.{name}.size": size for name, size in sizes.items()}
        check_same_options({**asked, "dist.topology": list(topology)})
        numbers = {f"{name}_num": size for name, size in sizes.items()}
        _made[key] = Mesh(**numbers, topology=list(topology))
    return _made[key]


def made_meshes() -> list[Mesh]:
    """Those that were made for the present processes, the first one first."""
    _forget_others()
    return list(_made.values())


def _forget_others() -> None:
    """Drops the meshes of a default group that has been replaced."""
    global _made_for
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is not _made_for:
        _made.clear()
        _made_for = default


def forget() -> None:
    """Drops the meshes that were made, and with them their groups."""
    global _made_for
    _made.clear()
    _made_for = None
