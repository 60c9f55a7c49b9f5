"""Markdown tables of what overlap.py simulates, for the README of the collective kernels."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.reports import overlap_simulator as simulator
from pallas_kernels.collective.cases import DENSE

Columns = Mapping[str, Callable[[dict], str]]  # heading -> what a row's cell says


def gather() -> str:
    """GPT-3's gather on a simulated H100: microseconds and overlap efficiency, by m."""
    machine = simulator.H100
    ways: dict[str, tuple[tuple[int, ...], bool]] = {
        "fused, 4 SMs copy": ((4,), True), "8 SMs": ((8,), True),
        "copy engine, no rotation": ((0,), False),
    }  # fmt: skip
    columns = ["m", "product", "gather", "serial", "XLA's ring", *ways]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for m in (512, 1024, 2048, 4096, 8192, 16384):
        op = DENSE["gpt3_175b"].up(m)
        gemm, serial = simulator.gemm_s(op.m, op.n, op.k, machine), simulator.serial_s(op, machine)
        cells = [f"{1e6 * s:.0f}" for s in (gemm, simulator.comm_s(op, machine), serial)]
        fused = [
            simulator.best_fused(op, machine, simulator.candidates(op, blocks, rotated))[0]
            for blocks, rotated in ways.values()
        ]
        for seconds in (simulator.ring_s(op, machine), *fused):
            hidden = simulator.efficiency(seconds, gemm, serial)
            cells.append(f"{1e6 * seconds:.0f} ({_percent(hidden)})")
        lines.append(f"| {m} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "*simulated, 8 x H100*"])


def _percent(share: float | None) -> str:
    """A share in percent; '-' where there is none."""
    return "-" if share is None else f"{100 * share:.0f} %"


def _simulated(path: Path, columns: Columns, device: str = "", **wanted: object) -> str:
    """A table of the rows of a simulated result that have the members `wanted`."""
    found = json.loads(path.read_text())
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in found["rows"]:
        if wanted.items() <= row.items():
            lines.append(f"| {' | '.join(cell(row) for cell in columns.values())} |")
    source = found["layer"], device or found["device"], found["date"], found["commit"]
    return "\n".join([*lines, "", f"*{', '.join(source)}*"])


def ops(path: Path) -> str:
    """GPT-3's products by m: serial, ring, fused, floor."""

    def us(name: str) -> Callable[[dict], str]:
        return lambda row: f"{1e6 * row[f'{name}_s']:.0f}"

    columns: Columns = {
        "product": lambda r: f"{r['kind']}, {8 * r['wire_bytes']} bits",
        "m": lambda r: str(r["m"]), "alone": us("gemm"), "collective": us("comm"),
        "serial": us("serial"), "ring": us("ring"), "fused": us("fused"), "floor": us("floor"),
        "efficiency": lambda r: _percent(r["fused_efficiency"]),
        "SMs that copy (c_max)": lambda r: f"{r['comm_blocks']} ({r['most_comm_blocks']})",
        "fastest": lambda r: r["fastest"],
    }  # fmt: skip
    return _simulated(path, columns, part="op", model="gpt3_175b")


def models(dense: Path, mixtures: Path) -> str:
    """Whole models, estimated: dense ones by pass, mixtures as means over their layouts."""
    head = ["model", "pass", "tokens", "one after the other", "hidden", "times, estimated",
            "times, as the paper reports"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    groups: dict[tuple, list[dict]] = {}
    for found in map(json.loads, (dense.read_text(), mixtures.read_text())):
        for row in found["rows"]:
            if row["part"] == "model" and row.get("std", 0.032) == 0.032:
                tokens = row["m"] if "m" in row else row["tokens"]
                groups.setdefault((row["model"], row["passes"], tokens), []).append(row)
    for key, rows in groups.items():
        serial, hidden, times = (
            sum(row[name] for row in rows) / len(rows)
            for name in ("serial_s", "fused_s", "speedup")
        )
        cells = *map(str, key), f"{1e6 * serial:.0f}", f"{1e6 * hidden:.0f}", f"{times:.2f}"
        lines.append(f"| {' | '.join(cells)} | {rows[0]['reported']:.2f} |")
    source = found["layer"], found["device"], found["date"], found["commit"]
    return "\n".join([*lines, "", f"*estimates: {', '.join(source)}*"])


def layers(path: Path) -> str:
    """Mixtures of experts: serial, fused and what is hidden, by layout."""
    columns: Columns = {
        "model": lambda r: r["model"],
        "tensor x expert": lambda r: f"{r['tensor']} x {r['expert']}",
        "products, us": lambda r: f"{1e6 * r['gemm_s']:.0f}",
        "serial": lambda r: f"{1e6 * r['serial_s']:.0f}",
        "fused": lambda r: f"{1e6 * r['fused_s']:.0f}",
        "times": lambda r: f"{r['speedup']:.2f}", "hidden": lambda r: _percent(r["hidden"]),
        "SMs that copy": lambda r: f"{r['dispatch_comm_blocks']}, {r['combine_comm_blocks']}",
    }  # fmt: skip
    return _simulated(path, columns, part="layer", tokens=16384, std=0.032)


def repository(path: Path) -> str:
    """What Flux's repository reports of its mixtures beside our simulation of the same shapes."""
    columns: Columns = {
        "layer": lambda r: f"{r['model']}, {r['tensor']} x {r['expert']}",
        "product": lambda r: r["product"], "alone, ms": lambda r: f"{r['gemm_ms']:.2f}",
        "fused, ms": lambda r: f"{r['fused_ms']:.2f}",
        "Flux, as reported, ms": lambda r: f"{r['reported_ms']:.2f}",
        "reported / ours": lambda r: f"{r['reported_ms'] / r['fused_ms']:.2f}",
    }  # fmt: skip
    return _simulated(path, columns, "8 x H100", part="repository")
