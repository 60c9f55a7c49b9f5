"""What a session on a GPU wrote, as tables: every kind of row has one, rehearsals have none."""

import json
import re

import pytest

from experiments.reports import gpu
from pallas_kernels.attention.cases import CASES as ATTENTION
from pallas_kernels.grouped.cases import CASES as GROUPED

DEVICE = "NVIDIA H100 80GB HBM3"
CASE = ATTENTION[0]


def timed(folder, case, implementation, median_s, **more):
    row = {
        "folder": folder,
        "case": case.name,
        "direction": "forward",
        "sets": 3,
        "runs": 51,
        "implementation": implementation,
        "median_s": median_s,
        "p10_s": 0.9 * median_s,
        "p90_s": 1.2 * median_s,
        "clock": "cupti",
        "floor_s": 1e-3,
        "of_floor": 1e-3 / median_s,
    }
    return row | more


TORCH = {"torch": "2.11.0", "relative_error": 0.004, "launch": "graph"}
KERNELS = [
    {"part": "smoke", "item": "machine", "jax": "0.11.2", "cores": 16, "sms": 132,
     "nvidia_smi": "H100, 580"},
    {"part": "smoke", "item": "one kernel", "errors": {"out": 0.5}, "passed": True},
    {"part": "smoke", "item": "peaks", "matmul_flops_per_s": 700e12, "copy_bytes_per_s": 3.0e12,
     "clock": "cupti"},
    timed("attention", CASE, "ours", 4e-3),
    timed("attention", CASE, "cudnn padded", 5e-3, clock="wall"),
    timed("attention", CASE, "torch flash padded", 6e-3, events_s=6.3e-3, **TORCH),
    timed("attention", CASE, gpu.CONTROL, 4.4e-3, sets=1, runs=3),
    {"folder": "attention", "case": CASE.name, "direction": "forward",
     "implementation": "tokamax packed", "note": "ModuleNotFoundError: No module named 'tokamax'"},
    {"folder": "attention", "case": "another", "direction": "forward",
     "implementation": "tokamax packed", "note": "ModuleNotFoundError: No module named 'tokamax'"},
    timed("grouped", GROUPED[0], "ours", 2e-3),
    timed("grouped", GROUPED[0], "dense", 1e-3),
    timed("grouped", GROUPED[0], "ragged_dot", 8e-3),
    {"bert": "stack", "step": "padded, XLA", "item": "stack, padded, XLA", "median_ms": 3.25,
     "p10_ms": 3.125, "p90_ms": 3.5, "n": 51, "clock": "cupti", "wall_ms": 3.75,
     "useful_tflops": 123.0},
    {"bert": "attention", "step": "padded, cuDNN", "item": "x", "note": "ValueError: no cuDNN"},
]  # fmt: skip
CHECKS = [
    {"part": "gemm checks", "item": "a", "errors": {"out": 0.25, "dx": 0.75}, "passed": True},
    {"part": "losses", "item": "b", "value": 3.0, "bound": 2.0, "passed": False},
    {"part": "expert exact", "item": "c", "runs": 100, "wrong": 4, "passed": False},
]
TRAIN = [
    {"variant": "varlen, batch 8", "attention": "varlen", "remat": "outputs", "batch": 8,
     "seq_len": 4096, "segments": 4, **more}
    for more in (
        {"item": "step", "median_s": 0.5, "p10_s": 0.45, "p90_s": 0.55, "n": 20, "clock": "wall",
         "tokens_per_s": 65536.0, "loss": 9.5, "memory_gib": 60.5, "mfu_causal": 0.42,
         "mfu_megatron": 0.44, "flops_per_token_causal": 7.5e9, "flops_per_token_megatron": 8e9},
        {"item": "estimate", "estimate_s": 0.4, "bound_gib": 61.0},
    )
]  # fmt: skip
OVERLAP = [
    {"folder": "collective", "item": "all gather m=4096", "link_gbytes_per_s": 400.0,
     "latency_us": 2.0, "plan": {}, "runs": 8, "gemm_s": 1e-4, "copy_s": 5e-5, "serial_s": 1.5e-4,
     "fused_s": 1.1e-4, "floor_s": 1e-4, "efficiency": 0.8, "relative_error": 0.004,
     "passed": True, "controls_s": {"ready": 1.02e-4, "free": 1.03e-4}, "clock": "cupti"},
]  # fmt: skip
TUNED = [
    {"part": "tune x", "item": "gemm x", "op": "fused_gemm", "key": {"M": 1}, "clock": "cupti",
     "tile": {"block_m": 128, "stages": 4}, "median_us": 10.5, "fastest": "hopper",
     "rivals": {"reference": 12.25}, "heuristic_us": 11.0, "candidates": 9, "failed": ["a: slow"]},
]  # fmt: skip
VERDICTS = [
    {"part": "fine", "verdict": "3 items", "failed": False, "seconds": 4.2, "faults": {},
     "skip": [], "finished": True},
    {"part": "broken", "verdict": "failed (1 items): dead", "failed": True, "seconds": 9.0,
     "faults": {}, "skip": ["tile 1"], "finished": True},
]  # fmt: skip
FILES = {
    "kernels": KERNELS,
    "checks": CHECKS,
    "train": TRAIN,
    "overlap": OVERLAP,
    "verdicts": VERDICTS,
}


