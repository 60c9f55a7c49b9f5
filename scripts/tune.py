"""Times every tile of the kernels on this GPU and keeps the fastest, for all who have its kind.

    PYTHONPATH=. python3 scripts/tune.py                     # what this GPU's table lacks
    PYTHONPATH=. python3 scripts/tune.py attention forward   # those with all these words
    PYTHONPATH=. python3 scripts/tune.py --again --minutes=8
    PYTHONPATH=. python3 scripts/tune.py --rehearse          # on a CPU, interpreted, nothing kept

A kernel folder's configs.tunings() say what is measured. Each candidate must give what plain JAX
gives, and is then timed beside it: all shortly, the best few in full. Rows go into
pallas_kernels/tuned/<device kind>.json as they come, so a run may be cut off and called again;
megajax and the kernels read the table by themselves. Needs jax with CUDA and absl only.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from megajax.core import script
from megajax.monitor import results
from pallas_kernels import bench, report, tuned
from pallas_kernels.attention import hopper_forward, reference
from pallas_kernels.attention.ranges import packed_rows

AGAIN = flags.DEFINE_boolean("again", False, "measure also what the table has")
MINUTES = flags.DEFINE_float("minutes", 9.0, "begin nothing after so long", lower_bound=0)
REHEARSE = flags.DEFINE_boolean("rehearse", False, "one tiny tile on a CPU, in a temporary folder")
WRONG = 0.02  # relative to the reference's size (chosen: 16-bit results differ by less than 0.01)
FINALISTS = 3  # that are timed in full (chosen: short timings of 5 calls order them well enough)

Row = dict[str, Any]


def tunings(words: Iterable[str] = ()) -> list[tuple[str, tuned.Tuning]]:
    """(folder, what to measure), those whose folder, op and key have all words.

    The expert kernels have none: one GPU beside ghosts does not draw their routing.
    """
    found = [
        (folder, tuning)
        for folder, module in report.FOLDERS.items()
        if hasattr(module, "tunings")
        for tuning in module.tunings()
    ]
    return [each for each in found if set(words) <= set(name_of(*each).split())]


def name_of(folder: str, tuning: tuned.Tuning) -> str:
    """'attention varlen_attention_forward width 128 ...'; words to choose by."""
    words = (f"{name} {value}" for name, value in tuning.key.items())
    return " ".join([folder, *tuning.op.split("_"), *words])


def tiny() -> tuned.Tuning:
    """A tile of the attention kernel on 128 tokens, for rehearsals."""
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


def wrong(found: Any, want: Any) -> str | None:
    """Says how results differ by more than 16-bit rounding, None if they do not."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        live = np.isfinite(other)
        if one.shape != other.shape or not np.isfinite(one[live]).all():
            return f"gave {one.shape} with values that are not finite where the reference's are"
        apart = np.linalg.norm(one[live] - other[live]) / max(np.linalg.norm(other[live]), 1e-9)
        if apart > WRONG:
            return f"differs from the reference by {apart:.3f} of its size"
    return None


