"""A process that has imported torch and forks the children of tests.

To import torch takes 1.5 s of a core, and tests/python alone has some hundred children. A child of
the template is what `python -c CODE` is behind its `import torch`: nothing of this project has been
imported, no thread of torch runs, and the interpreter ends as it does at the end of a program.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile

MESSAGE = 1 << 17  # bytes of the longest request
# What a child may have another value of than the template: nothing reads it before or while torch
# is imported. For all else (OMP_NUM_THREADS, PYTHONPATH, ...) an interpreter has to start anew.
READ_LATER = {"HOME", "PATH", "PYTEST_CURRENT_TEST", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
READ_LATER |= {"LOCAL_WORLD_SIZE", "USE_TORCHACC", "XDG_CACHE_HOME"}


def serve(channel: int) -> str:
    """In the template: forks a child per request until nobody is left who could ask.

    Returns the code that is to be run: the child's in the child, none in the template.
    """
    import torch  # noqa: F401  # what the template is for

    # Collections would write to every object, and the child would copy torch's pages for it.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
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
        answers.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
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
    """The template with the environment `env` and the working directory `cwd`, seen from a test."""

    def __init__(self, env: dict[str, str], cwd: str) -> None:
        self.env = env
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from tests.template import serve; exec(serve({theirs.fileno()}))"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=cwd,
                env={**env, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

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
        message = json.dumps({"code": code, "env": env}).encode()
        assert len(message) <= MESSAGE, f"code and environment have {len(message)} bytes"
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (
            tempfile.TemporaryFile("w+") as stdout,
            tempfile.TemporaryFile("w+") as stderr,
            answers,
        ):
            with theirs:
                files = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
                socket.send_fds(self.channel, [message], files)

            def number() -> int:
                answer = answers.recv(64)
                assert answer, "the template was ended"
                return int(answer)

            pid = number()
            answers.settimeout(timeout)
            try:
                status = number()
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                answers.settimeout(None)
                number()
                raise subprocess.TimeoutExpired(["python", "-c", code], timeout) from None
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(
                ["python", "-c", code], status, stdout.read(), stderr.read()
            )
