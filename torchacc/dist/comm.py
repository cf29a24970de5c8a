"""How gradients are added up in data parallel training: the policies of `dist.comm`.

Each is a hook of DistributedDataParallel that is called with a bucket of gradients when the last of
them is there. Shapes depend on the bucket alone, so every step records the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup, distributed_c10d
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torchacc import launched
from torchacc.device import device_type
from torchacc.logger import logger
from torchacc_device import _scaling

if TYPE_CHECKING:
    from torchacc.config import CommConfig

# A hierarchical all-reduce is done in pieces of at least so many bytes, and in at most so many.
_PIECE, _PIECES = 1 << 20, 32
_INSIDE = 8  # processes on a machine, where nobody says how many: TI-ACC's default
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def make_policy(options: CommConfig, group: ProcessGroup) -> Policy | None:
    """How the processes of `group` average gradients as `options` say; None: by plain all-reduces.

    All of these processes have to call it. Raises ValueError on all of them where machines have
    unlike numbers of processes, for `hierarchical`, and as `Hierarchical` does.
    """
    policy: Policy
    if options.hierarchical and options.intra_size is None:
        _check_machines(group)
    groups = _several(group, options.streams)
    if options.compression is not None:
        policy = Compressed(groups, _HALVES[options.compression])
    elif options.topk:
        policy = Largest(groups, options.topk_ratio, options.topk_threshold, options.topk_fp16)
    elif options.hierarchical:
        policy = Hierarchical(groups, options.intra_size, options.hierarchical_threshold)
    elif options.streams > 1:
        policy = Plain(groups)
    else:
        return None
    if dist.get_rank() == 0:
        streams = f", on {options.streams} streams" if options.streams > 1 else ""
        logger.info("gradients are exchanged by: %s%s", policy, streams)
    return policy


def _check_machines(group: ProcessGroup) -> None:
    """Each knows only its own launcher: else some processes could refuse, and the others wait."""
    counts = [0] * group.size()
    dist.all_gather_object(counts, launched.local_world_size(default=0), group=group)
    if len(set(counts)) > 1:
        raise ValueError(
            f"[config] dist.comm.hierarchical: the processes {dist.get_process_group_ranks(group)},"
            f" which average gradients, have LOCAL_WORLD_SIZE = {counts}. Start as many on each "
            "machine, set dist.comm.intra_size (LIGHT_INTRA_SIZE), or leave hierarchical False."
        )


def register_policy(model: DistributedDataParallel, policy: Policy) -> None:
    model.register_comm_hook(policy, _call)


def _call(policy, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, as objects
    return policy(bucket)


def _several(group: ProcessGroup, streams: int) -> list[ProcessGroup]:
    """`group` and others of the same processes: collectives of one group come one by one."""
    ranks = dist.get_process_group_ranks(group)
    return [group, *(own_group([ranks], group) for _ in range(streams - 1))]


def own_group(groups: list[list[int]], like: ProcessGroup) -> ProcessGroup:
    """The group of this process among `groups`, with the backend and the timeout of `like`.

    All processes of `like` have to call it, and make groups in the same order. Raises RuntimeError
    on all of them where they would find each other by different names: torch takes the name of a
    group of some processes from how many groups each of them is in.
    """
    backend = dist.get_backend_config(like)
    timeout = like._get_backend(torch.device(device_type())).transport.options._timeout
    if sum(map(len, groups)) < dist.get_world_size():
        counts: list[Any] = [None] * like.size()
        dist.all_gather_object(counts, len(distributed_c10d._world.pg_names), group=like)
        if len(set(counts)) > 1:
            raise RuntimeError(
                f"[config] the processes {dist.get_process_group_ranks(like)}, which exchange "
                f"gradients, are in {counts} process groups, and would not find each other in a "
                "new one. Make the model parallel before groups that not all of them are in, or "
                "set dist.comm.streams to 1 and dist.comm.hierarchical to False."
            )
        mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
        return dist.new_group(mine, timeout, backend, use_local_synchronization=True)
    # Names are counted by all processes alike, whatever groups each of them is in.
    made = [dist.new_group(ranks, timeout, backend) for ranks in groups]
    return next(g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def processes_inside(ranks: Sequence[int], intra_size: int | None) -> int:
    """How many neighbours of `ranks` are on one machine: `intra_size`, at most all.

    With None it is how many of them the launcher has started on each machine, or 8. Raises
    ValueError for a number that does not divide them, or where machines have unlike numbers.
    """
    if intra_size is None:
        local = launched.local_world_size(default=_INSIDE)
        counts = set(Counter(rank // local for rank in ranks).values())
        if len(counts) > 1:
            raise ValueError(
                f"[config] dist.comm.hierarchical: of the processes {list(ranks)}, which average "
                f"gradients, the machines have unlike numbers ({sorted(counts)}). Leave it False, "
                "or start as many on each machine."
            )
        return counts.pop()
    inside = min(intra_size, len(ranks))
    if len(ranks) % inside:
        raise ValueError(
            f"[config] dist.comm.intra_size = {intra_size} does not divide the {len(ranks)} "
            "processes of data parallel training: set it (or LIGHT_INTRA_SIZE) to the number of "
            "processes on each machine, or leave it None."
        )
    return inside


class Policy(ABC):
    """Averages the gradients of a bucket over the processes of a group.

    `groups` are groups of these same processes: buckets take turns, so that several are under way
    on connections, or streams of a GPU, of their own.

    A copy of a model, and one that was pickled, exchanges by all-reduces: torch gives it no hook.
    """

    def __init__(self, groups: list[ProcessGroup]) -> None:
        self.groups = groups
        self.processes = groups[0].size()

    def __deepcopy__(self, _: dict[int, Any]) -> Policy:
        return self  # groups cannot be copied

    def __reduce__(self) -> Any:
        return type(None), ()  # or pickled

    def turn(self, bucket: GradBucket) -> int:
        """Which of the groups exchanges this bucket."""
        return bucket.index() % len(self.groups)

    @abstractmethod
    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        """Starts the exchange; the future's value is the bucket with the averages."""

    def plain(self, bucket: GradBucket) -> Future[Tensor]:
        """One all-reduce of the whole bucket."""
        flat = bucket.buffer().div_(self.processes)
        work = dist.all_reduce(flat, group=self.groups[self.turn(bucket)], async_op=True)
        return work.get_future().then(lambda _: flat)


