"""Tables of documents: measurements of scripts/gpu_check.py, kernels, and parts of a train step."""

import collections
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reports import bytetransformer
from experiments.reports.reporting import (
    Columns,
    Row,
    markdown_table,
    read,
    rows_of,
    rows_table,
    source,
    table,
)
from pallas_kernels import bench
from pallas_kernels.cases import paper_lengths

# ---- what gpu_check.py wrote
#
# Markdown tables of what scripts/gpu_check.py wrote: each file, of every device that was there.
#
# The files lie in experiments/results, named by device (nvidia_h200_checks.json); without one a
# table says that nothing was measured. Tables of tiles read pallas_kernels/tuned.


NOTHING = "*Not measured yet.*"
RUNS = 50  # calls that a time should have (scripts/gpu_session/kernels.py)


def measured(folder: Path, file: str) -> list[dict[str, Any]]:
    """Returns the files of that kind, by device; rehearsals are none."""
    paths = sorted(folder.glob(f"*_{file}.json"))
    files = [read(p) for p in paths if p.name != f"rehearsal_{file}.json"]
    return [each for each in files if each.get("layer", "").startswith("measured on")]


def origin(file: Mapping[str, Any]) -> str:
    """Returns the line under a table; of rows from several commits it names all of them."""
    commits = dict.fromkeys(row["commit"] for row in file["rows"] if row.get("commit"))
    words = [file.get("layer"), file.get("date"), *(commits or [file.get("commit")])]
    return f"*{', '.join(str(word) for word in words if word)}*"


def tables(files: Sequence[dict[str, Any]], columns: Columns, keep: Callable[[Row], bool]) -> str:
    """Returns one table for each device, of the rows that `keep` accepts."""
    parts = []
    for file in files:
        if rows := [row for row in file["rows"] if keep(row)]:
            parts.append(f"{rows_table(rows, columns)}\n\n{origin({**file, 'rows': rows})}")
    return "\n\n".join(parts) or NOTHING


def peaks(folder: Path) -> str:
    """Returns the rates that plain JAX reaches on each machine."""
    columns: Columns = {
        "bf16 product, TFLOP/s": lambda r: r["matmul_flops_per_s"] / 1e12,
        "memory, TB/s": lambda r: r["copy_bytes_per_s"] / 1e12,
        "clock": lambda r: r["clock"],
    }
    return tables(measured(folder, "kernels"), columns, lambda r: "copy_bytes_per_s" in r)


def machines(folder: Path) -> str:
    """Returns what each machine was, and whether the first small kernel was right there."""
    files = measured(folder, "kernels")
    for file in files:
        about: Row = {}
        for row in file["rows"]:
            about |= row if row.get("part") == "smoke" else {}
        file["rows"] = [about]
    columns: Columns = {
        "nvidia-smi": lambda r: r["nvidia_smi"],
        "SMs": lambda r: r["sms"],
        "jax": lambda r: r["jax"],
        "CPU cores": lambda r: r["cores"],
        "first kernel": lambda r: _right(r.get("passed")),
    }
    return tables(files, columns, lambda r: "nvidia_smi" in r)


def _right(passed: bool | None) -> str | None:
    return None if passed is None else "right" if passed else "wrong"


def checks(folder: Path) -> str:
    """Returns how many results of each part were right, and the worst error divided by its
    bound."""
    summaries = []
    for file in measured(folder, "checks"):
        parts: dict[str, list[Row]] = {}
        for row in file["rows"]:
            parts.setdefault(row["part"], []).append(row)
        rows = [
            {
                "part": part,
                "right": sum(bool(r.get("passed")) for r in rows),
                "of": len(rows),
                "worst": max(map(_worst, rows)),
            }
            for part, rows in parts.items()
        ]
        summaries.append(file | {"rows": rows})
    columns: Columns = {
        "part": lambda r: r["part"],
        "passed": lambda r: r["right"],
        "checks": lambda r: r["of"],
        "largest error / allowed error": lambda r: r["worst"],
    }
    return tables(summaries, columns, lambda r: True)


def summary(folder: Path) -> str:
    """Returns a paragraph for each device: what is right, and times beside the best rival's."""
    paragraphs = []
    for file in measured(folder, "kernels"):
        device = file["device"]
        checked, trained, served = (
            [
                row
                for other in measured(folder, kind)
                if other["device"] == device
                for row in other["rows"]
            ]
            for kind in ("checks", "train", "serving")
        )
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
            if (times := _over_libraries(file["rows"], kernels))
        ]
        if ratios:
            text.append(f"our forward kernels run {', '.join(ratios)}")
        roofs = [row["of_roofline"] for row in served if row.get("of_roofline")]
        if roofs:
            text.append(f"the engine decodes at {100 * max(roofs):.1f} % of the memory roofline")
        paragraphs.append(f"{'; '.join(text)}. {origin(file)}")
    return "\n\n".join(paragraphs) or "**Nothing has been measured on a GPU yet.**"


