"""What an encoder's run reads and measures: labelled texts, or text with hidden tokens.

Accuracy is the fraction of held-out targets that no other label or token has a larger logit than.
Beside that of a classifier stands what one answer for all examples would get right, and by the name
of each class its precision and recall. The classes of a run are those of the classifier that it
goes on from (its own labels.json, or the folder of init_from), else the labels of its data.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.data.corpus import open_corpora
from megajax.data.labelled import (
    Classes,
    FixedRows,
    ShuffledRows,
    majority,
    open_labelled,
    shown,
)
from megajax.data.loader import Rows, finite_batches, held_out, training_rows
from megajax.data.masked import MaskedRows
from megajax.models.parts import Batch
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder
from megajax.training import banner, resume
from megajax.training.evaluate import evaluate, evaluated_rows
from megajax.training.finetune import FinetuneConfig
from megajax.training.run_dir import RunDir, saved_labels
from megajax.training.state import TrainState
from megajax.training.step import TrainStep


class Accuracy:
    """A hook of the training loop: held-out loss and accuracy."""

    last_sample = None  # an encoder writes no text

    def __init__(
        self,
        train_step: TrainStep,
        recorder: Recorder,
        every: int,
        batches: Callable[[], Iterable[Batch]],
        more: dict[str, float],
        labels: tuple[str, ...],
    ):
        """every: steps between evaluations; 0: at the end. batches: the same ones at every call.
        more: what is recorded beside each evaluation. labels: the names of a classifier's classes.
        """
        self._step, self._recorder, self._every = train_step, recorder, every
        self._batches, self._more, self._labels = batches, more, labels

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        return last or (self._every > 0 and finished % self._every == 0)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Nothing is measured before the first step."""
        return state

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Evaluates and records."""
        weights = self._step.weights(state)
        if found := evaluate(self._step, weights, self._batches(), None, labels=self._labels):
            self._recorder.emit(finished, found | self._more)
        return state


class Examples:
    """Labelled texts, or text with hidden tokens, by the head of the model (systems/job.py)."""

    def __init__(self, cfg: FinetuneConfig, console: Console, run_dir: RunDir):
        """Opens what the run reads, and says what it holds."""
        self._cfg = cfg
        self._held_labels: np.ndarray | None = None
        self.labels: tuple[str, ...] = ()
        if cfg.model.head == "classify":
            self._open_labelled(console, run_dir)
        else:
            self._open_text(console)

    def _open_labelled(self, console: Console, run_dir: RunDir) -> None:
        cfg, seq_len = self._cfg, self._cfg.train.seq_len
        classes = known_classes(cfg, run_dir)
        found = open_labelled(cfg.data, seq_len, cfg.cache_dir, console.say, classes)
        self.tokenizer, self.labels = found.tokenizer, found.labels
        if cfg.model.labels != len(found.labels):
            whose = f"data.source={cfg.data.source}" if classes is None else classes.whose
            raise UserError(
                f"model.labels={cfg.model.labels} must be the {len(found.labels)} of {whose}: "
                f"{shown(found.labels)} (--model.labels={len(found.labels)})"
            )
        if cfg.model.vocab < found.vocab:
            raise UserError(
                f"model.vocab={cfg.model.vocab} is fewer than the {found.vocab} of data.source="
                f"{cfg.data.source}; nearest: {found.vocab} (--model.vocab)"
            )
        self._held_labels = found.held_out.labels_N
        console.say(
            f"{cfg.data.source}: {quantity(len(found.train))} examples to learn, "
            f"{quantity(len(found.held_out))} held out ({self.tokenizer.name})"
        )
        whose = "of the data" if classes is None else f"of {classes.whose}"
        named = [f"{i} {name}" for i, name in enumerate(found.labels)]
        console.say(f"classes {whose}: {shown(named)}")
        counts = np.bincount(found.train.labels_N, minlength=len(found.labels))
        if unseen := [name for name, n in zip(found.labels, counts, strict=True) if not n]:
            console.say(f"classes without an example to learn: {shown(unseen)}")
        self.rows: Rows = ShuffledRows(found.train, seq_len, cfg.train.seed)
        self._held: Callable[[int], list[tuple[Rows, int]]] = lambda most: [
            (FixedRows(found.held_out, seq_len), i) for i in range(min(most, len(found.held_out)))
        ]
        self.identity = {
            "examples": found.fingerprint,
            "tokenizer": self.tokenizer.identity,
            "seq_len": seq_len,
            "seed": cfg.train.seed,
        }

    def _open_text(self, console: Console) -> None:
        cfg, seq_len, seed = self._cfg, self._cfg.train.seq_len, self._cfg.train.seed
        corpora, self.tokenizer = open_corpora(
            cfg.data, cfg.cache_dir, console.say, cfg.model.vocab - 1
        )
        banner.show_data(console, cfg, corpora, self.tokenizer)
        ids = self.tokenizer.vocab  # the next id is the mask

        def masked(rows: Rows, seed: int) -> Rows:
            return MaskedRows(rows, ids, ids, seed)

        self.rows = masked(training_rows(corpora, seq_len, seed), seed)
        self._held = lambda most: [
            (masked(rows, 0), i) for rows, i in held_out(corpora, seq_len, most)
        ]
        self.identity = resume.identity(corpora, self.tokenizer, cfg) | {"masked": True}

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> Accuracy:
        """Returns the evaluations of a run."""
        like, most = train_step.abstract_eval_batch, evaluated_rows(self._cfg)
        rows, every = self._held(most), self._cfg.eval.every
        more = {}
        if self._held_labels is not None and rows:  # of the same examples
            more["eval_majority"] = majority(self._held_labels[:most])

        def batches() -> Any:
            return finite_batches(rows, like, train_step.storage.tokens)

        return Accuracy(train_step, recorder, every, batches, more, self.labels)


def known_classes(cfg: FinetuneConfig, run_dir: RunDir) -> Classes | None:
    """Returns the classes that a run's data must have, if it goes on from a trained classifier: its
    former start, or the folder of init_from. Raises: UserError for names that cannot be read."""
    former = saved_labels(run_dir.path)
    if former is not None:
        remedy = "Restore the data to continue the run, or give another --run_dir"
        return Classes(former, f"the run in {run_dir.path}", remedy)
    if cfg.init_from is None or cfg.new_head:
        return None
    from megajax.checkpoint import hf

    remedy = "Name the labels as its classes, or begin a new head with --new_head=true"
    return Classes(hf.load_labels(cfg.init_from), cfg.init_from, remedy)