class Plain(Policy):
    """All-reduces of whole buckets."""

    def __str__(self) -> str:
        return "all-reduce"

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        return self.plain(bucket)


class _Feedback:
    """What a lossy exchange left out, by bucket; it is added to the gradients of the next step.

    It is kept as it would be without the scale of its step's loss, which is another one in a later
    step. Where an exchanged bucket is not finite a GradScaler skips the step: then what the step
    itself left out is not added, but what it was to add is. All processes have the same buckets, so
    they agree.
    """

    def __init__(self) -> None:
        # Of each bucket: its parameters, what was left out, and what had been added before.
        self._left: dict[int, tuple[tuple[int, ...], Tensor, Tensor]] = {}
        self._exchanged: list[Tensor] = []  # of this step, whether each bucket is finite
        self._counts: Tensor | None = None  # whether what the step before left out does

    def begin(self, bucket: GradBucket) -> None:
        """Hears of every bucket, in the order of their indices."""
        if bucket.index() == 0:
            self._counts = torch.stack(self._exchanged).all() if self._exchanged else None
            self._exchanged = []

    def end(self, exchanged: Tensor) -> Tensor:
        """Hears of every bucket that has been exchanged; returns it."""
        self._exchanged.append(exchanged.isfinite().all())
        return exchanged

    def added(self, bucket: GradBucket) -> Tensor:
        """What the last exchange of the bucket left out."""
        flat = bucket.buffer()
        parameters, left, before = self._left.get(bucket.index(), ((), flat, flat))
        # After its first step DistributedDataParallel arranges the buckets anew.
        if self._counts is None or parameters != _identity(bucket):
            return torch.zeros_like(flat)
        kept = torch.where(self._counts, left, before)
        scale = _scaling.loss_scale(flat.device)
        return kept if scale is None else kept * scale

    def leave(self, bucket: GradBucket, left: Tensor, before: Tensor) -> None:
        """`before`: what was `added`."""
        scale = _scaling.loss_scale(left.device)
        if scale is not None:
            left, before = left / scale, before / scale
        self._left[bucket.index()] = (_identity(bucket), left, before)


