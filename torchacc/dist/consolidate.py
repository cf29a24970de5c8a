"""The command consolidate_and_reshard_fsdp_ckpts: makes sharded files whole, or divides them anew.

`python -m torchacc consolidate_and_reshard_fsdp_ckpts` is the same. It runs in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchacc.dist import state_dict_utils as utils

NAME = "consolidate_and_reshard_fsdp_ckpts"
HELP = "make sharded checkpoints whole, or divide them among another number of processes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ckpt_dir", required=True, help="the folder with the shards' files")
    parser.add_argument(
        "--model_ckpt_name_pattern",
        default=utils.MODEL_PATTERN,
        help="which of them are the model's (%(default)s)",
    )
    parser.add_argument(
        "--optimizer_ckpt_name_pattern",
        default=utils.OPTIMIZER_PATTERN,
        help="which of them are the optimizer's (%(default)s)",
    )
    parser.add_argument(
        "--ckpt_type",
        choices=("all", "model", "optimizer"),
        default="all",
        help="what to convert (%(default)s)",
    )
    parser.add_argument(
        "--reshard_num",
        type=_at_least_one,
        default=1,
        help="into how many shards; 1 (the default) makes one file without shards",
    )
    parser.add_argument("--save_dir", default="", help="where to write (as --ckpt_dir)")
    for kind in ("model", "optimizer"):
        parser.add_argument(
            f"--{kind}_save_name_pattern",
            default="",
            help=f"the written file's name ({kind}_consolidated.pth), or that of the shards' files "
            f"with a star for the rank and one for their number (rank-*-of-*-{kind}.pth)",
        )


def run(options: argparse.Namespace) -> int:
    """Does what the arguments say. Status 1 where that cannot be: the reason is on stderr."""
    model = {
        "model_ckpt_name_pattern": options.model_ckpt_name_pattern,
        "model_save_name_pattern": options.model_save_name_pattern,
    }
    optimizer = {
        "optimizer_ckpt_name_pattern": options.optimizer_ckpt_name_pattern,
        "optimizer_save_name_pattern": options.optimizer_save_name_pattern,
    }
    convert, patterns = {
        "all": (utils.consolidate_and_reshard_fsdp_checkpoint, model | optimizer),
        "model": (utils.consolidate_and_reshard_fsdp_model_dict, model),
        "optimizer": (utils.consolidate_and_reshard_fsdp_optim_dict, optimizer),
    }[options.ckpt_type]
    try:
        convert(
            options.ckpt_dir,
            save_dir=options.save_dir,
            reshard_num=options.reshard_num,
            **patterns,
        )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: returns its exit status."""
    parser = argparse.ArgumentParser(prog=NAME, description=f"{HELP[0].upper()}{HELP[1:]}.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of at least 1")
    return int(text)
