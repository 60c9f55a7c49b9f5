"""Pools of devices, and groups of workers that are called over them.

A ResourcePool is a set of devices with one thread. Models on one pool share its devices and run in
the order of their calls; models on different pools run at the same time. A call returns a future at
once, and arguments may be futures of other calls: data goes from model to model, and the controller
handles promises (HybridFlow sections 2.5 and 4).

`@register(protocol)` on a method says how its arguments reach the ranks of a group and what becomes
of their results:

    data    the rows of DataBatches are padded and cut over the data ranks, in order; the results'
            rows are put together and what was padded is taken away
    one     the first rank alone; its result
    all     every rank with the same arguments; a list of their results

A worker with a mesh (an attribute `mesh` with megajax's axes) is one SPMD program for all devices:
there is one of it, 'data' pads rows to its data ranks and calls it once, and the sharding of its
arrays cuts the rows. Any other class has an instance for each device, a rank each.
"""

import functools
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from megajax.core.axes import BATCH_AXES
from megajax.systems.hybridflow.batch import DataBatch


class Call(NamedTuple):
    """The arguments of a method on one rank."""

    args: tuple
    kwargs: Mapping[str, Any]


class Protocol(NamedTuple):
    """distribute(group, *args, **kwargs) -> (a Call for each rank that is called, the first rank
    first; what `collect` is told); collect(group, results, told) -> the result."""

    distribute: Callable[..., tuple[Sequence[Call], Any]]
    collect: Callable[["WorkerGroup", list[Any], Any], Any]


class ResourcePool:
    """Devices that models share. close() ends the thread; so does leaving a `with`."""

    def __init__(self, devices: Sequence[jax.Device]):
        """Raises: ValueError for no device, or one that is listed twice."""
        self.devices = tuple(devices)
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"a pool needs distinct devices, at least one; {self.devices} given")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pool")

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Runs a function in the pool's thread, after what was submitted before."""
        return self._thread.submit(function, *args)

    def close(self) -> None:
        """Waits for what was submitted and ends the thread."""
        self._thread.shutdown()

    def __enter__(self) -> "ResourcePool":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread."""
        self.close()


class Timing(NamedTuple):
    """Seconds that the calls of a method took, and that they waited before: for their arguments,
    and for the pool's devices, on which other models ran."""

    seconds: float
    waiting: float


class WorkerGroup:
    """The workers of one class on one pool; their registered methods are called as the group's.

    ranks: how many data ranks there are. workers: the instances. A class whose constructor takes
    `devices` gets those of the pool, and if it then has no mesh, an instance is made for each rank
    with that rank's device. One that takes `rank` gets the rank's number.
    """

    def __init__(self, pool: ResourcePool, worker: type, /, **config: Any):
        """Args: config: of the class. Raises: what the class raises for it."""
        self.pool, self._worker = pool, worker
        self._timings: dict[str, Timing] = {}
        names = inspect.signature(worker).parameters

        def make(devices: Sequence[jax.Device], rank: int) -> Any:
            offered = {"devices": devices, "rank": rank}
            taken = {k: v for k, v in offered.items() if k in names and k not in config}
            return worker(**config, **taken)

        first = make(pool.devices, 0)
        self.mesh: Mesh | None = getattr(first, "mesh", None)
        if self.mesh is None:
            more = enumerate(pool.devices[1:], 1)
            if "devices" in names and len(pool.devices) > 1:
                first = make(pool.devices[:1], 0)
            self.workers = [first, *(make((device,), rank) for rank, device in more)]
            self.ranks = len(pool.devices)
        else:
            self.workers = [first]
            self.ranks = 1
            for axis in BATCH_AXES:
                self.ranks *= self.mesh.shape[axis]

    def __getattr__(self, name: str) -> Callable[..., Future]:
        """Returns a registered method, which gives a Future. Raises: AttributeError."""
        method = getattr(self.__dict__.get("_worker"), name, None)
        protocol = getattr(method, "_protocol", None)
        if protocol is None:
            members = inspect.getmembers(self.__dict__.get("_worker"))
            listed = sorted(n for n, member in members if hasattr(member, "_protocol"))
            raise AttributeError(f"no registered method {name!r}; there are {listed}")
        return lambda *args, **kwargs: self._call(name, _protocols()[protocol], args, kwargs)

    def take_timings(self) -> dict[str, Timing]:
        """Returns the timings of the methods that ran since the last time, by name."""
        timings, self._timings = self._timings, {}
        return timings

    def _call(self, name: str, protocol: Protocol, args: tuple, kwargs: dict[str, Any]) -> Future:
        asked = time.perf_counter()
        # What is already known to be wrong is said to the caller, not to who reads the future.
        if not any(isinstance(x, Future) for x in (*args, *kwargs.values())):
            calls, told = protocol.distribute(self, *args, **kwargs)
            return self.pool.submit(self._work, name, protocol, calls, told, asked)

        def later() -> Any:
            known = [_awaited(x) for x in args]
            named = {k: _awaited(x) for k, x in kwargs.items()}
            return self._work(name, protocol, *protocol.distribute(self, *known, **named), asked)

        return self.pool.submit(later)

    def _work(
        self, name: str, protocol: Protocol, calls: Sequence[Call], told: Any, asked: float
    ) -> Any:
        began = time.perf_counter()
        results = [
            getattr(worker, name)(*call.args, **call.kwargs)
            for worker, call in zip(self.workers, calls, strict=False)
        ]
        before = self._timings.get(name, Timing(0.0, 0.0))
        self._timings[name] = Timing(
            before.seconds + time.perf_counter() - began, before.waiting + began - asked
        )
        return protocol.collect(self, results, told)


