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
RUNS = 50  # calls that a time should have (scripts/gpu_kernels.py)


def measured(folder: Path, file: str) -> list[dict[str, Any]]:
    """Returns the files of that kind, by device; rehearsals are none."""
    paths = sorted(folder.glob(f"*_{file}.json"))
    found = [json.loads(p.read_text()) for p in paths if p.name != f"rehearsal_{file}.json"]
    return [each for each in found if each.get("layer", "").startswith("measured on")]


def source(file: Mapping[str, Any]) -> str:
    """The line under a table; of rows from several commits, all of them."""
    commits = dict.fromkeys(row["commit"] for row in file["rows"] if row.get("commit"))
    words = [file.get("layer"), file.get("date"), *(commits or [file.get("commit")])]
    return f"*{', '.join(str(word) for word in words if word)}*"


def tables(files: Sequence[dict[str, Any]], columns: Columns, keep: Callable[[Row], bool]) -> str:
    """One table a device, of the rows that are kept."""
    found = []
    for file in files:
        rows = [row for row in file["rows"] if keep(row)]
        if rows:
            cells = [[shown(value(row)) for value in columns.values()] for row in rows]
            lines = [list(columns), ["---"] * len(columns), *cells]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            found.append(f"{table}\n\n{source({**file, 'rows': rows})}")
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
        "memory, TB/s": lambda r: r["copy_bytes_per_s"] / 1e12,
        "clock": lambda r: r["clock"],
    }
    return tables(measured(folder, "kernels"), columns, lambda r: "copy_bytes_per_s" in r)


def machines(folder: Path) -> str:
    """What each machine was, and whether the first small kernel was right there."""
    files = measured(folder, "kernels")
    for file in files:
        about: Row = {}
        for row in file["rows"]:
            about |= row if row.get("part") == "smoke" else {}
        file["rows"] = [about]
    columns: Columns = {
        "nvidia-smi": lambda r: r["nvidia_smi"], "SMs": lambda r: r["sms"],
        "jax": lambda r: r["jax"], "CPU cores": lambda r: r["cores"],
        "first kernel": lambda r: _right(r.get("passed")),
    }  # fmt: skip
    return tables(files, columns, lambda r: "nvidia_smi" in r)


def _right(passed: bool | None) -> str | None:
    return None if passed is None else "right" if passed else "wrong"


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
        "part": lambda r: r["part"], "passed": lambda r: r["right"], "checks": lambda r: r["of"],
        "largest error / allowed error": lambda r: r["worst"],
    }  # fmt: skip
    return tables(found, columns, lambda r: True)


def summary(folder: Path) -> str:
    """A paragraph a device: what is right, and times beside the best rival's."""
    found = []
    for file in measured(folder, "kernels"):
        device = file["device"]
        checked, trained, served = (
            [row for other in measured(folder, kind) if other["device"] == device
             for row in other["rows"]]
            for kind in ("checks", "train", "serving")
        )  # fmt: skip
        passed = sum(bool(row["passed"]) for row in checked)
        text = [f"**{device}**: {passed} of {len(checked)} correctness checks pass"]
        steps = [row for row in trained if "mfu_megatron" in row]
        if steps:
            best = max(steps, key=lambda row: row["mfu_megatron"])
            text.append(
                f"a 1.2B decoder trains at {best['tokens_per_s']:,.0f} tokens/s,"
                f" {100 * best['mfu_megatron']:.1f} % MFU"
            )
        ratios = [
            f"{what} {min(times):.2f} to {max(times):.2f} times as fast as {rival}"
            for kernels, what, rival in (
                ("gemm", "products", "the best library's"),
                ("attention", "attention", "the best library's"),
                ("quant_gemm", "products with quantized weights", "XLA's bf16 products"),
            )
            if (times := _beside(file["rows"], kernels))
        ]  # fmt: skip
        if ratios:
            text.append(f"our forward kernels run {', '.join(ratios)}")
        roofs = [row["of_roofline"] for row in served if row.get("of_roofline")]
        if roofs:
            text.append(f"the engine decodes at {100 * max(roofs):.1f} % of the memory roofline")
        found.append(f"{'; '.join(text)}. {source(file)}")
    return "\n\n".join(found) or "**Nothing has been measured on a GPU yet.**"


def _beside(rows: Sequence[Row], kernels: str) -> list[float]:
    """Returns, for each case, the forward time of the best library beside ours."""
    libraries = {"xla", "dense", "torch", "cudnn padded", "cudnn packed"}
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("folder") == kernels and row["direction"] == "forward" and "median_s" in row:
            times.setdefault(row["case"], {})[row["implementation"]] = row["median_s"]
    found = []
    for case in times.values():
        best = min((case[name] for name in libraries & case.keys()), default=None)
        if best is not None and "ours" in case:
            found.append(best / case["ours"])
    return found


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
        "items left out": lambda r: ", ".join(r["skip"]) or None,
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

    def percent(name: str) -> Callable[[Row], str | None]:
        return lambda row: f"{100 * row[name]:.1f} %" if row.get(name) else None

    columns: Columns = {
        "variant": lambda r: r["variant"],
        "what ran": lambda r: f"attention {r['attention']}, remat {r['remat']}",
        "rows x tokens": lambda r: f"{r['batch']} x {r['seq_len']}",
        "segments a row": lambda r: r["segments"], "a step, s": lambda r: r.get("median_s"),
        "p10 to p90": lambda r: spread(r, "s"), "steps": lambda r: r.get("n"),
        "tokens/s": lambda r: r.get("tokens_per_s"),
        "GFLOP a token": lambda r: _scaled(r, "flops_per_token_causal", 1e-9),
        "MFU, visible pairs inside segments": percent("mfu_causal"),
        "MFU, all pairs inside segments": percent("mfu_megatron"),
        "last loss": lambda r: r.get("loss"), "peak GiB": lambda r: r.get("memory_gib"),
        "GiB by the plan's lower bound": lambda r: r.get("bound_gib"),
        "estimated / measured time": ratio,
    }  # fmt: skip
    return tables(files, columns, lambda r: True)


