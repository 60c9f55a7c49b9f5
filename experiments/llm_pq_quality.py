"""LLM-PQ (arXiv 2403.01136): measures how quantized weights change the loss of trained models.

    uv run experiments/llm_pq_quality.py --study=indicators --run_dirs=RUN,RUN,...
    uv run --group rivals experiments/llm_pq_quality.py --study=rounding --run_dirs=RUN --qwix
    uv run --group models experiments/llm_pq_quality.py --study=rounding --gguf=FILE --group=32
    uv run --group models experiments/llm_pq_quality.py --study=plans --gguf=FILE --cases=case5

A plan gives each layer a width of 3, 4, 8 or 16 bits. --study=indicators measures the held-out loss
of --plans random plans, and of plans with the same widths in other orders, which have equal bytes.
It prints the rank correlation (Spearman) between each indicator, summed over the layers, and the
measured change of the loss. --study=rounding measures each method of rounding in 4 and 3 bits, with
--qwix also those of qwix on the same matrices with the same calibration. --study=plans plans for
the clusters of --cases, scaled down to the model, and compares the simulated tokens a second of our
plans and of PipeEdge's partition at equal measured loss.
All studies calibrate on training text and judge on held-out text.
The command writes llm_pq_STUDY.json into --out. Exit code 2: a flag is wrong.
"""

import megajax.core.interrupted  # noqa: F401

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from experiments.reports import llm_pq_quality as report
from experiments.reports.reporting import written
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, equal, option
from megajax.core.errors import UserError
from megajax.monitor import results
from megajax.systems import llm_pq
from megajax.systems.open_model import OpenModel, open_model


@dataclass(frozen=True)
class Config(Checked):
    """The models, and how they are judged."""

    study: Literal["indicators", "rounding", "plans"] = option("indicators", "what is measured")
    run_dirs: str = option(
        "", "folders of training runs whose models are measured, joined by commas"
    )
    gguf: str | None = option(None, "GGUF file of a Llama-like model with its tokenizer")
    rows: int = option(
        32, "rows of training text for calibration, and of held-out text for the loss", at_least=1
    )
    length: int = option(256, "length of a row", "tokens", at_least=2)
    plans: int = option(
        30, "number of random plans", at_least=3, needs=equal("study", "indicators")
    )
    bits: str = option("4,3", "widths, joined by commas", needs=equal("study", "rounding"))
    group: int = option(
        128, "inputs that share a scale", at_least=1, needs=equal("study", "rounding")
    )
    methods: str = option(
        "",
        "methods of rounding, joined by commas; none: all for rounding, rtn for plans",
        needs=equal("study", "rounding", "plans"),
    )
    cases: str = option(
        "case5", "clusters of LLM-PQ, joined by commas", needs=equal("study", "plans")
    )
    time_limit_s: float = option(
        20.0,
        "longest time of the search for a plan",
        unit="s",
        above=0,
        needs=equal("study", "plans"),
    )
    qwix: bool = option(False, "also measure qwix's methods", needs=equal("study", "rounding"))
    seed: int = option(0, "random seed of the plans and of the order of the text", at_least=0)
    name: str = option("", "name of the file, after llm_pq_; none: the study's")
    out: str = results.out_option("llm_pq_quality")

    def __post_init__(self):
        """Refuses widths and methods that do not exist."""
        super().__post_init__()
        for method in filter(None, self.methods.split(",")):
            if method not in report.OURS:
                raise UserError(f"methods={method} must be of {', '.join(report.OURS)} (--methods)")
        for case in self.cases.split(","):
            if case not in llm_pq.PRESETS:
                raise UserError(f"cases={case} must be of case1 to case11 (--cases)")
        for width in self.bits.split(","):
            if width not in ("2", "3", "4", "8"):
                raise UserError(f"bits={width} must be of 2, 3, 4, 8 (--bits)")

    def models(self) -> Iterator[OpenModel]:
        """Yields the models. Raises: UserError where none is named."""
        if not self.run_dirs and self.gguf is None:
            raise UserError("a model must be named (--run_dirs or --gguf)")
        for run_dir in filter(None, self.run_dirs.split(",")):
            yield open_model(run_dir=run_dir)
        if self.gguf is not None:
            yield open_model(gguf=self.gguf)


LAYERS = {
    "indicators": "measured held-out loss",
    "rounding": "measured held-out loss",
    "plans": "measured held-out loss, simulated times",
}
PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def rows_of(cfg: Config) -> Iterator[dict[str, Any]]:
    """Yields the rows of the study, each printed."""
    methods = [m for m in cfg.methods.split(",") if m]
    roundings = {name: report.OURS[name] for name in methods or report.OURS}
    if cfg.qwix:
        roundings |= report.roundings()
    for opened in cfg.models():
        subject = report.subject(opened, cfg.rows, cfg.length, cfg.seed)
        print(f"{subject.name}: {subject.dense:.4f} nats a token", flush=True)
        if cfg.study == "indicators":
            rows = iter(report.indicator_rows(subject, cfg.plans, cfg.seed))
        elif cfg.study == "plans":
            cases = cfg.cases.split(",")
            rows = report.rows(subject, cases, methods or ["rtn"], cfg.time_limit_s)
        else:
            widths = [int(b) for b in cfg.bits.split(",")]
            rows = report.rounding_rows(subject, widths, cfg.group, roundings)
        for row in rows:
            print((report.told_equal if cfg.study == "plans" else report.told)(row), flush=True)
            yield row


def main() -> int:
    """Measures, prints, and writes after each row."""
    cfg, _ = config.from_flags(PRESETS)
    folder = results.writable_folder(cfg.out)
    mesh_.start(1)
    about = results.facts("cpu", LAYERS[cfg.study]) | {
        "rows": cfg.rows,
        "length": cfg.length,
        "seed": cfg.seed,
    }
    path = folder / f"llm_pq_{cfg.name or cfg.study}.json"
    list(written(rows_of(cfg), path, about, []))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
