"""A process that has imported torch and forks the children of tests.

To import torch takes 1.5 s of a core, and tests/python alone has some hundred children. A child of
the template is what `python -c CODE` is behind its `import torch`: nothing of this project has been
imported, no thread of torch runs, and the interpreter is finalized at the end. But for three
things: children share the seed of hashes and where libraries lie in memory, the interpreter's last
collection leaves alone what torch's import has made, and torch._dynamo is there, which torch
imports itself (0.4 to 0.8 s) with the first optimizer or the first Meta kernel that promotes types.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

MESSAGE = 1 << 17  # bytes of the longest request
# What a child may have another value of than the template: nothing reads it before or while torch
# is imported. For all else (HOME, OMP_NUM_THREADS, ...) an interpreter has to start anew.
READ_LATER = {
    "PATH",
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_CURRENT_TEST",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "REPORTS",
    "LIGHT_2D_ALLREDUCE",
    "LIGHT_INTRA_SIZE",
    "TIACC_TRAINING_FUSION_THRESHOLD",
    "TIACC_TRAINING_NUM_NCCL_STREAMS",
    # torch sets it in the process that runs the tests, as soon as one of these imports inductor.
    "TORCHINDUCTOR_CACHE_DIR",
}


def serve(channel: int) -> str:
    """In the template: forks a child per request until nobody is left who could ask.

    Returns the code that is to be run: the child's in the child, none in the template.
    """
    import torch._dynamo  # noqa: F401  # what the template is for

    # Collections would write to every object, and the child would copy torch's pages for it.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    asked = socket.socket(fileno=channel)
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MESSAGE, 3)
        if not message:
            return ""
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers = socket.socket(fileno=descriptors[0])
    pid = os.fork()
    if pid != 0:  # children run at the same time, and each has somebody who waits for it
        answers.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # the test has given up
            answers.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers.close()
    for number, output in enumerate(descriptors[1:], 1):
        os.dup2(output, number)
        os.close(output)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    return request["code"]


class Template:
    """The template with the environment `env` and the working directory `cwd`, seen from a test.

    Its children find the `modules` of torch imported, too.
    """

    def __init__(self, env: dict[str, str], cwd: str, modules: tuple[str, ...] = ()) -> None:
        self.env = env
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports = "".join(f"import {module}; " for module in modules)
        code = f"{imports}from tests.template import serve; exec(serve({theirs.fileno()}))"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=cwd,
                env={**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self.channel.close()
        self.process.wait()

    def can_run(self, env: dict[str, str]) -> bool:
        """Whether a child with the environment `env` may come from this template."""
        changed = {name for name, _ in env.items() ^ self.env.items()}
        return all(name.startswith("ACC_") or name in READ_LATER for name in changed)

    def run(
        self, code: str, env: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs `code` as subprocess.run does `python -c CODE`, its output captured as text.

        Raises subprocess.TimeoutExpired when it has been ended after `timeout` seconds.
        """
        assert self.process.poll() is None, f"the template ended: {self.process.returncode}"
        command = ["python", "-c", code]
        message = json.dumps({"code": code, "env": env}).encode()
        assert len(message) <= MESSAGE, f"code and environment have {len(message)} bytes"
        with ExitStack() as opened:
            answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.enter_context(answers)
            with theirs, ExitStack() as writable:
                ends = [answers.fileno()]
                given = [theirs.fileno()]
                for _ in ("stdout", "stderr"):
                    end, other = os.pipe()
                    opened.callback(os.close, end)
                    writable.callback(os.close, other)
                    ends.append(end)
                    given.append(other)
                socket.send_fds(self.channel, [message], given)
            received: list[list[bytes]] = [[] for _ in ends]
            try:
                _receive(dict(zip(ends, received, strict=True)), timeout)
            except BaseException as error:
                if len(received[0]) == 1:  # its pid, and no status
                    with suppress(ProcessLookupError):
                        os.kill(int(received[0][0]), signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    output, errors = map(b"".join, received[1:])
                    raise subprocess.TimeoutExpired(command, timeout, output, errors) from None
                raise
        assert len(received[0]) == 2, "the child's keeper was ended"
        stdout, stderr = (b"".join(chunks).decode() for chunks in received[1:])
        return subprocess.CompletedProcess(command, int(received[0][1]), stdout, stderr)


def _receive(chunks: dict[int, list[bytes]], timeout: float) -> None:
    """Adds what comes from each descriptor until all have ended; TimeoutError if they do not."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for end in chunks:
            selector.register(end, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if chunk:
                    chunks[key.fd].append(chunk)
                else:
                    selector.unregister(key.fd)
