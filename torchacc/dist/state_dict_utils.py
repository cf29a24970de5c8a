"""Files of shards: read and checked, made whole, and divided among another number of processes.

No model, no device and no process group is needed: what is in such a file says it all
(`torchacc.dist.shard_format`, `docs/checkpoints.md`). `torchacc.dist.consolidate` is the command.
Names are TorchAcc's; the page says what differs.

Memory: files are mapped, so what is loaded is read when it is used. The whole tensors are in memory
once, and once more where they are divided again.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import os
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchacc.dist import shard_format
from torchacc.dist.optimizer_states import (
    named,
    names_of,
    parameters_of,
    same,
    shards_of_part,
    shards_of_unit,
    whole_of_part,
    whole_of_unit,
)
from torchacc.dist.shard_format import METADATA, Layout, check_whole
from torchacc.files import replacing_all
from torchacc.logger import logger
from torchacc.progress import Progress
from torchacc.serialization import write

# Files are called rank-0-of-2-model.pth, and rank0-of-2-model.pth in TorchAcc's own examples.
MODEL_PATTERN = "rank*-of-*-model.pth"
OPTIMIZER_PATTERN = "rank*-of-*-optimizer.pth"
_WHOLE_FILE = "{}_consolidated.pth"
_SHARD_FILES = "rank-*-of-*-{}.pth"  # a star for the rank and one for the number of shards

Shards = list[dict[str, Any]]
_Item = TypeVar("_Item")


# --- files ----------------------------------------------------------------------------------------


def load_checkpoints(ckpt_dir: str | os.PathLike[str], ckpt_name: str) -> Shards:
    """The shards in the files of `ckpt_dir` that match the pattern `ckpt_name`, by rank.

    Of shards that several processes hold (`dp` beside `fsdp`) one is taken. Tensors lie in the
    files, which must not be written to meanwhile; they may be replaced or deleted.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: one of them is damaged or no such file, shards are missing, or they are not of
            one checkpoint. Every file is looked at. The message names the file.
    """
    paths = _matching(ckpt_dir, ckpt_name)
    if not paths:
        pattern = os.path.join(os.fspath(ckpt_dir), ckpt_name)
        raise FileNotFoundError(f"[checkpoint] no file matches {pattern}.")
    checkpoints, layouts = [], []
    for number, path in enumerate(paths, 1):
        logger.info("[checkpoint] shard %d of %d: %s", number, len(paths), path)
        checkpoints.append(_read(path))
        layouts.append(shard_format.check_shard(checkpoints[-1], path))
    shard_format.check_same_job(layouts, paths)
    chosen: dict[int, tuple[int, dict[str, Any]]] = {}
    for layout, checkpoint in zip(layouts, checkpoints, strict=True):
        if layout.rank not in chosen or layout.replica < chosen[layout.rank][0]:
            chosen[layout.rank] = (layout.replica, checkpoint)
    return [chosen[rank][1] for rank in range(layouts[0].world_size)]


def _matching(ckpt_dir: str | os.PathLike[str], ckpt_name: str) -> list[str]:
    """The files, without links to nothing: an interrupted save leaves some for what is new."""
    found = glob.glob(os.path.join(glob.escape(os.fspath(ckpt_dir)), ckpt_name))
    return sorted(path for path in found if os.path.exists(path))


def _read(path: str) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"[checkpoint] {path} ({os.path.getsize(path)} bytes) cannot be read: it is truncated, "
            f"damaged, or holds more than tensors and plain values. torch.load says: {lines[0]}"
        ) from error


def save_checkpoints(
    state_dict_list: Shards | dict[str, Any],
    shard_metadata_list: Sequence[dict[str, Any]] | None,
    save_paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    save_type: str,
) -> None:
    """Writes shards to their files, or one dictionary (what is consolidated) to a single file.

    What was there before is replaced when all files are complete, and stays if any cannot be. They
    take their places at once: a process that is killed leaves all of the old files or all of the
    new ones (`torchacc.files.replacing_all`).

    Args:
        shard_metadata_list: those of the shards; None for a single dictionary.
        save_paths: as many as there are shards, or one path.
        save_type: `model` or `optimizer`, the key of a shard in its file.

    Raises:
        ValueError: numbers that do not fit together, or another `save_type`.
        OSError: a file cannot be written.
    """
    _write(_files(state_dict_list, shard_metadata_list, save_paths, save_type))


def _files(
    state_dict_list: Shards | dict[str, Any],
    shard_metadata_list: Sequence[dict[str, Any]] | None,
    save_paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    save_type: str,
) -> list[tuple[Any, dict[str, Any]]]:
    """The paths that `save_checkpoints` writes to, each with what comes into the file."""
    if save_type not in shard_format.KINDS:
        raise ValueError(f"[checkpoint] save_type = {save_type!r}. Use 'model' or 'optimizer'.")
    if isinstance(state_dict_list, Mapping):
        contents: Sequence[dict[str, Any]] = [dict(state_dict_list)]
        paths: list[Any] = [save_paths]
    else:
        metadata = list(shard_metadata_list or ())
        paths = list(save_paths)  # type: ignore[arg-type]
        if not len(state_dict_list) == len(metadata) == len(paths):
            raise ValueError(
                f"[checkpoint] {len(state_dict_list)} shards, {len(metadata)} metadata and "
                f"{len(paths)} paths to save them to: there should be one each."
            )
        contents = [
            {save_type: state, METADATA: each}
            for state, each in zip(state_dict_list, metadata, strict=True)
        ]
    return list(zip(paths, contents, strict=True))


def _write(files: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    for path, _ in files:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    total = sum(_bytes(content) for _, content in files)
    parts: list[Path] = []

    def text() -> str:
        written = total
        with contextlib.suppress(OSError):  # they have taken their places, or cannot be asked
            written = min(total, sum(part.stat().st_size for part in parts))
        return f"writing: {written >> 20} of {total >> 20} MiB"

    with Progress("checkpoint", text), replacing_all([path for path, _ in files]) as made:
        parts += made
        for part, (_, content) in zip(made, files, strict=True):
            write(content, part)
    for path, _ in files:
        logger.info("[checkpoint] written: %s", path)


def _bytes(content: dict[str, Any]) -> int:
    """What the tensors in its containers take in a file, where memory that they share is once."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()  # a container may be in itself
    left: list[Any] = [content]
    while left:
        each = left.pop()
        if isinstance(each, Tensor):
            if each.layout is torch.strided:
                storage = each.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        elif isinstance(each, (dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            left += each.values() if isinstance(each, dict) else each
    return sum(sizes.values())


# --- models ---------------------------------------------------------------------------------------


def consolidate_sharded_model_checkpoints(
    ckpt_dir: str | os.PathLike[str], checkpoints: Shards
) -> dict[str, Tensor]:
    """The whole model's state, for `load_state_dict` of the model as it is without FSDP.

    Buffers, and whatever is not sharded, are those of the first shard.

    Args:
        ckpt_dir: where the shards are from, for messages.
        checkpoints: what `load_checkpoints` gave.

    Raises ValueError where they do not make up a model.
    """
    layout = _layouts(ckpt_dir, checkpoints, "model")[0]
    shards = [checkpoint["model"] for checkpoint in checkpoints]
    whole: dict[str, Any] = {}
    with _counted("making the model whole", shards[0].items()) as counted:
        for name, value in counted:
            if name not in layout.units:
                whole[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                continue
            without = [str(rank) for rank, shard in enumerate(shards) if name not in shard]
            if without:
                raise ValueError(
                    f"[checkpoint] {ckpt_dir}: {name} is missing in shards {', '.join(without)}."
                )
            whole |= layout.units[name].whole([shard[name] for shard in shards])
    for name, (part, _) in layout.parts().items():
        check_whole(whole.get(name), part, f"{ckpt_dir}: {name}")
    for other, name in layout.shared.items():
        whole[other] = whole[name]
    return whole


def reshard_model_dict(
    consolidate_model_dict: Mapping[str, Any], shard_model: Mapping[str, Any], reshard_num: int
) -> tuple[Shards, list[dict[str, Any]]]:
    """A whole model's state in `reshard_num` shards, and their metadata.

    Args:
        shard_model: a shard of any number of processes, whose metadata say what the units are.

    Raises ValueError where the state lacks a parameter, or has one of another shape.
    """
    layout = _template(shard_model, reshard_num)
    for name, (part, _) in layout.parts().items():
        check_whole(consolidate_model_dict.get(name), part, name)
    known = {*layout.parts(), *layout.shared}
    rest = {name: value for name, value in consolidate_model_dict.items() if name not in known}
    made: Shards = [{} for _ in range(reshard_num)]
    with _counted("dividing the model", layout.units.items()) as counted:
        for name, unit in counted:
            shards = unit.shards(consolidate_model_dict, reshard_num)
            for state, shard in zip(made, shards, strict=True):
                state[name] = shard
    return [{**state, **rest} for state in made], _metadata(layout, reshard_num)


# --- optimizers -----------------------------------------------------------------------------------


def consolidate_sharded_optimizer_checkpoints(
    ckpt_dir: str | os.PathLike[str], checkpoints: Shards
) -> dict[str, Any]:
    """The whole optimizer's state under the names of the model's parameters.

    As `FullyShardedDataParallel.full_optim_state_dict` gives it, for `optim_state_dict_to_load` and
    torch's `set_optimizer_state_dict`.

    Args:
        ckpt_dir: where the shards are from, for messages.
        checkpoints: what `load_checkpoints` gave.

    Raises ValueError where they do not make up a state, or are of different moments.
    """
    layouts = _layouts(ckpt_dir, checkpoints, "optimizer")
    layout = layouts[0]
    held = [
        named(checkpoint["optimizer"], layout, f"shard {rank} of {ckpt_dir}")
        for rank, checkpoint in enumerate(checkpoints)
    ]
    parts = layout.parts()
    for rank, each in enumerate(held):
        if not same(each["param_groups"], held[0]["param_groups"]):
            raise ValueError(
                f"[checkpoint] {ckpt_dir}: the parameter groups (learning rate, ...) of shards 0 "
                f"and {rank} differ. They are of different moments, or of different optimizers."
            )
    state: dict[str, Any] = {}
    keys = [key for group in held[0]["param_groups"] for key in group["params"]]
    with _counted("making the optimizer whole", keys) as counted:
        for key in counted:
            states = [each["state"].get(key) for each in held]
            if not any(states):
                continue
            where = f"{ckpt_dir}: the optimizer's state of {key}"
            if key in layout.units:
                state |= whole_of_unit(layout.units[key], states, where)
            else:
                state[key] = whole_of_part(*parts[key], states, where)
    groups = [
        {
            **group,
            "params": [name for key in group["params"] for name in parameters_of(layout, key)],
        }
        for group in held[0]["param_groups"]
    ]
    return {"state": state, "param_groups": copy.deepcopy(groups)}


def reshard_optim_dict(
    consolidate_optim_dict: Mapping[str, Any], shard_optim: Mapping[str, Any], reshard_num: int
) -> tuple[Shards, list[dict[str, Any]]]:
    """A whole optimizer's state in `reshard_num` shards, and their metadata.

    Args:
        shard_optim: a shard of any number of processes: it says what the units are, and whether
            states go by names or by numbers.

    Raises ValueError where the state is not one of this model.
    """
    layout = _template(shard_optim, reshard_num)
    template = shard_optim["optimizer"]
    names = names_of(template, layout, "shard_optim")
    whole, parts = consolidate_optim_dict["state"], layout.parts()
    made: Shards = [{} for _ in range(reshard_num)]
    with _counted("dividing the optimizer", names.items()) as counted:
        for key, name in counted:
            inside = parameters_of(layout, name)
            present = [each for each in inside if each in whole]
            if not present:
                continue
            if len(present) < len(inside):
                missing = next(each for each in inside if each not in whole)
                raise ValueError(
                    f"[checkpoint] the optimizer has a state of {present[0]} and none of "
                    f"{missing}, which lie in one unit, {name}."
                )
            if name in layout.units:
                shards = shards_of_unit(layout.units[name], whole, reshard_num)
            else:
                shards = shards_of_part(*parts[name], whole[name], reshard_num)
            for state, shard in zip(made, shards, strict=True):
                if shard is not None:
                    state[key] = shard
    groups, made_of = consolidate_optim_dict["param_groups"], template["param_groups"]
    if len(groups) != len(made_of):
        raise ValueError(
            f"[checkpoint] the optimizer has {len(groups)} parameter groups, and the shards' has "
            f"{len(made_of)}: they are not of one optimizer."
        )
    groups = [
        {
            **saved,
            "params": list(group["params"]),
            **({"param_names": list(group["param_names"])} if "param_names" in group else {}),
        }
        for saved, group in zip(groups, made_of, strict=True)
    ]
    made = [{"state": state, "param_groups": copy.deepcopy(groups)} for state in made]
    return made, _metadata(layout, reshard_num)


# --- both -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _counted(doing: str, items: Collection[_Item]) -> Iterator[Iterator[_Item]]:
    """Gives the items, one after the other; a terminal is told how many are done."""
    done = 0

    def each() -> Iterator[_Item]:
        nonlocal done
        for item in items:
            yield item
            done += 1

    with Progress("checkpoint", lambda: f"{doing}: {done} of {len(items)}"):
        yield each()


def _layouts(ckpt_dir: str | os.PathLike[str], checkpoints: Shards, kind: str) -> list[Layout]:
    """The metadata of checked shards in the order of their ranks, each with the key `kind`."""
    names = [f"shard number {number} from {ckpt_dir}" for number in range(len(checkpoints))]
    if not checkpoints:
        raise ValueError(f"[checkpoint] there are no shards from {ckpt_dir}.")
    layouts = [
        shard_format.check_shard(checkpoint, name)
        for checkpoint, name in zip(checkpoints, names, strict=True)
    ]
    shard_format.check_same_job(layouts, names)
    for number, (layout, checkpoint) in enumerate(zip(layouts, checkpoints, strict=True)):
        if layout.rank != number:
            raise ValueError(
                f"[checkpoint] {names[number]} is shard {layout.rank}. Give them in the order of "
                "their ranks, as load_checkpoints does."
            )
        if kind not in checkpoint:
            keys = ", ".join(map(repr, checkpoint))
            raise ValueError(f"[checkpoint] {names[number]} has {keys}, and no {kind!r}.")
    return layouts


def _template(shard: Mapping[str, Any], reshard_num: int) -> Layout:
    if not isinstance(reshard_num, int) or reshard_num < 1:
        raise ValueError(f"[checkpoint] reshard_num = {reshard_num!r} should be 1 or more.")
    return shard_format.read_layout(shard[METADATA], "the shard that says what the units are")


def _metadata(layout: Layout, reshard_num: int) -> list[dict[str, Any]]:
    return [
        replace(layout, rank=rank, world_size=reshard_num, replica=0).to_dict()
        for rank in range(reshard_num)
    ]


# --- files to files -------------------------------------------------------------------------------


def consolidate_and_reshard_fsdp_model_dict(
    ckpt_dir: str | os.PathLike[str],
    model_ckpt_name_pattern: str = MODEL_PATTERN,
    save_dir: str | os.PathLike[str] = "",
    model_save_name_pattern: str = "",
    reshard_num: int = 1,
    save_model: bool = True,
) -> tuple[Any, list[dict[str, Any]] | None]:
    """Makes the sharded model in files whole, and divides it again with `reshard_num` above 1.

    Args:
        ckpt_dir: the folder of the files; `model_ckpt_name_pattern` says which.
        save_dir: where to write; `ckpt_dir` if empty. It is made if it is not there.
        model_save_name_pattern: the file's name (`model_consolidated.pth` if empty); for shards
            with a star for the rank and one for their number (`rank-*-of-*-model.pth`).
        save_model: whether to write at all.

    Returns:
        The state and None, or a list of states and one of metadata.

    Raises what `load_checkpoints` and the other functions here raise; then nothing was written.
    """
    to = _save_paths("model", save_dir or ckpt_dir, model_save_name_pattern, reshard_num)
    if save_model:
        _check_apart(ckpt_dir, [model_ckpt_name_pattern], to)
    checkpoints = load_checkpoints(ckpt_dir, model_ckpt_name_pattern)
    made = _converted("model", ckpt_dir, checkpoints, reshard_num)
    if save_model:
        save_checkpoints(*made, to, "model")
    return made


def consolidate_and_reshard_fsdp_optim_dict(
    ckpt_dir: str | os.PathLike[str],
    optimizer_ckpt_name_pattern: str = OPTIMIZER_PATTERN,
    save_dir: str | os.PathLike[str] = "",
    optimizer_save_name_pattern: str = "",
    reshard_num: int = 1,
    save_optimizer: bool = True,
) -> tuple[Any, list[dict[str, Any]] | None]:
    """The same for an optimizer. The model's files are not needed."""
    to = _save_paths("optimizer", save_dir or ckpt_dir, optimizer_save_name_pattern, reshard_num)
    if save_optimizer:
        _check_apart(ckpt_dir, [optimizer_ckpt_name_pattern], to)
    checkpoints = load_checkpoints(ckpt_dir, optimizer_ckpt_name_pattern)
    made = _converted("optimizer", ckpt_dir, checkpoints, reshard_num)
    if save_optimizer:
        save_checkpoints(*made, to, "optimizer")
    return made


def consolidate_and_reshard_fsdp_checkpoint(
    ckpt_dir: str | os.PathLike[str],
    model_ckpt_name_pattern: str = MODEL_PATTERN,
    optimizer_ckpt_name_pattern: str = OPTIMIZER_PATTERN,
    save_dir: str | os.PathLike[str] = "",
    model_save_name_pattern: str = "",
    optimizer_save_name_pattern: str = "",
    reshard_num: int = 1,
    save_checkpoint: bool = True,
) -> tuple[tuple[Any, list[dict[str, Any]] | None], tuple[Any, list[dict[str, Any]] | None]]:
    """The same for a model and its optimizer: what the two functions before return.

    Both are made before anything is written, and are in memory together.

    Raises:
        FileNotFoundError: there is no file of the model, or none of the optimizer.
        ValueError: files that are damaged or not of one checkpoint, an optimizer of another model,
            a `reshard_num` below 1, or names to write to that are those of files that are read, or
            of both, or have not a star for each number. Nothing was written.
        OSError: a file cannot be written.
    """
    folder = save_dir or ckpt_dir
    to_model = _save_paths("model", folder, model_save_name_pattern, reshard_num)
    to_optimizer = _save_paths("optimizer", folder, optimizer_save_name_pattern, reshard_num)
    if to_model == to_optimizer:
        raise ValueError(
            f"[checkpoint] model_save_name_pattern and optimizer_save_name_pattern are both "
            f"{model_save_name_pattern!r}: the optimizer would replace the model."
        )
    if save_checkpoint:
        patterns = [model_ckpt_name_pattern, optimizer_ckpt_name_pattern]
        _check_apart(ckpt_dir, patterns, to_model, to_optimizer)
    models = load_checkpoints(ckpt_dir, model_ckpt_name_pattern)
    optimizers = load_checkpoints(ckpt_dir, optimizer_ckpt_name_pattern)
    one, other = (
        shard_format.read_layout(shards[0][METADATA], f"the first shard of the {kind}")
        for shards, kind in ((models, "model"), (optimizers, "optimizer"))
    )
    if (one.units, one.order) != (other.units, other.order):
        raise ValueError(
            f"[checkpoint] {ckpt_dir}: the optimizer is of another model than the model's files: "
            f"{shard_format.difference(one, other)}."
        )
    shard_format.check_same_save(one, other, os.fspath(ckpt_dir))
    save = {"save_id": uuid.uuid4().hex, "kinds": list(shard_format.KINDS)}
    model = _converted("model", ckpt_dir, models, reshard_num, save)
    optimizer = _converted("optimizer", ckpt_dir, optimizers, reshard_num, save)
    if save_checkpoint:
        files = _files(*model, to_model, "model")
        _write(files + _files(*optimizer, to_optimizer, "optimizer"))
    return model, optimizer


def _converted(
    kind: str,
    ckpt_dir: str | os.PathLike[str],
    checkpoints: Shards,
    reshard_num: int,
    save: Mapping[str, Any] | None = None,
) -> tuple[Any, list[dict[str, Any]] | None]:
    """What is to be written. `save`: what its metadata say of it; a save of its own if None."""
    is_model = kind == "model"
    logger.info("[checkpoint] making the %s whole: %d shards", kind, len(checkpoints))
    consolidate = (
        consolidate_sharded_model_checkpoints
        if is_model
        else consolidate_sharded_optimizer_checkpoints
    )
    made: tuple[Any, list[dict[str, Any]] | None] = (consolidate(ckpt_dir, checkpoints), None)
    if reshard_num > 1:
        logger.info("[checkpoint] dividing the %s into %d shards", kind, reshard_num)
        reshard = reshard_model_dict if is_model else reshard_optim_dict
        states, metadata = reshard(made[0], checkpoints[0], reshard_num)
        # Mixed with the files of another save it is told.
        save = save or {"save_id": uuid.uuid4().hex, "kinds": [kind]}
        made = states, [{**each, **save} for each in metadata]
    return made


def _check_apart(
    ckpt_dir: str | os.PathLike[str], patterns: Sequence[str], *to: list[str] | str
) -> None:
    """Raises ValueError where a file that is read is one of those that are to be written."""
    read = {os.path.realpath(path) for each in patterns for path in _matching(ckpt_dir, each)}
    for paths in to:
        for path in [paths] if isinstance(paths, str) else paths:
            if os.path.realpath(path) in read:
                raise ValueError(
                    f"[checkpoint] {path} is one of the files that are read, which are never "
                    "replaced. Write to another folder (save_dir), or under other names "
                    "(model_save_name_pattern, optimizer_save_name_pattern)."
                )


def _save_paths(
    kind: str, folder: str | os.PathLike[str], pattern: str, reshard_num: int
) -> list[str] | str:
    """Where to write. Raises ValueError for a pattern that does not give each shard a name."""
    if not isinstance(reshard_num, int) or reshard_num < 1:
        raise ValueError(f"[checkpoint] reshard_num = {reshard_num!r} should be 1 or more.")
    pattern = pattern or (_WHOLE_FILE if reshard_num == 1 else _SHARD_FILES).format(kind)
    stars = 0 if reshard_num == 1 else 2
    if pattern.count("*") != stars:
        expected = "no star" if stars == 0 else "two stars, for the rank and the number of shards"
        raise ValueError(
            f"[checkpoint] {kind}_save_name_pattern = {pattern!r} should have {expected}, since "
            f"reshard_num is {reshard_num}; for instance "
            f"{(_SHARD_FILES if stars else _WHOLE_FILE).format(kind)!r}."
        )
    if stars == 0:
        return os.path.join(os.fspath(folder), pattern)
    begin, middle, end = pattern.split("*")
    names = [f"{begin}{rank}{middle}{reshard_num}{end}" for rank in range(reshard_num)]
    return [os.path.join(os.fspath(folder), name) for name in names]
