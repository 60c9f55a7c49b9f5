"""What an encoder's run reads and measures: labelled texts, or text with hidden tokens.

Accuracy is the fraction of held-out targets that no other label or token has a larger logit than.
Beside that of a classifier stands what one answer for all examples would get right.
"""

from collections.abc import Callable, Iterable
from typing import Any

from megajax.core.errors import UserError
from megajax.data.corpus import open_corpora
from megajax.data.labelled import FixedRows, ShuffledRows, open_labelled
from megajax.data.loader import Rows, finite_batches, held_out, training_rows
from megajax.data.masked import MaskedRows
from megajax.models.parts import Batch
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder
from megajax.training import banner, resume
from megajax.training.evaluate import evaluate
from megajax.training.finetune import FinetuneConfig
from megajax.training.run_dir import RunDir
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
    ):
        """every: steps between evaluations; 0: at the end. batches: the same ones at every call.
        more: what is recorded beside each evaluation."""
        self._step, self._recorder, self._every = train_step, recorder, every
        self._batches, self._more = batches, more

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        return last or (self._every > 0 and finished % self._every == 0)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Nothing is measured before the first step."""
        return state

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Evaluates and records."""
        if found := evaluate(self._step, state.params, self._batches(), None):
            self._recorder.emit(finished, found | self._more)
        return state


class Examples:
    """Labelled texts, or text with hidden tokens, by the head of the model (systems/job.py)."""

    def __init__(self, cfg: FinetuneConfig, console: Console):
        """Opens what the run reads, and says what it holds."""
        self._cfg = cfg
        self._more: dict[str, float] = {}
        (self._open_labelled if cfg.model.head == "classify" else self._open_text)(console)

    def _open_labelled(self, console: Console) -> None:
        cfg, seq_len = self._cfg, self._cfg.train.seq_len
        found = open_labelled(cfg.data, seq_len, cfg.cache_dir, console.say)
        self.tokenizer = found.tokenizer
        for name, least, there in (
            ("labels", len(found.labels), cfg.model.labels),
            ("vocab", found.vocab, cfg.model.vocab),
        ):
            if there < least:
                raise UserError(
                    f"model.{name}={there} is fewer than the {least} of data.source="
                    f"{cfg.data.source}; nearest: {least} (--model.{name})"
                )
        self._more = {"eval_majority": found.held_out.majority}
        console.say(
            f"{cfg.data.source}: {quantity(len(found.train))} examples to learn, "
            f"{quantity(len(found.held_out))} held out, labels {', '.join(found.labels[:12])} "
            f"({self.tokenizer.name})"
        )
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
        like, cfg = train_step.abstract_eval_batch, self._cfg.eval
        rows = self._held(cfg.batches * int(like["tokens"].size // like["tokens"].shape[-1]))

        def batches() -> Any:
            return finite_batches(rows, like, train_step.order)

        return Accuracy(train_step, recorder, cfg.every, batches, self._more)
