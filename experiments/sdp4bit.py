"""SDP4Bit (arXiv 2410.15526): what 4 bits on the wire cost a model, and what they save.

    uv run experiments/sdp4bit.py                       # two variants, a few steps
    uv run experiments/sdp4bit.py --preset=paper        # nine variants, three seeds
    uv run --extra aot experiments/sdp4bit.py --bytes   # and the bytes of the program for H100s

Quality: a small GPT is trained on the bytes of Python's standard library, on 2 emulated nodes of 2
CPU devices, once for each variant of the exchange (experiments/reports/sdp4bit.py lists them with
their flags). All variants see the same tokens in the same order. The reported loss is that of
held-out text with the weights that the ranks use; the loss with the float32 masters is beside it.
Bytes (--bytes): the exchange is compiled for 2 nodes of 4 H100s, and the bytes of its collectives
are counted. Speed: ESTIMATES of the cost model for the paper's ten pairs of model and cluster;
nothing is timed.

`paper` takes about 20 minutes on two idle CPU cores. After Ctrl-C the same command continues after
the last finished run, and a command with more variants or seeds adds to the runs that are there.
Several processes can share the work: give each of them some of --variants, and afterwards all
variants to one. The command writes sdp4bit.json after every run, and sdp4bit.svg and .png, into
--out. `tiny` only shows that the experiment runs: its models have learned too little to compare.
"""

import megajax.core.interrupted  # noqa: F401

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.reports import sdp4bit as report
from experiments.reports.reporting import closing, written
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean, nearest_multiples
from megajax.monitor import results


@dataclass(frozen=True)
class Config(Checked):
    """What is trained."""

    variants: str = option(",".join(report.VARIANTS), "variants of the exchange, joined by commas")
    seeds: int = option(
        3, "number of random seeds (of parameters, order of the data and rounding)", at_least=1
    )
    steps: int = option(400, "length of one run", "steps", at_least=1, at_most=report.KEYS - 1)
    layers: int = option(2, "layers of the model", at_least=1)
    width: int = option(64, "width of the model, a multiple of 32", at_least=32)
    batch: int = option(
        16, "rows of a step, a multiple of the number of emulated devices", at_least=1
    )
    seq_len: int = option(64, "length of a row", "tokens", at_least=1)
    nodes: int = option(2, "number of emulated nodes", at_least=1)
    ranks: int = option(2, "number of emulated devices of a node", at_least=1)
    held_out: int = option(16, "held-out batches that an evaluation reads", at_least=1)
    evals: int = option(8, "number of evaluations in a run", at_least=1)
    bytes: bool = option(
        False, "compile the exchange for H100s and count its bytes; needs --extra aot"
    )
    draw: bool = option(False, "train nothing; write and draw the runs that have been done")
    state: str = option("runs/sdp4bit", "folder in which finished runs are kept")
    cache_dir: str = option("~/.cache/megajax", "folder for tokenised text and compiled programs")
    out: str = results.out_option("sdp4bit")

    def __post_init__(self):
        """Refuses what does not exist or cannot be cut."""
        super().__post_init__()
        names(self.variants)
        devices = self.nodes * self.ranks
        for name, unit in (("batch", devices), ("width", 32), ("width", devices)):
            value = getattr(self, name)
            if value % unit:
                raise UserError(
                    f"{name}={value} must be a multiple of {unit}; "
                    f"{nearest_multiples(value, unit)} (--{name})"
                )
        if self.evals > self.steps:
            raise UserError(
                f"evals={self.evals} must be at most steps={self.steps}; nearest: {self.steps} "
                "(--evals)"
            )

    @property
    def study(self) -> report.Study:
        """What all runs share."""
        return report.Study(
            self.layers,
            self.width,
            self.steps,
            self.batch,
            self.seq_len,
            self.nodes,
            self.ranks,
            self.held_out,
            self.evals,
        )


def tiny() -> Config:
    """The exchange as it is and in four bits, one seed, a few steps of one block."""
    return Config(
        f"{report.FLOAT32},SDP4Bit", seeds=1, steps=12, layers=1, held_out=2, evals=2, batch=8
    )


def names(text: str) -> list[str]:
    """'qW,qWD' -> ['qW', 'qWD']. Raises: UserError."""
    words = text.split(",")
    for word in words:
        if word not in report.VARIANTS:
            raise UserError(
                f"variants={text}: {word!r} must be one of {', '.join(report.VARIANTS)}."
                f"{did_you_mean(word, report.VARIANTS)} (--variants)"
            )
    if len(set(words)) < len(words):
        raise UserError(f"variants={text} names one twice (--variants)")
    return words


def runs(cfg: Config, folder: Path) -> Iterator[report.Row]:
    """Yields every run, trained here or found in `folder`, where it is when it is yielded."""
    runners: dict[str, report.Runner] = {}
    for seed, variant in itertools.product(range(cfg.seeds), names(cfg.variants)):
        path = report.saved(folder, variant, seed)
        row = report.saved_run(path)
        if row is None and not cfg.draw:
            if variant not in runners:  # compiled once for all seeds
                runners[variant] = report.Runner(cfg.study, variant, cfg.cache_dir)
            row = runners[variant].run(seed)
            results.write(path, {}, [row])
        if row is not None:
            yield row


