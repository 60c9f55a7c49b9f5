"""Tile-Wise sparsity (arXiv 2008.13006): what a pattern costs in quality, and what it saves.

    uv run experiments/tilewise.py                     # one model, three patterns, seconds
    uv run experiments/tilewise.py --preset=paper      # two models, twelve patterns, three seeds
    uv run experiments/tilewise.py --preset=paper --stages=50,75,90,95,98  # two more stages

Quality: two models are trained, then pruned in stages with fine-tuning between them, by first-order
Taylor scores. One is an encoder that says from which package of Python's standard library a passage
comes, the other the nano GPT on the text that pretraining reads. Patterns: tile-wise with chunks of
1, 8, 32 and 64 rows (TW-1 to TW-64), with an element-wise residual (TEW), with apriori tuning
(TW-1a), rows of tiles alone (TW1D-1); element-wise (EW), vector-wise (VW), block-wise (BW to
BW-128). A model of which nothing is pruned is fine-tuned as long. Units are those of the paper
divided by 4, because matrices are 128 wide instead of 768 (experiments/reports/tilewise.py). Units
are ranked by the paper's rule, the L2 norm of their scores / n; training uses --unit_score=rms by
default.
Speed: FLOPs and bytes of the paper's BERT shapes are counted from masks; floors and the cost
model's times are estimates. scripts/gpu_check.py tile_sparse measures times on a GPU.

`paper` takes about half an hour. After Ctrl-C the same command continues after the last point, and
a command with more stages, patterns or seeds adds to the points that are there. The command writes
tilewise.json after every point, and at the end the .svg and .png of tilewise and tilewise_price,
into --out. `tiny` only shows that the experiment runs: its model has learned too little to compare.
"""

import megajax.core.interrupted  # noqa: F401

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.reports import tilewise as report
from experiments.reports.reporting import closing
from megajax.core import config, files
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean, nearest_multiples
from megajax.models.decoder_config import PRESETS as DECODERS
from megajax.models.encoder_config import EncoderConfig
from megajax.monitor import results
from megajax.training.masking import UnitScore

TASKS = ("passages", "text")


@dataclass(frozen=True)
class Config(Checked):
    """What is trained and pruned."""

    tasks: str = option("passages,text", "models, joined by commas")
    methods: str = option(",".join(report.METHODS), "patterns, joined by commas")
    stages: str = option("50,75,90,95", "sparsities in rising order, joined by commas", "percent")
    seeds: int = option(
        3, "number of random seeds (of weights, order of the data, dropout)", at_least=1
    )
    steps: int = option(
        400, "length of the training before anything is pruned", "steps", at_least=1
    )
    tune: int = option(25, "length of the fine-tuning after each stage", "steps", at_least=1)
    unit_score: UnitScore = option(
        "paper", "how units rank: paper, L2 of their scores over n; rms, over sqrt(n)"
    )
    layers: int = option(
        2, "blocks of the encoder, 128 wide; the text's model is pretraining's", at_least=1
    )
    tokenizer: str = option(
        "bpe:1024", "tokenizer of the passages, as for pretraining; it is trained on them"
    )
    held_out: int = option(
        1024, "held-out passages, and 16ths of the text's held-out rows", at_least=32
    )
    draw: bool = option(False, "train nothing; write and draw the points that have been done")
    state: str = option("runs/tilewise", "folder from which an interrupted run continues")
    cache_dir: str = option(
        "~/.cache/megajax", "folder for tokenised text, tokenizers and compiled programs"
    )
    out: str = results.out_option("tilewise")

    def __post_init__(self):
        """Refuses tasks and patterns that do not exist or cannot be pruned."""
        super().__post_init__()
        names("tasks", self.tasks, TASKS)
        names("methods", self.methods, report.METHODS)
        percentages(self.stages)
        if self.held_out % 32:
            raise UserError(
                f"held_out={self.held_out} must be a multiple of 32; "
                f"{nearest_multiples(self.held_out, 32)} (--held_out)"
            )


def tiny() -> Config:
    """The encoder on bytes, three patterns at one sparsity."""
    return Config(
        "passages",
        "TW-1,TW-64,BW",
        "75",
        seeds=1,
        steps=30,
        tune=5,
        tokenizer="bytes",
        held_out=128,
    )


def names(name: str, text: str, known: Any) -> list[str]:
    """'a,b' -> ['a', 'b']. Raises: UserError."""
    words = text.split(",")
    for word in words:
        if word not in known:
            raise UserError(
                f"{name}={text}: {word!r} must be one of {', '.join(known)}."
                f"{did_you_mean(word, known)} (--{name})"
            )
    return words


