"""ByteCheckpoint (arXiv 2407.20143): what a save costs the training loop, and what a load costs.

    uv run experiments/bytecheckpoint.py                 # 16 MB, 3 times, seconds
    uv run experiments/bytecheckpoint.py --preset=paper  # 512 MB, 20 times, on the disk of --folder

The same state through our manager, plain Orbax (asynchronous and synchronous) and the disk itself,
one after another within every repetition, so that all meet the same machine. Stall: until the
training loop may go on, beside one copy of the state into memory that was touched before. Whole:
until the step counts, beside writing and syncing the same bytes; "ours, read back": until it was
also read again and compared, which the loop does not wait for. Load: files are dropped from the
page cache first, for all alike; into the mesh that saved and, in turn, one other, every array
compared bit by bit. Plan: who writes what of a 405B model's state on --plan_ranks ranks, SIMULATED
but for planning itself. GOALS: the file says for each whether it is met.
Writes bytecheckpoint.json, .svg and .png into --out, the former after every repetition: interrupt
it when there are enough, go on with --resume. Exit code 1: an array came back different.
"""

import megajax.core.interrupted  # noqa: F401

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import planner
from megajax.checkpoint.manager import CheckpointManager
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.core.mesh import MeshSpec
from megajax.core.paths import expand
from megajax.monitor import results

MIB = 1 << 20
DEVICES = 8
LEAVES = 16  # (chosen) arrays of the state
SAVED = MeshSpec(data=4, tensor=2)
OTHERS = (MeshSpec(data=2, tensor=4), MeshSpec(data=8), MeshSpec(data=2, node=2, tensor=2))
# (ByteCheckpoint, table of section 6: stall against PyTorch's own format, vDiT 4B on 128 A100s)
PAPER_STALL = 61.37 / 0.38
BASE = {"stall": "one copy", "whole": "write and sync", "load": "read"}
# The machine's own time over ours must be at least this (chosen before it was measured).
GOALS = {"stall": 1 / 1.2, "whole": 0.7, "load": 0.7}
COLOURS = {
    "ours": "#0072B2", "ours, read back": "#56B4E9", "orbax": "#E69F00",
    "orbax, waits": "#D55E00", "machine": "#999999",
}  # fmt: skip


@dataclass(frozen=True)
class Config(Checked):
    """How much is saved, how often, where."""

    megabytes: int = option(16, "of the state", "MB", at_least=1)
    runs: int = option(3, "repetitions", at_least=1)
    plan_ranks: int = option(
        768, "of the planned save: 128 (pipe 16 x tensor 8) times data", at_least=128
    )
    folder: str = option("", "where checkpoints are written; empty: a temporary folder")
    resume: bool = option(False, "goes on with the repetitions that the file in --out holds")
    out: str = results.out_option("bytecheckpoint")

    def __post_init__(self):
        """Refuses what cannot be measured."""
        super().__post_init__()
        if self.plan_ranks % 128:
            raise UserError(
                f"plan_ranks={self.plan_ranks} must be a multiple of 128; "
                f"{nearest_multiples(self.plan_ranks, 128)} (--plan_ranks)"
            )


def paper() -> Config:
    """128 million float32 numbers, 20 times; the largest job of MegaScale."""
    return Config(megabytes=512, runs=20, plan_ranks=12288)


PRESETS = {"tiny": Config, "paper": paper}
config.define_flags(PRESETS, "tiny")