def show(row: report.Row) -> None:
    """Prints a run or what was made of runs."""
    if row["part"] == "run":
        text = f"held-out loss {row['loss']:.4f}, of the masters {row['loss_masters']:.4f}"
        text = f"{row['variant']}, seed {row['seed']} | {text}, drift {row['drift']:.1e}"
    elif row["part"] == "gap":
        paper = ", ".join(f"{m} {p:+.2f}" for m, p in row["paper_percent"].items())
        text = f"{row['variant']} | {_percent(row['gap_percent'], row['gap_error'])} above float32"
        text += f" ({row['n']} seeds)" + (f"; paper: {paper} %" if paper else "")
    elif row["part"] == "claim":
        text = f"claim: {row['what']} | {_percent(row['value'], row['error'])}: "
        if row["sure"] is None:
            text += "one seed, which cannot tell it from chance"
        else:
            text += f"{'holds' if row['met'] else 'does not hold'} in the mean of {row['n']} seeds"
            text += (
                ", beyond two standard errors" if row["sure"] else ", within two standard errors"
            )
    elif row["part"] == "bytes":
        text = f"compiled for H100 | {row['codec']}, {row['level']}: {row['bits']:.4f} bits, "
        text += f"{row['of_bf16']:.4f} of bfloat16's bytes"
    else:
        text = f"estimate | {row['cluster']}, {row['model']}: {row['estimate_speedup']:.2f} times "
        text += f"from cards, {row['calibrated_speedup']:.2f} calibrated on 1.3B"
        text += f" (paper {row['paper_speedup']:.2f})"
    print(text, flush=True)


def _percent(value: float, error: float | None) -> str:
    return f"{value:+.3f}" + ("" if error is None else f" ± {error:.3f}") + " %"


def main() -> int:
    """Trains, compares, counts, estimates; writes after every run."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    path = results.writable_folder(cfg.out) / "sdp4bit.json"
    mesh_.start(cfg.nodes * cfg.ranks)
    mesh_.cache_programs(cfg.cache_dir)
    counted = list(report.rows()) if cfg.bytes else []
    # Runs do not depend on these: more of them go on from what is there.
    ignored = "variants", "seeds", "bytes", "draw", "out", "state", "cache_dir"
    same = config.fingerprint(cfg, ignore=ignored)
    folder = results.writable_folder(f"{cfg.state}/{same}", "state")
    about: dict[str, Any] = results.facts(jax.devices()[0].device_kind, "trained here")
    about |= {"preset": config.start_name(), "steps": cfg.steps, "layers": cfg.layers}
    about |= {"width": cfg.width, "tokens": cfg.study.tokens, "nodes": cfg.nodes}
    about |= {"ranks": cfg.ranks, "assumed": report.ASSUMED}
    trained: list[report.Row] = []
    code = 0
    try:
        for row in written(runs(cfg, folder), path, about, trained):
            show(row)
    except KeyboardInterrupt:
        print(f"stopped after {len(trained)} runs; the same command goes on", file=sys.stderr)
        code = 130
    made = [*report.gaps(trained), *report.claims(trained), *counted]
    made += [{"part": "estimate"} | row for row in report.estimates()]
    results.write(path, about, [*trained, *made])
    for row in made:
        show(row)
    if any(row["part"] == "gap" for row in made):
        report.draw([*trained, *made], path.with_suffix(""))
    print(f"{path}, .svg and .png")
    print(conclusion(cfg, made))
    gap = next((r for r in made if r["part"] == "gap" and r["variant"] == "SDP4Bit"), None)
    judged = gap is not None and gap["n"] > 1
    print(
        closing(
            config.start_name(),
            paper="loss +0.09 to +0.24 % (125M to 1.3B)",
            ours=_percent(gap["gap_percent"], gap["gap_error"]) if gap and judged else "",
            source="a small GPT on emulated devices",
        )
    )
    return code


def conclusion(cfg: Config, rows: list[report.Row]) -> str:
    """Returns what the run has shown, beside the paper's number."""
    gap = next((r for r in rows if r["part"] == "gap" and r["variant"] == "SDP4Bit"), None)
    if gap is None:
        return "Shown: the chosen exchanges run; SDP4Bit and float32 were not both among them."
    paper = ", ".join(f"{p:+.2f} % ({m})" for m, p in gap["paper_percent"].items())
    text = f"SDP4Bit's held-out loss is {_percent(gap['gap_percent'], gap['gap_error'])} above "
    text += f"float32's after {cfg.steps} steps of a small model; the paper has {paper}."
    if gap["n"] < 2:
        text += " This run is too short to judge that: it shows that both exchanges train."
        text += " --preset=paper trains 400 steps of three seeds; its results are in "
        text += "docs/papers/sdp4bit.md."
    return text


PRESETS = {"tiny": tiny, "paper": Config}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