def write(folder, slug, layer):
    about = {"device": DEVICE, "layer": layer, "date": "2026-01-02", "commit": "abc"}
    for name, rows in {**FILES, "": TUNED}.items():
        path = folder / (f"{slug}_{name}.json" if name else f"{slug}.json")
        path.write_text(json.dumps(about | {"rows": rows}))


def everything(folder):
    named = (
        gpu.machines,
        gpu.peaks,
        gpu.checks,
        gpu.verdicts,
        gpu.training,
        gpu.bert,
    )
    texts = {table.__name__: table(folder) for table in named}
    texts |= {k: gpu.overlap(folder, k) for k in ("collective", "expert")}
    return texts | {f: gpu.floors(folder, f) for f in ("attention", "grouped", "norm")}


@pytest.fixture
def texts(tmp_path):
    write(tmp_path, "nvidia_h100", f"measured on {DEVICE}")
    return everything(tmp_path) | {"tuned": tuned(tmp_path)}


def tuned(folder):
    only = folder / "tuned"
    only.mkdir()
    (only / "nvidia_h100.json").write_text((folder / "nvidia_h100.json").read_text())
    return gpu.tuned(only)


def line(text, start):
    (match,) = [each for each in text.splitlines() if each.startswith(start)]
    return [cell.strip() for cell in match.strip("|").split("|")]


def test_every_row_has_a_table_that_shows_it(texts):
    assert line(texts["machines"], "| H100, 580")[1:] == ["132", "0.11.2", "16", "right"]
    assert line(texts["peaks"], "| 700") == ["700", "3", "cupti"]
    assert line(texts["checks"], "| gemm checks")[1:] == ["1", "1", "0.75"]
    assert line(texts["checks"], "| losses")[1:] == ["0", "1", "1.5"]
    assert line(texts["checks"], "| expert exact")[1:] == ["0", "1", "0.04"]
    assert texts["verdicts"].index("| broken") < texts["verdicts"].index("| fine")
    step = line(texts["training"], "| varlen")
    for cell in ("attention varlen, remat outputs", "8 x 4096", "0.45 to 0.55", "42.0 %", "44.0 %",
                 "7.5", "9.5", "60.5", "61", "0.8"):  # fmt: skip
        assert cell in step, cell
    stack = line(texts["bert"], "| stack")
    assert stack[1:] == ["padded, XLA", "3.25", "3.125 to 3.5", "51", "cupti", "3.75", "123"]
    assert "ValueError: no cuDNN" in texts["bert"]
    fused = line(texts["collective"], "| all gather")
    assert "right (off by 0.004)" in fused and "ready 102, free 103" in fused
    assert "emulated link" in texts["collective"] and texts["expert"] == gpu.NOTHING
    tile = line(texts["tuned"], "| gemm x")
    assert tile[1:4] == ["block_m 128, stages 4", "1 of 9", "cupti"]
    assert all(
        f"measured on {DEVICE}" in texts[name] for name in texts if name not in ("norm", "expert")
    )


def test_a_case_stands_beside_its_floor_and_its_best_rival(texts):
    text = texts["attention"]
    head, cells = line(text, "| case"), line(text, f"| {CASE.name} | forward |")
    row = dict(zip(head, cells, strict=True))
    floor = CASE.floor_s(bytes_per_s=3.35232e12)
    assert row["floor, us"] == f"{1e6 * floor:.0f}" and row["ours, us"] == "4000"
    assert row["torch flash padded, us"] == "6000" and row["tokamax packed, us"] == ""
    assert row["ours, p10 to p90"] == "3600.0 to 4800.0"
    assert row["floor over ours"] == f"{floor / 4e-3:.2f}"
    assert row["best rival over ours"] == "1.25"
    # A dense product does less than a grouped one: a bound, no rival.
    head = line(texts["grouped"], "| case")
    cells = line(texts["grouped"], f"| {GROUPED[0].name} | forward |")
    assert dict(zip(head, cells, strict=True))["best rival over ours"] == "4.00"


def test_under_a_table_is_what_a_reader_must_know_of_it(texts):
    remarks = [each[2:] for each in texts["attention"].splitlines() if each.startswith("- ")]
    assert remarks == [
        "Floors are those of the data sheet, 3.35 TB/s of memory. Measured in the same session:"
        " memory 3.00 TB/s, a bf16 product 700 TFLOP/s.",
        "Clocks: cupti 3 times, wall 1 times. 1 of 4 times have fewer than 3 inputs or 50 calls.",
        f"{CASE.name}, forward: our kernel took 1.100 times as long in the process that times"
        " PyTorch.",
        "PyTorch 2.11.0: 1 of 1 programs ran as a CUDA graph; results differ from plain JAX's by at"
        " most 0.004 of their size; CUDA events gave 1.050 times CUPTI's time (median).",
        f"Not measured: tokamax packed, {CASE.name} (forward) and 1 more: ModuleNotFoundError: No"
        " module named 'tokamax'",
    ]


def test_a_rehearsal_has_no_table(tmp_path):
    write(tmp_path, "rehearsal", "rehearsed on a CPU: times mean nothing")
    texts = everything(tmp_path)
    for name in ("attention", "grouped", "norm"):  # floors are known without a GPU
        assert not re.search(r"[0-9] to [0-9]", texts.pop(name))
    assert set(texts.values()) == {gpu.NOTHING}
