"""The kernels' parts of gpu_check.py: are they right, and how fast beside their rivals.

Times are device times of forward and of forward with backward on useful FLOPs, ours beside rivals
on the same inputs in the same process, the floor of the card that is there beside them. A rehearsal
runs the same lines on a CPU through the interpreter, on tiny shapes; its times mean nothing. A
kernel folder's bench.py has CASES, TINY_CASES, checks(rehearsal), sides(case, implementation) and,
where PyTorch has a rival, torch_sides(case); those of products with communication have checks(),
times() and rehearsals().

PyTorch's rivals have a process of their own, which draws the same inputs: the libraries that
PyTorch brings along, a crash or a hang cannot harm the rows of our kernels. That process times our
kernel on its first case once more, so that a table can say how far the two processes agree.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import jax

from pallas_kernels import bench, rivals
from scripts.gpu_session.channel import Item

FORWARD, BOTH = "forward", "forward+backward"
CONTROL = "ours, in PyTorch's process"
# Sides whose products XLA times on the GPU while it compiles them: not while another part measures.
AUTOTUNED = ("xla", "reference", "dense", "ragged_dot")
UNTUNED: Any = {"xla_gpu_autotune_level": 0}  # of a program that is not timed
SIDE_S, RUNS = 0.4, 50  # of timed calls (chosen: 50 calls of anything below 8 ms)
RUN_S = 45  # limit of what runs (chosen: drawing inputs, and SIDE_S many times over)
TORCH_S = 90  # the same for PyTorch, which compiles when it runs (chosen)


def bench_of(folder: str) -> Any:
    """Imports a kernel folder's bench.py alone, as those of other folders may be broken."""
    return bench.module_of(folder, "bench")


def checks(folder: str, span: Sequence[int | None], rehearsal: bool) -> list[Item]:
    """Returns a stretch of a folder's correctness matrix."""

    def measure(errors: Callable[[], dict[str, float]]) -> dict[str, Any]:
        ratios = errors()
        return {"errors": ratios, "passed": max(ratios.values()) <= 1}

    about = {"folder": folder}
    return [
        Item(name, lambda errors=errors: measure(errors), about=about, limit_s=120)
        for name, errors in bench_of(folder).checks(rehearsal)[slice(*span)]
    ]


def worth(case: Any) -> int:
    """Returns a case's place in the queue of its folder: cases that papers report come first."""
    order = ("d128 16k", "varlen", "d128", "llama 8k", "gqa")
    return next((i for i, word in enumerate(order) if case.name.startswith(word)), len(order))


def differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns (cotangents, arguments) -> results and gradients."""

    def both(cotangents: Any, *args: Any) -> Any:
        out, pull = jax.vjp(function, *args)
        return out, pull(cotangents)

    return both


def calls_of(once_s: float) -> int:
    """Returns how often to call a program that takes so long: RUNS times, or as SIDE_S allows."""
    return max(3, min(RUNS, int(SIDE_S / once_s)))


def row_of(case: Any, direction: str, timing: bench.Timing, sets: int) -> dict[str, Any]:
    """Returns a row with a time and the floor of this GPU."""
    rate = bench.memory_rate(jax.devices()[0].device_kind)
    passes = (False, True) if direction == BOTH else (False,)
    floor = sum(case.floor_s(p, rate) for p in passes)
    return {**asdict(timing), "sets": sets, "floor_s": floor, "of_floor": floor / timing.median_s}


class Timed:
    """One side of a case in one direction."""

    def __init__(self, case: Any, direction: str, build: Callable[[], bench.Side], tiny: bool):
        """tiny: for a rehearsal, which is timed by the wall clock."""
        self._case, self._direction, self._build, self._tiny = case, direction, build, tiny
        self._program: Any = None
        self._shapes: tuple[Any, ...] = ()
        self._sets = 0

    def prepare(self) -> None:
        """Traces and compiles the program; nothing runs."""
        function, like = self._build()
        run, self._shapes = function, tuple(like)
        if self._direction == BOTH:
            run = differentiated(function)
            self._shapes = (jax.eval_shape(function, *like), *like)
        self._sets = 1 if self._tiny else bench.sets_of(run, self._shapes)
        program = jax.jit(bench.chained(run))
        self._program = program.lower(*[self._shapes] * self._sets).compile()

    def prepare_and_run(self) -> dict[str, Any]:
        """Prepares and times it, without preparing it ahead."""
        self.prepare()
        return self.run()

    def run(self) -> dict[str, Any]:
        """Times it. Raises: what the program raises."""
        program, self._program = self._program, None  # its memory is free for the next
        keys = jax.random.split(jax.random.key(0), self._sets)
        inputs = [bench.normal(key, self._shapes) for key in keys]
        _, (_, once) = bench.wall_clock(program, inputs, 2)
        runs = calls_of(once / self._sets)
        if self._tiny:
            timing = bench.measure_program(program, inputs, 1, 1, bench.wall_clock)
        else:
            timing = bench.measure_program(program, inputs, runs, min(10, runs))
        return row_of(self._case, self._direction, timing, self._sets)


class TorchTimed:
    """One of PyTorch's rivals of a case in one direction."""

    def __init__(self, case: Any, direction: str, build: Callable[[], rivals.Rival], tiny: bool):
        """tiny: for a rehearsal, on a CPU."""
        self._case, self._direction, self._build, self._tiny = case, direction, build, tiny
        self._function: Any = None
        self._twin: Any = None
        self._shapes: tuple[Any, ...] = ()
        self._sets = 0

    def prepare(self) -> None:
        """Imports PyTorch and compiles the twin in JAX for comparison; nothing runs."""
        rivals.version()
        rival = self._build()
        self._function, twin, self._shapes = rival.function, rival.twin, tuple(rival.like)
        if self._direction == BOTH:
            self._function = rivals.with_gradients(rival.function)
            twin = differentiated(rival.twin)
            self._shapes = (jax.eval_shape(rival.twin, *rival.like), *rival.like)
        self._sets = 1 if self._tiny else bench.sets_of(twin, self._shapes)
        self._twin = jax.jit(twin).lower(*self._shapes).compile(compiler_options=UNTUNED)

    def run(self) -> dict[str, Any]:
        """Compares one result with plain JAX's, then times PyTorch's program.

        Raises: ValueError when PyTorch computes something else; what PyTorch raises.
        """
        try:
            keys = jax.random.split(jax.random.key(0), self._sets)
            drawn = [bench.normal(key, self._shapes) for key in keys]
            inputs = [rivals.tensors(each) for each in drawn]
            results = rivals.arrays(self._function(*inputs[0]))
            error = rivals.compare(results, self._twin(*drawn[0]))
            del results
            return {"torch": rivals.version(), "relative_error": error, **self._time(inputs)}
        finally:
            self._twin = None
            rivals.release()

    def _time(self, inputs: list[tuple[Any, ...]]) -> dict[str, Any]:
        program, events = rivals.program(self._function, inputs), {}
        _, (_, once) = bench.wall_clock(program, (), 2)
        runs = calls_of(once / self._sets)
        if self._tiny:
            timing = bench.measure_program(program, inputs, 1, 1, bench.wall_clock)
        else:
            timing = bench.measure_program(program, inputs, runs, min(10, runs), rivals.clock)
            again = bench.measure_program(program, inputs, runs, 0, rivals.events)
            events = {"events_s": again.median_s}
        row = row_of(self._case, self._direction, timing, self._sets)
        return row | {"launch": program.how, **events}


