"""`python -m torchacc run script.py`: a script written for CUDA, unchanged, on the lazy device."""

from __future__ import annotations

import atexit
import builtins
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from torchacc.huggingface import take_float16
from torchacc.patch import patch
from torchacc_device import _imported, _patches

# What is in the last lines of an error where CUDA itself was missed, and not a device.
_SIGNS = ("cuda", "nvcc", "triton", "0 active drivers")


class ScriptError(Exception):
    """The script cannot be run at all; the text says which, and why."""


def run(script: str, arguments: Sequence[str]) -> None:
    """Runs a file as `python script arguments...` does, with "cuda" meaning the lazy device.

    It is `__main__` from here on, has `sys.argv` and its folder as the first of `sys.path`, and
    what it raises, SystemExit too, is raised here. The traceback that Python prints then begins in
    the script. What was patched for it (`torchacc.patch(devices=True)`) is taken back when the
    process ends, after the script's threads and exit handlers.

    Raises:
        ScriptError: there is no such file, it cannot be read, or it is a folder.
    """
    code, path = _compiled(script)
    atexit.register(_patches.undo_as_cuda)
    patch(devices=True)
    # The script's "cuda" is in a list there, and what its devices say of themselves is not.
    _imported.when_imported("accelerate.accelerator", take_float16)
    main = ModuleType("__main__")
    vars(main).update(
        __file__=path,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", path),
        __cached__=None,
    )
    sys.modules["__main__"] = main
    sys.argv[:] = [script, *arguments]
    # `python -m` has put the current folder there, and `python -P` or -I nothing.
    folder = os.path.dirname(os.path.realpath(path))
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder
    try:
        exec(code, vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        _begin_in_script(error, path)
        raise


def _compiled(script: str) -> tuple[CodeType, str]:
    """The script's code, and its path. A mistake in its syntax is raised as Python tells it."""
    if os.path.isdir(script):
        raise ScriptError(f"{script} is a folder: name the script in it.")
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise ScriptError(f"cannot open {script!r}: {error.strerror}.") from None
    try:
        return compile(source, path, "exec", dont_inherit=True), path
    except SyntaxError as error:
        _begin_in_script(error, path)
        raise


def _begin_in_script(error: BaseException, path: str) -> None:
    """Has `error` printed without the frames that led to the script, by whatever hook is set."""
    hook = sys.excepthook
    inside = error.__traceback__
    while inside is not None and inside.tb_frame.f_code.co_filename != path:
        inside = inside.tb_next

    def excepthook(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if value is error:
            trace = inside
        hook(kind, value.with_traceback(trace), trace)
        if value is error and _misses_cuda(value, trace):
            print(
                "[torchacc run] what this script calls cuda is the device acc. What needs CUDA "
                "itself (kernels of its own, Triton, CUDA graphs) does not run on it: "
                "docs/migration.md has what does.",
                file=sys.stderr,
            )

    sys.excepthook = excepthook


def _misses_cuda(error: BaseException, trace: TracebackType | None) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return False
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else os.path.basename(trace.tb_frame.f_code.co_filename)
    said = f"{type(error).__name__} {error} {where}".lower()
    return any(sign in said for sign in (*_SIGNS, "cpp_extension"))