def _over_libraries(rows: Sequence[Row], kernels: str) -> list[float]:
    """Returns, for each case, the forward time of the best library divided by ours."""
    libraries = {"xla", "dense", "torch", "cudnn padded", "cudnn packed"}
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("folder") == kernels and row["direction"] == "forward" and "median_s" in row:
            times.setdefault(row["case"], {})[row["implementation"]] = row["median_s"]
    ratios = []
    for case in times.values():
        best = min((case[name] for name in libraries & case.keys()), default=None)
        if best is not None and "ours" in case:
            ratios.append(best / case["ours"])
    return ratios


def _worst(row: Row) -> float:
    """Returns the error divided by its bound; of exact results the share of runs that were
    wrong."""
    if "errors" in row:
        return max(row["errors"].values())
    return row["value"] / row["bound"] if "bound" in row else row["wrong"] / row["runs"]


def verdicts(folder: Path) -> str:
    """Returns the verdict on each part, failures first."""
    files = measured(folder, "verdicts")
    for file in files:
        file["rows"].sort(key=lambda row: not row.get("failed"))
    columns: Columns = {
        "part": lambda r: r["part"],
        "verdict": lambda r: r["verdict"][:300],
        "seconds": lambda r: round(r["seconds"]),
        "items left out": lambda r: ", ".join(r["skip"]) or None,
    }
    return tables(files, columns, lambda r: True)


def training(folder: Path) -> str:
    """Returns steps of a 1.2B decoder on one GPU beside the cost model's estimates."""
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
        "segments a row": lambda r: r["segments"],
        "a step, s": lambda r: r.get("median_s"),
        "p10 to p90": lambda r: spread(r, "s"),
        "steps": lambda r: r.get("n"),
        "tokens/s": lambda r: r.get("tokens_per_s"),
        "GFLOP a token": lambda r: (
            1e-9 * r["flops_per_token_causal"] if "flops_per_token_causal" in r else None
        ),
        "MFU, visible pairs inside segments": percent("mfu_causal"),
        "MFU, all pairs inside segments": percent("mfu_megatron"),
        "last loss": lambda r: r.get("loss"),
        "peak GiB": lambda r: r.get("memory_gib"),
        "GiB by the plan's lower bound": lambda r: r.get("bound_gib"),
        "estimated / measured time": ratio,
    }
    return tables(files, columns, lambda r: True)


def serving(folder: Path) -> str:
    """Returns decoding of a 1.2B model beside its memory roofline, and attention beside a copy."""

    def each(row: Row) -> str:
        return f"{1e3 * row.get('token_s', row.get('median_s')):.3g}"

    def share(row: Row) -> str | None:
        share = row.get("of_roofline", row.get("of_copy"))
        return None if share is None else f"{100 * share:.1f} %"

    columns: Columns = {
        "what": lambda r: r["item"],
        "ms": each,
        "tokens/s": lambda r: r.get("tokens_per_s"),
        "share of the roofline, or of the memory's rate": share,
        "goal": lambda r: r.get("goal"),
        "tokens/s over bf16": lambda r: r.get("over_bf16"),
        "clock": lambda r: r["clock"],
    }
    return tables(measured(folder, "serving"), columns, lambda r: "launches" not in r)


def decoding(folder: Path) -> str:
    """Returns the launches of the GPU for a token of the 1.2B model, and its largest kernels."""
    columns: Columns = {
        "what": lambda r: r["item"],
        "launches": lambda r: r["launches"],
        "the GPU computes, ms": lambda r: 1e3 * r["busy_s"],
        "largest kernels, us": lambda r: ", ".join(
            f"{name} {1e6 * s:.0f}" for name, s in list(r["kernels"].items())[:5]
        ),
    }
    return tables(measured(folder, "serving"), columns, lambda r: "launches" in r)


def spread(row: Row, unit: str) -> str | None:
    """Returns the 10th and the 90th percentile of a row's times; None if it has none."""
    if f"p10_{unit}" not in row:
        return None
    return f"{row[f'p10_{unit}']:.4g} to {row[f'p90_{unit}']:.4g}"


