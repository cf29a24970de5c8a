"""Other names of torchrun: the command `xlarun`, and TI-ACC's launcher.

Neither imports anything but torch's launcher: the device belongs to the processes that it starts.
They read TI-ACC's switches (LIGHT_2D_ALLREDUCE and the others) from the environment themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.utils import macros


def xlarun(arguments: Sequence[str] | None = None) -> None:
    """torchrun, under the name that EasyCV's documents use."""
    run.main(arguments)


def launch(
    arguments: Sequence[str] | None = None,
    program: str = "python -m tiacc_training.torch.distributed.launch",
) -> None:
    """torchrun, which also hands `--local_rank=N` to the program unless `--use_env` is given.

    TI-ACC's launcher did, as torch's had at its time. `program`: what the help calls it.
    """
    parser = run.get_args_parser()
    parser.prog = program
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="leave --local_rank away: the program reads LOCAL_RANK from the environment",
    )
    options = parser.parse_args(arguments)
    if not options.use_env:
        script = [options.training_script, *options.training_script_args[:1]]
        # With `-m torchacc run script.py` it is the script's, whose name comes behind.
        place = 2 if options.module and script == ["torchacc", "run"] else 0
        options.training_script_args.insert(place, f"--local_rank={macros.local_rank}")
        options.use_env = True  # else torch adds its own spelling, --local-rank
    run.run(options)