def times(folder: str, direction: str, rehearsal: bool) -> list[Item]:
    """Returns every case of a folder on every side, ours first, the most valuable cases first."""
    module, items = bench_of(folder), []
    for case in sorted(module.TINY_CASES if rehearsal else module.CASES, key=worth):
        sides = module.sides(case, "interpret" if rehearsal else "hopper")
        for name, build in sides.items():
            timed = Timed(case, direction, build, rehearsal)
            about = {
                "folder": folder,
                "case": case.name,
                "direction": direction,
                "implementation": name,
            }
            steps: Any = (timed.run, timed.prepare)
            if name in AUTOTUNED:
                steps = (timed.prepare_and_run, None)
            items.append(Item(f"{case.name}, {name}", *steps, about, RUN_S, name != "ours"))
    return items


def torch_times(folder: str, direction: str, rehearsal: bool) -> list[Item]:
    """Returns every case of a folder on PyTorch's sides, and ours once, after the first case."""
    module, items = bench_of(folder), []
    cases = sorted(module.TINY_CASES if rehearsal else module.CASES, key=worth)

    def item(case: Any, name: str, timed: Timed | TorchTimed) -> Item:
        about = {
            "folder": folder,
            "case": case.name,
            "direction": direction,
            "implementation": name,
        }
        return Item(f"{case.name}, {name}", timed.run, timed.prepare, about, TORCH_S, True)

    for case in cases:
        for name, build in module.torch_sides(case).items():
            items.append(item(case, name, TorchTimed(case, direction, build, rehearsal)))
        if case is cases[0]:
            build = module.sides(case, "interpret" if rehearsal else "hopper")["ours"]
            items.append(item(case, CONTROL, Timed(case, direction, build, rehearsal)))
    return items


def bert(rehearsal: bool) -> list[Item]:
    """Returns ByteTransformer's workload, batch 16 x 1024: the stack, then attention alone."""
    from experiments.reports import bytetransformer as report
    from megajax.models.encoder_config import PRESETS, EncoderConfig

    tiny = EncoderConfig(layers=1, width=64, heads=1, mlp=64)
    cfg = tiny if rehearsal else PRESETS["bert_base"]()
    dtype, batch, longest = ("float32", 2, 16) if rehearsal else ("bfloat16", 16, 1024)
    clock, runs = (bench.wall_clock, 1) if rehearsal else (bench.device_clock, RUNS)
    ours, forced = report.OURS, None if rehearsal else "hopper"
    steps = (
        dataclasses.replace(ours, name=f"{ours.name}, our kernels", implementation=forced),
        dataclasses.replace(ours, name=f"{ours.name}, this GPU's defaults"),
        report.CUDNN,
        report.PADDED,
    )
    return [
        Item(
            f"{what}, {step.name}",
            functools.partial(timed, cfg, step, dtype, batch, longest, clock, runs),
            about={"bert": what, "step": step.name},
            limit_s=120,
            optional=step in steps[2:],
        )
        for what, timed in (("stack", report.timed), ("attention", report.timed_attention))
        for step in steps
    ]


def fused(folder: str, exact: bool, rehearsal: bool) -> list[Item]:
    """Returns products with communication inside, on virtual ranks or beside an emulated link."""
    module = bench_of(folder)
    if rehearsal:
        runs = module.rehearsals()
        runs = [each for each in runs if (each[0] in {c.name for c in module.CHECKS}) == exact]
    else:
        runs = module.checks() if exact else module.times()
    about = {"folder": folder} | (
        {} if exact else {"links": "emulated: copies held back by a clock"}
    )
    limit_s = 90 if exact else 240  # of times: a dozen programs are compiled
    return [Item(name, run, about=about | more, limit_s=limit_s) for name, more, run in runs]