def percentages(text: str) -> list[float]:
    """'50,75' -> [0.5, 0.75]. Raises: UserError."""
    try:
        percents = [float(word) for word in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if not all(0 < x < 100 for x in percents) or percents != sorted(set(percents)):
        raise UserError(
            f"stages={text} must be rising percentages between 0 and 100 with commas "
            "(--stages=50,75,90,95)"
        )
    return [x / 100 for x in percents]


def make_subject(cfg: Config, name: str) -> report.Subject:
    """Builds a model and opens its text."""
    if name == "text":
        return report.text(DECODERS["nano"](), 64, 8, cfg.held_out // 16, cfg.cache_dir)
    model = EncoderConfig(layers=cfg.layers, max_positions=128, dropout=0.1)
    return report.passages(model, 33, cfg.tokenizer, 32, cfg.held_out, cfg.cache_dir)


def points(cfg: Config, folder: Path, done: set[report.Key]) -> Iterator[dict[str, Any]]:
    """Yields every point that is not done yet; its state is in `folder` when it is yielded."""
    stages = percentages(cfg.stages)
    rates = {"passages": (1.5e-3, 1e-3), "text": (3e-3, 1e-3)}
    trainers = {
        name: report.Trainer(
            make_subject(cfg, name),
            report.Training(cfg.steps, cfg.tune, *rates[name]),
            cfg.unit_score,
        )
        for name in names("tasks", cfg.tasks, TASKS)
    }
    methods = report.DENSE, *names("methods", cfg.methods, report.METHODS)
    for (seed, (task, trainer)), method in itertools.product(
        itertools.product(range(cfg.seeds), trainers.items()), methods
    ):
        start = folder / f"{task}-{seed}.npz"
        about = {"part": "point", "task": task, "seed": seed, "method": method}
        if (task, seed, report.DENSE, "") not in done:
            report.save_state(start, trainer.dense(seed))
            row = trainer.measure(report.load(start, trainer.abstract()).params)
            yield (
                about | {"method": report.DENSE, "stages": "", "goal": 0.0, "sparsity": 0.0} | row
            )
            done.add((task, seed, report.DENSE, ""))
        passed = [through(stages[: i + 1]) for i in range(len(stages))]
        count = sum((task, seed, method, p) in done for p in passed)
        if count == len(stages):
            continue
        before = folder / f"{task}-{seed}-{method}-{passed[count - 1]}.npz" if count else start
        chain = report.chain(
            trainer,
            report.load(before, trainer.abstract()),
            seed,
            report.METHODS.get(method),
            stages[count:],
        )
        for p, (state, row) in zip(passed[count:], chain, strict=True):
            report.save_state(folder / f"{task}-{seed}-{method}-{p}.npz", state)
            yield about | {"stages": p} | row


def through(stages: list[float]) -> str:
    """[0.5, 0.75] -> '50-75': the sparsities that a chain has passed."""
    return "-".join(f"{100 * s:g}" for s in stages)


def belongs(cfg: Config, row: dict[str, Any]) -> bool:
    """Whether a point is of this configuration, and not of another one with the same models."""
    stages = percentages(cfg.stages)
    passed = [through(stages[:i]) for i in range(len(stages) + 1)]
    return (
        row["task"] in cfg.tasks.split(",")
        and row["seed"] < cfg.seeds
        and row["method"] in (report.DENSE, *cfg.methods.split(","))
        and row["stages"] in passed
    )


def trained_scores(path: Path) -> dict[str, np.ndarray]:
    """Returns the sums of (w dL/dw)^2 of the first block's matrices, from a saved encoder."""
    arrays = files.read_arrays(path, "state of a study")
    query, up, down = (
        arrays[f"opt.scores.blocks.{name}"][0] for name in ("attention.query", "mlp.up", "mlp.down")
    )
    return {"attention": query.reshape(len(query), -1), "up": up, "down": down}


def show(row: report.Row) -> None:
    """Prints a point, or a figure that was computed from points."""
    if row["part"] == "point":
        goal = f"{row['method']} at {100 * row['goal']:.0f} %" if row["goal"] else "trained"
        text = f"loss {row['loss']:.3f}, accuracy {100 * row['accuracy']:.1f} %"
        if "kept_least" in row:
            shares = (f"{100 * row[name]:.3g}" for name in ("kept_least", "kept_most"))
            text += f", matrices keep {' to '.join(shares)} %"
        print(f"{row['task']}, seed {row['seed']} | {goal} | {text}", flush=True)
    elif row["part"] == "price":
        lost = ", ".join(
            f"{task} loses {row[f'{task}_lost']:+.3f} nats"
            for task in TASKS
            if f"{task}_lost" in row
        )
        print(
            f"{row['method']} at {100 * row['goal']:.0f} % | {row['flops_saved']:.2f} times fewer "
            f"FLOPs, {row['bytes_saved']:.2f} bytes | estimate: {row['speedup_estimate']:.2f} "
            f"times as fast{'' if row['kernel'] else ' if there were a kernel'} | {lost}"
        )
    elif row["part"] == "claim":
        ratio = "BW loses nothing" if row["ratio"] is None else f"ratio {row['ratio']:.2f}"
        verdict = "tiles lose less" if row["met"] else "tiles do not lose less"
        print(
            f"claim, {row['task']}, {row['what']}: {row['tiles']} {row['tw']:+.4f}, "
            f"{row['blocks']} {row['bw']:+.4f}, "
            f"{ratio}: {verdict} ({row['n']} seed{'' if row['n'] == 1 else 's'})"
        )


def finish(cfg: Config, path: Path, about: dict[str, Any], rows: list[Any], scores: Path) -> None:
    """Writes the claims that follow from the points, counts speeds and draws the figures."""
    quality = list(report.quality(rows))
    claims = list(report.claims(quality))
    speeds, prices = [], []
    if scores.exists():
        methods = [report.METHODS[m] for m in names("methods", cfg.methods, report.METHODS)]
        stages = percentages(cfg.stages)
        speeds = list(report.speeds(trained_scores(scores), methods, stages, cfg.unit_score))
        prices = list(report.prices(quality, speeds))
    results.write(path, about, [*rows, *quality, *claims, *speeds, *prices])
    for row in (*prices, *claims):
        show(row)
    if quality:
        report.draw_quality(quality, claims, path.with_suffix(""))
    if any("n" in name for row in prices for name in row):
        report.draw_price(prices, path.with_name("tilewise_price"))
    if claims:
        print(conclusion(cfg, claims))


def conclusion(cfg: Config, claims: list[report.Row]) -> str:
    """Returns how far the run confirms the paper's claim."""
    less = sum(row["met"] for row in claims)
    text = f"Tiles lose less than blocks in {less} of {len(claims)} comparisons; the paper claims "
    text += "that they do at equal sparsity, and a speed-up of 1.95 times at 75 % on a V100."
    if cfg.seeds < 2:
        text += f" One seed of {cfg.steps} steps is too little to judge that: this run shows that "
        text += "pruning, packing and fine-tuning work. --preset=paper trains 400 steps of three "
        text += "seeds; docs/papers/tilewise.md has its results."
    return text


def main() -> int:
    """Trains, prunes and measures; writes after every point."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    path = results.writable_folder(cfg.out) / "tilewise.json"
    mesh_.start()
    mesh_.cache_programs(cfg.cache_dir)
    # Points do not depend on these: more of them go on from what is there.
    ignored = "tasks", "methods", "stages", "seeds", "draw", "out", "state", "cache_dir"
    same = config.fingerprint(cfg, ignore=ignored)
    folder = results.writable_folder(f"{cfg.state}/{same}", "state")
    about: dict[str, Any] = results.facts(jax.devices()[0].device_kind, "trained here")
    about |= {"preset": config.start_name(), "steps": cfg.steps, "tune": cfg.tune}
    about |= {"unit_score": cfg.unit_score}
    saved = report.former(folder / "points.json")
    rows = {k: row for k, row in saved.items() if belongs(cfg, row)}
    if rows:
        print(f"{len(rows)} points are in {folder}: going on after them", flush=True)
    code = 0
    try:
        for row in () if cfg.draw else points(cfg, folder, set(saved)):
            saved[report.key(row)] = rows[report.key(row)] = row
            results.write(folder / "points.json", about, list(saved.values()))
            results.write(path, about, list(rows.values()))
            show(row)
    except KeyboardInterrupt:
        print(f"stopped after {len(rows)} points; the same command goes on", file=sys.stderr)
        code = 130
    finish(cfg, path, about, list(rows.values()), folder / "passages-0.npz")
    print(f"{path}, .svg and .png")
    print(closing(config.start_name()))
    return code


PRESETS = {"tiny": tiny, "paper": Config}
config.define_flags(PRESETS, "tiny")

if __name__ == "__main__":
    sys.exit(config.run(main))
