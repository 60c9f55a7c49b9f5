"""The kernels part of gpu_check.py: is it right, and how fast, in order of worth.

A sample of every folder's correctness matrix comes first. Then times, of the goals that matter
most first: device time of forward and of forward with backward on useful FLOPs, ours beside rivals
on the same inputs in the same process, and a BERT forward (ByteTransformer's workload). What is
left of the matrix comes last. A rehearsal runs the same lines on a CPU through the interpreter, on
tiny shapes; its times mean nothing. A kernel folder's bench.py has CASES, TINY_CASES,
checks(rehearsal) and sides(case, implementation).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from experiments.reports import padding as padding_report
from experiments.reports import padding_free
from megajax.models.encoder_config import PRESETS as ENCODERS
from megajax.models.encoder_config import EncoderConfig
from pallas_kernels import bench
from pallas_kernels.attention import bench as attention
from pallas_kernels.bench import Add, attempt
from pallas_kernels.gemm import bench as gemm
from pallas_kernels.grouped import bench as grouped
from pallas_kernels.norm import bench as norm
from pallas_kernels.tile_sparse import bench as tile_sparse

FORWARD, BOTH = "forward", "forward+backward"
SIDE_S = 2.0  # of timed calls (chosen: 50 calls of anything below 40 ms)
FOLDERS = {
    "attention": attention,
    "norm": norm,
    "gemm": gemm,
    "grouped": grouped,
    "tile_sparse": tile_sparse,
}
TINY_BERT = EncoderConfig(layers=1, width=64, heads=1, mlp=64)


@dataclass(frozen=True)
class Bench:
    """One case of a folder in one direction, with all its sides."""

    folder: str
    case: Any
    direction: str

    @property
    def worth(self) -> int:
        """Its place in the queue: the goals first, in their order."""
        name, backward = self.case.name, self.direction == BOTH
        goals = (
            self.folder == "attention" and name.startswith("d128 16k") and not backward,
            self.folder == "attention" and name.startswith("varlen"),
            self.folder == "attention" and name.startswith("d128"),
            self.folder != "attention" and not backward,
            True,
        )
        return goals.index(True)


def queue(rehearsal: bool) -> list[Bench]:
    """All cases, forward and with backward, in order of worth; a rehearsal needs the larger."""
    found = [
        Bench(name, case, direction)
        for name, folder in FOLDERS.items()
        for case in (folder.TINY_CASES if rehearsal else folder.CASES)
        for direction in ((BOTH,) if rehearsal else (FORWARD, BOTH))
    ]
    return sorted(found, key=lambda each: each.worth)


def time_side(
    each: Bench, function: Callable, like: list[Any], clock: bench.Clock, runs: int
) -> dict[str, Any]:
    """Times one side; its row says how much of the H200's floor that is."""

    def normal(key: jax.Array, shapes: Any) -> Any:
        leaves, form = jax.tree.flatten(shapes)
        keys = jax.random.split(key, len(leaves))
        drawn = (jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True))
        return form.unflatten(drawn)

    def both(cotangents, *args):
        out, pull = jax.vjp(function, *args)
        return out, pull(cotangents)

    run, shapes = function, tuple(like)
    case, passes = each.case, (False,)
    if each.direction == BOTH:
        run, passes = both, (False, True)
        shapes = (jax.eval_shape(function, *like), *like)
    inputs = [normal(key, shapes) for key in jax.random.split(jax.random.key(0), 3)]
    compiled = jax.jit(run)
    clock(compiled, *inputs[0])
    # What takes long is run less often: the whole has minutes.
    runs = max(1, min(runs, int(SIDE_S / clock(compiled, *inputs[1]))))
    timing = bench.measure(compiled, inputs, runs, min(10, runs), clock)
    flops, nbytes, floor = (
        sum(count(part) for part in passes) for count in (case.flops, case.bytes, case.floor_s)
    )
    return {
        **asdict(timing), "tflops": flops / timing.median_s / 1e12,
        "gbytes_per_s": nbytes / timing.median_s / 1e9, "of_floor": floor / timing.median_s,
    }  # fmt: skip


def check(add: Add, checks: list, deadline: float) -> None:
    """Adds a row for each check, until the deadline."""
    for name, errors in checks:
        if time.perf_counter() > deadline:
            return add({"check": name, "note": "not run: out of time, nor what follows it"})

        def measure(errors: Callable = errors) -> dict[str, Any]:
            found = errors()
            return found | {"passed": max(found.values()) <= 1}

        attempt(add, {"check": name}, measure)


def time_cases(
    add: Add, about: dict[str, Any], deadline: float, rehearsal: bool, wanted: Any = None
) -> None:
    """Adds the peaks of this machine to `about`, and the times of every case on every side.

    wanted: of a Bench, whether it is run; None: all.
    """
    implementation = "interpret" if rehearsal else "hopper"
    clock = bench.wall_clock if rehearsal else bench.device_clock
    if "matmul_flops_per_s" not in about:
        about |= bench.peaks(256 if rehearsal else 8192, clock)
    for each in queue(rehearsal):
        if wanted is not None and not wanted(each):
            continue
        sides = FOLDERS[each.folder].sides(each.case, implementation)
        for name, build in sides.items():
            row = {
                "folder": each.folder, "case": each.case.name, "direction": each.direction,
                "implementation": name,
            }  # fmt: skip
            if time.perf_counter() > deadline:
                add(row | {"note": "not run: out of time"})
                continue

            def measure(each: Bench = each, build: Callable = build) -> dict[str, Any]:
                return time_side(each, *build(), clock, 1 if rehearsal else 50)

            attempt(add, row, measure)


def bert(rehearsal: bool) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """ByteTransformer's workload at batch 16, length 1024: the stack, then attention alone."""
    cfg = TINY_BERT if rehearsal else ENCODERS["bert_base"]()
    dtype, batch, longest = ("float32", 2, 16) if rehearsal else ("bfloat16", 16, 1024)
    clock = bench.wall_clock if rehearsal else bench.device_clock
    ours, forced = padding_free.OURS, None if rehearsal else "hopper"
    steps = (
        dataclasses.replace(ours, name=f"{ours.name}, all kernels", implementation=forced),
        ours, padding_free.CUDNN, padding_free.PADDED,
    )  # fmt: skip
    for timed in (padding_report.timed, padding_report.timed_attention):
        for step in steps:
            measure = functools.partial(
                timed, cfg, step, dtype, batch, longest, clock, 1 if rehearsal else 50
            )
            yield {"bert": timed.__name__, "step": step.name}, measure


def check_kernels(
    add: Add, about: dict[str, Any], deadline: float, rehearsal: bool, only: str | None = None
) -> None:
    """Adds the rows: a sample of checks, the goals' times, BERT, all other times, all checks.

    only: a folder, whose checks and times alone are added.
    """
    began = time.perf_counter()
    folders = [name for name in FOLDERS if only in (None, name)]
    checks = {name: FOLDERS[name].checks(rehearsal) for name in folders}
    sample = [each for found in checks.values() for each in found[:4]]
    rest = [each for found in checks.values() for each in found[4:]]
    check(add, sample, began + (deadline - began) / 3)

    def time_those(first: bool) -> None:
        def wanted(each: Bench) -> bool:
            return each.folder in folders and (each.worth < 3) == first

        time_cases(add, about, deadline, rehearsal, wanted)

    time_those(True)
    for row, measure in bert(rehearsal) if only is None else ():
        if time.perf_counter() > deadline:
            add(row | {"note": "not run: out of time"})
        else:
            attempt(add, row, measure)
    time_those(False)
    check(add, rest, deadline)
