"""Evaluation: held-out loss in nats a token and bits a byte, figures by class, a sampled text.

`evaluate` computes the figures of some batches. `Measure` is the hook of the training loop that
calls it and samples; `Text` is the data of a pretraining run.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import write_whole
from megajax.core.tree import Tree
from megajax.data.corpus import Corpus, open_corpora
from megajax.data.loader import held_out_batches, held_out_rows, training_rows
from megajax.data.tokenizer import Tokenizer, prompt_ids
from megajax.layers.losses import LossSums
from megajax.models.parts import Batch
from megajax.monitor.console import Console
from megajax.monitor.records import Recorder
from megajax.training import report, resume
from megajax.training.config import Config, JobConfig
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep
from megajax.training.task import TrainState

if TYPE_CHECKING:
    from megajax.serving.engine import Engine

MOST_SHOWN = 200  # (chosen) classes that have figures of their own


def evaluated_rows(cfg: JobConfig) -> int:
    """Returns the number of held-out rows that an evaluation reads. It depends neither on the mesh
    nor on --train.accumulate."""
    return cfg.eval.batches * cfg.train.global_batch


def evaluate(
    train_step: TrainStep,
    params: Tree,
    batches: Iterable[Batch],
    corpora: Sequence[Corpus] | None,
    rows: Sequence[int] = (),
    labels: Sequence[str] = (),
) -> dict[str, float | int | None]:
    """Returns eval_NAME of each value that the task reports (eval_loss, of a language model in nats
    a token; eval_accuracy where it counts what it predicted right), eval_bits_per_byte, and
    eval_tokens, or the name of another unit: how many predictions there were; {} without any.

    labels: the names of a classifier's classes, of which `by_label` says more than these figures.

    Bits per byte makes tokenizers comparable: total bits over the bytes of the text. It is None
    when nobody knows the bytes (a foreign .bin), and left out where targets are no text (corpora
    None). rows: of each corpus in the batches.
    """
    total: LossSums | None = None
    for batch in batches:
        sums = train_step.evaluate(params, batch)
        total = sums if total is None else total + sums
    count = 0 if total is None else int(total.count)
    if total is None or not count:
        return {}
    values = jax.device_get(train_step.metrics(jax.device_get(total), np.float64(count)))
    figures: dict[str, float | int | None] = {f"eval_{n}": float(x) for n, x in values.items()}
    figures[f"eval_{train_step.task.unit}"] = count
    if corpora is not None:
        figures["eval_bits_per_byte"] = bits_per_byte(float(values["loss"]), corpora, rows)
    if labels and "classes_3C" in total.terms:
        figures |= by_label(jax.device_get(total.classes_3C), labels)
    return figures


def by_label(classes_3C: np.ndarray, labels: Sequence[str]) -> dict[str, float | int | None]:
    """Returns eval_precision/NAME, eval_recall/NAME and eval_examples/NAME of each class, and
    eval_f1, the mean of the F1 scores of all classes that have examples.

    Precision is None if the class was never predicted, recall if it has no examples.

    classes_3C: as LossSums has them. Of more than MOST_SHOWN classes: eval_f1 only.
    """
    figures: dict[str, float | int | None] = {}
    means: list[float] = []
    for name, counts in zip(labels, classes_3C.T.tolist(), strict=True):
        there, said, right = counts
        if there:
            means.append(2 * right / (there + said))
        if len(labels) <= MOST_SHOWN:
            figures[f"eval_precision/{name}"] = right / said if said else None
            figures[f"eval_recall/{name}"] = right / there if there else None
            figures[f"eval_examples/{name}"] = there
    return figures | {"eval_f1": sum(means) / len(means)}


def bits_per_byte(
    nats_per_token: float, corpora: Sequence[Corpus], rows: Sequence[int]
) -> float | None:
    """Converts a loss over `rows` rows of each corpus; None when one does not know its bytes."""
    parts = [(c.bytes_per_token, n) for c, n in zip(corpora, rows, strict=True) if n]
    if not parts or any(ratio is None for ratio, _ in parts):
        return None
    mean = sum(ratio * n for ratio, n in parts if ratio is not None) / sum(n for _, n in parts)
    return nats_per_token / math.log(2) / mean


# ---- measure
#
# The measurement beside training: held-out loss, then a sample of what the model writes.


PAGE = 16  # tokens


class Measure:
    """A hook of the training loop."""

    def __init__(
        self,
        cfg: Config,
        train_step: TrainStep,
        corpora: Sequence[Corpus],
        tokenizer: Tokenizer,
        recorder: Recorder,
        console: Console,
        run_dir: RunDir,
        batches: Callable[[], Iterable[Batch]],
    ):
        """batches: gives the held-out batches, the same ones at every call.

        Raises: UserError for a prompt without tokens, or with more than the model has positions.
        """
        self._cfg, self._step, self._corpora, self._tokenizer = cfg, train_step, corpora, tokenizer
        self._recorder, self._console, self._run_dir = recorder, console, run_dir
        self._batches = batches
        self._engine: Engine | None = None
        self.last_sample: str | None = None
        text, self._prompt = self._encode_prompt() if cfg.eval.sample_tokens else ("", [])
        self._shown = text

    def _encode_prompt(self) -> tuple[str, list[int]]:
        """Returns the text that the sample continues, and its ids."""
        cfg, tokenizer = self._cfg, self._tokenizer
        prompt = self.prompt() or (cfg.eval.prompt, prompt_ids(tokenizer, cfg.eval.prompt))
        if not 0 < len(prompt[1]) < cfg.model.max_positions:
            raise UserError(
                f"eval.prompt of {len(prompt[1])} tokens must have from 1 to "
                f"{cfg.model.max_positions - 1}, below model.max_positions; eval.sample_tokens=0 "
                "samples nothing (--eval.prompt, --eval.sample_tokens)"
            )
        return prompt

    def prompt(self) -> tuple[str, list[int]] | None:
        """Returns a prompt other than eval.prompt's text, with its ids; None: there is none."""
        return None

    def figures(self, state: TrainState) -> dict[str, float | int | None]:
        """Returns the figures of the held-out rows."""
        seq_len = self._cfg.train.seq_len
        rows = held_out_rows(self._corpora, seq_len, evaluated_rows(self._cfg))
        return evaluate(self._step, self._step.weights(state), self._batches(), self._corpora, rows)

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        every = self._cfg.eval.every
        return last or (every > 0 and finished % every == 0)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Nothing is measured before the first step."""
        return state

    def __call__(self, state: TrainState, step: int) -> TrainState:
        """Evaluates, records, samples."""
        if row := self.figures(state):
            self._recorder.emit(step, row)
        if self._cfg.eval.sample_tokens:
            self.last_sample = self.sample(state)
            if jax.process_index() == 0:
                file = self._run_dir.samples / f"{step:08d}.txt"
                text = (self.last_sample + "\n").encode(errors="backslashreplace")
                try:
                    file.parent.mkdir(exist_ok=True)
                    write_whole(file, text)
                except OSError as error:
                    self._console.say(f"cannot write {file}: {error.strerror}")
        return state

    def sample(self, state: TrainState) -> str:
        """Returns the prompt with the model's continuation.

        The engine keeps its compiled programs from one call to the next, and no memory of a device.
        """
        from megajax.serving import Engine, SamplingParams
        from megajax.serving.programs import LEAST

        cfg, params = self._cfg, self._step.storage.natural(self._step.weights(state))
        room = min(cfg.eval.sample_tokens, cfg.model.max_positions - len(self._prompt))
        if self._engine is None:
            pages = -(-(len(self._prompt) + room) // PAGE) + 1
            # Prompts in chunks of the smallest program's size, so that there is one program only.
            self._engine = Engine(
                cfg.model,
                params,
                mesh=self._step.layout.mesh,
                pages=pages + 1,
                page_size=PAGE,
                max_batch=1,
                dtype=cfg.train.dtype,
                prefill_chunk=LEAST,
                tokenizer=self._tokenizer,
                zero=cfg.zero,
                decode_steps=1,
            )
        else:
            self._engine.load(params, self._engine.version + 1)
        asked = SamplingParams(
            max_tokens=room, temperature=cfg.eval.temperature, seed=cfg.train.seed
        )
        self._engine.submit(self._prompt, asked)
        ids = [token for output in self._engine.run() for token in output.tokens]
        self._engine.sleep()
        if ids[-1] in self._tokenizer.ends:
            ids.pop()
        return self._shown + self._tokenizer.decode(ids)


# ---- text
#
# What pretraining reads and measures: packed rows of text, held-out loss, samples.


class Text:
    """The corpora of a pretraining run (systems/job.py: Reading)."""

    labels: tuple[str, ...] = ()  # the next token is no class

    def __init__(self, cfg: Config, console: Console, run_dir: RunDir):
        """Opens the corpora, and says what they hold."""
        self._cfg = cfg
        self._corpora, self.tokenizer = open_corpora(
            cfg.data, cfg.cache_dir, console.say, cfg.model.vocab
        )
        report.show_data(console, cfg, self._corpora, self.tokenizer)
        self.rows = training_rows(self._corpora, cfg.train.seq_len, cfg.train.seed)
        self.identity: dict[str, Any] = resume.identity(self._corpora, self.tokenizer, cfg)

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> Measure:
        """Returns the evaluations of a run."""

        def batches() -> Any:
            like, most = train_step.abstract_eval_batch, evaluated_rows(self._cfg)
            return held_out_batches(self._corpora, like, most, train_step.storage.tokens)

        return Measure(
            self._cfg,
            train_step,
            self._corpora,
            self.tokenizer,
            recorder,
            console,
            run_dir,
            batches,
        )