def overlap(folder: Path, kernels: str) -> str:
    """Returns products with communication inside, on one GPU beside an emulated link."""
    word = "efficiency" if kernels == "collective" else "hidden"

    def us(name: str) -> Callable[[Row], float]:
        return lambda row: 1e6 * row[name]

    def controls(row: Row) -> str:
        return ", ".join(f"{name} {1e6 * s:.4g}" for name, s in row["controls_s"].items())

    columns: Columns = {
        "case": lambda r: r["item"],
        "emulated link, GB/s": lambda r: r["link_gbytes_per_s"],
        "product, us": us("gemm_s"),
        "copies, us": us("copy_s"),
        "one after the other, us": us("serial_s"),
        "fused, us": us("fused_s"),
        "no less than, us": us("floor_s"),
        "communication hidden": lambda r: r[word],
        "result": lambda r: f"{_right(r['passed'])} (off by {r['relative_error']:.2g})",
        "controls, us": controls,
        "launches": lambda r: r["runs"],
        "clock": lambda r: r["clock"],
    }
    is_fused = lambda r: r["folder"] == kernels and "fused_s" in r  # noqa: E731
    return tables(measured(folder, "overlap"), columns, is_fused)


def bert(folder: Path) -> str:
    """Returns times of BERT-base at batch 16 and length 1024: all layers, and one attention."""
    columns: Columns = {
        "what": lambda r: r["bert"],
        "step": lambda r: r.get("step", r["item"]),
        "ms": lambda r: r.get("median_ms", r.get("note")),
        "p10 to p90": lambda r: spread(r, "ms"),
        "calls": lambda r: r.get("n"),
        "clock": lambda r: r.get("clock"),
        "host's ms": lambda r: r.get("wall_ms"),
        "useful TFLOP/s": lambda r: r.get("useful_tflops"),
    }
    return tables(measured(folder, "kernels"), columns, lambda r: "bert" in r)


def tuned(folder: Path) -> str:
    """Returns the tables of tiles."""
    files = [read(path) for path in sorted(folder.glob("*.json"))]
    columns: Columns = {
        "tuning": lambda r: r["item"],
        "fastest tile": lambda r: ", ".join(f"{k} {v}" for k, v in r["tile"].items()),
        "candidates left out": lambda r: f"{len(r['failed'])} of {r['candidates']}",
        "clock": lambda r: r["clock"],
        "fastest tile, us": lambda r: r["median_us"],
        "heuristic's tile, us": lambda r: r["heuristic_us"],
        "others, us": lambda r: ", ".join(f"{k} {v:.4g}" for k, v in r["rivals"].items()),
        "fastest implementation": lambda r: r["fastest"],
    }
    return tables([f for f in files if f["rows"]], columns, lambda r: "median_us" in r)


# ---- documents of kernels
#
# Markdown tables of the kernels' own documents: what a compiler said, floors, measured times.
#
# A table of times has a line for each case and direction, and under it what a reader must know of
# them: the GPU's own rates, the clocks, and what could not be measured, with the reason.


REPORTED = (
    "attention",
    "paged",
    "tile_sparse",
    "norm",
    "gemm",
    "grouped",
    "quant_gemm",
    "quantize",
    "collective",
    "expert",
)
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
# Implementations that do less than the case asks for: they are bounds and no rivals.
BOUNDS = {"grouped": ("dense",), "quantize": ("copy",), "paged": ("copy",)}
CONTROL = "ours, in PyTorch's process"
DIRECTIONS = (("forward", (False,)), ("forward+backward", (False, True)))
UNDIFFERENTIATED = ("quantize", "quant_gemm", "paged")  # have no kernel of a backward pass


def compiled(results: Path, folder: str) -> str:
    """Returns what ptxas says of every shipped configuration of a folder of kernels."""
    columns = {
        "configuration": "config",
        "kernel": "name",
        "registers": "registers",
        "spilled bytes": "spilled_bytes",
        "shared bytes": "shared_bytes",
        "ptxas makes wgmma wait": "serialized",
    }
    report = read(results / "kernel_report.json")
    rows = [row for row in report["rows"] if row["config"].startswith(f"{folder} ")]
    return f"{rows_table(rows, columns)}\n\n{source(report)}"


def floors(results: Path, folder: str) -> str:
    """Returns the roofline of every case of a folder, and the time of each GPU; one table a
    device."""
    files = measured(results, "kernels")
    files = [file for file in files if any(row.get("folder") == folder for row in file["rows"])]
    return "\n\n".join(_floors(file, folder) for file in files or [{"rows": []}])