def _identity(bucket: GradBucket) -> tuple[int, ...]:
    return tuple(id(parameter) for parameter in bucket.parameters())


class Compressed(Policy):
    """Sends gradients in a 16-bit type and adds what rounding them lost to the next step's.

    The sum of all processes is rounded to that type too, which no process could make up for alone.
    """

    def __init__(self, groups: list[ProcessGroup], dtype: torch.dtype) -> None:
        super().__init__(groups)
        self._dtype = dtype
        self._feedback = _Feedback()

    def __str__(self) -> str:
        return f"all-reduce in {str(self._dtype).removeprefix('torch.')} with error feedback"

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        self._feedback.begin(bucket)
        if flat.element_size() <= 2:
            return self.plain(bucket).then(lambda done: self._feedback.end(done.value()))
        before = self._feedback.added(bucket)
        whole = flat + before
        # Divided before it is sent: sums of float16 overflow soon.
        sent = whole.div(self.processes).to(self._dtype)
        self._feedback.leave(bucket, whole - sent.to(flat.dtype) * self.processes, before)
        work = dist.all_reduce(sent, group=self.groups[self.turn(bucket)], async_op=True)
        return work.get_future().then(lambda _: self._feedback.end(flat.copy_(sent)))


class Largest(Policy):
    """Sends the share `ratio` of the elements, the largest, and keeps the rest for the next step.

    Buckets of less than `threshold` bytes are sent as they are.
    """

    def __init__(
        self, groups: list[ProcessGroup], ratio: float, threshold: int, fp16: bool
    ) -> None:
        super().__init__(groups)
        self._ratio = ratio
        self._threshold = threshold
        self._fp16 = fp16
        self._feedback = _Feedback()

    def __str__(self) -> str:
        kind = " in float16" if self._fp16 else ""
        return (
            f"the largest {self._ratio:.3g} of each bucket from {self._threshold} bytes{kind}, "
            "with error feedback"
        )

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        self._feedback.begin(bucket)
        if flat.nbytes < self._threshold:
            return self.plain(bucket).then(lambda done: self._feedback.end(done.value()))
        before = self._feedback.added(bucket)
        whole = flat + before
        count = max(1, int(flat.numel() * self._ratio))
        places = whole.abs().topk(count, sorted=False).indices
        values = whole.index_select(0, places).div(self.processes)
        if self._fp16:
            values = values.to(torch.float16)
        kept = values.to(flat.dtype) * -self.processes
        self._feedback.leave(bucket, whole.index_add(0, places, kept), before)
        all_places = places.new_empty(count * self.processes)
        all_values = values.new_empty(count * self.processes)
        group = self.groups[self.turn(bucket)]
        first = dist.all_gather_into_tensor(all_places, places, group=group, async_op=True)
        second = dist.all_gather_into_tensor(all_values, values, group=group, async_op=True)

        def add_up(_: Future[list[Tensor]]) -> Tensor:
            first.wait()
            flat.zero_().index_add_(0, all_places, all_values.to(flat.dtype))
            return self._feedback.end(flat)

        return second.get_future().then(add_up)