def _awaited(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else value


# ---- protocols


def register(protocol: str) -> Callable[[Callable], Callable]:
    """Marks a method as callable over a group. protocol: 'data', 'one', 'all', or one that
    `register_protocol` named. Raises: ValueError for another."""
    if protocol not in _protocols():
        raise ValueError(f"protocol {protocol!r} must be one of {', '.join(_protocols())}")

    def mark(method: Callable) -> Callable:
        method._protocol = protocol  # type: ignore[attr-defined]
        return method

    return mark


def register_protocol(
    name: str, distribute: Callable[..., Sequence[Any]], collect: Callable[..., Any]
) -> None:
    """Adds a protocol.

    Args: distribute(group, *args, **kwargs): what each rank gets, the first rank first: a Call, or
        a tuple of its arguments; ranks beyond the last one are not called. collect(group, results):
        the result of the call.
    Raises: ValueError for a name that is taken.
    """

    def calls(group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[list[Call], None]:
        listed = list(distribute(group, *args, **kwargs))
        if len(listed) > len(group.workers):
            raise ValueError(
                f"protocol {name!r} gave {len(listed)} calls for {len(group.workers)} workers"
            )
        as_tuples = [x if isinstance(x, tuple) else (x,) for x in listed]
        return [x if isinstance(x, Call) else Call(x, {}) for x in as_tuples], None

    with _LOCK:
        if name in _protocols():
            raise ValueError(f"protocol {name!r} exists")
        _protocols()[name] = Protocol(calls, lambda group, results, _: collect(group, results))


def _distribute_data(
    group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[list[Call], tuple[int, int]]:
    batches = [x for x in (*args, *kwargs.values()) if isinstance(x, DataBatch)]
    if not batches:
        raise ValueError("protocol 'data' needs a DataBatch among the arguments")
    if len({len(b) for b in batches}) > 1:
        raise ValueError(f"batches of {[len(b) for b in batches]} rows cannot be cut alike")
    rows = len(batches[0])
    if not rows:
        raise ValueError("an empty batch has no row for any rank")
    parts = group.ranks if group.mesh is None else 1

    def cut(x: Any) -> list[Any]:
        is_batch = isinstance(x, DataBatch)
        return x.pad(group.ranks)[0].chunk(parts) if is_batch else [x] * parts

    pieces = [cut(x) for x in args]
    named = {k: cut(x) for k, x in kwargs.items()}
    calls = [
        Call(tuple(p[i] for p in pieces), {k: p[i] for k, p in named.items()}) for i in range(parts)
    ]
    return calls, (rows, rows + -rows % group.ranks)


def _collect_data(group: WorkerGroup, results: list[Any], told: tuple[int, int]) -> Any:
    """Puts the rows together: of DataBatches, or of arrays or lists with an entry a row. A row may
    have become several, as answers to a prompt do."""
    if all(r is None for r in results):
        return None
    if not all(isinstance(r, DataBatch) for r in results):  # bare columns
        if not all(isinstance(r, list) or getattr(r, "ndim", 0) for r in results):
            raise ValueError(
                "a method under 'data' returns a DataBatch, or an array or a list with an entry a "
                f"row, or None, on all ranks; not {', '.join(type(r).__name__ for r in results)}"
            )
        columns = [DataBatch({"rows": r}) for r in results]
        return _collect_data(group, columns, told)["rows"]
    rows, padded = told
    rank_rows, made_rows = padded // len(results), [len(r) for r in results]
    if len(set(made_rows)) > 1 or made_rows[0] % rank_rows:
        raise ValueError(
            f"a method under 'data' made {made_rows} rows of {rank_rows} on each rank; a row "
            "becomes one, or equally many"
        )
    return DataBatch.concatenate(results).unpad((padded - rows) * (made_rows[0] // rank_rows))


_LOCK = threading.Lock()


@functools.cache
def _protocols() -> dict[str, Protocol]:
    """Returns the protocols by name. `register_protocol` adds to them: methods are marked while
    modules load, before there is any group that could hold them."""
    return {
        "data": Protocol(_distribute_data, _collect_data),
        "one": Protocol(
            lambda group, *args, **kwargs: ([Call(args, kwargs)], None),
            lambda group, results, told: results[0],
        ),
        "all": Protocol(
            lambda group, *args, **kwargs: ([Call(args, kwargs)] * len(group.workers), None),
            lambda group, results, told: results,
        ),
    }
