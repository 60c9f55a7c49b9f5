"""Evaluates a language model: perplexity, multiple choice, exact match; or a classifier of texts.

uv run scripts/evaluate.py --run_dir=RUN --texts=TEXT/
uv run scripts/evaluate.py --hf=FOLDER --tasks=TASK.jsonl --few_shot=5 --out=results.json
uv run scripts/evaluate.py --gguf=FILE --tasks=A.jsonl,B.jsonl
uv run scripts/evaluate.py --run_dir=CLASSIFIER --tasks=LABELLED.jsonl

A line of a task is {"prompt": ..., "choices": [...], "answer": index} or {"prompt": ...,
"target": ...}; for an encoder that learned labels it is {"text": ..., "label": ...}. The metrics
are those of lm-evaluation-harness (megajax/evaluation.py, docs/evaluation.md). A file of --out is
written after each task; the same command reads it again and skips the tasks that are in it.
Exit code 2: a flag or a line of a file is wrong.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megajax import LLM, evaluation
from megajax.core import config, files
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option, other_than
from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.documents import is_held_out
from megajax.data.source import open_source
from megajax.systems.encoder import OpenEncoder, open_encoder
from megajax.systems.open_model import open_model

PART = 64  # (chosen) rows between two lines of progress
QUIET_S = 5.0  # (chosen) least time between them
MAX_OUT = 2**24  # (chosen) bytes of a file of results


@dataclass(frozen=True)
class Config(Checked):
    """The model, and on what it is evaluated."""

    run_dir: str | None = option(None, "folder of a run")
    hf: str | None = option(
        None, "Hugging Face folder (config.json, safetensors, tokenizer.json) or ORG/NAME"
    )
    gguf: str | None = option(None, "GGUF file of a Llama-like model, with its tokenizer")
    step: int | None = option(
        None,
        "checkpoint of the run; none: the latest",
        needs=other_than("run_dir", None),
        at_least=0,
    )
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    adapter: str | None = option(None, "PEFT folder of an adapter for the model; none: no adapter")
    texts: str | None = option(
        None, "texts for the perplexity, separated by commas; each as --data.source of pretraining"
    )
    held_out: float | None = option(
        None,
        "fraction of the texts that are read: those that pretraining holds out with this "
        "--data.holdout; none: all",
        needs=other_than("texts", None),
        above=0,
        below=1,
    )
    tasks: str | None = option(None, "files of tasks in jsonl, separated by commas")
    few_shot: int = option(
        0,
        "number of examples before a prompt: other rows of the file with their answers",
        needs=other_than("tasks", None),
        at_least=0,
    )
    limit: int | None = option(
        None, "most rows of a task and documents of a text that are read; none: all", at_least=1
    )
    new_tokens: int = option(32, "most tokens of an answer to a prompt", "tokens", at_least=1)
    stride: int | None = option(
        None,
        "distance of the windows in which a long text is read; none: half the context",
        "tokens",
        at_least=1,
    )
    context: int | None = option(
        None, "most tokens that are read at a time; none: the model's, at most 4096", at_least=4
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "data type of computation")
    max_batch: int = option(16, "largest number of sequences that run at a time", at_least=1)
    seed: int = option(0, "random seed of the examples", at_least=0, at_most=2**32 - 1)
    out: str | None = option(None, "JSON file of results, which a later start continues")
    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    cache_dir: str = option("~/.cache/megajax", "folder for compiled programs")
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, resets=True)


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")

type Result = dict[str, Any]


def main() -> int:
    """Prints a table of metrics, and writes it."""
    cfg, _ = config.from_flags(PRESETS)
    if cfg.texts is None and cfg.tasks is None:
        raise UserError("there is nothing to evaluate: give texts or tasks (--texts, --tasks)")
    tasks = [(name, *read(cfg, name)) for name in listed(cfg.tasks, "tasks")]
    encoder = open_encoder(run_dir=cfg.run_dir, hf=cfg.hf, step=cfg.step, tokenizer=cfg.tokenizer)
    if encoder is not None:
        return classify(cfg, encoder, tasks)
    if labelled := [name for name, kind, _ in tasks if kind == "label"]:
        raise UserError(
            f"{labelled[0]} has texts with labels, which an encoder that learned labels predicts; "
            "a decoder needs rows with a prompt (--tasks)"
        )
    sources = [(name, texts_of(cfg, name)) for name in listed(cfg.texts, "texts")]
    opened = open_model(
        run_dir=cfg.run_dir, hf=cfg.hf, gguf=cfg.gguf, step=cfg.step, tokenizer=cfg.tokenizer
    )
    results = Results(cfg)
    mesh_.start(cfg.emulate)
    llm = LLM(
        opened,
        adapter=cfg.adapter,
        cache_dir=cfg.cache_dir,
        mesh=cfg.mesh,
        dtype=cfg.dtype,
        max_batch=cfg.max_batch,
        **({} if cfg.context is None else {"context": cfg.context}),
    )
    print(llm, flush=True)
    for name, texts in sources:
        if not results.have(name, texts):
            results.add(name, perplexity(cfg, llm, name, texts))
    for name, kind, rows in tasks:
        if not results.have(name, rows):
            metrics = choices(llm, name, rows) if kind == "choices" else exact(cfg, llm, name, rows)
            results.add(name, metrics)
    print(table(results.rows))
    return 0


# ---- what is read


def listed(names: str | None, flag: str) -> list[str]:
    """Returns names separated by commas. Raises: UserError for an empty or a repeated one."""
    split = [] if names is None else [name.strip() for name in names.split(",")]
    if not all(split) or len({*split}) < len(split):
        raise UserError(f"{flag}={names} must be unlike names separated by commas (--{flag})")
    return split


def read(cfg: Config, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns (the kind of a task's rows, its first rows with their examples)."""
    kind, rows = evaluation.read_task(name)
    if kind == "label":
        if cfg.few_shot:
            raise UserError(f"{name} has texts with labels, which take no examples (--few_shot=0)")
        return kind, rows[: cfg.limit]
    try:
        return kind, evaluation.few_shot(rows, cfg.few_shot, cfg.seed)[: cfg.limit]
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def texts_of(cfg: Config, name: str) -> list[str]:
    """Returns the first documents of a source. Raises: UserError if there are none."""
    try:
        documents = (d.text for d in open_source(name, DataConfig(source=name)).documents())
    except UserError as error:
        raise UserError(str(error).replace("data.source", "texts")) from None
    chosen = (t for t in documents if cfg.held_out is None or is_held_out(t, cfg.held_out))
    texts = [t for t in itertools.islice(chosen, cfg.limit) if t]
    if not texts:
        raise UserError(f"texts={name} has no text to read (--texts, --held_out)")
    return texts


