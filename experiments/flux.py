"""Flux (arXiv 2406.06858): tensor parallelism with its communication hidden inside the products.

    uv run experiments/flux.py                      # two sizes of GPT-3 175B, seconds
    uv run experiments/flux.py --preset=paper       # GPT-3 175B and Llama-2 70B, m 64 to 16384
    uv run experiments/flux.py --part=exact         # the layer itself, on 8 emulated devices

The feed-forward layers of both models run on 8 GPUs, with an all-gather before the first product
and a reduce-scatter after the second. Times are SIMULATED (pallas_kernels/collective/README.md says
how): those of the product alone, of the collective alone, of one after the other, of XLA's ring in
lockstep, of one fused kernel with its best number of SMs that copy, and of the floor that no
overlap can pass. Flux's overlap efficiency is shown beside them. The authors' figures, dashed in
the figure, are of their kernels on their GPUs. Figures for whole models (Flux reports 1.24 times in
training and 1.66 in prefill) are ESTIMATES. The command writes flux_simulated.json, .svg and .png
into --out.

With --part=exact the layers run with plain collectives and with rings on 8 EMULATED devices, 1/64
as wide, on 8 and on 200 rows. Products and all gradients are compared with float64. The command
then writes flux_emulated.json.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, Literal

from experiments.reports import overlap as report
from experiments.reports.overlap_simulator import MACHINES
from experiments.reports.reporting import closing, written
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, option
from megajax.monitor import results
from pallas_kernels.collective.cases import DENSE, RANKS

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Config(Checked):
    """What is simulated, and on what."""

    part: Literal["simulated", "exact"] = option(
        "simulated", "what is done: simulated times, or the layer compared with NumPy"
    )
    models: str = option(",".join(DENSE), "models, joined by commas")
    rows: str = option(
        ",".join(map(str, ROWS)),
        "simulated rows m of the layer's input on all ranks, a multiple of 8",
    )
    card: Literal["H100", "H800"] = option("H800", "simulated GPU; H800: as in the paper")
    out: str = results.out_option("flux")

    def __post_init__(self):
        """Refuses models and sizes that do not exist."""
        super().__post_init__()
        report.names("models", self.models, DENSE)
        report.shared("rows", self.rows)


def tiny() -> Config:
    """Two sizes of GPT-3 175B."""
    return Config(models="gpt3_175b", rows="1024,4096")


def paper() -> Config:
    """Every size of both models."""
    return Config()


def main() -> int:
    """Does one part, and writes after every row."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    return check(cfg) if cfg.part == "exact" else simulate(cfg)


def check(cfg: Config) -> int:
    """Compares the layer on emulated devices with NumPy."""
    mesh_.start(RANKS)
    about = results.facts(f"{RANKS} emulated CPU devices", "emulated")
    about |= {"preset": config.start_name(), "dtype": "float32", "narrower": report.FLUX_NARROWER}
    path = results.writable_folder(cfg.out) / "flux_emulated.json"
    rows: list[report.Row] = []
    layers = report.flux_rows(report.names("models", cfg.models, DENSE))
    for row in written(layers, path, about, rows):
        worst = max(value for name, value in row.items() if name.endswith("_error"))
        print(
            f"emulated | {row['model']} {row['way']}, {row['m']} rows | largest error of y and all "
            f"gradients {worst:.1e}, same bits twice: {row['same_bits']}",
            flush=True,
        )
    print(path)
    worst = max(v for row in rows for name, v in row.items() if name.endswith("_error"))
    print(
        f"Shown: {len(rows)} layers on {RANKS} emulated devices give NumPy's results and "
        f"gradients, largest error {worst:.1e}. Nothing was timed; the paper has no such check."
    )
    print(closing(config.start_name()))
    return 0


def simulate(cfg: Config) -> int:
    """Simulates the times and draws their figure."""
    machine = MACHINES[cfg.card]
    about: dict[str, Any] = results.facts(f"8 x {machine.name}", "simulated")
    about |= {"preset": config.start_name(), "machine": dataclasses.asdict(machine)}
    about |= {"reported": report.reported()}
    path = results.writable_folder(cfg.out) / "flux_simulated.json"
    models = report.names("models", cfg.models, DENSE)
    rows: list[report.Row] = []
    products = report.dense_rows(models, report.numbers("rows", cfg.rows), machine)
    for row in written(products, path, about, rows):
        took = " ".join(
            f"{side} {1e6 * row[f'{side}_s']:.0f}" for side in ("serial", "ring", "fused")
        )
        print(
            f"simulated | {row['model']} {row['kind']} m {row['m']}, {8 * row['wire_bytes']} bits "
            f"on the wire | {took} us, floor {1e6 * row['floor_s']:.0f} us | "
            f"efficiency {100 * row['fused_efficiency']:.0f} % with {row['comm_blocks']} SMs",
            flush=True,
        )
    for row in written(report.dense_model_rows(models, machine), path, about, rows):
        print(
            f"simulated estimate | {row['model']} {row['passes']}, {row['m']} tokens | a block: "
            f"serial {1e6 * row['serial_s']:.0f} hidden {1e6 * row['fused_s']:.0f} us | "
            f"{row['speedup']:.2f} times; Flux reports {row['reported']:.2f}",
            flush=True,
        )
    if "gpt3_175b" in models:
        shown = report.draw_ops(rows, machine.name, path.with_suffix(""))
        print(f"{shown}. Flux reports up to {report.FLUX_BEST:.0f} %, measured.")
    print(path)
    best = max((r["fused_efficiency"] for r in rows if "fused_efficiency" in r), default=None)
    hidden = "of the communication hidden"
    print(
        closing(
            config.start_name(),
            paper=f"up to {report.FLUX_BEST:.0f} % {hidden}",
            ours="" if best is None else f"up to {100 * best:.0f} %",
            source=f"simulated, {machine.name}",
        )
    )
    return 0


PRESETS = {"tiny": tiny, "paper": paper}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
