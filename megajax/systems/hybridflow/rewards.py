"""Rewards: functions of users that score responses, one or several, with time limits.

Two signatures are taken, told apart by the parameters' names:

    verl   f(data_source, solution_str, ground_truth, extra_info=None) -> float, or a dict with
           'score'; called for each row
    TRL    f(prompts, completions, **columns) -> list of floats, None where it does not apply;
           called for all rows

`score` calls them in this process, or with a time limit in processes of their own, which are ended
with all that they started when a call takes longer. Such a process imports the function's module,
or the script's file: what a script does stands under `if __name__ == "__main__"`. A function that
cannot be sent to another process (a lambda, a closure) is called in a thread, which is left alone
after its time: name functions at the top of a module. Of what a function prints in a process, the
first bytes of each call are shown. A reward that executes what a model wrote uses sandbox.run.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import importlib.util
import inspect
import math
import numbers
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np
from absl import logging

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.systems.hybridflow.batch import DataBatch

MOST = float(np.finfo(np.float32).max)
START_S = 120.0  # (chosen) in which a process must have imported the functions' modules
PRINTED = 2**16  # (chosen) bytes that are shown of what a function prints in one call
Reward = Callable[..., Any]


class RewardError(UserError):
    """A reward failed, hung, or gave no number. The text names uid, row, function and cause."""


class _Cause(Exception):
    """Why a call gave no result. The text is shown as it is."""


def score(
    functions: Sequence[Reward] | Reward,
    rows: DataBatch | Mapping[str, Any],
    weights: Sequence[float] | None = None,
    timeout: float | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Returns (scores (B,) float32, metrics): the weighted sum of what the functions give.

    Args:
      functions: see the module. rows: columns prompts, completions, data_source, ground_truth,
        extra_info, uid and others, as far as the functions ask for them. weights: one a function;
        None: 1 each. timeout: seconds of a call; None: no limit.
    Returns: metrics: means over the rows: `reward/NAME` of each function; of dicts, each number
      beside 'score' under its key, and under `NAME/KEY` where several functions give it.
    Raises: RewardError for a call that fails, hangs or gives no finite number; ValueError for
      weights, functions and rows that are not so.
    """
    batch = rows if isinstance(rows, DataBatch) else DataBatch(rows)
    with Scorer(functions, weights, timeout) as scorer:
        scores, metrics, errors = scorer.score(batch, stops=True)
    if errors:
        raise next(iter(errors.values()))
    return scores, metrics


