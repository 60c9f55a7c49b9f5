"""ByteCheckpoint (arXiv 2407.20143): what a save costs the training loop, and what a load costs.

    uv run experiments/bytecheckpoint.py                 # 16 MB, 3 times, seconds
    uv run experiments/bytecheckpoint.py --preset=paper  # 512 MB, 20 times, on the disk of --folder

The same state is saved and loaded by our manager, by plain Orbax (asynchronous and synchronous) and
by plain file operations. All of them run in turn within every repetition, so that other work on the
machine affects all alike.
Stall: time until the training loop can continue, compared with one copy of the state into memory.
Whole: time until the step is stored, compared with writing and syncing the same bytes; in the row
"ours, read back" also until it was read again and compared, for which the loop does not wait.
Load: the files are dropped from the page cache first. The state is loaded into the mesh that saved
it and, in turn, into one other mesh, and every array is compared bit by bit.
Plan: which rank writes what of a 405B model's state on --plan_ranks ranks; the times are SIMULATED,
apart from that of planning. The result file says which goals are met (GOALS in
experiments/reports/bytecheckpoint.py).
The command writes bytecheckpoint.json after every repetition, and then bytecheckpoint.svg and .png,
into --out. It may be interrupted, and --resume continues. Exit code 1: an array came back
different.
"""

import megajax.core.interrupted  # noqa: F401

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.reports import bytecheckpoint as report
from experiments.reports.bytecheckpoint import seconds
from experiments.reports.reporting import closing
from megajax.checkpoint.manager import CheckpointManager
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.core.files import expand
from megajax.core.mesh import MeshSpec
from megajax.monitor import results

MIB = 1 << 20
DEVICES = 8
LEAVES = 16  # (chosen) arrays of the state
SAVED = MeshSpec(data=4, tensor=2)
OTHERS = (MeshSpec(data=2, tensor=4), MeshSpec(data=8), MeshSpec(data=2, node=2, tensor=2))


@dataclass(frozen=True)
class Config(Checked):
    """How much is saved, how often, where."""

    megabytes: int = option(16, "size of the state", "MB", at_least=1)
    runs: int = option(3, "number of repetitions", at_least=1)
    plan_ranks: int = option(
        768,
        "number of ranks of the planned save: 128 (pipe 16 x tensor 8) times data",
        at_least=128,
    )
    folder: str = option("", "folder in which checkpoints are written; empty: a temporary one")
    resume: bool = option(False, "continue with the repetitions that the file in --out holds")
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
    """Returns the host's view of every shard."""
    return [np.asarray(s.data) for x in state.values() for s in x.addressable_shards]


def forget(folder: Path) -> None:
    """Syncs and drops a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_raw(path: Path, shards: list[np.ndarray]) -> None:
    """Writes one file and syncs it: the rate of the disk itself."""
    with open(path, "wb") as file:
        for shard in shards:
            file.write(memoryview(np.ascontiguousarray(shard)).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def read_raw(path: Path, target: np.ndarray) -> None:
    """Reads a file into memory that was touched before."""
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
        restored = jax.block_until_ready(manager.restore(like=like))
        took = time.perf_counter() - began
        name = "ours" if spec == SAVED else f"ours, to {mesh_.describe(mesh).partition(' on')[0]}"
        yield "load", name, took
        for leaf, x in restored.items():
            if not np.array_equal(np.asarray(x), np.asarray(state[leaf])):
                sys.exit(f"error: {leaf} came back different on {mesh_.describe(mesh)}")
    like = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in state.items()
    }
    forget(folder)
    took = seconds(lambda: jax.block_until_ready(ocp.load(folder / "orbax" / "1", like)))
    yield "load", "orbax", took


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
    plan = report.planned(cfg.plan_ranks)
    times = former(path, about) if cfg.resume else {}
    try:
        for run in repeat(cfg, state, times):
            seen = [{"what": w, "how": h, "seconds": t} for (w, h), t in times.items()]
            measured = [*report.summarise(times, nbytes), *report.goals(times)]
            results.write(path, about | {"times": seen}, [*measured, plan])
            print(f"repetition {run}/{cfg.runs}", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; {path} holds the repetitions before")
    if not times:
        return 0
    measured = report.summarise(times, nbytes)
    print(report.text(measured, report.goals(times), plan))
    print(f"{path}, .svg and .png")
    print(f"{report.draw(measured, path, nbytes / 1e6)}. The paper's factor is of a cluster with a")
    print("remote file system, ours of this machine's disk.")
    print(closing(config.start_name()))
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
            rows = [
                *measure_saves(state, copies, Path(name)),
                *measure_loads(state, target, Path(name), OTHERS[run % len(OTHERS)]),
            ]
            if run == done:  # warms up
                continue
            for what, how, took in rows:
                times.setdefault((what, how), []).append(took)
            yield run


def former(path: Path, about: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Returns the seconds that a result file holds. Raises: UserError for another machine's."""
    try:
        data = json.loads(path.read_text())
    except OSError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is no result: {error} (--resume)") from None
    for name in ("device", "cores", "megabytes", "commit"):
        if data.get(name) != about[name]:
            raise UserError(
                f"{path} is of {name} {data.get(name)}, this run of {about[name]}; leave "
                "--resume out (--resume)"
            )
    return {(row["what"], row["how"]): row["seconds"] for row in data.get("times", ())}


if __name__ == "__main__":
    sys.exit(config.run(main))
