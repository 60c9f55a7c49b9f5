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
after its time: name functions at the top of a module. A reward that executes what a model wrote
uses sandbox.run.
"""

import concurrent.futures
import contextlib
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
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.systems.hybridflow.batch import DataBatch

MOST = float(np.finfo(np.float32).max)
START_S = 120.0  # (chosen) in which a process must have imported the functions' modules
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
        scores, metrics, errors = scorer.score(batch)
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

    def score(self, rows: DataBatch) -> tuple[np.ndarray, dict[str, float], dict[int, RewardError]]:
        """Returns (scores (B,) float32, metrics, errors by row).

        A row with an error has the score NaN and counts in no metric.
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

    def _results(self, i: int, rows: DataBatch) -> list[Any]:
        """Returns what function i gives for each row, an exception where it failed."""
        parameters, takes_all = self._parameters[i]
        call = self._callers[i]
        if "completions" in parameters:  # TRL
            names = rows.keys() if takes_all else [n for n in rows.keys() if n in parameters]
            try:
                results = call({name: list(rows[name]) for name in names})
                if hasattr(results, "__array__"):  # of JAX or torch, too
                    results = np.asarray(results)
                if not isinstance(results, Sequence | np.ndarray) or len(results) != len(rows):
                    raise ValueError(f"it gave {_shown(results)} for {len(rows)} completions")
                return [0.0 if x is None else x for x in results]
            except Exception as error:
                return [error] * len(rows)
        results = []
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
                results.append(call(arguments))
            except Exception as error:
                results.append(error)
        return results

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
            raise ValueError(f"a dict without 'score': {_shown(result)}")
        more = {
            str(key): number
            for key, value in result.items()
            if key != "score" and (number := _real(value)) is not None
        }
        result = result["score"]
    number = _real(result)
    if number is None:
        raise ValueError(f"a number is needed, not {_shown(result)}")
    if not abs(number) <= MOST:
        raise ValueError(f"a finite number is needed, not {number}")
    return number, more


def _real(value: Any) -> float | None:
    """Returns a number of Python, NumPy, JAX or torch; None for what is none."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, _Cause) else f"{type(error).__name__}: {error!s:.500}"


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
        raise ValueError(f"reward {name}: its signature cannot be read: {error}") from error
    names = {p.name for p in parameters}
    if "completions" not in names and "solution_str" not in names:
        raise ValueError(
            f"reward {name} has the parameters {sorted(names)}; it needs (data_source, "
            "solution_str, ground_truth, extra_info=None) or (prompts, completions, **columns)"
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
    JAX's threads may hang, and `multiprocessing` would run the main module again."""

    def __init__(self, sent: bytes, function: Reward, seconds: float):
        self._sent, self._seconds = sent, seconds
        self._thread = _Thread(function, seconds)
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None
        self._is_importable = True

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        if self._process is None and self._is_importable:
            self._start()
        if not self._is_importable:
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
        with there:
            # The child finds modules where this process does, the script's folder included.
            command = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
                f"serve({there.fileno()}, {os.getpid()})"
            )
            self._process = subprocess.Popen(
                (sys.executable, "-c", command),
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pipe = Connection(parent.detach())
        try:  # the first word says whether it could import the function
            self._pipe.send_bytes(self._sent)
            self._is_importable = self._pipe.poll(START_S) and bool(self._pipe.recv())
        except (EOFError, OSError):
            self._is_importable = False
        if not self._is_importable:
            self.close()

    def close(self) -> int | None:
        """Ends the process, with those that it started. Returns its exit code."""
        code = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code, self._process = self._process.wait(), None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        return code


def serve(number: int, parent: int) -> None:
    """Answers the calls that come over a socket, until it is closed.

    number: its descriptor. parent: the process whose end ends this one, in a call too.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(number)
    try:
        function = pickle.loads(pipe.recv_bytes())
    except Exception:
        pipe.send(False)
        return
    pipe.send(True)
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


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpid(), signal.SIGKILL)


# ---- functions of files


class FileReward:
    """A function at the top of a Python file, which a process can load by the file's path."""

    def __init__(self, path: str, name: str):
        """Loads the file. Raises: UserError for a file or a function that is not there, or that
        cannot be loaded."""
        self.path, self.__name__ = path, name
        self._function = _load(path, name)
        self.__signature__ = inspect.signature(self._function)

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
    except Exception as error:
        raise UserError(
            f"reward={path}:{name}: the file fails: {type(error).__name__}: {error} (--reward)"
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