def make_state(megabytes: int, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Random float32 arrays cut over both axes; random bits do not compress."""
    columns = 1024
    rows = max(megabytes * 1_000_000 // (4 * columns * LEAVES), 1)
    rows += -rows % 64
    sharding = NamedSharding(mesh, P("data", "tensor"))
    keys = jax.random.split(jax.random.key(0), LEAVES)
    draw = jax.jit(lambda key: jax.random.normal(key, (rows, columns)), out_shardings=sharding)
    return {f"layer_{i}": draw(key) for i, key in enumerate(keys)}


def pieces(state: dict[str, jax.Array]) -> list[np.ndarray]:
    """The host's view of every shard."""
    return [np.asarray(s.data) for x in state.values() for s in x.addressable_shards]


def seconds(call: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Syncs and drops a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_raw(path: Path, shards: list[np.ndarray]) -> None:
    """The disk's own rate: one file, one sync."""
    with open(path, "wb") as file:
        for shard in shards:
            file.write(memoryview(np.ascontiguousarray(shard)).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def read_raw(path: Path, target: np.ndarray) -> None:
    """Into memory that was touched before."""
    with open(path, "rb") as file:
        at, view = 0, memoryview(target)
        while count := file.readinto(view[at : at + 8 * MIB]):
            at += count


def measure_saves(
    state: dict[str, jax.Array], copies: list[np.ndarray], folder: Path
) -> Iterator[tuple[str, str, float]]:
    """Yields (what, how, seconds) of one repetition; its files stay for the loads."""
    import orbax.checkpoint.experimental.v1 as ocp

    shards = pieces(state)
    took = seconds(lambda: [np.copyto(c, s) for c, s in zip(copies, shards, strict=True)])
    yield "stall", "one copy", took
    raw = folder / "raw"
    yield "whole", "write and sync", seconds(lambda: write_raw(raw, shards))
    manager = CheckpointManager(folder / "ours", keep=1)
    step = (manager.latest() or 0) + 1
    began = time.perf_counter()
    handle = manager.save(step, state)
    stall = time.perf_counter() - began
    handle.result()
    yield "whole", "ours", time.perf_counter() - began
    yield "stall", "ours", stall
    handle.wait_checked()
    yield "whole", "ours, read back", time.perf_counter() - began
    manager.close()  # the bytes of the step before go now, not beside what is measured next
    shutil.rmtree(folder / "orbax", ignore_errors=True)
    began = time.perf_counter()
    response = ocp.save_async(folder / "orbax" / "1", state)
    stall = time.perf_counter() - began
    response.result()
    yield "whole", "orbax", time.perf_counter() - began
    yield "stall", "orbax", stall
    waits = seconds(lambda: ocp.save(folder / "orbax" / "2", state))
    yield "stall", "orbax, waits", waits
    yield "whole", "orbax, waits", waits


def measure_loads(
    state: dict[str, jax.Array], target: np.ndarray, folder: Path, other: MeshSpec
) -> Iterator[tuple[str, str, float]]:
    """Yields (what, how, seconds) of one repetition. Raises: SystemExit for a different array."""
    import orbax.checkpoint.experimental.v1 as ocp

    forget(folder)
    yield "load", "read", seconds(lambda: read_raw(folder / "raw", target))
    manager = CheckpointManager(folder / "ours", keep=1)
    for spec in (SAVED, other):
        mesh = spec.build()
        sharding = NamedSharding(mesh, P(("node", "data"), "tensor"))
        like = {
            k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for k, x in state.items()
        }
        forget(folder)
        began = time.perf_counter()
        found = jax.block_until_ready(manager.restore(like=like))
        took = time.perf_counter() - began
        name = "ours" if spec == SAVED else f"ours, to {mesh_.describe(mesh).partition(' on')[0]}"
        yield "load", name, took
        for leaf, x in found.items():
            if not np.array_equal(np.asarray(x), np.asarray(state[leaf])):
                sys.exit(f"error: {leaf} came back different on {mesh_.describe(mesh)}")
    like = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in state.items()
    }
    forget(folder)
    took = seconds(lambda: jax.block_until_ready(ocp.load(folder / "orbax" / "1", like)))
    yield "load", "orbax", took


def summarise(times: dict[tuple[str, str], list[float]], nbytes: int) -> list[dict[str, Any]]:
    """One row for each measurement: seconds, rate, and the ratio to the machine's own."""
    rows = []
    for (what, how), found in times.items():
        p10, median, p90 = (float(x) for x in np.percentile(found, (10, 50, 90)))
        machine = float(np.median(times[what, BASE[what]]))
        rows.append(
            {
                "what": what, "how": how, "median_s": median, "p10_s": p10, "p90_s": p90,
                "runs": len(found), "gb_per_s": nbytes / median / 1e9,
                "times_the_machine": median / machine,
            }
        )  # fmt: skip
    return sorted(
        rows, key=lambda row: ("stall whole load".split().index(row["what"]), row["median_s"])
    )


def goals(times: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """Returns for each goal the median over the repetitions of the machine's time over ours.

    Also how many times faster ours is than Orbax, and than Orbax that the loop waits for.
    """
    rows = []
    for what, least in GOALS.items():
        ours = np.array(times[what, "ours"])

        def over(how: str, what: str = what, ours: np.ndarray = ours) -> float | None:
            found = times.get((what, how))
            return None if found is None else float(np.median(np.array(found) / ours))

        rate = over(BASE[what])
        rows.append(
            {
                "what": "goal", "how": f"{what}: {BASE[what]} / ours", "goal": least, "rate": rate,
                "met": rate is not None and rate >= least, "runs": len(ours),
                "orbax_over_ours": over("orbax"), "orbax_waits_over_ours": over("orbax, waits"),
            }
        )  # fmt: skip
    return rows


def state_of_405b() -> list[planner.Leaf]:
    """Llama 3 405B (arXiv 2407.21783, table 3): float32 parameters and two moments, ZeRO-1."""
    L, D, F, H, G, K, V = 126, 16384, 53248, 128, 8, 128, 128256
    shapes = {  # and the dimensions that pipe and tensor cut
        "query": ((L, D, H, K), 0, 2), "key": ((L, D, G, K), 0, 2), "value": ((L, D, G, K), 0, 2),
        "out": ((L, H, K, D), 0, 1), "gate": ((L, D, F), 0, 2), "up": ((L, D, F), 0, 2),
        "down": ((L, F, D), 0, 1), "norms": ((L, 2, D), 0, None), "tokens": ((V, D), None, 0),
        "head": ((D, V), None, 1),
    }  # fmt: skip
    found = []
    for prefix in ("params", "mu", "nu"):
        for name, (shape, pipe, tensor) in shapes.items():
            cuts: list[tuple[str, ...]] = [()] * len(shape)
            for axis, place in (("pipe", pipe), ("tensor", tensor)):
                if place is not None:
                    cuts[place] += (axis,)
            if prefix != "params" and name != "norms":
                widest = max(range(len(shape)), key=lambda d: shape[d] * (not cuts[d]))
                cuts[widest] += ("data",)
            found.append(planner.Leaf(f"{prefix}.{name}", shape, 4, tuple(cuts)))
    return found


def planned(ranks: int) -> dict[str, Any]:
    """Plans a save of the 405B state twice, the second time from the cache."""
    mesh = {"pipe": 16, "data": ranks // 128, "tensor": 8}
    cache, leaves = planner.PlanCache(), state_of_405b()
    first = seconds(lambda: cache.plan(leaves, mesh))
    second = seconds(lambda: cache.plan(leaves, mesh))
    found = cache.plan(leaves, mesh)
    estimate = planner.simulate(found)
    per_rank = found.bytes_per_rank
    return {
        "what": "plan", "how": f"{ranks} ranks", "plan_s": first, "plan_again_s": second,
        "imbalance": found.imbalance, "gb_per_rank": float(per_rank.max()) / 1e9,
        "metadata_mb": found.metadata_bytes / 1e6, "estimate_stall_s": estimate.stall,
        "estimate_save_s": estimate.save, "estimate_load_s": estimate.load,
    }  # fmt: skip


def draw(rows: list[dict[str, Any]], path: Path, megabytes: float) -> None:
    """Three panels, one for each question; SVG and PNG."""
    from matplotlib.figure import Figure

    titles = {"stall": "the loop stands still", "whole": "until the step counts", "load": "load"}
    figure = Figure(figsize=(8, 6.4), dpi=110, layout="constrained")
    counts = [sum(row["what"] == what for row in rows) for what in titles]
    panels = figure.subplots(3, 1, height_ratios=[1 + n for n in counts])
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        mine = [row for row in rows if row["what"] == what][::-1]
        names = [r["how"].partition(", to ")[0] for r in mine]
        kind = [name if name in COLOURS else "machine" for name in names]
        low, high = ([abs(r["median_s"] - r[p]) for r in mine] for p in ("p10_s", "p90_s"))
        axes.barh([r["how"] for r in mine], [r["median_s"] for r in mine], xerr=[low, high],
                  color=[COLOURS[k] for k in kind])  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds, median with 10th and 90th percentile")
    by = {(r["what"], r["how"]): r["median_s"] for r in rows}
    gain = by["stall", "orbax, waits"] / by["stall", "ours"]
    figure.suptitle(
        f"{megabytes:.0f} MB: a save stalls the loop {gain:.0f} times less than one that waits "
        f"(paper: {PAPER_STALL:.0f})",
        fontsize=11,
    )
    for suffix in ("svg", "png"):
        figure.savefig(path.with_suffix(f".{suffix}"))


def main() -> int:
    """Measures, writes after every repetition, draws."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    path = results.writable_folder(cfg.out) / "bytecheckpoint.json"
    if cfg.folder:
        results.writable_folder(cfg.folder, "folder")
    mesh_.start(None, DEVICES)
    state = make_state(cfg.megabytes, SAVED.build())
    nbytes = sum(x.nbytes for x in state.values())
    about = results.facts(
        f"{jax.device_count()} {jax.devices()[0].device_kind}", "measured on this disk"
    )
    about |= {
        "megabytes": nbytes / 1e6,
        "cores": os.cpu_count(),
        "cache": "every load begins with its files dropped from the page cache",
    }
    plan = planned(cfg.plan_ranks)
    times = former(path, about) if cfg.resume else {}
    try:
        for run in repeat(cfg, state, times):
            seen = [{"what": w, "how": h, "seconds": t} for (w, h), t in times.items()]
            measured = [*summarise(times, nbytes), *goals(times)]
            results.write(path, about | {"times": seen}, [*measured, plan])
            print(f"repetition {run}/{cfg.runs}", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; {path} holds the repetitions before")
    if not times:
        return 0
    measured = summarise(times, nbytes)
    for row in [*measured, *goals(times), plan]:
        print(" | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    draw(measured, path, nbytes / 1e6)
    return 0


def repeat(
    cfg: Config, state: dict[str, jax.Array], times: dict[tuple[str, str], list[float]]
) -> Iterator[int]:
    """Yields the number of each repetition when its seconds were added to `times`."""
    copies = [np.ones_like(s) for s in pieces(state)]
    target = np.ones(sum(c.nbytes for c in copies), np.uint8)
    done = len(times.get(("stall", "ours"), ()))
    with tempfile.TemporaryDirectory(
        dir=expand(cfg.folder, "folder") if cfg.folder else None
    ) as name:
        for run in range(done, cfg.runs + 1):
            found = [
                *measure_saves(state, copies, Path(name)),
                *measure_loads(state, target, Path(name), OTHERS[run % len(OTHERS)]),
            ]
            if run == done:  # warms up
                continue
            for what, how, took in found:
                times.setdefault((what, how), []).append(took)
            yield run


def former(path: Path, about: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds that a result file holds. Raises: UserError for another machine's."""
    try:
        found = json.loads(path.read_text())
    except OSError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is no result: {error} (--resume)") from None
    for name in ("device", "cores", "megabytes", "commit"):
        if found.get(name) != about[name]:
            raise UserError(
                f"{path} is of {name} {found.get(name)}, this run of {about[name]}; leave "
                "--resume out (--resume)"
            )
    return {(row["what"], row["how"]): row["seconds"] for row in found.get("times", ())}


if __name__ == "__main__":
    sys.exit(config.run(main))
