"""The measurement beside training: held-out loss, then a sample of what the model writes."""

from collections.abc import Callable, Iterable, Sequence

import jax

from megajax.data.corpus import Corpus
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
    """Call it with (state, step)."""

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
        """batches: gives the held-out batches, the same ones at every call."""
        self._cfg, self._step, self._corpora, self._tokenizer = cfg, train_step, corpora, tokenizer
        self._recorder, self._console, self._run_dir = recorder, console, run_dir
        self._batches = batches
        self._generator: Generator | None = None
        self.last_sample: str | None = None

    def __call__(self, state: TrainState, step: int) -> None:
        """Evaluates, records, samples."""
        row = evaluate(self._step, state.params, self._batches(), self._corpora)
        if row:
            self._recorder.emit(step, row)
        if self._cfg.eval.sample_tokens:
            self.last_sample = self.sample(state)
            if jax.process_index() == 0:
                self._run_dir.samples.mkdir(exist_ok=True)
                (self._run_dir.samples / f"{step:08d}.txt").write_text(self.last_sample + "\n")

    def sample(self, state: TrainState) -> str:
        """Returns the prompt with the model's continuation."""
        cfg = self._cfg
        if self._generator is None:
            self._generator = Generator(
                cfg.model,
                self._step.layout.mesh,
                cfg.shard.zero,
                cfg.train.dtype,
                SamplingConfig(cfg.eval.temperature),
            )
        tokenizer = self._tokenizer
        begin = [] if tokenizer.begin is None else [tokenizer.begin]
        prompt = begin + tokenizer.encode([cfg.eval.prompt])[0].tolist()
        room = cfg.model.max_positions - len(prompt)
        ids = self._generator(
            self._step.natural(state.params),
            [prompt],
            min(cfg.eval.sample_tokens, room),
            cfg.train.seed,
            tokenizer.end,
        )[0]
        return cfg.eval.prompt + tokenizer.decode(ids)
