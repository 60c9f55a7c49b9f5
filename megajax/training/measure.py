"""The measurement beside training: held-out loss, then a sample of what the model writes."""

import math
from collections.abc import Callable, Iterable, Sequence

import jax

from megajax.core.errors import UserError
from megajax.data.corpus import Corpus
from megajax.data.loader import held_out_rows
from megajax.data.tokenizer import Tokenizer
from megajax.models.parts import Batch
from megajax.monitor.console import Console
from megajax.monitor.records import Recorder
from megajax.serving.generate import Generator
from megajax.serving.sampling import SamplingConfig
from megajax.training.config import Config
from megajax.training.evaluate import evaluate
from megajax.training.run_dir import RunDir
from megajax.training.state import TrainState
from megajax.training.step import TrainStep


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
        self._generator: Generator | None = None
        self.last_sample: str | None = None
        self._prompt = self._encode_prompt() if cfg.eval.sample_tokens else []

    def _encode_prompt(self) -> list[int]:
        cfg, tokenizer = self._cfg, self._tokenizer
        begin = [] if tokenizer.begin is None else [tokenizer.begin]
        prompt = begin + tokenizer.encode([cfg.eval.prompt])[0].tolist()
        if not 0 < len(prompt) < cfg.model.max_positions:
            raise UserError(
                f"eval.prompt of {len(prompt)} tokens must have from 1 to "
                f"{cfg.model.max_positions - 1}, below model.max_positions; eval.sample_tokens=0 "
                "samples nothing (--eval.prompt, --eval.sample_tokens)"
            )
        return prompt

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        every = self._cfg.eval.every
        return last or (every > 0 and finished % every == 0)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Nothing is measured before the first step."""
        return state

    def __call__(self, state: TrainState, step: int) -> TrainState:
        """Evaluates, records, samples."""
        like, most = self._step.abstract_eval_batch["tokens"], self._cfg.eval.batches
        rows = held_out_rows(self._corpora, like.shape[-1], most * math.prod(like.shape[:-1]))
        row = evaluate(self._step, state.params, self._batches(), self._corpora, rows)
        if row:
            self._recorder.emit(step, row)
        if self._cfg.eval.sample_tokens:
            self.last_sample = self.sample(state)
            if jax.process_index() == 0:
                self._run_dir.samples.mkdir(exist_ok=True)
                (self._run_dir.samples / f"{step:08d}.txt").write_text(
                    self.last_sample + "\n", encoding="utf-8"
                )
        return state

    def sample(self, state: TrainState) -> str:
        """Returns the prompt with the model's continuation."""
        cfg = self._cfg
        if self._generator is None:
            self._generator = Generator(
                cfg.model,
                self._step.layout.mesh,
                cfg.zero,
                cfg.train.dtype,
                SamplingConfig(cfg.eval.temperature),
            )
        room = cfg.model.max_positions - len(self._prompt)
        ids = self._generator(
            self._step.natural(state.params),
            [self._prompt],
            min(cfg.eval.sample_tokens, room),
            cfg.train.seed,
            self._tokenizer.end,
        )[0]
        return cfg.eval.prompt + self._tokenizer.decode(ids)
