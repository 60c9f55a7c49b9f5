"""The measurement of tune.py's parts: each tile of a kernel, of which the fastest is kept.

    python3 scripts/gpu_session/tune.py attention forward   # names of tunings with all words

`tunings()` of a kernel folder's bench.py has what is measured. Each candidate must give what plain
JAX gives, and is then timed beside it: all shortly, the best few in full. Each has a limit of its
own: the parent kills this process when one hangs, and the next process leaves it out.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench, tuned
from pallas_kernels.attention import hopper_forward, reference
from pallas_kernels.attention.ranges import packed_rows
from scripts.gpu_session.channel import PREPARE_S, Item, is_poison, reason

WRONG = 0.02  # relative to the reference's size (chosen: 16-bit results differ by less than 0.01)
FINALISTS = 3  # that are timed in full (chosen: short timings order them well enough)
RUNS, SHORT = 50, 6  # calls, in full and shortly
TILE_S = 20  # limit of one candidate (chosen: a hundred times what any takes)

Row = dict[str, Any]


class Parent(Protocol):
    """The members of channel.Channel that a measurement uses."""

    spec: dict[str, Any]

    def stage(self, name: str, limit_s: float, item: str | None = None, skip: str = "") -> None:
        """Says what comes next."""


def tunings(words: Iterable[str] = ()) -> list[tuple[str, tuned.Tuning]]:
    """Returns (folder, tuning) whose folder, op and key have all words, each name once."""
    words = set(words)
    folders = words.intersection(bench.FOLDERS) or bench.FOLDERS  # building is slow
    named: dict[str, tuple[str, tuned.Tuning]] = {}
    for folder in sorted(folders):
        for tuning in bench.module_of(folder, "bench").tunings():
            named.setdefault(name_of(folder, tuning), (folder, tuning))
    return [each for name, each in named.items() if words <= set(name.split())]


def name_of(folder: str, tuning: tuned.Tuning) -> str:
    """'attention varlen_attention_forward width 128 ...'; words to choose by."""
    words = (f"{name} {value}" for name, value in tuning.key.items())
    return " ".join([folder, *tuning.op.split("_"), *words])


def tiny() -> tuned.Tuning:
    """Returns a tuning of one tile of the attention kernel on 128 tokens, for rehearsals."""
    options = {"spec": reference.Spec(0.125)}

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        q, k, v = (
            jax.random.normal(one, (128, 1, 64), jnp.bfloat16) for one in jax.random.split(key, 3)
        )
        return (
            q,
            k,
            v,
            packed_rows(*[jnp.array([0, 60, 128], jnp.int32)] * 2, 128, True, None),
            None,
        )

    def function(tile: Any, interpret: bool) -> Callable[..., Any]:
        return functools.partial(hopper_forward.forward, tile=tile, interpret=interpret, **options)

    plain = functools.partial(reference.forward, **options)
    tile = hopper_forward.Tile(64, 2)
    return tuned.Tuning("rehearsal", {"width": 64}, (tile,), function, inputs, plain)


def wrong(results: Any, want: Any) -> str | None:
    """Returns how results differ by more than 16-bit rounding, None if they do not."""
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        live = np.isfinite(other)
        if one.shape != other.shape or not np.isfinite(one[live]).all():
            return f"gave {one.shape} with values that are not finite where the reference's are"
        apart = np.linalg.norm(one[live] - other[live]) / max(np.linalg.norm(other[live]), 1e-9)
        if apart > WRONG:
            return f"differs from the reference by {apart:.3f} of its size"
    return None


def compiled(function: Callable[..., Any], like: tuple[Any, ...], sets: int) -> Callable[..., Any]:
    """Returns the program that calls a function on so many inputs; nothing runs."""
    return jax.jit(bench.chained(function)).lower(*[like] * sets).compile()


class Measurement:
    """One tuning, from its candidates to its row of the table."""

    def __init__(
        self,
        name: str,
        tuning: tuned.Tuning,
        parent: Parent,
        clock: bench.Clock,
        interpret: bool = False,
    ):
        """parent: is told which candidate comes next; spec["skip"] has those that are left out.

        interpret: a rehearsal, which calls each program once.
        """
        self._name, self._tuning, self._parent = name, tuning, parent
        self._clock, self._interpret = clock, interpret
        self._runs, self._short, self._warmup = (1, 1, 0) if interpret else (RUNS, SHORT, 10)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._reasons: list[str] = []
        self._like: tuple[Any, ...] = ()
        self._sets = 1

    def prepare(self) -> None:
        """Compiles all candidates; nothing runs."""
        skip = self._parent.spec.get("skip", ())
        self._like = jax.eval_shape(self._tuning.inputs, jax.random.key(0))
        if not self._interpret:
            self._sets = bench.sets_of(self._tuning.reference, self._like)
        self._reasons = [f"{tile}: was killed" for tile in skip]
        for tile in self._tuning.candidates:
            if str(tile) in skip or tile in self._programs:
                continue
            self._parent.stage(f"compile {tile}", PREPARE_S, self._name, str(tile))
            try:
                function = self._tuning.function(tile, self._interpret)
                self._programs[tile] = compiled(function, self._like, self._sets)
            except Exception as error:  # a tile that cannot run must not lose the others
                self._reasons.append(f"{tile}: {reason(error)[:200]}")

    def run(self) -> Row:
        """Returns the table's row.

        Raises: RuntimeError, with every candidate's reason, when none runs and is right.
        """
        tuning, inputs = self._tuning, self._inputs(self._tuning.inputs)
        self._parent.stage("reference", PREPARE_S, self._name)
        want = jax.jit(tuning.want or tuning.reference)(*inputs[0])
        short = self._race(inputs, want)
        if not short:
            raise RuntimeError("; ".join(self._reasons))
        last = sorted(short, key=short.__getitem__)[:FINALISTS]
        times = {tile: self._time(self._programs[tile], inputs, str(tile)) for tile in last}
        best = min(times, key=lambda tile: times[tile].median_s)
        # Microseconds of plain JAX and of the other rivals that can run.
        self._parent.stage("time the reference", PREPARE_S, self._name)
        program = compiled(self._tuning.reference, self._like, self._sets)
        rivals = {"reference": 1e6 * self._time(program, inputs).median_s}
        for name, (function, draw) in self._tuning.others.items():
            self._parent.stage(f"time {name}", PREPARE_S, self._name)
            try:
                sets = self._inputs(draw)
                program = compiled(function, jax.eval_shape(lambda x: x, sets[0]), len(sets))
                rivals[name] = 1e6 * self._time(program, sets).median_s
            except Exception as error:
                if is_poison(error):
                    raise
                self._reasons.append(f"{name}: {reason(error)[:200]}")
        plain = rivals["reference"]
        fastest = tuning.words[0 if 1e6 * times[best].median_s <= plain else 1]
        first = short.get(tuning.candidates[0])
        return {
            "op": tuning.op,
            "key": dict(tuning.key),
            "tile": dataclasses.asdict(best),
            "correct": True,  # only candidates that `_race` found right are timed
            "median_us": 1e6 * times[best].median_s,
            "fastest": fastest,
            "rivals": rivals,
            **({} if tuning.link is None else {"link": tuning.link}),
            "heuristic_us": None if first is None else 1e6 * first,
            "candidates": len(tuning.candidates),
            "failed": self._reasons,
            "clock": times[best].clock,
        }

    def _inputs(self, draw: Callable[[jax.Array], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [draw(key) for key in jax.random.split(jax.random.key(0), self._sets)]

    def _race(self, inputs: list[tuple[Any, ...]], want: Any) -> dict[Any, float]:
        """Returns the short times of the candidates that are right."""
        short = {}
        for tile, program in self._programs.items():
            self._parent.stage(f"run {tile}", TILE_S, self._name, str(tile))
            try:
                if why := wrong(program(*inputs)[0], want):
                    raise ValueError(why)
                timing = bench.measure_program(program, inputs, self._short, 0, self._clock)
                short[tile] = timing.median_s
            except Exception as error:
                if is_poison(error):
                    raise
                self._reasons.append(f"{tile}: {reason(error)[:200]}")
        return short

    def _time(self, program: Callable[..., Any], inputs: Any, skip: str = "") -> bench.Timing:
        self._parent.stage(f"time {skip}", TILE_S, self._name, skip)
        return bench.measure_program(program, inputs, self._runs, self._warmup, self._clock)


def items(name: str, parent: Parent, rehearsal: bool) -> list[Item]:
    """Returns the one item of a part. Raises: ValueError for a name that no tuning has."""
    if rehearsal:
        tuning, clock = tiny(), bench.wall_clock
    else:
        matches = [each for folder, each in tunings(name.split()) if name_of(folder, each) == name]
        if not matches:
            raise ValueError(f"no tuning is named {name!r}; scripts/gpu_session/tune.py lists them")
        tuning, clock = matches[0], bench.device_clock
    measurement = Measurement(name, tuning, parent, clock, interpret=rehearsal)
    return [Item(name, measurement.run, measurement.prepare, limit_s=60)]


def main(words: list[str]) -> None:
    """Prints names."""
    jax.config.update("jax_platforms", "cpu")
    print("\n".join(name_of(*each) for each in tunings(words)))


if __name__ == "__main__":
    main(sys.argv[1:])