class Hierarchical(Policy):
    """Adds up within each machine, then across machines, each process its part of the bucket.

    Between machines so travels one copy of the gradients for each machine, not for each process.
    `intra_size` neighbouring ranks are on one machine (`processes_inside`). Buckets of `threshold`
    bytes and more are sent as they are.

    All processes of the group have to make one. Raises ValueError when `intra_size` does not divide
    the number of processes.
    """

    def __init__(self, groups: list[ProcessGroup], intra_size: int | None, threshold: int) -> None:
        super().__init__(groups)
        self._threshold = threshold
        members = dist.get_process_group_ranks(groups[0])
        self._inside = processes_inside(members, intra_size)
        self._machines = self.processes // self._inside
        if self._machines == 1 and launched.local_world_size() < launched.world_size():
            logger.warning(
                "[config] dist.comm.hierarchical has no effect: with dist.comm.intra_size = %s all "
                "%d processes that average gradients count as one machine's.",
                intra_size,
                self.processes,
            )
        ranks = torch.tensor(members).view(self._machines, -1)
        turns = range(len(groups))
        self._intra = [own_group(ranks.tolist(), groups[0]) for _ in turns]
        self._inter = [own_group(ranks.t().tolist(), groups[0]) for _ in turns]
        self._under_way: list[Iterator[bool]] = []

    def __str__(self) -> str:
        return f"all-reduce over {self._machines} machines of {self._inside} processes"

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        if bucket.index() == 0:
            self._under_way.clear()  # what a step that failed has left
        # A stage waits for the one before, so it is recorded when the next bucket is complete: what
        # the backward computes until then hides it.
        self._advance()
        flat = bucket.buffer()
        if self._machines == 1 or flat.nbytes >= self._threshold:
            future = self.plain(bucket)
        else:
            future = Future()
            self._under_way.append(self._stages(flat, self.turn(bucket), future))
            next(self._under_way[-1])
        while bucket.is_last() and self._under_way:
            self._advance()
        return future

    def _advance(self) -> None:
        """The next stage of each bucket that is under way, the oldest first."""
        self._under_way = [each for each in self._under_way if next(each, False)]

    def _stages(self, flat: Tensor, turn: int, future: Future[Tensor]) -> Iterator[bool]:
        """Records a stage at a time.

        Every piece goes through them on its own, and they wait for single pieces: some travel
        between machines while others do within them.
        """
        pieces = flat.div(self.processes).split(self._piece_length(flat))
        received = [self._exchanged(piece, self._intra[turn]) for piece in pieces]
        yield True
        parts = []
        for rows in received:
            parts.append(rows.sum(0))
            dist.all_reduce(parts[-1], group=self._inter[turn], async_op=True)
        yield True
        whole = [part.new_empty(part.numel() * self._inside) for part in parts]
        for gathered, part in zip(whole, parts, strict=True):
            dist.all_gather_into_tensor(gathered, part, group=self._intra[turn], async_op=True)
        yield True
        for piece, gathered in zip(flat.split(pieces[0].numel()), whole, strict=True):
            piece.copy_(gathered[: piece.numel()])
        future.set_result(flat)

    def _piece_length(self, flat: Tensor) -> int:
        size = max(_PIECE, -(-flat.nbytes // _PIECES))
        return -(-size // (flat.element_size() * self._inside)) * self._inside

    def _exchanged(self, piece: Tensor, group: ProcessGroup) -> Tensor:
        """This process's part of a piece, as each process of the machine has it: a row of each.

        Their sum is a kernel of the step. Gloo's reduce-scatter is an all-reduce of the whole.
        """
        length = -(-piece.numel() // self._inside)
        if length * self._inside > piece.numel():
            piece = torch.nn.functional.pad(piece, (0, length * self._inside - piece.numel()))
        rows = piece.new_empty(length * self._inside)
        dist.all_to_all_single(rows, piece.contiguous(), group=group, async_op=True)
        return rows.view(self._inside, length)