class Scorer:
    """Reward functions with their processes, which live until `close`.

    `score` returns errors by row instead of raising them, so that a caller may skip rows.
    """

    def __init__(
        self,
        functions: Sequence[Reward] | Reward,
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
    ):
        """Args and errors: as of the function `score`."""
        self._functions = [functions] if callable(functions) else list(functions)
        if not self._functions or not all(callable(f) for f in self._functions):
            raise ValueError("rewards need at least one function")
        count = len(self._functions)
        self._weights = [1.0] * count if weights is None else [float(w) for w in weights]
        if len(self._weights) != count or not all(map(math.isfinite, self._weights)):
            raise ValueError(f"weights={weights} must be {count} finite numbers, one a function")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds, or None for no limit")
        self._names = _names(self._functions)
        self._parameters = [
            _parameters(f, n) for f, n in zip(self._functions, self._names, strict=True)
        ]
        self._timeout = timeout
        self._callers = [self._caller(f) for f in self._functions]

    def __enter__(self) -> "Scorer":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes."""
        self.close()

    def close(self) -> None:
        """Ends the processes."""
        for caller in self._callers:
            if isinstance(caller, _Process):
                caller.close()

    def score(
        self, rows: DataBatch, stops: bool = False
    ) -> tuple[np.ndarray, dict[str, float], dict[int, RewardError]]:
        """Returns (scores (B,) float32, metrics, errors by row).

        A row with an error has the score NaN and counts in no metric. stops: after the first error
        nothing more is called, and all scores are NaN.
        """
        parts_FB = np.zeros((len(self._functions), len(rows)))
        errors: dict[int, RewardError] = {}
        extras: list[dict[str, dict[int, float]]] = []  # of each function, by key and row
        for i, name in enumerate(self._names):
            extras.append({})
            for row, result in enumerate(self._results(i, rows)):
                try:
                    value, more = _number(result)
                except Exception as error:
                    errors.setdefault(row, self._error(rows, row, name, error))
                    if stops:
                        return np.full(len(rows), math.nan, np.float32), {}, errors
                    continue
                parts_FB[i, row] = value
                for key, number in more.items():
                    extras[i].setdefault(key, {})[row] = number
        scores_B = np.tensordot(self._weights, parts_FB, 1)
        good_B = np.ones(len(rows), bool)
        good_B[list(errors)] = False
        scores_B[~good_B] = math.nan
        metrics: dict[str, float] = {}
        for i, name in enumerate(self._names):
            if good_B.any():
                metrics[f"reward/{name}"] = float(parts_FB[i, good_B].mean())
            for key, by_row in extras[i].items():
                shared = sum(key in other for other in extras) > 1
                if good := [number for row, number in by_row.items() if good_B[row]]:
                    metrics[f"{name}/{key}" if shared else key] = float(np.mean(good))
        return scores_B.astype(np.float32), metrics, errors

    def _caller(self, function: Reward) -> Callable[[Mapping[str, Any]], Any]:
        if self._timeout is None:
            return functools.partial(_called, function)
        try:
            sent = _sendable(function)
        except Exception:  # pickle raises what it likes
            return _Thread(function, self._timeout)
        return _Process(sent, function, self._timeout)

    def _results(self, i: int, rows: DataBatch) -> Iterator[Any]:
        """Yields what function i gives for each row, an exception where it failed."""
        parameters, takes_all = self._parameters[i]
        call = self._callers[i]
        if "completions" in parameters:  # TRL
            names = rows.keys() if takes_all else [n for n in rows.keys() if n in parameters]
            try:
                results = call({name: list(rows[name]) for name in names})
                if hasattr(results, "__array__"):  # of JAX or torch, too
                    results = np.asarray(results)
                if not isinstance(results, Sequence | np.ndarray) or len(results) != len(rows):
                    raise _Cause(f"it gave {_shown(results)} for {len(rows)} completions")
                results = [0.0 if x is None else x for x in results]
            except Exception as error:
                results = [error] * len(rows)
            yield from results
            return
        for row in range(len(rows)):
            arguments = {
                "data_source": _cell(rows, "data_source", row),
                "solution_str": _cell(rows, "completions", row),
                "ground_truth": _cell(rows, "ground_truth", row),
                "extra_info": _cell(rows, "extra_info", row),
            }
            if not takes_all:
                arguments = {k: v for k, v in arguments.items() if k in parameters}
            try:
                result = call(arguments)
            except Exception as error:
                result = error
            yield result

    def _error(self, rows: DataBatch, row: int, name: str, error: Exception) -> RewardError:
        uid = _cell(rows, "uid", row)
        return RewardError(f"reward {name} on row {row} (uid {uid}): {_text(error)}")


def _cell(rows: DataBatch, name: str, row: int) -> Any:
    return rows[name][row] if name in rows else None


def _number(result: Any) -> tuple[float, dict[str, float]]:
    """Returns (score, other numbers) of a result. Raises: what it is, or what is wrong with it."""
    if isinstance(result, Exception):
        raise result
    more: dict[str, float] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise _Cause(f"a dict without 'score': {_shown(result)}")
        more = {
            str(key): number
            for key, value in result.items()
            if key != "score" and (number := _real(value)) is not None
        }
        result = result["score"]
    number = _real(result)
    if number is None:
        raise _Cause(f"a number is needed, not {_shown(result)}")
    if not abs(number) <= MOST:
        raise _Cause(f"a finite number is needed, not {number}")
    return number, more


def _real(value: Any) -> float | None:
    """Returns a number of Python, NumPy, JAX or torch; None for what is none."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def _text(error: BaseException) -> str:
    """Returns the cause of an error as one line, with the place that raised it."""
    if isinstance(error, _Cause):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, SyntaxError):  # its text has the place
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def _names(functions: Sequence[Reward]) -> list[str]:
    """Returns a name for each function, numbered where they are equal."""
    names = [getattr(f, "__name__", type(f).__name__) for f in functions]
    return [n if names.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(names)]


