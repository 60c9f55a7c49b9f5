"""Flux (arXiv 2406.06858): tensor parallelism with its communication hidden inside the products.

    uv run experiments/flux.py                      # two sizes of GPT-3 175B, seconds
    uv run experiments/flux.py --preset=paper       # GPT-3 175B and Llama-2 70B, m 64 to 16384

The feed-forward layers of both models on 8 GPUs: an all-gather before the first product, a reduce-
scatter after the second. Times are SIMULATED (pallas_kernels/collective/README.md says how): the
product alone, the collective alone, one after the other, XLA's ring in lockstep, one fused kernel
with its best number of SMs that copy, and the floor that no overlap passes. Flux's overlap
efficiency stands beside them; what its authors report is dashed in the figure and is for their
kernels on their GPUs, not for ours. Writes flux_simulated.json, .svg and .png into --out.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megajax.core import config
from megajax.core.config import option
from megajax.monitor import results
from megajax.systems import overlap_report as report
from pallas_kernels.collective.cases import DENSE, ROWS
from pallas_kernels.collective.simulator import MACHINES


@dataclass(frozen=True)
class Config:
    """What is simulated, and on what."""

    models: str = option(",".join(DENSE), "models, with commas")
    rows: str = option(",".join(map(str, ROWS)), "rows m of the layer's input on all ranks")
    card: Literal["H100", "H800"] = option("H800", "simulated GPU; H800: as in the paper")
    out: str = option(str(Path(__file__).parent / "results"), "folder of the files written")

    def __post_init__(self):
        """Refuses models and sizes that do not exist."""
        report.names("models", self.models, DENSE)
        report.numbers("rows", self.rows)


def tiny() -> Config:
    """Two sizes of GPT-3 175B."""
    return Config(models="gpt3_175b", rows="1024,4096")


def paper() -> Config:
    """Every size of both models."""
    return Config()


def main() -> int:
    """Simulates, writes after every row, prints and draws."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    machine = MACHINES[cfg.card]
    about: dict[str, Any] = results.facts(f"8 x {machine.name}", "simulated")
    about |= {"preset": config.start_name(), "machine": dataclasses.asdict(machine)}
    about |= {"reported": report.reported()}
    path = Path(cfg.out).expanduser() / "flux_simulated.json"
    models = report.names("models", cfg.models, DENSE)
    rows: list[report.Row] = []
    for row in report.dense_rows(models, report.numbers("rows", cfg.rows), machine):
        rows.append(row)
        results.write(path, about, rows)
        took = " ".join(f"{way} {1e6 * row[f'{way}_s']:.0f}" for way in ("serial", "ring", "fused"))
        print(
            f"simulated | {row['model']} {row['kind']} m {row['m']}, {8 * row['wire_bytes']} bits "
            f"on the wire | {took} us, floor {1e6 * row['floor_s']:.0f} us | "
            f"efficiency {100 * row['fused_efficiency']:.0f} % with {row['comm_blocks']} SMs",
            flush=True,
        )
    if "gpt3_175b" in models:
        report.draw_ops(rows, machine.name, path.with_suffix(""))
    print(path)
    return 0


PRESETS = {"tiny": tiny, "paper": paper}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
