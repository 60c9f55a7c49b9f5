"""Tables of measurements that tests write, and GPUs that are not here."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import tuned

A100, H100, CPU = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "cpu"
CORES = {A100: 108, H100: 132, CPU: None}
_folders = itertools.count()


def mesh(kind: str, **sizes: int) -> AbstractMesh:
    """A mesh of devices of a kind; without sizes of one device."""
    sizes = sizes or {"d": 1}
    device = AbstractDevice(kind, CORES[kind], platform="cpu" if kind == CPU else "gpu")
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device
    )


@contextlib.contextmanager
def on(kind: str) -> Iterator[None]:
    """Programs that are traced inside are for one device of this kind."""
    with jax.sharding.use_abstract_mesh(mesh(kind)):
        yield


def row(op: str, key: tuned.Key, **changes: Any) -> dict[str, Any]:
    """A measurement in which the kernel was right and the fastest; no tile: the heuristic's."""
    measurement = {"op": op, "key": dict(key), "tile": {}, "correct": True}
    return (
        measurement
        | {"median_us": 1.0, "fastest": "hopper", "rivals": {"reference": 2.0}}
        | changes
    )


def write(monkeypatch: Any, tmp_path: Any, *rows: dict[str, Any], kind: str = H100) -> None:
    """Makes these the measurements of all that is known."""
    folder = tmp_path / f"tables{next(_folders)}"
    folder.mkdir()
    (folder / f"{tuned.slug(kind)}.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tuned, "FOLDER", folder)


def let_kernels_win(monkeypatch: Any) -> None:
    """Makes every kernel of one GPU the default where it can run, in its heuristic's tile."""
    members = {"octaves": 0.0}
    monkeypatch.setattr(tuned, "find", lambda op, key, kind=None: row(op, key) | members)
