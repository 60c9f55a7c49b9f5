"""Scripts as processes of their own, without the seconds that imports take.

Each is a fork of one server, which has imported what megajax depends on, and the modules of megajax
that most scripts import. The server has run nothing: a fork starts JAX's backends, and ends, as any
process does.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).parent.parent
DEPENDENCIES = (
    "flax.nnx",
    "jax.experimental.pallas.mosaic_gpu",
    "matplotlib.pyplot",
    "optax",
    "orbax.checkpoint",
    "rich.console",
)
OURS = ("megajax.systems.aot", "megajax.systems.job", "megajax.systems.strategies")

SECONDS = 600  # that a script may take, on a machine however busy; then it is gone


def run(script: str, *args: object, env: dict | None = None) -> subprocess.CompletedProcess:
    """Runs a script of the repository; returns its exit code and what it wrote."""
    with start(script, *args, env=env) as process:
        code = process.wait()
        return subprocess.CompletedProcess(process.args, code, *process.written())


def start(script: str, *args: object, env: dict | None = None) -> "Process":
    """Starts a script of the repository. env: its whole environment; None: this process's."""
    return Process([str(ROOT / script), *map(str, args)], dict(os.environ if env is None else env))


class Process:
    """As subprocess.Popen, of a fork of the server; its two streams are files."""

    def __init__(self, args: list[str], env: dict):
        self.args, self.returncode = args, None
        folder = tempfile.mkdtemp(dir=_folder())
        self._files = [pathlib.Path(folder, name) for name in ("out", "err")]
        out, err = map(str, self._files)
        self.pid = _ask({"argv": args, "env": env, "out": out, "err": err})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.wait()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = SECONDS + 60) -> int:
        """Returns the exit code; raises TimeoutError."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.args} runs after {timeout} s:\n{self.written()}")
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing once the process has ended and was seen to."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = SECONDS + 60) -> tuple[str, str]:
        """Waits for the end; returns what the process wrote to stdout and to stderr."""
        self.wait(timeout)
        return self.written()

    def written(self) -> tuple[str, str]:
        """What the process wrote to stdout and to stderr so far."""
        return tuple(file.read_text() if file.exists() else "" for file in self._files)


def _ask(request: dict) -> int | None:
    server = _server()
    print(json.dumps(request), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


@functools.cache
def _folder() -> str:
    """What all processes write, until this one ends."""
    folder = tempfile.mkdtemp(prefix="megajax_forks_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> None:
    """Starts and waits for processes; returns in forks only, once they are set up."""
    for name in (*DEPENDENCIES, *OURS):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy all of it
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        with warnings.catch_warnings(action="ignore"):  # NumPy's idle threads stay behind
            child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            os.environ.clear()
            os.environ.update(request["env"])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for i, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT), i)
            sys.argv = request["argv"]
            sys.path[0] = os.path.dirname(sys.argv[0])
            return
        print(child, flush=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
