"""The planning problem of LLM-PQ: partition of layers, bits of every layer, micro-batches; times.

A pipeline of unlike devices serves a fixed set of requests: all prompts first (prefill), then
`new_tokens - 1` rounds of decoding, since the prefill gives the first token. The objective of
LLM-PQ (arXiv 2403.01136) leaves out the round trip of decoding: a micro-batch cannot begin its next
token before its previous one has left the last stage. Here the time of a round is

    R = max(sum of stages and links, m x slowest of them)        m micro-batches

and decoding takes (n - 2) R + sum + (m - 1) slowest. `simulate` checks this event by event.

Legend: L layers, D devices, B widths in bits, S stages.
"""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import json_text, or_nan, read_object, write_whole
from megajax.schedule import simulator
from megajax.schedule.ir import Task

SLACK = 1e-12  # of a budget, for sums of floats in another order
MOST_BYTES = 2**24  # (chosen) of a placement's file

Stage = tuple[int, int, int]  # (device, first layer, layer behind the last)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model of L layers of equal shape, D devices and a set of requests.

    bits: the B widths that a layer may have. omega: (L, B) loss of quality of a layer at a width,
    in any unit, at least 0. prefill_s, decode_s: {size of a micro-batch in requests: (D, B) seconds
    of ONE layer for one micro-batch}. prefill_hop_s, decode_hop_s: {size: seconds from one stage to
    the next}. layer_bytes: (B,) bytes of a layer's weights. cache_bytes: bytes of one layer's keys
    and values for all requests. first_bytes, last_bytes: what the first and the last stage hold
    besides their layers. memory: (D,) bytes. requests: their number. new_tokens: tokens of each
    answer. If a micro-batch does not divide the requests, the last one is smaller but takes as
    long.
    Raises: UserError for shapes that do not match and for numbers that are negative or not finite.
    """

    bits: tuple[int, ...]
    omega: np.ndarray
    prefill_s: Mapping[int, np.ndarray]
    decode_s: Mapping[int, np.ndarray]
    prefill_hop_s: Mapping[int, float]
    decode_hop_s: Mapping[int, float]
    layer_bytes: np.ndarray
    cache_bytes: float
    first_bytes: float
    last_bytes: float
    memory: np.ndarray
    requests: int
    new_tokens: int

    def __post_init__(self) -> None:
        """Converts the fields to arrays and checks them."""
        put = object.__setattr__
        if not isinstance(self.bits, Iterable):
            raise UserError(f"bits={self.bits!r} must be a sequence of widths, such as (4, 8, 16)")
        put(self, "bits", tuple(check_count("a width of bits", b) for b in self.bits))
        widths = len(self.bits)
        if widths == 0 or len(set(self.bits)) < widths:
            raise UserError(f"bits={self.bits} must be different widths, at least one")
        put(self, "memory", _numbers("memory", self.memory, ("devices",)))
        shape = (len(self.memory), widths)
        put(self, "omega", _numbers("omega", self.omega, ("layers", widths)))
        put(self, "layer_bytes", _numbers("layer_bytes", self.layer_bytes, (widths,)))
        for name in ("prefill", "decode"):
            times = getattr(self, f"{name}_s")
            hops = getattr(self, f"{name}_hop_s")
            for member, table in ((f"{name}_s", times), (f"{name}_hop_s", hops)):
                if not isinstance(table, Mapping) or not table:
                    raise UserError(
                        f"{member} must be a dictionary {{requests of a micro-batch: seconds}} "
                        f"with one entry at least; got {table!r}"
                    )
                for size in table:
                    check_count(f"a micro-batch of {member}", size)
            if missing := sorted(set(times) - set(hops)):
                raise UserError(f"{name}_hop_s has no seconds for micro-batches {missing}")
            put(
                self,
                f"{name}_s",
                {
                    int(size): _numbers(f"{name}_s[{size}]", times[size], shape)
                    for size in sorted(times)
                },
            )
            put(
                self,
                f"{name}_hop_s",
                {
                    int(size): float(_numbers(f"{name}_hop_s[{size}]", hops[size], ()))
                    for size in sorted(times)
                },
            )
        for name in ("cache_bytes", "first_bytes", "last_bytes"):
            put(self, name, float(_numbers(name, getattr(self, name), ())))
        for name in ("requests", "new_tokens"):
            put(self, name, check_count(name, getattr(self, name)))

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.omega)

    @property
    def devices(self) -> int:
        """D, the number of devices."""
        return len(self.memory)

    def batches(self, size: int) -> int:
        """Returns the number of micro-batches of this size, rounded up."""
        return -(-self.requests // size)

    def twins(self) -> list[tuple[int, int]]:
        """Returns pairs of successive devices of equal memory and times, which are exchangeable."""
        pairs, last = [], {}
        for j in range(self.devices):
            rows = [*self.prefill_s.values(), *self.decode_s.values()]
            key = (float(self.memory[j]), *(row[j].tobytes() for row in rows))
            if key in last:
                pairs.append((last[key], j))
            last[key] = j
        return pairs

    def in_twin_order(self, stages: Iterable[Stage]) -> tuple[Stage, ...]:
        """Returns the same stages where twins come in the order of their numbers, the first ones
        used: as `milp.Layers` has them, and as good."""
        first: dict[int, int] = {}  # of the twins of a device
        for a, b in self.twins():
            first[b] = first.get(a, a)
        kinds: dict[int, list[int]] = {}
        for d in reversed(range(self.devices)):
            kinds.setdefault(first.get(d, d), []).append(d)
        return tuple((kinds[first.get(d, d)].pop(), i, j) for d, i, j in stages)

    def alike(self) -> bool:
        """Returns whether all layers lose the same quality at each width."""
        return bool((self.omega == self.omega[0]).all())


def check_count(name: str, value: Any) -> int:
    """Returns a count. Raises: UserError for what is no whole number, at least 1."""
    try:
        count = int(value)
        if count == value and count >= 1:
            return count
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"{name} must be a whole number, at least 1; got {value!r}")


def _numbers(name: str, value: Any, shape: tuple[int | str, ...]) -> np.ndarray:
    """shape: a word stands for any size from 1 on."""
    try:
        if np.iscomplexobj(value):
            raise TypeError
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be real numbers") from None
    fits = numbers.ndim == len(shape) and all(
        have >= 1 if isinstance(want, str) else have == want
        for want, have in zip(shape, numbers.shape, strict=True)
    )
    if not fits:
        rule = f"({', '.join(map(str, shape))})" if shape else "one number"
        if words := [want for want in shape if isinstance(want, str)]:
            rule += f", with one of the {words[0]} at least"
        raise UserError(f"{name} has the shape {numbers.shape}; it must be {rule}")
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise UserError(f"{name} must be finite and at least 0")
    return numbers


@dataclass(frozen=True)
class Times:
    """Times of a placement: seconds of all prefills and of all decoding, and tokens a second."""

    prefill_s: float
    decode_s: float
    tokens_per_s: float

    @property
    def seconds(self) -> float:
        """Seconds from the first prompt to the last token."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Placement:
    """A plan: which device holds which layers in how many bits, and the sizes of micro-batches.

    stages: (device, first layer, one past the last layer) in the pipeline's order; devices that are
    not named stay unused. bits: the width of each layer. prefill_batch, decode_batch: requests of a
    micro-batch. tokens_per_s: tokens of all answers in a second. gap: no placement is shorter by a
    larger fraction of the time of the run; 0: proven optimal; NaN: not known. prefill_s, decode_s:
    seconds of each phase. omega: loss of quality, summed over layers. status: why the search ended:
    'optimal', 'time limit', 'interrupted' or 'heuristic'.
    """

    stages: tuple[Stage, ...]
    bits: tuple[int, ...]
    prefill_batch: int
    decode_batch: int
    tokens_per_s: float
    gap: float
    prefill_s: float
    decode_s: float
    omega: float
    status: str

    def save(self, path: str | Path) -> None:
        """Writes a JSON file that `load` reads, whole or not at all.

        null stands for an infinite time or omega, and for a gap of NaN: not known.
        """
        write_whole(Path(path), json_text(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> "Placement":
        """Reads what `save` wrote. Raises: UserError for a file of another kind."""
        fields = read_object(path, MOST_BYTES)
        try:
            fields["stages"] = tuple((int(d), int(a), int(b)) for d, a, b in fields["stages"])
            fields["bits"] = tuple(int(b) for b in fields["bits"])
            fields["gap"] = float(or_nan(fields["gap"]))
            for name in ("tokens_per_s", "prefill_s", "decode_s", "omega"):
                fields[name] = float(or_nan(fields[name], math.inf))
            for name in ("prefill_batch", "decode_batch"):
                fields[name] = check_count(name, fields[name])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is no placement that LLM-PQ wrote: {error!r}") from None


def timed(
    problem: Problem, stages: Sequence[Stage], bits: Sequence[int], prefill: int, decode: int
) -> Times:
    """Returns the times of a placement by the formula of the module's docstring.

    Args: bits: the width of each layer. prefill, decode: requests of a micro-batch in each phase.
    """
    column = {b: k for k, b in enumerate(problem.bits)}

    def spent(table: np.ndarray) -> list[float]:
        return [sum(table[d, column[b]] for b in bits[i:j]) for d, i, j in stages]

    return of_stages(
        problem, spent(problem.prefill_s[prefill]), spent(problem.decode_s[decode]), prefill, decode
    )


def of_stages(
    problem: Problem, prefill_S: list[float], decode_S: list[float], prefill: int, decode: int
) -> Times:
    """Returns the times of stages by their seconds (S,) for one micro-batch in each phase."""
    links = len(prefill_S) - 1
    prefill_S = [*prefill_S, *[problem.prefill_hop_s[prefill]] * links]
    decode_S = [*decode_S, *[problem.decode_hop_s[decode]] * links]
    prefill_s = sum(prefill_S) + (problem.batches(prefill) - 1) * max(prefill_S)
    decode_s, n, m = 0.0, problem.new_tokens, problem.batches(decode)
    if n > 1:
        total, slowest = sum(decode_S), max(decode_S)
        decode_s = (n - 2) * max(total, m * slowest) + total + (m - 1) * slowest
    seconds = float(prefill_s + decode_s)
    rate = problem.requests * n / seconds if seconds else float("inf")
    return Times(float(prefill_s), float(decode_s), rate)


def omega_of(problem: Problem, bits: Sequence[int]) -> float:
    """Returns the loss of quality of these bits (one entry a layer), summed over layers."""
    column = {b: k for k, b in enumerate(problem.bits)}
    return float(sum(row[column[b]] for row, b in zip(problem.omega, bits, strict=True)))


def held(problem: Problem, stages: Sequence[Stage], bits: Sequence[int]) -> list[float]:
    """Returns the bytes that each stage holds."""
    size = dict(zip(problem.bits, problem.layer_bytes.tolist(), strict=True))
    ends = [(k == 0, k == len(stages) - 1) for k in range(len(stages))]
    return [
        sum(size[b] + problem.cache_bytes for b in bits[i:j])
        + first * problem.first_bytes
        + last * problem.last_bytes
        for (_, i, j), (first, last) in zip(stages, ends, strict=True)
    ]


def violations(
    problem: Problem, stages: Sequence[Stage], bits: Sequence[int], quality: float | None
) -> list[str]:
    """Returns a sentence for each rule that a placement breaks; []: it is legal.

    Args: quality: bound on the sum of omega; None: no bound.
    """
    broken = []
    devices = [d for d, _, _ in stages]
    if len(set(devices)) < len(devices) or not set(devices) <= set(range(problem.devices)):
        broken.append(f"stages {devices} must be different devices of the cluster")
        return broken
    edges = [0, *(stop for _, _, stop in stages)]
    if [start for _, start, _ in stages] != edges[:-1] or edges[-1] != problem.layers:
        broken.append(f"stages {list(stages)} must cut {problem.layers} layers without a hole")
    if any(stop <= start for _, start, stop in stages):
        broken.append("a stage must have a layer; leave the device out")
    if len(bits) != problem.layers or not set(bits) <= set(problem.bits):
        broken.append(f"every layer must have one of the widths {problem.bits}")
    if broken:
        return broken
    for d, need in zip(devices, held(problem, stages, bits), strict=True):
        if need > problem.memory[d] * (1 + SLACK):
            broken.append(f"device {d} holds {need:.0f} bytes of {problem.memory[d]:.0f}")
    if quality is not None and omega_of(problem, bits) > quality * (1 + SLACK) + 1e-300:
        broken.append(f"the sum of omega is {omega_of(problem, bits):g}, more than {quality:g}")
    return broken


# ---- simulation
#
# A placement event by event: every micro-batch through every stage and link, by the simulator of
# schedules. It does not use the formula that the planner minimises (`timed`), so it checks it. The
# times of micro-batches may differ here, and those of decoding may grow with every token; the
# formula leaves both out.


# (micro-batch, round) -> seconds on each stage and link in the order of the pipeline.
Seconds = Callable[[int, int], Sequence[float]]


def pipeline_s(seconds: Seconds, batches: int, rounds: int) -> float:
    """Returns the seconds until the last micro-batch has left the last stage for the last time.

    All micro-batches wait before the first stage at time 0, in their order, and pass through the
    pipeline `rounds` times. A micro-batch begins its next token when its previous one has left the
    last stage. Stages and links process one micro-batch at a time, first come first served.
    """
    tasks = []
    before: dict[int, tuple[str, ...]] = {}  # of a micro-batch: its latest task
    # No micro-batch passes another one, so each place serves them in the order of their rounds.
    for lap, batch in itertools.product(range(rounds), range(batches)):
        for place, duration in enumerate(seconds(batch, lap)):
            name = f"micro-batch {batch} round {lap} place {place}"
            deps = before.get(batch, ())
            tasks.append(Task(name, f"place {place}", deps, duration, "GEN", batch, place))
            before[batch] = (name,)
    return simulator.run(tasks, ()).end


def simulate(problem: Problem, placement: Placement) -> Times:
    """Returns the simulated times of a placement; every micro-batch counts as a full one.

    Decoding starts after all prompts.
    """
    column = {b: k for k, b in enumerate(problem.bits)}

    def phase(table: np.ndarray, hop: float, size: int, rounds: int) -> float:
        places: list[float] = []
        for device, start, stop in placement.stages:
            places += [hop] if places else []
            places.append(sum(table[device, column[b]] for b in placement.bits[start:stop]))
        return pipeline_s(lambda _batch, _round: places, problem.batches(size), rounds)

    prefill, decode = placement.prefill_batch, placement.decode_batch
    prefill_s = phase(problem.prefill_s[prefill], problem.prefill_hop_s[prefill], prefill, 1)
    decode_s = 0.0
    if problem.new_tokens > 1:
        decode_s = phase(
            problem.decode_s[decode], problem.decode_hop_s[decode], decode, problem.new_tokens - 1
        )
    seconds = prefill_s + decode_s
    tokens = problem.requests * problem.new_tokens
    return Times(prefill_s, decode_s, tokens / seconds if seconds else float("inf"))


# ---- partitions of layers of one width
#
# The even split, and the partition with the fastest slowest stage. Rivals use them. The planner
# starts from them, so its result is never slower than theirs.


def even_split(problem: Problem) -> list[Stage]:
    """Returns stages with equally many layers, in the order of the cluster.

    The first devices take the remaining layers. Devices beyond the number of layers stay unused.
    """
    devices = min(problem.devices, problem.layers)
    small, more = divmod(problem.layers, devices)
    edges = [0]
    for d in range(devices):
        edges.append(edges[-1] + small + (d < more))
    return [(d, edges[d], edges[d + 1]) for d in range(devices)]


def partition(problem: Problem, column: int, seconds_D: np.ndarray) -> list[Stage] | None:
    """Returns the stages with the fastest slowest stage, all layers of one width; None: none fits.

    Among equally fast partitions, the slowest devices get as few layers as possible.
    Args: column: index of the width in problem.bits. seconds_D: seconds of one layer on each
    device.
    """
    each = problem.layer_bytes[column] + problem.cache_bytes
    D = problem.devices
    best: tuple[float, list[int], int, int] | None = None
    for first, last in itertools.product(range(D), repeat=2):
        if first == last and D > 1:
            continue  # one stage has both: a device alone is the case below
        room_D = problem.memory * (1 + SLACK)
        room_D[first] -= problem.first_bytes
        room_D[last] -= problem.last_bytes
        most_D = np.where(room_D < 0, 0, problem.layers)
        if each > 0:
            most_D = np.minimum(np.floor(np.maximum(room_D, 0) / each), most_D).astype(int)
        if (room_D[[first, last]] < 0).any():
            continue
        spread = _spread(problem.layers, most_D, seconds_D)
        if spread is None or not all(spread[1][d] for d in (first, last)):
            continue
        if best is None or spread[0] < best[0]:
            best = (*spread, first, last)
    if best is None:  # no two devices hold the ends: one device may hold the complete model
        need = each * problem.layers + problem.first_bytes + problem.last_bytes
        able = [d for d in range(problem.devices) if need <= problem.memory[d] * (1 + SLACK)]
        if not able:
            return None
        return [(min(able, key=lambda d: seconds_D[d]), 0, problem.layers)]
    _, counts, first, last = best
    between = [d for d in range(D) if d not in (first, last) and counts[d]]
    order = [first] if first == last else [first, *between, last]
    edges = np.cumsum([0, *(counts[d] for d in order)]).tolist()
    return [(d, edges[k], edges[k + 1]) for k, d in enumerate(order)]


def _spread(
    layers: int, most_D: np.ndarray, seconds_D: np.ndarray
) -> tuple[float, list[int]] | None:
    """(slowest stage, layers of each device): the smallest bottleneck that holds all layers."""
    limits = sorted({float(k * s) for s in seconds_D for k in range(1, layers + 1)})

    def able(limit: float) -> np.ndarray:
        free_D = np.full(len(seconds_D), np.inf)  # layers that take no time
        fit_D = np.divide(limit, seconds_D, out=free_D, where=seconds_D > 0)
        return np.minimum(most_D, np.floor(fit_D * (1 + 1e-12))).astype(int)

    if int(able(limits[-1]).sum()) < layers:
        return None
    at = bisect.bisect_left(range(len(limits)), layers, key=lambda k: int(able(limits[k]).sum()))
    counts = able(limits[at])
    spare = int(counts.sum()) - layers
    for d in np.argsort(-seconds_D, kind="stable"):
        less = min(spare, max(int(counts[d]) - 1, 0))
        counts[d] -= less
        spare -= less
    return (limits[at], counts.tolist()) if spare == 0 else None


def simple(problem: Problem) -> Iterator[tuple[list[Stage], list[int]]]:
    """Yields (stages, bits) of both partitions at every width; they may break memory or quality."""
    for column, width in enumerate(problem.bits):
        bits = [width] * problem.layers
        yield even_split(problem), bits
        for table in problem.decode_s.values():
            stages = partition(problem, column, table[:, column])
            if stages is not None:
                yield stages, bits


# ---- arrangements of counts
#
# Counts say how many layers of each width every device has; `arrange` turns them into the order of
# devices and the width of each layer with the least loss. If a device follows a set of other
# devices, its layers are known, whatever the order inside the set. So the least loss is a shortest
# path over sets of devices (Held and Karp), and the widths inside a stage are an assignment
# problem. The result is exact. There are at most 2^stages sets, and far fewer if devices and counts
# are equal. When the time for that ends, an order that fits into memory is taken instead of the
# best one.
#
# Legend: I layers of a stage.


def arrange(
    problem: Problem, counts_DB: np.ndarray, deadline: float = math.inf
) -> tuple[list[Stage], list[int]] | None:
    """Returns (stages, bits) with the least sum of omega; None: no order fits the memory.

    Args: counts_DB: layers of each width on each device, as many in all as the model has. deadline:
      of time.monotonic(); from then on the sum of omega is not the least.
    """
    devices = [int(d) for d in np.flatnonzero(counts_DB.sum(1))]
    sizes = counts_DB.sum(1)
    room_D = problem.memory * (1 + SLACK) - counts_DB @ (problem.layer_bytes + problem.cache_bytes)
    known: dict[tuple, tuple[float, list[int]]] = {}
    twin = _twins(problem, counts_DB, devices)

    def stage(start: int, d: int) -> tuple[float, list[int]]:
        key = (start, counts_DB[d].tobytes())
        if key not in known:
            known[key] = widths(problem.omega[start : start + sizes[d]], counts_DB[d])
        return known[key]

    order = _shortest(problem, devices, sizes, room_D, twin, stage, deadline)
    if order is None:
        return None
    stages: list[Stage] = []
    bits: list[int] = []
    start = 0
    for d in order:
        stages.append((d, start, start + int(sizes[d])))
        bits += [problem.bits[b] for b in stage(start, d)[1]]
        start += int(sizes[d])
    return stages, bits


def _shortest(
    problem: Problem,
    devices: list[int],
    sizes: np.ndarray,
    room_D: np.ndarray,
    twin: list[int | None],
    stage: Callable[[int, int], tuple[float, list[int]]],
    deadline: float,
) -> list[int] | None:
    """Returns the devices in the order with the least sum of omega."""
    every = (1 << len(devices)) - 1
    least: dict[int, tuple[float, int, int]] = {0: (0.0, -1, 0)}  # set: (omega, last, set before)
    start_of, edge = {0: 0}, [0]
    while edge:  # sets of one more device each
        further: dict[int, None] = {}
        for done in edge:
            if time.monotonic() > deadline:
                return _any_order(problem, devices, room_D)
            for k, d in enumerate(devices):
                before = twin[k]
                if done >> k & 1 or (before is not None and not done >> before & 1):
                    continue
                more = done | 1 << k
                need = problem.first_bytes * (done == 0) + problem.last_bytes * (more == every)
                if need > room_D[d]:
                    continue
                omega = least[done][0] + stage(start_of[done], d)[0]
                if more not in least or omega < least[more][0]:
                    least[more] = (omega, k, done)
                    start_of[more] = start_of[done] + int(sizes[d])
                    further[more] = None
        edge = list(further)
    if every not in least:
        return None
    order: list[int] = []
    done = every
    while done:
        _, k, done = least[done]
        order.insert(0, devices[k])
    return order


def _any_order(problem: Problem, devices: list[int], room_D: np.ndarray) -> list[int] | None:
    """Returns an order of the devices whose first and last hold what the ends need."""
    if (room_D[devices] < 0).any():
        return None
    if len(devices) == 1:
        return devices if room_D[devices[0]] >= problem.first_bytes + problem.last_bytes else None
    for first, last in itertools.permutations(devices, 2):
        if room_D[first] >= problem.first_bytes and room_D[last] >= problem.last_bytes:
            return [first, *(d for d in devices if d not in (first, last)), last]
    return None


def _twins(problem: Problem, counts_DB: np.ndarray, devices: list[int]) -> list[int | None]:
    """Returns for each device the last one before it with the same memory and the same counts.

    Their order does not matter, so the later one never comes first.
    """
    twins: list[int | None] = []
    last: dict[tuple, int] = {}
    for k, d in enumerate(devices):
        key = (float(problem.memory[d]), counts_DB[d].tobytes())
        twins.append(last.get(key))
        last[key] = k
    return twins


def widths(omega_IB: np.ndarray, counts_B: np.ndarray) -> tuple[float, list[int]]:
    """Returns (least sum of omega, index of the width of each layer) of one stage."""
    from scipy.optimize import linear_sum_assignment  # a third of a second

    slots = np.repeat(np.arange(len(counts_B)), counts_B)
    cost = omega_IB[:, slots]
    if (counts_B > 0).sum() == 1:
        picked = slots
    else:
        rows, columns = linear_sum_assignment(cost)
        picked = slots[columns[np.argsort(rows)]]
    return float(omega_IB[np.arange(len(picked)), picked].sum()), picked.tolist()