def _parameters(function: Reward, name: str) -> tuple[set[str], bool]:
    """Returns (names of the parameters, whether it takes any others). Raises: ValueError."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {name}: its signature cannot be read: {error}") from error
    names = {p.name for p in parameters}
    if "completions" not in names and "solution_str" not in names:
        raise UserError(
            f"reward {name} has the parameters {sorted(names)}; it needs (data_source, "
            "solution_str, ground_truth, extra_info=None) or (prompts, completions, **columns) "
            "(--reward)"
        )
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


# ---- callers: of one function, by keyword arguments


def _called(function: Reward, arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except SystemExit as end:  # it would end the run
        raise _Cause(f"it called sys.exit({end.code!r})") from end


class _Thread:
    """Calls in threads. One that is late goes on by itself: a thread cannot be ended."""

    def __init__(self, function: Reward, seconds: float):
        self._function, self._seconds = function, seconds

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(_called(self._function, arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="reward").start()
        try:
            return future.result(self._seconds)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the function's own TimeoutError
                raise
            raise _Cause(f"no answer within {self._seconds:g} s") from error


class _Process:
    """Calls in a process of its own, which is ended when it is late and started again for the next
    call. It is a new interpreter that imports the function's module: a fork of a process with
    JAX's threads may hang, and `multiprocessing` would run the main module again. It ends with
    this process, even if that is killed while a function runs (`serve`)."""

    def __init__(self, sent: bytes, function: Reward, seconds: float):
        self._sent, self._function, self._seconds = sent, function, seconds
        self._thread = _Thread(function, seconds)
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None
        self._lifeline = -1
        self._room = 0  # bytes of a call's output that are still shown; below 0: no more of it
        self._refusal: str | None = None  # why it cannot load the function

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        self._room = PRINTED
        if self._process is None and self._refusal is None:
            self._start()
        if self._refusal is not None:
            if isinstance(self._function, FileReward):
                raise _Cause(f"its process cannot load it: {self._refusal}")
            return self._thread(arguments)
        assert self._pipe is not None
        try:
            self._pipe.send(dict(arguments))
            if not self._pipe.poll(self._seconds):
                self.close()
                raise _Cause(f"no answer within {self._seconds:g} s")
            is_good, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _Cause(f"its process ended (exit code {self.close()})") from error
        if not is_good:
            raise _Cause(result)
        return result

    def _start(self) -> None:
        parent, there = socket.socketpair()
        read, self._lifeline = os.pipe()
        with there:
            # The child finds modules where this process does, the script's folder included.
            command = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
                f"serve({there.fileno()}, {read})"
            )
            self._process = subprocess.Popen(
                (sys.executable, "-u", "-c", command),
                pass_fds=(there.fileno(), read),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        os.close(read)
        printed = self._process.stdout
        threading.Thread(target=self._show, args=(printed,), daemon=True, name="prints").start()
        self._pipe = Connection(parent.detach())
        try:  # the first message: why it could not import the function, or None
            self._pipe.send_bytes(self._sent)
            late = f"not within {START_S:g} s"
            self._refusal = self._pipe.recv() if self._pipe.poll(START_S) else late
        except (EOFError, OSError):
            self._refusal = "it ended"
        if self._refusal is not None:
            self.close()
            if not isinstance(self._function, FileReward):
                logging.warning(
                    "reward %s runs in a thread, which cannot be ended: no process can load it: %s",
                    getattr(self._function, "__name__", "?"),
                    self._refusal,
                )

    def _show(self, printed: BinaryIO) -> None:
        """Writes what the process prints to standard output, as much as there is room for."""
        with printed:
            while piece := printed.read(2**16):
                if self._room < 0:
                    continue
                text = piece[: self._room].decode(errors="replace")
                self._room -= len(piece)
                if self._room < 0:
                    text += (
                        f"\n[what a reward prints beyond {PRINTED:,} bytes a call is left out]\n"
                    )
                with contextlib.suppress(OSError, ValueError):  # nobody reads it
                    sys.stdout.write(text)
                    sys.stdout.flush()

    def close(self) -> int | None:
        """Ends the process, with those that it started. Returns its exit code."""
        code = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code, self._process = self._process.wait(), None
        if self._pipe is not None:
            self._pipe.close()
            os.close(self._lifeline)
            self._pipe = None
        return code


def serve(number: int, lifeline: int) -> None:
    """Answers the calls that come over a socket, until it is closed.

    number: its descriptor. lifeline: an end of a pipe into which nobody writes. When the process
    with its other end closes it or is killed, the kernel kills this process group, even amid C code
    that keeps the interpreter's lock, such as a regular expression.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    pipe = Connection(number)
    try:
        function = pickle.loads(pipe.recv_bytes())
    except Exception as error:
        pipe.send(_text(error))
        return
    pipe.send(None)
    while True:
        try:
            arguments = pipe.recv()
        except (EOFError, OSError):
            return
        # An exception is sent as text: some cannot be made again from what pickle stores of them.
        try:
            answer = True, _called(function, arguments)
        except Exception as error:
            answer = False, _text(error)
        try:
            pipe.send(answer)
        except Exception as error:
            pipe.send((False, f"its result cannot be sent: {_text(error)}"))


