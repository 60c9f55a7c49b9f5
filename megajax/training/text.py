"""What pretraining reads and measures: packed rows of text, held-out loss, samples."""

from typing import Any

from megajax.data.corpus import open_corpora
from megajax.data.loader import held_out_batches, training_rows
from megajax.monitor.console import Console
from megajax.monitor.records import Recorder
from megajax.training import banner, resume
from megajax.training.config import Config
from megajax.training.evaluate import evaluated_rows
from megajax.training.measure import Measure
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep


class Text:
    """The corpora of a pretraining run (systems/job.py: Reading)."""

    labels: tuple[str, ...] = ()  # the next token is no class

    def __init__(self, cfg: Config, console: Console, run_dir: RunDir):
        """Opens the corpora, and says what they hold."""
        self._cfg = cfg
        self._corpora, self.tokenizer = open_corpora(
            cfg.data, cfg.cache_dir, console.say, cfg.model.vocab
        )
        banner.show_data(console, cfg, self._corpora, self.tokenizer)
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
            self._cfg, train_step, self._corpora, self.tokenizer, recorder, console, run_dir,
            batches,
        )  # fmt: skip