def measure(tuning: tuned.Tuning, clock: bench.Clock, runs: int, interpret: bool = False) -> Row:
    """Returns the table's row of one tuning.

    Raises: RuntimeError, with every candidate's reason, when none runs and is right.
    """
    inputs = [tuning.inputs(key) for key in jax.random.split(jax.random.key(0), 3)]
    plain = jax.jit(tuning.reference)
    want = jax.jit(tuning.want or tuning.reference)(*inputs[0])
    functions, short, reasons = {}, {}, []
    for tile in tuning.candidates:
        try:
            function = jax.jit(tuning.function(tile, interpret))
            if reason := wrong(function(*inputs[0]), want):
                raise ValueError(reason)
            short[tile] = bench.measure(
                function, inputs, min(runs, 5), min(runs, 2), clock
            ).median_s
            functions[tile] = function
        except Exception as error:  # a tile that cannot run must not lose the others
            reasons.append(f"{tile}: {type(error).__name__}: {str(error)[:200]}")
    if not short:
        raise RuntimeError("; ".join(reasons))
    last = sorted(short, key=short.__getitem__)[:FINALISTS]
    times = {
        t: bench.measure(functions[t], inputs, runs, min(runs, 10), clock).median_s for t in last
    }
    best = min(times, key=times.__getitem__)
    rival = bench.measure(plain, inputs, runs, min(runs, 10), clock).median_s
    rivals = {"reference": 1e6 * rival}
    for name, (function, draw) in tuning.others.items():
        try:
            sets = [draw(key) for key in jax.random.split(jax.random.key(0), 3)]
            timing = bench.measure(jax.jit(function), sets, runs, min(runs, 10), clock)
            rivals[name] = 1e6 * timing.median_s
        except Exception as error:
            reasons.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    fastest = tuning.words[0 if times[best] <= rival else 1]
    return {
        "op": tuning.op, "key": dict(tuning.key), "tile": dataclasses.asdict(best),
        "median_us": 1e6 * times[best], "fastest": fastest,
        "rivals": rivals, "heuristic_us": _microseconds(short, tuning),
        "candidates": len(tuning.candidates), "failed": reasons,
    }  # fmt: skip


def _microseconds(short: dict[Any, float], tuning: tuned.Tuning) -> float | None:
    """Of the heuristic's tile, timed shortly; None if it failed."""
    first = short.get(tuning.candidates[0])
    return None if first is None else 1e6 * first


def same(row: Row, tuning: tuned.Tuning) -> bool:
    """Whether a row of the table is of this tuning."""
    return row["op"] == tuning.op and row["key"] == dict(tuning.key)


def tune(
    wanted: Iterable[tuple[str, tuned.Tuning]], path: Path, clock: bench.Clock, deadline: float,
    *, runs: int = 50, again: bool = False, interpret: bool = False,
) -> int:  # fmt: skip
    """Measures what is wanted and not in the table, and writes it row by row.

    Returns: how many tunings failed.
    """
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    about = {"date": results.facts("", "")["date"], "commit": results.commit()}
    failed = 0
    for folder, tuning in wanted:
        name = name_of(folder, tuning)
        if not again and any(same(row, tuning) for row in rows):
            continue
        if time.perf_counter() > deadline:
            print(f"{name}: not measured, out of time; call again", flush=True)
            continue
        try:
            row = measure(tuning, clock, runs, interpret) | about
        except Exception as error:
            failed += 1
            print(f"{name}: FAILED: {type(error).__name__}: {str(error)[:1000]}", flush=True)
            continue
        rows = [each for each in rows if not same(each, tuning)] + [row]
        results.write(path, {}, rows)
        rival = row["rivals"]["reference"]
        print(
            f"{name}: {row['tile']} {row['median_us']:.1f} us, reference {rival:.1f} us, "
            f"{row['fastest']} is faster; {len(row['failed'])} of {row['candidates']} tiles failed",
            flush=True,
        )
    return failed


def main(argv: list[str]) -> int:
    """Returns 1 when a tuning failed."""
    deadline = time.perf_counter() + 60 * MINUTES.value
    if REHEARSE.value:
        jax.config.update("jax_num_cpu_devices", 8)  # the interpreter needs as many threads
        with tempfile.TemporaryDirectory() as folder:
            path, wanted = Path(folder) / "cpu.json", [("tiny", tiny())]
            return tune(wanted, path, bench.wall_clock, deadline, runs=1, interpret=True)
    kind = tuned.device_kind()
    if kind is None:
        sys.exit("error: jax finds no GPU; --rehearse runs one tiny tile on a CPU")
    wanted = tunings(argv[1:])
    if not wanted:
        known = sorted({name_of(*each) for each in tunings()})
        sys.exit("error: nothing has these words; there are\n" + "\n".join(known))
    failed = tune(
        wanted, tuned.FOLDER / f"{kind}.json", bench.device_clock, deadline, again=AGAIN.value
    )
    print(f"{tuned.FOLDER / kind}.json: commit it, and the kernels take these tiles")
    return bool(failed)


if __name__ == "__main__":
    script.start(main)