# ---- functions of files


class FileReward:
    """A function at the top of a Python file, which a process can load by the file's path."""

    def __init__(self, path: str, name: str):
        """Loads the file. Raises: UserError for a file or a function that is not there, or that
        cannot be loaded."""
        self.path, self.__name__ = path, name
        self._function = _load(path, name)
        try:
            self.__signature__ = inspect.signature(self._function)
        except (TypeError, ValueError) as error:
            raise UserError(f"reward={path}:{name}: {error} (--reward)") from error

    def __call__(self, **arguments: Any) -> Any:
        """Calls the function."""
        return self._function(**arguments)

    def __reduce__(self) -> tuple:
        """Says how a process makes it again."""
        return FileReward, (self.path, self.__name__)


def _load(path: str, name: str) -> Reward:
    file = expand(path, "reward")
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"reward={path}:{name}: no Python file {file} (--reward=FILE.py:FUNCTION)")
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:  # where Python finds modules of a script
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"reward={path}:{name}: the file fails: {_text(error)} (--reward)"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise UserError(f"reward={path}:{name}: the file has the functions {names} (--reward)")
    return function


def open_rewards(flag: str) -> list[Reward]:
    """Returns the functions of --reward=FILE.py:FUNCTION,... Raises: UserError."""
    functions: list[Reward] = []
    for word in flag.split(","):
        path, _, name = word.strip().rpartition(":")
        if not path or not name.isidentifier():
            raise UserError(f"reward={word}: it must be FILE.py:FUNCTION (--reward)")
        functions.append(FileReward(path, name))
    return functions


def _sendable(function: Reward) -> bytes:
    """Returns what another process makes the function from. Raises: what pickle raises."""
    if getattr(function, "__module__", None) == "__main__":
        # Another interpreter has another main module; it can load this one's file by its path.
        file, name = getattr(sys.modules["__main__"], "__file__", None), function.__qualname__
        if file and name.isidentifier():
            return pickle.dumps(_Later(file, name))
    return pickle.dumps(function)


class _Later:
    """Becomes a FileReward where it is loaded."""

    def __init__(self, path: str, name: str):
        self._arguments = path, name

    def __reduce__(self) -> tuple:
        return FileReward, self._arguments