# ---- metrics


def perplexity(cfg: Config, llm: LLM, name: str, texts: list[str]) -> list[Result]:
    """Returns nats a token, the perplexity, and bits a byte."""
    scores = in_parts(
        name, texts, lambda part: evaluation.score_texts(llm.engine, part, stride=cfg.stride)
    )
    nats, bits = evaluation.summed(scores)
    error, count = evaluation.ratio_error(scores).error, sum(s.tokens for s in scores)
    value = math.exp(min(nats, 700))
    return [
        metric("nats a token", nats, error, count),
        metric("perplexity", value, value * error, count),
        metric("bits a byte", bits, error * bits / nats, sum(s.bytes for s in scores)),
    ]


def choices(llm: LLM, name: str, rows: list[dict[str, Any]]) -> list[Result]:
    """Returns the accuracy by the sums of log-probabilities, and by these over lengths."""
    scores = in_parts(name, rows, lambda part: evaluation.choice_scores(llm.engine, part))
    pairs = [*zip(rows, scores, strict=True)]
    norms: dict[str, evaluation.Norm] = {"acc": "none", "acc_norm": "characters"}
    return [
        metric(
            label,
            *evaluation.mean([evaluation.choose(r, s, norm) == r["answer"] for r, s in pairs]),
            len(rows),
        )
        for label, norm in norms.items()
    ]


def exact(cfg: Config, llm: LLM, name: str, rows: list[dict[str, Any]]) -> list[Result]:
    """Returns the share of answers that are the target."""
    right = in_parts(
        name, rows, lambda part: evaluation.matched(llm.engine, part, max_tokens=cfg.new_tokens)
    )
    return [metric("exact_match", *evaluation.mean(right), len(rows))]


def classify(
    cfg: Config, opened: OpenEncoder, tasks: list[tuple[str, str, list[dict[str, Any]]]]
) -> int:
    """Prints the accuracy of a classifier, and the precision and recall of each class."""
    if not opened.labels:
        raise UserError(f"{opened.name} makes vectors, no labels; there is nothing to evaluate")
    for name, kind, rows in tasks:
        unknown = [row["label"] for row in rows if row.get("label") not in opened.labels]
        if kind != "label" or unknown:
            has = f"the label {unknown[0]!r:.80}" if kind == "label" else f"rows with {kind}"
            raise UserError(
                f"{name} has {has}; {opened.name} needs rows with a text and one of its "
                f"{len(opened.labels)} labels: {', '.join(opened.labels):.300} (--tasks)"
            )
    for flag in ("texts", "adapter"):
        if (value := getattr(cfg, flag)) is not None:
            raise UserError(f"{flag}={value}: {opened.name} is a classifier of texts (--{flag})")
    results = Results(cfg)
    mesh_.start(cfg.emulate)
    mesh_.cache_programs(cfg.cache_dir)
    encoder = opened.load()
    for name, _, rows in tasks:
        if not results.have(name, rows):
            chances = in_parts(
                name, rows, lambda part: [*encoder([encoder.row(r["text"])[0] for r in part])]
            )
            answers = [opened.labels[int(each.argmax())] for each in chances]
            results.add(name, of_classes(opened.labels, [r["label"] for r in rows], answers))
    print(table(results.rows))
    return 0


