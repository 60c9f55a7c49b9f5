"""The measurement beside training: held-out loss, then a sample of what the model writes."""

from collections.abc import Callable, Iterable, Sequence

import jax

from megajax.core.errors import UserError
from megajax.core.files import write_whole
from megajax.data.corpus import Corpus
from megajax.data.loader import held_out_rows
from megajax.data.tokenizer import Tokenizer, prompt_ids
from megajax.models.parts import Batch
from megajax.monitor.console import Console
from megajax.monitor.records import Recorder
from megajax.serving.engine import Engine
from megajax.serving.laid import LEAST
from megajax.serving.params import SamplingParams
from megajax.training.config import Config
from megajax.training.evaluate import evaluate, evaluated_rows
from megajax.training.run_dir import RunDir
from megajax.training.state import TrainState
from megajax.training.step import TrainStep

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
        self._prompt = self._encode_prompt() if cfg.eval.sample_tokens else []

    def _encode_prompt(self) -> list[int]:
        cfg, tokenizer = self._cfg, self._tokenizer
        prompt = prompt_ids(tokenizer, cfg.eval.prompt)
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
        seq_len = self._cfg.train.seq_len
        rows = held_out_rows(self._corpora, seq_len, evaluated_rows(self._cfg))
        row = evaluate(self._step, self._step.weights(state), self._batches(), self._corpora, rows)
        if row:
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
        cfg, params = self._cfg, self._step.storage.natural(self._step.weights(state))
        room = min(cfg.eval.sample_tokens, cfg.model.max_positions - len(self._prompt))
        if self._engine is None:
            pages = -(-(len(self._prompt) + room) // PAGE) + 1
            # Prompts in chunks of the smallest program's size, so that there is one program only.
            self._engine = Engine(
                cfg.model, params, mesh=self._step.layout.mesh, pages=pages + 1, page_size=PAGE,
                max_batch=1, dtype=cfg.train.dtype, prefill_chunk=LEAST, tokenizer=self._tokenizer,
                zero=cfg.zero, decode_steps=1,
            )  # fmt: skip
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
        return cfg.eval.prompt + self._tokenizer.decode(ids)
