"""Markdown tables of the kernels' own documents: what a compiler said, floors, measured times.

A table of times has a line for each case and direction, and under it what a reader must know of
them: the GPU's own rates, the clocks, and what could not be measured, with the reason.
"""

import collections
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.reports import attention_area as area
from experiments.reports import gpu_tables
from megajax.monitor.results import table
from pallas_kernels import bench
from pallas_kernels.attention.cases import paper_lengths

REPORTED = (
    "attention", "paged", "tile_sparse", "norm", "gemm", "grouped", "quant_gemm", "quantize",
    "collective",
    "expert",
)  # fmt: skip
# What stands beside our times of a folder: heading -> implementation in a DEVICE_kernels.json.
SIDES = {
    "attention": {
        "ours, us": "ours", "cuDNN padded, us": "cudnn padded", "cuDNN packed, us": "cudnn packed",
        "tokamax packed, us": "tokamax packed", "XLA, us": "reference",
        "torch flash padded, us": "torch flash padded",
        "torch cuDNN padded, us": "torch cudnn padded",
        "torch flash packed, us": "torch flash packed",
    },
    "norm": {"ours, us": "ours", "XLA, us": "xla", "torch.compile, us": "torch compiled"},
    "gemm": {"ours, us": "ours", "XLA, us": "xla", "torch, us": "torch"},
    "grouped": {
        "ours, us": "ours", "JAX's kernels, us": "ragged_dot_mgpu",
        "XLA's ragged_dot, us": "ragged_dot", "torch._grouped_mm, us": "torch grouped",
        "one dense product, us": "dense",
    },
    "packing": {"ours, us": "ours"},
    "paged": {
        "ours, us": "ours", "plain JAX, us": "reference", "a copy of as many bytes, us": "copy",
    },
    "quant_gemm": {
        "ours, us": "ours", "XLA, us": "xla", "bf16 by cuBLAS, us": "dense",
        "torch bf16, us": "torch",
    },
    "quantize": {"ours, us": "ours", "XLA, us": "xla", "a copy of as many bytes, us": "copy"},
    "tile_sparse": {
        "ours, us": "ours", "dense cuBLAS, us": "dense", "plain JAX, us": "reference",
    },
}  # fmt: skip
BOUNDS = {
    "grouped": ("dense",),
    "quantize": ("copy",),
    "paged": ("copy",),
}  # do less than is asked for: no rivals
CONTROL = "ours, in PyTorch's process"
DIRECTIONS = (("forward", (False,)), ("forward+backward", (False, True)))
UNDIFFERENTIATED = ("quantize", "quant_gemm", "paged")  # have no kernel of a backward pass

Row = dict[str, Any]


def compiled(results: Path, folder: str) -> str:
    """What ptxas says of every shipped configuration of a folder of kernels."""
    columns = {
        "configuration": "config", "kernel": "name", "registers": "registers",
        "spilled bytes": "spilled_bytes", "shared bytes": "shared_bytes",
        "ptxas makes wgmma wait": "serialized",
    }  # fmt: skip
    return table(results / "kernel_report.json", columns, config=f"{folder} ")


def floors(results: Path, folder: str) -> str:
    """The roofline of every case of a folder, and what each GPU took; one table a device."""
    files = gpu_tables.measured(results, "kernels")
    files = [file for file in files if any(row.get("folder") == folder for row in file["rows"])]
    return "\n\n".join(_floors(file, folder) for file in files or [{"rows": []}])


