"""MegaScale's ablation (arXiv 2402.15627, table 3) by the cost model: SIMULATED, never measured.

    uv run experiments/megascale_ablation.py

The model has 175B parameters and runs on 256 A100s: batch 256, PP 8 x DP 4 x TP 8, 6 chunks a
stage. Each row adds one change to the row before. Only the sign of each modelled row is claimed.
Absolute figures differ from the paper's, because the efficiencies of matmuls and attention are
assumed and the baseline overlaps no communication here, while the paper's Megatron-LM overlaps a
part. Operators and the data pipeline are not modelled. The command writes megascale_ablation.json
into --out; scripts/tables.py makes the table of docs/papers/megascale.md from the file in
experiments/results.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import sys
from dataclasses import dataclass

from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core.hardware import parse_cluster
from megajax.cost.estimate import estimate
from megajax.cost.step import Pipeline, StepShape
from megajax.cost.traffic import Overlap, transfers
from megajax.models.decoder_config import PRESETS
from megajax.monitor import results

CLUSTER = parse_cluster("a100:32x8")
SIZES = {"pipe": 8, "node": 1, "data": 4, "expert": 1, "context": 1, "tensor": 8}
# (what is added, MFU of the paper in percent)
PAPER = (
    ("Megatron-LM", 47.7),
    ("parallel block (PTB)", 52.3),
    ("sliding window (SWA)", 53.3),
    ("TP overlap", 55.5),
    ("PP overlap", 58.0),
    ("DP overlap", 59.5),
    ("operators", 61.2),
    ("data pipeline, garbage collection", 62.3),
    ("LAMB, batch x 3", 65.3),
)


@dataclass(frozen=True)
class Config(config.Checked):
    """The folder of the table; what is simulated is the paper's."""

    out: str = results.out_option("megascale_ablation")


config.define_flags({"default": Config}, "default")


def mfu(parallel: bool, window: int | None, overlap: Overlap, batch: int) -> float:
    """Returns the simulated MFU, with the attention credited as in the paper's tables.

    Selective recomputation (attention is made again) and a fused attention kernel.
    """
    block = "parallel" if parallel else "serial"
    model = dataclasses.replace(PRESETS["megascale_175b"](), block=block, window=window)
    pipeline = Pipeline(SIZES["pipe"], batch // SIZES["data"], 6, stash="residuals")
    step = StepShape(
        model.workload(batch, 2048),
        SIZES,
        ("data",),
        remat="dots",
        fused_attention=True,
        local_gradients=True,
        pipeline=pipeline,
    )
    return estimate(step, CLUSTER, transfers(step, overlap)).mfu_megatron


def rows() -> list[dict]:
    """Returns one row for each line of the paper's table; what is not modelled has no figure."""
    everything = Overlap(data=1, tensor=1, pipe=1)
    steps = {
        "Megatron-LM": (False, None, Overlap(), 256),
        "parallel block (PTB)": (True, None, Overlap(), 256),
        "sliding window (SWA)": (True, 1024, Overlap(), 256),
        "TP overlap": (True, 1024, Overlap(tensor=1), 256),
        "PP overlap": (True, 1024, Overlap(tensor=1, pipe=1), 256),
        "DP overlap": (True, 1024, everything, 256),
        "LAMB, batch x 3": (True, 1024, everything, 768),
    }
    made, paper_before, ours_before = [], None, None
    for name, paper in PAPER:
        ours = 100 * mfu(*steps[name]) if name in steps else None
        made.append(
            {
                "added": name,
                "paper": f"{paper} %",
                "paper_gain": None if paper_before is None else f"{paper - paper_before:+.1f}",
                "ours": "not modelled" if ours is None else f"{ours:.1f} %",
                "gain": None
                if ours is None or ours_before is None
                else f"{ours - ours_before:+.1f}",
            }
        )
        paper_before, ours_before = paper, ours_before if ours is None else ours
    return made


def main() -> int:
    """Simulates, writes and prints."""
    cfg, _ = config.from_flags({"default": Config})
    path = results.writable_folder(cfg.out) / "megascale_ablation.json"
    steps = rows()
    results.write(path, results.facts("256 x A100", "simulated"), steps)
    columns = {
        "added": "added",
        "MFU, paper": "paper",
        "gain, paper": "paper_gain",
        "MFU, simulated": "ours",
        "gain, simulated": "gain",
    }
    print(results.columns(steps, columns))
    print(
        "Simulated, not measured: all modelled rows together bring the MFU from "
        f"{steps[0]['ours']} to {steps[-1]['ours']}; the paper measured "
        f"{steps[0]['paper']} to {steps[-1]['paper']}."
    )
    print(path)
    print(
        closing(
            "default",
            paper=f"{steps[0]['paper']} to {steps[-1]['paper']}",
            ours=f"{steps[0]['ours']} to {steps[-1]['ours']}",
            source="MFU, simulated",
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