def serving(folder: Path) -> str:
    """Decoding of a 1.2B model beside its memory roofline, and attention beside a copy."""

    def each(row: Row) -> str:
        return f"{1e3 * row.get('token_s', row.get('median_s')):.3g}"

    def share(row: Row) -> str | None:
        found = row.get("of_roofline", row.get("of_copy"))
        return None if found is None else f"{100 * found:.1f} %"

    columns: Columns = {
        "what": lambda r: r["item"], "ms": each, "tokens/s": lambda r: r.get("tokens_per_s"),
        "share of the roofline, or of the memory's rate": share, "goal": lambda r: r.get("goal"),
        "tokens/s over bf16": lambda r: r.get("over_bf16"), "clock": lambda r: r["clock"],
    }  # fmt: skip
    return tables(measured(folder, "serving"), columns, lambda r: "launches" not in r)


def decoding(folder: Path) -> str:
    """What the GPU does for a token of the 1.2B model, and its largest kernels."""
    columns: Columns = {
        "what": lambda r: r["item"], "launches": lambda r: r["launches"],
        "the GPU computes, ms": lambda r: 1e3 * r["busy_s"],
        "largest kernels, us": lambda r: ", ".join(
            f"{name} {1e6 * s:.0f}" for name, s in list(r["kernels"].items())[:5]
        ),
    }  # fmt: skip
    return tables(measured(folder, "serving"), columns, lambda r: "launches" in r)


def spread(row: Row, unit: str) -> str | None:
    """The 10th and the 90th percentile of a row's times, where it has any."""
    if f"p10_{unit}" not in row:
        return None
    return f"{row[f'p10_{unit}']:.4g} to {row[f'p90_{unit}']:.4g}"


def _scaled(row: Row, name: str, scale: float) -> float | None:
    return scale * row[name] if row.get(name) is not None else None


def overlap(folder: Path, kernels: str) -> str:
    """Products with communication inside, on one GPU beside an emulated link."""
    word = "efficiency" if kernels == "collective" else "hidden"

    def us(name: str) -> Callable[[Row], float]:
        return lambda row: 1e6 * row[name]

    def controls(row: Row) -> str:
        return ", ".join(f"{name} {1e6 * s:.4g}" for name, s in row["controls_s"].items())

    columns: Columns = {
        "case": lambda r: r["item"], "emulated link, GB/s": lambda r: r["link_gbytes_per_s"],
        "product, us": us("gemm_s"), "copies, us": us("copy_s"),
        "one after the other, us": us("serial_s"), "fused, us": us("fused_s"),
        "no less than, us": us("floor_s"), "communication hidden": lambda r: r[word],
        "result": lambda r: f"{_right(r['passed'])} (off by {r['relative_error']:.2g})",
        "controls, us": controls, "launches": lambda r: r["runs"], "clock": lambda r: r["clock"],
    }  # fmt: skip
    wanted = lambda r: r["folder"] == kernels and "fused_s" in r  # noqa: E731
    return tables(measured(folder, "overlap"), columns, wanted)


def bert(folder: Path) -> str:
    """BERT-base at batch 16 and length 1024, all layers and one attention."""
    columns: Columns = {
        "what": lambda r: r["bert"], "step": lambda r: r.get("step", r["item"]),
        "ms": lambda r: r.get("median_ms", r.get("note")), "p10 to p90": lambda r: spread(r, "ms"),
        "calls": lambda r: r.get("n"), "clock": lambda r: r.get("clock"),
        "host's ms": lambda r: r.get("wall_ms"),
        "useful TFLOP/s": lambda r: r.get("useful_tflops"),
    }  # fmt: skip
    return tables(measured(folder, "kernels"), columns, lambda r: "bert" in r)


def tuned(folder: Path) -> str:
    """The tables of tiles."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    columns: Columns = {
        "tuning": lambda r: r["item"],
        "fastest tile": lambda r: ", ".join(f"{k} {v}" for k, v in r["tile"].items()),
        "candidates left out": lambda r: f"{len(r['failed'])} of {r['candidates']}",
        "clock": lambda r: r["clock"], "fastest tile, us": lambda r: r["median_us"],
        "heuristic's tile, us": lambda r: r["heuristic_us"],
        "others, us": lambda r: ", ".join(f"{k} {v:.4g}" for k, v in r["rivals"].items()),
        "fastest implementation": lambda r: r["fastest"],
    }  # fmt: skip
    return tables([f for f in files if f["rows"]], columns, lambda r: "median_us" in r)