def _floors(measured: Row, folder: str) -> str:
    cases = bench.module_of(folder, "cases").CASES
    rate = bench.memory_rate(measured.get("device", "H200"))
    rows = [row for row in measured["rows"] if row.get("folder") == folder]
    times = {(r["case"], r["direction"], r["implementation"]): r for r in rows if "median_s" in r}
    columns = ["case", "pass", "GFLOP", "MB", "floor, us", *SIDES[folder]]
    columns += ["ours, p10 to p90", "floor over ours", "best rival over ours"]
    lines, bounds = [], BOUNDS.get(folder, ())
    for case in cases:
        for direction, parts in DIRECTIONS[: 1 if folder in UNDIFFERENTIATED else 2]:
            flops, nbytes = (sum(f(part) for part in parts) for f in (case.flops, case.bytes))
            floor = sum(case.floor_s(part, rate) for part in parts)
            sides = [times.get((case.name, direction, side)) for side in SIDES[folder].values()]
            rivals = [s for s in sides[1:] if s and s["implementation"] not in bounds]
            line = [
                case.name,
                direction,
                f"{flops / 1e9:.1f}",
                f"{nbytes / 1e6:.1f}",
                f"{1e6 * floor:.{0 if floor > 1e-4 else 1}f}",
                *map(_microseconds, sides),
                *_judged(floor, sides[0], rivals),
            ]
            lines.append(line)
    remarks = [f"- {remark}" for remark in _remarks(measured, rows, rate)]
    parts = [markdown_table(columns, lines)]
    parts += ["\n".join(remarks)] if remarks else []
    return "\n\n".join([*parts, *([origin(measured)] if measured["rows"] else [])])


def _microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    us = 1e6 * row["median_s"]
    return f"{us:.{0 if us > 100 else 1}f}"


def _judged(floor: float, ours: Row | None, rivals: Sequence[Row]) -> list[str]:
    """Returns the last three cells of a line."""
    if ours is None:
        return ["", "", ""]
    took = ours["median_s"]
    best = min((row["median_s"] for row in rivals), default=None)
    return [
        f"{1e6 * ours['p10_s']:.1f} to {1e6 * ours['p90_s']:.1f}",
        f"{floor / took:.2f}",
        f"{best / took:.2f}" if best else "",
    ]


def _remarks(measured: Row, rows: Sequence[Row], rate: float) -> Iterator[str]:
    """Yields remarks on a table of times: rates, clocks, both processes, what is missing."""
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
        few = sum(row["sets"] < bench.SETS or row["runs"] < RUNS for row in timed)
        yield (
            f"Clocks: {', '.join(f'{name} {n} times' for name, n in clocks.items())}. {few} of"
            f" {len(timed)} times have fewer than {bench.SETS} inputs or {RUNS} calls."
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
    """Returns a sentence on how PyTorch's times were taken."""
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
    """Returns the pairs that attention kernels visit, divided by the useful ones, on the paper's
    draws."""
    lines = []
    for longest in (64, 128, 256, 512, 1024):
        lengths = paper_lengths(longest)
        # One capacity for all: few programs.
        alone, grouped = (bytetransformer.of_lengths(lengths, 64, n, 16 * 1024) for n in (1, 4))
        areas = [*(alone[name] for name in ("forward", "dq", "dkv")), grouped["forward"]]
        lines.append((longest, *(f"{a.computed:.2f} ({a.passed:.2f})" for a in areas)))
    return markdown_table(("longest", "forward", "dq", "dkv", "forward, 4 heads a group"), lines)


# ---- where a train step spends its time


NAMES = ("before", "now", "recommended")


def configurations(path: Path) -> str:
    """Returns step time, MFU and memory of each configuration."""
    columns = {
        "configuration": "configuration",
        "segments a row": "segments",
        "remat": "remat",
        "loss chunks": "loss_chunks",
        "step, ms (estimate)": "step_ms",
        "MFU, % (estimate)": "mfu_percent",
        "memory, GiB (estimate)": "bound_gib",
    }
    return table(path, columns)


def memory(path: Path) -> str:
    """Returns the step's memory by XLA."""
    columns = {
        "configuration": "configuration",
        "loss chunks": "loss_chunks",
        "arguments, GiB": "arguments_gib",
        "temporary, GiB": "temporary_gib",
        "peak, GiB": "peak_gib",
        "terms of the cost model, GiB": "bound_gib",
    }
    return table(path, columns)


def causes(path: Path, segments: int) -> str:
    """Returns the milliseconds of each configuration by cause. segments: number of segments in a
    row."""
    result = read(path)
    by_name = {row["configuration"]: row["causes_ms"] for row in rows_of(result, segments=segments)}
    names = list(dict.fromkeys(cause for name in NAMES for cause in by_name[name]))
    lines = [
        (cause, *(f"{by_name[name].get(cause, 0.0):.1f}" for name in NAMES)) for cause in names
    ]
    lines.append(("all", *(f"{sum(by_name[name].values()):.1f}" for name in NAMES)))
    return f"{markdown_table(('ms (estimate)', *NAMES), lines)}\n\n{source(result)}"
