"""COMET (arXiv 2502.19811): a mixture of experts with its communication hidden tile by tile.

    uv run experiments/comet.py                     # one model, seconds
    uv run experiments/comet.py --preset=paper      # three models, four layouts, three imbalances
    uv run experiments/comet.py --part=exact        # the layer itself, on 8 emulated devices

The models are Mixtral 8x7B, Qwen2-MoE and Phi-3.5-MoE on 8 GPUs, with tensor x expert parallelism
8x1, 4x2, 2x4 and 1x8. Tokens are assigned to experts so that the experts' shares of the work have a
given standard deviation. Times are SIMULATED (pallas_kernels/collective/README.md says how): those
of both grouped products of a layer alone, one after the other with their communication, and fused,
on the rank with the most work. Figures for whole models are ESTIMATES. COMET's authors report 1.96
times for a layer and 1.71 times for a model over other systems; these cannot be compared with our
times. The milliseconds that Flux's repository reports for such products are shown beside ours of
the same shapes. The command writes comet_simulated.json, .svg and .png into --out.

With --part=exact the layer runs with plain collectives and with rings on 8 EMULATED devices, a
sixteenth as wide. Products and gradients are compared with a float64 loop over the tokens. The
command then writes comet_emulated.json.
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
from megajax.core.errors import UserError
from megajax.monitor import results
from pallas_kernels.collective.cases import RANKS
from pallas_kernels.expert.cases import MIXTURES

LAYOUTS = ((8, 1), (4, 2), (2, 4), (1, 8))  # (tensor, expert)
MOST_STD = 0.5  # of shares of at least 2 experts: 1 and 0
MOST_TOKENS = 64  # of an exact layer: the loop's seconds


@dataclass(frozen=True)
class Config(Checked):
    """What is simulated, and on what."""

    part: Literal["simulated", "exact"] = option(
        "simulated", "what is done: simulated times, or the layer compared with a loop"
    )
    models: str = option(",".join(MIXTURES), "models, joined by commas")
    tokens: str = option("4096,16384", "tokens of a layer on all ranks, a multiple of 8")
    stds: str = option(
        "0,0.032,0.05", "standard deviations of the experts' shares of the rows, joined by commas"
    )
    card: Literal["H100", "H800"] = option("H800", "simulated GPU; H800: as in the papers")
    out: str = results.out_option("comet")

    def __post_init__(self):
        """Refuses models and sizes that do not exist."""
        super().__post_init__()
        report.names("models", self.models, MIXTURES)
        report.shared("tokens", self.tokens)
        largest = max(report.numbers("stds", self.stds, float))
        if largest >= MOST_STD:
            raise UserError(
                f"stds={self.stds}: the shares of the rows add up to 1, so {largest:g} must be "
                f"below {MOST_STD} (--stds)"
            )


def tiny() -> Config:
    """Mixtral at 4096 tokens."""
    return Config(models="mixtral_8x7b", tokens="4096", stds="0.032")


def paper() -> Config:
    """Three models, two numbers of tokens, three imbalances."""
    return Config()


def main() -> int:
    """Does one part, and writes after every row."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    return check(cfg) if cfg.part == "exact" else simulate(cfg)


def check(cfg: Config) -> int:
    """Compares the layer on emulated devices with a loop."""
    mesh_.start(RANKS)
    about = results.facts(f"{RANKS} emulated CPU devices", "emulated")
    about |= {"preset": config.start_name(), "dtype": "float32", "narrower": report.COMET_NARROWER}
    path = results.writable_folder(cfg.out) / "comet_emulated.json"
    rows: list[report.Row] = []
    layers = report.comet_rows(
        report.names("models", cfg.models, MIXTURES),
        LAYOUTS,
        min(report.numbers("tokens", cfg.tokens) + [MOST_TOKENS]),
        report.numbers("stds", cfg.stds, float)[-1:],
    )
    for row in written(layers, path, about, rows):
        worst = max(value for name, value in row.items() if name.endswith("_error"))
        print(
            f"emulated | {row['model']} {row['tensor']}x{row['expert']} {row['way']}, "
            f"{row['tokens']} tokens | largest error of y and all gradients {worst:.1e}, "
            f"same bits twice: {row['same_bits']}",
            flush=True,
        )
    print(path)
    worst = max(v for row in rows for name, v in row.items() if name.endswith("_error"))
    print(
        f"Shown: {len(rows)} expert layers on {RANKS} emulated devices give a plain loop's results "
        f"and gradients, largest error {worst:.1e}. Nothing was timed; the paper has no such check."
    )
    print(closing(config.start_name()))
    return 0


def simulate(cfg: Config) -> int:
    """Simulates the times and draws their figure."""
    machine = MACHINES[cfg.card]
    about: dict[str, Any] = results.facts(f"8 x {machine.name}", "simulated")
    about |= {"preset": config.start_name(), "machine": dataclasses.asdict(machine)}
    about |= {"reported": report.reported()}
    path = results.writable_folder(cfg.out) / "comet_simulated.json"
    rows: list[report.Row] = []
    for row in report.expert_rows(
        report.names("models", cfg.models, MIXTURES),
        LAYOUTS,
        report.numbers("tokens", cfg.tokens),
        report.numbers("stds", cfg.stds, float),
        machine,
    ):
        model = report.mixture_row(row, machine)
        rows += [row, model]
        results.write(path, about, rows)
        print(
            f"simulated | {row['model']} {row['tensor']}x{row['expert']}, {row['tokens']} tokens, "
            f"imbalance {row['std_reached']:.3f} | serial {1e6 * row['serial_s']:.0f} "
            f"fused {1e6 * row['fused_s']:.0f} us | {row['speedup']:.2f} times, hidden "
            f"{100 * row['hidden']:.0f} %; estimate of a block with attention: "
            f"{model['speedup']:.2f} times",
            flush=True,
        )
    for row in written(report.repository_rows(MACHINES["H100"]), path, about, rows):
        print(
            f"simulated H100 | {row['model']} {row['tensor']}x{row['expert']} {row['product']} | "
            f"product {row['gemm_ms']:.2f} fused {row['fused_ms']:.2f} ms; Flux's repository "
            f"reports {row['reported_ms']:.2f} ms"
        )
    shown = report.draw_layers(rows, machine.name, path.with_suffix(""))
    print(" ".join(shown.split()))
    print(path)
    fast = [row["speedup"] for row in rows if row.get("part") == "model"]
    print(
        closing(
            config.start_name(),
            paper="whole models 1.71 times as fast (section 5)",
            ours=f"{min(fast):.2f} to {max(fast):.2f} times" if fast else "",
            source=f"estimated from simulated layers, {machine.name}",
        )
    )
    return 0


PRESETS = {"tiny": tiny, "paper": paper}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
