"""Reads the kernel latencies that NeuSight (ASPLOS'25, sitar-lab/NeuSight) published.

The folder of this data set has four parts: collect/, train/ and test/ contain CSV files, plain or
gzipped, in which each row is one kernel of PyTorch in float32 with its latency in milliseconds;
devices/ contains a JSON file for each GPU, from which its card is made. The columns with kernel
names, grids and blocks are not read, because they describe the run and not the program.
"""

import csv
import dataclasses
import functools
import gzip
import json
import math
import os
import pathlib
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import DeviceCard
from megajax.cost.record import OpRecord, product, rowwise
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import with_chip

SOURCE = (
    "kernel latencies of github.com/sitar-lab/NeuSight (ASPLOS'25), MIT licence, "
    "copyright (c) 2025 Georgia Institute of Technology and Microsoft Corporation"
)
FOLDERS = ("collect", "train", "test")
_SOFTMAX = ("reduce", "add", "exponential", "reduce", "divide")
_NORM = ("reduce", "add", "multiply", "reduce", "power", "multiply", "multiply", "add")
# {NeuSight's name: (its elementary operations, the number of arrays of the result's shape that it
# reads)}. The second operand of a name that ends in u, such as addu, is a scalar.
ROWWISE: dict[str, tuple[Sequence[str], int]] = {
    "add": (("add",), 2),
    "sub": (("add",), 2),
    "mul": (("multiply",), 2),
    "div": (("divide",), 2),
    "pow": (("power",), 2),
    "addu": (("add",), 1),
    "subu": (("add",), 1),
    "mulu": (("multiply",), 1),
    "divu": (("divide",), 1),
    "powu": (("power",), 1),
    "relu": (("maximum",), 1),
    "tanh": (("exponential",), 1),
    "gelu": (("multiply", "exponential", "add", "multiply", "multiply"), 1),
    "softmax": (_SOFTMAX, 1),
    "ln": (_NORM, 1),
}
OPS = ("bmm", "linear", *ROWWISE)
GROUPS = {"elem": tuple(n for n in ROWWISE if n not in ("softmax", "ln"))}


def group(op: str) -> str:
    """Returns the group of an operation in NeuSight's tables: 'elem' (element-wise) or its name."""
    return next((name for name, ops in GROUPS.items() if op in ops), op)


def load(
    folder: str | os.PathLike[str],
    ops: Collection[str] | str | None = None,
    devices: Collection[str] | str | None = None,
) -> Dataset:
    """Returns the rows of NeuSight's CSV files in their order: collect/, train/, test/, by name.

    Args: ops: names of column OPName, or 'elem' for all element-wise ones; None: all that the
        folder has. devices: names of column Device; None: all.
    Returns: a Dataset; a row without a positive latency has NaN seconds. A record's name is its
        operation's.
    Raises: UserError on an unknown operation or device, a device without a card, a damaged row.
    """
    root = pathlib.Path(folder)
    cards = _cards(root)
    chosen = _ops(ops)
    names = None if devices is None else {devices} if isinstance(devices, str) else set(devices)
    records, seconds, rows, known = [], [], [], set(cards)
    for place, row in _rows(root):
        known.add(row["Device"])
        if (names is not None and row["Device"] not in names) or row["OPName"] not in chosen:
            if ops is None and row["OPName"] not in OPS:
                raise UserError(f"{place}: {_unknown(row['OPName'])}")
            continue
        if row["Device"] not in cards:
            raise UserError(
                f"{place}: device {row['Device']} has no card in {root / 'devices'}; "
                f"cards: {', '.join(sorted(cards)) or 'none'}"
            )
        try:
            records.append(_record(row["OPName"], *_sizes(row)))
            seconds.append(_seconds(row["Latency"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{place}: the row is damaged: {error}") from error
        rows.append(row["Device"])
    for name in names or ():
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"device {name} must be one of {', '.join(sorted(known))}.{near}")
    used = {name: cards[name] for name in (names or set(rows)) if name in cards}
    return Dataset(records, np.array(seconds), rows, used, {"source": SOURCE})


def _ops(ops: Collection[str] | str | None) -> set[str]:
    names: set[str] = set()
    for name in OPS if ops is None else (ops,) if isinstance(ops, str) else ops:
        if name not in OPS and name not in GROUPS:
            raise UserError(_unknown(name))
        names.update(GROUPS.get(name, (name,)))
    return names


def _unknown(name: str) -> str:
    known = (*OPS, *GROUPS)
    return f"operation {name} must be one of {', '.join(known)}.{did_you_mean(name, known)}"


def _cards(root: pathlib.Path) -> dict[str, DeviceCard]:
    cards = {}
    for path in sorted((root / "devices").glob("*.json")):
        try:
            entry: dict[str, Any] = json.loads(path.read_text())
            card = DeviceCard(
                entry["Device"],
                {"float32": float(entry["SingleFLOPs"]) * 1e9},
                memory_bytes=int(entry["Dev_Mem"] * 1e9),
                memory_bytes_per_s=float(entry["Mem_Bw"]) * 1e9,
                link_bytes_per_s=0.0,
                network_bytes_per_s=0.0,
                sms=int(entry["Num_Sm"]),
                l2_bytes=float(entry["L2Cache"]) * 2**20,
                clock_hz=float(entry["Freq"]) * 1e6,
            )
            cards[entry["Device"]] = with_chip(card)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is no device card of NeuSight: {error!r}") from error
    return cards


def _rows(root: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    files = [p for sub in FOLDERS for p in sorted((root / sub).glob("*.csv*"))]
    files = [p for p in files if p.name.endswith((".csv", ".csv.gz"))]
    if not files:
        raise UserError(f"{root} has no CSV file in {', '.join(FOLDERS)}")
    for path in files:
        opened = (
            gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")
        )
        try:
            with opened as file:
                reader = csv.DictReader(file)
                needed = ("Device", "Latency", "OPName")
                for column in needed:
                    if column not in (reader.fieldnames or ()):
                        raise UserError(f"{path} has no column {column}")
                for row in reader:
                    place = f"{path}:{reader.line_num}"
                    if any(row[column] is None for column in needed):
                        raise UserError(
                            f"{place}: the row is damaged: it ends before its last column"
                        )
                    yield place, row
        except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
            raise UserError(f"{path} is damaged: {error}") from error


def _sizes(row: dict[str, str]) -> tuple[float, ...]:
    columns = ("B", "M", "N", "K") if row["OPName"] in ("bmm", "linear") else ("B", "H")
    sizes = tuple(float(row[name]) for name in columns)
    if not all(size >= 1 and math.isfinite(size) for size in sizes):
        raise ValueError(f"sizes {sizes} must be positive")
    return sizes


def _seconds(text: str) -> float:
    value = float(text) if text.strip() else math.nan
    return value / 1e3 if value > 0 and math.isfinite(value) else math.nan


@functools.lru_cache(maxsize=200_000)
def _record(op: str, *sizes: float) -> OpRecord:
    """Rows of several devices share their programs' records."""
    if op == "bmm":
        batch, m, n, k = sizes
        record = product(batch, m, n, k, "float32")
    elif op == "linear":  # PyTorch keeps the weight as (outputs, inputs)
        batch, m, n, k = sizes
        record = product(1, batch * m, n, k, "float32", transposed=1)
    else:
        opcodes, reads = ROWWISE[op]
        rows, width = sizes
        record = rowwise(opcodes, rows, width, reads, "float32")
    return dataclasses.replace(record, name=op)