def _floors(measured: Row, folder: str) -> str:
    cases = bench.module_of(folder, "cases").CASES
    rate = bench.memory_rate(measured.get("device", "H200"))
    rows = [row for row in measured["rows"] if row.get("folder") == folder]
    times = {(r["case"], r["direction"], r["implementation"]): r for r in rows if "median_s" in r}
    columns = ["case", "pass", "GFLOP", "MB", "floor, us", *SIDES[folder]]
    columns += ["ours, p10 to p90", "floor over ours", "best rival over ours"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for case in cases:
        for direction, parts in DIRECTIONS[: 1 if folder in UNDIFFERENTIATED else 2]:
            flops, nbytes = (sum(f(part) for part in parts) for f in (case.flops, case.bytes))
            floor = sum(case.floor_s(part, rate) for part in parts)
            sides = [times.get((case.name, direction, side)) for side in SIDES[folder].values()]
            cells = [
                case.name, direction, f"{flops / 1e9:.1f}", f"{nbytes / 1e6:.1f}",
                f"{1e6 * floor:.{0 if floor > 1e-4 else 1}f}", *map(_microseconds, sides),
                *_judged(floor, sides[0], [s for s in sides[1:] if s and not _is_bound(s)]),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    remarks = [f"- {remark}" for remark in _remarks(measured, rows, rate)]
    return "\n".join([*lines, *([""] if remarks else []), *remarks, *_source(measured)])


def _source(measured: Row) -> list[str]:
    return ["", gpu_tables.source(measured)] if measured["rows"] else []


def _is_bound(row: Row) -> bool:
    return row["implementation"] in BOUNDS.get(row["folder"], ())


def _microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    us = 1e6 * row["median_s"]
    return f"{us:.{0 if us > 100 else 1}f}"


def _judged(floor: float, ours: Row | None, rivals: Sequence[Row]) -> list[str]:
    """The last three cells of a line."""
    if ours is None:
        return ["", "", ""]
    took = ours["median_s"]
    best = min((row["median_s"] for row in rivals), default=None)
    return [
        f"{1e6 * ours['p10_s']:.1f} to {1e6 * ours['p90_s']:.1f}", f"{floor / took:.2f}",
        f"{best / took:.2f}" if best else "",
    ]  # fmt: skip


def _remarks(measured: Row, rows: Sequence[Row], rate: float) -> Iterator[str]:
    """Yields what belongs to a table of times: rates, clocks, both processes, what is missing."""
    for row in measured["rows"]:
        if "copy_bytes_per_s" in row:
            yield (
                f"Floors are those of the data sheet, {rate / 1e12:.2f} TB/s of memory. Measured in"
                f" the same session: memory {row['copy_bytes_per_s'] / 1e12:.2f} TB/s, a bf16"
                f" product {row['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s."
            )
    timed = [row for row in rows if "median_s" in row]
    clocks = collections.Counter(row["clock"] for row in timed)
    if clocks:
        few = sum(row["sets"] < bench.SETS or row["runs"] < gpu_tables.RUNS for row in timed)
        yield (
            f"Clocks: {', '.join(f'{name} {n} times' for name, n in clocks.items())}. {few} of"
            f" {len(timed)} times have fewer than {bench.SETS} inputs or {gpu_tables.RUNS} calls."
        )
    ours = {(r["case"], r["direction"]): r for r in timed if r["implementation"] == "ours"}
    for row in timed:
        other = ours.get((row["case"], row["direction"]))
        if row["implementation"] == CONTROL and other:
            ratio = row["median_s"] / other["median_s"]
            yield (
                f"{row['case']}, {row['direction']}: our kernel took {ratio:.3f} times as long in"
                " the process that times PyTorch."
            )
    torch = [row for row in timed if "torch" in row]
    if torch:
        yield _of_torch(torch)
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "note" in row:
            where = f"{row['case']} ({row['direction']})"
            missing.setdefault((row["implementation"], row["note"]), []).append(where)
    for (name, why), where in missing.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield f"Not measured: {name}, {where[0]}{more}: {why.replace('|', '/')}"


def _of_torch(rows: Sequence[Row]) -> str:
    """How PyTorch's times were taken."""
    graphs = sum(row["launch"] == "graph" for row in rows)
    both = [row["events_s"] / row["median_s"] for row in rows if row["clock"] == "cupti"]
    text = (
        f"PyTorch {', '.join(sorted({row['torch'] for row in rows}))}: {graphs} of {len(rows)}"
        " programs ran as a CUDA graph; results differ from plain JAX's by at most"
        f" {max(row['relative_error'] for row in rows):.2g} of their size"
    )
    if not both:
        return f"{text}."
    return f"{text}; CUDA events gave {statistics.median(both):.3f} times CUPTI's time (median)."


def visited() -> str:
    """Pairs of rows that the attention kernels visit over the useful ones, on the paper's draws."""
    lines = ["| longest | forward | dq | dkv | forward, 4 heads a group |", "|---|---|---|---|---|"]
    for longest in (64, 128, 256, 512, 1024):
        lengths = paper_lengths(longest)
        # One capacity for all: few programs.
        alone, grouped = (area.of_lengths(lengths, 64, n, 16 * 1024) for n in (1, 4))
        cells = [*(alone[name] for name in ("forward", "dq", "dkv")), grouped["forward"]]
        found = (f"{a.computed:.2f} ({a.passed:.2f})" for a in cells)
        lines.append(f"| {longest} | {' | '.join(found)} |")
    return "\n".join(lines)
