"""The kernels' parts of gpu_check.py: are they right, and how fast beside their rivals.

Times are device times of forward and of forward with backward on useful FLOPs, ours beside rivals
on the same inputs in the same process, the floor of the card that is there beside them. A rehearsal
runs the same lines on a CPU through the interpreter, on tiny shapes; its times mean nothing. A
kernel folder's bench.py has CASES, TINY_CASES, checks(rehearsal) and sides(case, implementation);
those of products with communication have checks(), times() and rehearsals().
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import jax
from worker_channel import Item

from pallas_kernels import bench

FORWARD, BOTH = "forward", "forward+backward"
SIDE_S, RUNS = 0.4, 50  # of timed calls (chosen: 50 calls of anything below 8 ms)
RUN_S = 45  # limit of what runs (chosen: drawing inputs, and SIDE_S many times over)


def bench_of(folder: str) -> Any:
    """A kernel folder's bench.py; the others may be broken."""
    return importlib.import_module(f"pallas_kernels.{folder}.bench")


def checks(folder: str, span: Sequence[int | None], rehearsal: bool) -> list[Item]:
    """A stretch of a folder's correctness matrix."""

    def measure(errors: Callable[[], dict[str, float]]) -> dict[str, Any]:
        found = errors()
        return {"errors": found, "passed": max(found.values()) <= 1}

    about = {"folder": folder}
    return [
        Item(name, lambda errors=errors: measure(errors), about=about, limit_s=120)
        for name, errors in bench_of(folder).checks(rehearsal)[slice(*span)]
    ]


def worth(case: Any) -> int:
    """A case's place in the queue of its folder: what papers report first."""
    order = ("d128 16k", "varlen", "d128", "llama 8k", "gqa")
    return next((i for i, word in enumerate(order) if case.name.startswith(word)), len(order))


class Timed:
    """One side of a case in one direction."""

    def __init__(self, case: Any, direction: str, build: Callable[[], bench.Side], tiny: bool):
        """tiny: a rehearsal's, which is timed by the wall clock."""
        self._case, self._direction, self._build, self._tiny = case, direction, build, tiny
        self._program: Any = None
        self._shapes: tuple[Any, ...] = ()
        self._sets = 0

    def prepare(self) -> None:
        """Traces and compiles the program; nothing runs."""
        function, like = self._build()

        def both(cotangents: Any, *args: Any) -> Any:
            out, pull = jax.vjp(function, *args)
            return out, pull(cotangents)

        run, self._shapes = function, tuple(like)
        if self._direction == BOTH:
            run, self._shapes = both, (jax.eval_shape(function, *like), *like)
        self._sets = 1 if self._tiny else bench.sets_of(run, self._shapes)
        program = jax.jit(bench.chained(run))
        self._program = program.lower(*[self._shapes] * self._sets).compile()

    def run(self) -> dict[str, Any]:
        """Times it. Raises: what the program raises."""
        program, self._program = self._program, None  # its memory is free for the next
        keys = jax.random.split(jax.random.key(0), self._sets)
        inputs = [bench.normal(key, self._shapes) for key in keys]
        runs = RUNS
        _, (_, once) = bench.wall_clock(program, inputs, 2)
        runs = max(3, min(RUNS, int(SIDE_S / once * self._sets)))
        if self._tiny:
            timing = bench.measure_program(program, inputs, 1, 1, bench.wall_clock)
        else:
            timing = bench.measure_program(program, inputs, runs, min(10, runs))
        case, rate = self._case, bench.memory_rate(jax.devices()[0].device_kind)
        passes = (False, True) if self._direction == BOTH else (False,)
        flops, nbytes = (sum(count(p) for p in passes) for count in (case.flops, case.bytes))
        floor = sum(case.floor_s(p, rate) for p in passes)
        return {
            **asdict(timing), "sets": self._sets, "tflops": flops / timing.median_s / 1e12,
            "gbytes_per_s": nbytes / timing.median_s / 1e9, "floor_s": floor,
            "of_floor": floor / timing.median_s,
        }  # fmt: skip


def times(folder: str, direction: str, rehearsal: bool) -> list[Item]:
    """Every case of a folder on every side, ours first, in order of worth."""
    module, found = bench_of(folder), []
    for case in sorted(module.TINY_CASES if rehearsal else module.CASES, key=worth):
        sides = module.sides(case, "interpret" if rehearsal else "hopper")
        for name, build in sides.items():
            timed = Timed(case, direction, build, rehearsal)
            about = {
                "folder": folder, "case": case.name, "direction": direction,
                "implementation": name,
            }  # fmt: skip
            found.append(
                Item(f"{case.name}, {name}", timed.run, timed.prepare, about, RUN_S, name != "ours")
            )
    return found


def bert(rehearsal: bool) -> list[Item]:
    """ByteTransformer's workload at batch 16, length 1024: the stack, then attention alone."""
    from experiments.reports import padding, padding_free
    from megajax.models.encoder_config import PRESETS, EncoderConfig

    tiny = EncoderConfig(layers=1, width=64, heads=1, mlp=64)
    cfg = tiny if rehearsal else PRESETS["bert_base"]()
    dtype, batch, longest = ("float32", 2, 16) if rehearsal else ("bfloat16", 16, 1024)
    clock, runs = (bench.wall_clock, 1) if rehearsal else (bench.device_clock, RUNS)
    ours, forced = padding_free.OURS, None if rehearsal else "hopper"
    steps = (
        dataclasses.replace(ours, name=f"{ours.name}, all kernels", implementation=forced),
        ours, padding_free.CUDNN, padding_free.PADDED,
    )  # fmt: skip
    return [
        Item(
            f"{what}, {step.name}",
            functools.partial(timed, cfg, step, dtype, batch, longest, clock, runs),
            about={"bert": what}, limit_s=120, optional=step in steps[2:],
        )
        for what, timed in (("stack", padding.timed), ("attention", padding.timed_attention))
        for step in steps
    ]  # fmt: skip


def fused(folder: str, exact: bool, rehearsal: bool) -> list[Item]:
    """Products with communication inside, on virtual ranks, or beside an emulated link."""
    module = bench_of(folder)
    if rehearsal:
        found = module.rehearsals()
        found = [each for each in found if (each[0] in {c.name for c in module.CHECKS}) == exact]
    else:
        found = module.checks() if exact else module.times()
    about = {"folder": folder} | (
        {} if exact else {"links": "emulated: copies held back by a clock"}
    )
    limit_s = 90 if exact else 240  # of times: a dozen programs are compiled
    return [Item(name, run, about=about | more, limit_s=limit_s) for name, more, run in found]
