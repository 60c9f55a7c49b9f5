"""Scripts as processes of their own, without the seconds that imports take.

Each is a fork of one server, which has imported what megajax depends on and nothing of megajax, so
what a script forgets to import of ours is missing here too. The server has run nothing: a fork
starts JAX's backends, and ends, as any process does.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).parent.parent
DEPENDENCIES = (
    "flax.nnx", "jax.experimental.pallas.mosaic_gpu", "matplotlib.pyplot", "optax",
    "orbax.checkpoint", "rich.console",
)  # fmt: skip

SECONDS = 600  # that a script may take, on a machine however busy; then it is gone


def run(script: str, *args: object) -> subprocess.CompletedProcess:
    """Runs a script of the repository; returns its exit code and what it wrote."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = pathlib.Path(folder, "out"), pathlib.Path(folder, "err")
        words = [str(ROOT / script), *map(str, args)]
        request = {"argv": words, "env": dict(os.environ), "out": str(out), "err": str(err)}
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> None:
    """Answers every request with an exit code; returns in forks only, once they are set up."""
    for name in DEPENDENCIES:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy all of it
    for line in sys.stdin:
        request = json.loads(line)
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
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