def of_classes(labels: Sequence[str], truth: Sequence[str], answers: Sequence[str]) -> list[Result]:
    """Returns the accuracy, and the precision and recall of each class that occurs. A precision
    without an answer of that class, and a recall without a row of it, are not listed."""
    right = [a == t for a, t in zip(answers, truth, strict=True)]
    rows = [metric("acc", *evaluation.mean(right), len(right))]
    for label in labels:
        for word, chosen in (("precision", answers), ("recall", truth)):
            hits = [r for r, c in zip(right, chosen, strict=True) if c == label]
            if hits:
                rows.append(metric(f"{word} {label}", *evaluation.mean(hits), len(hits)))
    return rows


def metric(label: str, value: float, error: float, n: int) -> Result:
    """Returns a row of the table."""
    return {"metric": label, "value": value, "error": error, "n": n}


def in_parts[T, U](name: str, rows: list[T], evaluate: Callable[[list[T]], list[U]]) -> list[U]:
    """Evaluates rows in parts and says how far it is. Raises: UserError that names the part."""
    begun = said = time.monotonic()
    made: list[U] = []
    for first in range(0, len(rows), PART):
        try:
            made += evaluate(rows[first : first + PART])
        except UserError as error:
            raise UserError(f"{name}, rows from number {first} on: {error}") from None
        now = time.monotonic()
        if now - said > QUIET_S and len(made) < len(rows):
            said, left_s = now, (now - begun) / len(made) * (len(rows) - len(made))
            print(f"{name}: {len(made)} of {len(rows)}, {left_s:.0f} s remain", flush=True)
    return made


# ---- results


class Results:
    """The metrics so far, in a file if one is named."""

    def __init__(self, cfg: Config):
        """Reads what an earlier start of the same command wrote. Raises: UserError for a file of
        another command."""
        self.rows: list[Result] = []
        self._path = None if cfg.out is None else files.expand(cfg.out, "out")
        self._digest = ""
        ignored = ("out", "emulate", "cache_dir", "mesh", "max_batch", "texts", "tasks")
        said = {n: v for n, v in dataclasses.asdict(cfg).items() if n not in ignored}
        self._config = json.loads(json.dumps(said))
        if self._path is None:
            return
        files.check_writable(self._path.parent, "out")
        if self._path.exists():
            there = files.read_object(self._path, MAX_OUT, "out")
            if there.get("config") != self._config or not isinstance(there.get("results"), list):
                raise UserError(
                    f"{self._path} has results of another command; name another file (--out)"
                )
            self.rows = [row for row in there["results"] if isinstance(row, dict)]

    def have(self, name: str, rows: Sequence[Any]) -> bool:
        """Whether there are results of these rows."""
        self._digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
        return any((r.get("task"), r.get("digest")) == (name, self._digest) for r in self.rows)

    def add(self, name: str, metrics: list[Result]) -> None:
        """Takes the metrics of the rows of which `have` was asked, and writes all."""
        self.rows = [row for row in self.rows if row.get("task") != name]
        self.rows += [{"task": name, **row, "digest": self._digest} for row in metrics]
        if self._path is not None:
            text = files.json_text({"config": self._config, "results": self.rows})
            try:
                files.write_whole(self._path, text)
            except OSError as error:
                raise UserError(f"cannot write {self._path}: {error.strerror} (--out)") from None


def table(rows: list[Result]) -> str:
    """Returns the metrics as text."""
    lines = [("task", "metric", "value", "± error", "n")]
    for row in rows:
        error = files.or_nan(row["error"])
        shown = "" if math.isnan(error) else f"{error:.4f}"
        value = f"{files.or_nan(row['value']):.4f}"
        lines.append((Path(row["task"]).name, row["metric"], value, shown, f"{row['n']:,}"))
    widths = [max(len(line[k]) for line in lines) for k in range(5)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if k < 2 else text.rjust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(config.run(main))
