"""Markdown tables of the kernels' own documents: what a compiler said, floors, measured times."""

import importlib
from pathlib import Path

from experiments.reports import gpu_tables
from megajax.monitor.results import table
from pallas_kernels import bench
from pallas_kernels.attention import area
from pallas_kernels.attention.cases import paper_lengths

REPORTED = ("attention", "tile_sparse", "norm", "gemm", "grouped", "collective", "expert")
# What stands beside our times of a folder: heading -> implementation in a DEVICE_kernels.json.
SIDES = {
    "attention": {
        "ours, us": "ours", "cuDNN padded, us": "cudnn padded", "cuDNN packed, us": "cudnn packed",
        "tokamax packed, us": "tokamax packed", "XLA, us": "reference",
    },
    "norm": {"ours, us": "ours", "XLA, us": "xla"},
    "gemm": {"ours, us": "ours", "XLA, us": "xla"},
    "grouped": {
        "ours, us": "ours", "JAX's kernels, us": "ragged_dot_mgpu",
        "XLA's ragged_dot, us": "ragged_dot", "one dense product, us": "dense",
    },
    "packing": {"ours, us": "ours"},
    "tile_sparse": {
        "ours, us": "ours", "dense cuBLAS, us": "dense", "plain JAX, us": "reference",
    },
}  # fmt: skip


def compiled(results: Path, folder: str) -> str:
    """What ptxas says of every shipped configuration of a folder of kernels."""
    columns = {
        "configuration": "config", "kernel": "name", "registers": "registers",
        "spilled bytes": "spilled_bytes", "shared bytes": "shared_bytes",
        "wgmma serialised": "serialized",
    }  # fmt: skip
    return table(results / "kernel_report.json", columns, config=f"{folder} ")


def floors(results: Path, folder: str) -> str:
    """The roofline of every case of a folder, and what each GPU took; one table a device."""
    files = gpu_tables.measured(results, "kernels")
    files = [file for file in files if any(row.get("folder") == folder for row in file["rows"])]
    return "\n\n".join(_floors(file, folder) for file in files or [{"rows": []}])


def _floors(measured: dict, folder: str) -> str:
    cases = importlib.import_module(f"pallas_kernels.{folder}.cases").CASES
    rate = bench.memory_rate(measured.get("device", "H200"))

    def took(case: str, direction: str, implementation: str) -> str:
        wanted = {
            "folder": folder, "case": case, "direction": direction,
            "implementation": implementation,
        }  # fmt: skip
        found = [
            row["median_s"]
            for row in measured["rows"]
            if wanted.items() <= row.items() and "median_s" in row
        ]
        return f"{1e6 * found[0]:.0f}" if found else ""

    columns = ["case", "pass", "GFLOP", "MB", "floor, us", *SIDES[folder]]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for case in cases:
        for direction, parts in (("forward", (False,)), ("forward+backward", (False, True))):
            flops, nbytes = (sum(f(part) for part in parts) for f in (case.flops, case.bytes))
            floor = sum(case.floor_s(part, rate) for part in parts)
            cells = [
                case.name, direction, f"{flops / 1e9:.1f}", f"{nbytes / 1e6:.1f}",
                f"{1e6 * floor:.{0 if floor > 1e-4 else 1}f}",
                *(took(case.name, direction, side) for side in SIDES[folder].values()),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(["", gpu_tables.source(measured)] if measured["rows"] else [])])


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
