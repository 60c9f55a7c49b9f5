"""Markdown tables of what scripts/gpu_check.py wrote: each file, of every device that was there.

The files lie in experiments/results, named by device (nvidia_h200_checks.json); without one a table
says that nothing was measured. Tables of tiles read pallas_kernels/tuned.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], Any]]
NOTHING = "*Not measured yet.*"


def measured(folder: Path, file: str) -> list[dict[str, Any]]:
    """Returns the files of that kind, by device; rehearsals are none."""
    paths = sorted(folder.glob(f"*_{file}.json"))
    found = [json.loads(p.read_text()) for p in paths if p.name != f"rehearsal_{file}.json"]
    return [each for each in found if each.get("layer", "").startswith("measured on")]


def source(file: Mapping[str, Any]) -> str:
    """The line under a table."""
    return f"*{', '.join(str(file[k]) for k in ('layer', 'date', 'commit') if file.get(k))}*"


def tables(files: Sequence[dict[str, Any]], columns: Columns, keep: Callable[[Row], bool]) -> str:
    """One table a device, of the rows that are kept."""
    found = []
    for file in files:
        rows = [row for row in file["rows"] if keep(row)]
        if rows:
            cells = [[shown(value(row)) for value in columns.values()] for row in rows]
            lines = [list(columns), ["---"] * len(columns), *cells]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            found.append(f"{table}\n\n{source(file)}")
    return "\n\n".join(found) or NOTHING


def shown(value: Any) -> str:
    """One cell."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def peaks(folder: Path) -> str:
    """What plain JAX reaches on each machine."""
    columns: Columns = {
        "bf16 product, TFLOP/s": lambda r: r["matmul_flops_per_s"] / 1e12,
        "copy, TB/s": lambda r: r["copy_bytes_per_s"] / 1e12,
        "clock": lambda r: r["clock"],
    }
    return tables(measured(folder, "kernels"), columns, lambda r: "copy_bytes_per_s" in r)


def machines(folder: Path) -> str:
    """What each machine was."""
    columns: Columns = {
        "nvidia-smi": lambda r: r["nvidia_smi"], "SMs": lambda r: r["sms"],
        "jax": lambda r: r["jax"], "CPU cores": lambda r: r["cores"],
    }  # fmt: skip
    return tables(measured(folder, "kernels"), columns, lambda r: "nvidia_smi" in r)


def checks(folder: Path) -> str:
    """How many results of each part were right; the worst error over its bound."""
    found = []
    for file in measured(folder, "checks"):
        parts: dict[str, list[Row]] = {}
        for row in file["rows"]:
            parts.setdefault(row["part"], []).append(row)
        rows = [
            {
                "part": part, "right": sum(bool(r.get("passed")) for r in rows), "of": len(rows),
                "worst": max(map(_worst, rows)),
            }
            for part, rows in parts.items()
        ]  # fmt: skip
        found.append(file | {"rows": rows})
    columns: Columns = {
        "part": lambda r: r["part"], "right": lambda r: r["right"], "of": lambda r: r["of"],
        "largest error over its bound": lambda r: r["worst"],
    }  # fmt: skip
    return tables(found, columns, lambda r: True)


def _worst(row: Row) -> float:
    """Error over bound; of exact results the share of runs that were wrong."""
    if "errors" in row:
        return max(row["errors"].values())
    return row["value"] / row["bound"] if "bound" in row else row["wrong"] / row["runs"]


def verdicts(folder: Path) -> str:
    """What became of each part, failures first."""
    files = measured(folder, "verdicts")
    for file in files:
        file["rows"].sort(key=lambda row: not row.get("failed"))
    columns: Columns = {
        "part": lambda r: r["part"], "verdict": lambda r: r["verdict"][:300],
        "seconds": lambda r: round(r["seconds"]),
        "left out": lambda r: ", ".join(r["skip"]) or None,
    }  # fmt: skip
    return tables(files, columns, lambda r: True)


def training(folder: Path) -> str:
    """Steps of a 1.2B decoder on one GPU beside the cost model's estimates."""
    files = measured(folder, "train")
    for file in files:
        by_variant: dict[str, Row] = {}
        for row in file["rows"]:
            by_variant[row["variant"]] = by_variant.get(row["variant"], {}) | row
        file["rows"] = list(by_variant.values())

    def ratio(row: Row) -> float | None:
        both = "estimate_s" in row and "median_s" in row
        return row["estimate_s"] / row["median_s"] if both else None

    def percent(row: Row) -> str | None:
        return f"{100 * row['mfu_causal']:.1f} %" if row.get("mfu_causal") else None

    def spread(row: Row) -> str:
        return f"{row['p10_s']:.3f} to {row['p90_s']:.3f}" if "p10_s" in row else "-"

    columns: Columns = {
        "variant": lambda r: r["variant"],
        "rows x tokens": lambda r: f"{r['batch']} x {r['seq_len']}",
        "segments a row": lambda r: r["segments"], "a step, s": lambda r: r.get("median_s"),
        "p10 to p90": spread, "tokens/s": lambda r: r.get("tokens_per_s"),
        "MFU, attention inside segments": percent, "peak GiB": lambda r: r.get("memory_gib"),
        "bound GiB": lambda r: r.get("bound_gib"), "estimate over measured": ratio,
    }  # fmt: skip
    return tables(files, columns, lambda r: True)


def overlap(folder: Path, kernels: str) -> str:
    """Products with communication inside, on one GPU beside an emulated link."""
    word = "efficiency" if kernels == "collective" else "hidden"

    def us(name: str) -> Callable[[Row], float]:
        return lambda row: 1e6 * row[name]

    columns: Columns = {
        "case": lambda r: r["item"], "link, GB/s": lambda r: r["link_gbytes_per_s"],
        "product, us": us("gemm_s"), "copies, us": us("copy_s"),
        "one after the other, us": us("serial_s"), "fused, us": us("fused_s"),
        "communication hidden": lambda r: r[word],
    }  # fmt: skip
    wanted = lambda r: r["folder"] == kernels and "fused_s" in r  # noqa: E731
    return tables(measured(folder, "overlap"), columns, wanted)


def bert(folder: Path) -> str:
    """BERT-base at batch 16 and length 1024, all layers and one attention."""
    columns: Columns = {
        "what": lambda r: r["bert"], "step": lambda r: r.get("step", r["item"]),
        "ms": lambda r: r.get("median_ms", r.get("note")), "clock": lambda r: r.get("clock"),
        "useful TFLOP/s": lambda r: r.get("useful_tflops"),
    }  # fmt: skip
    return tables(measured(folder, "kernels"), columns, lambda r: "bert" in r)


def tuned(folder: Path) -> str:
    """The tables of tiles."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    columns: Columns = {
        "tuning": lambda r: r["item"], "ours, us": lambda r: r["median_us"],
        "heuristic's tile, us": lambda r: r["heuristic_us"],
        "others, us": lambda r: ", ".join(f"{k} {v:.4g}" for k, v in r["rivals"].items()),
        "fastest": lambda r: r["fastest"],
    }  # fmt: skip
    return tables([f for f in files if f["rows"]], columns, lambda r: "median_us" in r)
