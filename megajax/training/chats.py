"""Fine-tuning on chats: a decoder learns the answers of conversations.

The model, its tokenizer and its chat template come from --init_from, a Hugging Face folder or a
GGUF file. Only the tokens that the assistant would write have a loss (data/chat.py). Everything
else is as in pretraining.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from megajax.core import config, files
from megajax.core.config import Checked, above, equal, group, option
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.data import chats as chats_
from megajax.data import tokenizer as tokenizer_
from megajax.data.chat import (
    Chat,
    ChatTemplate,
    bos_and_eos,
    chat_template,
    read_template,
    rows,
)
from megajax.data.chats import ChatDataConfig, ChatRows, ChatSet, marked
from megajax.data.loader import Rows, finite_batches
from megajax.data.token_ids import GENERATION
from megajax.data.tokenizer import (
    Tokenizer,
    bpe_size,
    check_vocabulary,
    need_tokenizer,
    open_tokenizer,
)
from megajax.models.decoder_config import PRESETS as MODELS
from megajax.models.decoder_config import DecoderConfig
from megajax.models.heads import critic_params
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder
from megajax.training import presets
from megajax.training.config import CheckpointConfig, Config, EvalConfig, LogConfig, TrainConfig
from megajax.training.evaluate import Measure, evaluate, evaluated_rows
from megajax.training.optim import OptimConfig
from megajax.training.presets import fit_vocabulary
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep
from megajax.training.task import Task, TrainState

# Templates that --chat_template names. chatml: that of many published models, whose tokens the
# tokenizer must have. plain: for any tokenizer with an end token.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + "
        "message['content'] if message['role'] != 'assistant' else 'assistant:' + ' ' + "
        "message['content'] + eos_token }}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ),
}
PROBE = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "answer"}]
NAMED = "--chat_template=chatml, --chat_template=plain or --chat_template=FILE"
COLOURS = "\x1b[32m", "\x1b[0m"  # green


@dataclass(frozen=True)
class ChatEvalConfig(EvalConfig, section="eval"):
    """What is measured beside training, and what is asked."""

    prompt: str = option(
        "",
        "question of a user that the sample answers; empty: the first held-out one",
        needs=above(0, "sample_tokens"),
    )
    sample_tokens: int = option(64, "tokens of the sample at most; 0: no sample", at_least=0)
    temperature: float = option(
        0.0, "temperature of the sample; 0: greedy", needs=above(0, "sample_tokens"), at_least=0
    )


@dataclass(frozen=True)
class DpoConfig(Checked, section="dpo"):
    """Direct preference optimisation (training/preference.py)."""

    beta: float = option(
        0.1,
        "weight of the reward: the larger, the closer the model stays to what it was",
        at_least=1e-6,
    )


@dataclass(frozen=True)
class ChatsConfig(Config):
    """A whole run of a decoder that learns chats, or which of two answers people prefer."""

    data: ChatDataConfig = group(ChatDataConfig)  # type: ignore[bad-override]
    eval: ChatEvalConfig = group(ChatEvalConfig)
    objective: Literal["sft", "dpo", "reward"] = option(
        "sft",
        "sft: the answers of conversations; dpo: to give the chosen answer of a pair rather than "
        "the rejected one; reward: a number for a conversation, larger with the chosen answer",
    )
    dpo: DpoConfig = group(DpoConfig, needs=equal("objective", "dpo"))
    chat_template: str | None = option(
        None,
        "chat template: a file in Jinja, or chatml or plain, which are built in; none: that of the "
        "model's tokenizer",
    )
    show_masks: bool = option(
        False, "print one row, its learnt tokens in green or in brackets, and end"
    )

    def task(self) -> Task:
        """Returns what the objective trains."""
        from megajax.training import preference  # which reads runs of this kind

        if self.objective == "dpo":
            return preference.dpo_task(self.model, self.train, self.dpo.beta)
        if self.objective == "reward":
            return preference.reward_task(self.model, self.train)
        return super().task()

    def check(self, sizes: Mapping[str, int]) -> None:
        """Checks what Config checks, and that each device has whole rows of pairs where a pipeline
        adds them up. Raises: UserError."""
        super().check(sizes)
        if self.objective != "sft" and sizes["pipe"] > 1 and sizes["context"] > 1:
            raise UserError(
                f"mesh.context={sizes['context']}: objective={self.objective} adds up the tokens "
                "of an answer, which pipeline stages do on whole rows; use 1 (--mesh.context)"
            )
        if self.objective == "reward" and self.lora.rank:
            raise UserError(
                f"lora.rank={self.lora.rank}: objective=reward trains a head, which adapters leave "
                "as it is; nearest: 0 (--lora.rank)"
            )

    def given_model(self) -> Any:
        """Returns the configuration of the model of `init_from`."""
        assert self.init_from is not None
        return model_of(self.init_from)

    def given_params(self, layout: Layout, fresh: Tree) -> Tree:
        """Returns the weights of `init_from`, also of a GGUF file."""
        assert self.init_from is not None
        if _is_gguf(self.init_from):
            params = _gguf(self.init_from).params(layout)
        else:
            params = super().given_params(layout, fresh)
        return critic_params(params, fresh) if self.objective == "reward" else params


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


def _gguf(name: str) -> Any:
    from megajax.foreign.gguf import GgufModel

    file = expand(name, "init_from")
    if not file.is_file():
        raise UserError(f"init_from={name} does not exist (--init_from)")
    return GgufModel(file)


def _tokenizer_of(name: str) -> Tokenizer:
    return _gguf(name).tokenizer() if _is_gguf(name) else open_tokenizer(name)


def model_of(init_from: str) -> Any:
    """Returns the configuration of the model in a Hugging Face folder or a GGUF file."""
    if _is_gguf(init_from):
        return _gguf(init_from).cfg
    from megajax.foreign import hf

    return hf.load_config(init_from)


def chat() -> ChatsConfig:
    """A decoder of 0.9 M parameters learns the form of the answers of a made set."""
    model = dataclasses.replace(MODELS["nano"](), vocab=512)
    return ChatsConfig(
        model=model,
        train=TrainConfig(steps=60, global_batch=16, seq_len=128),
        optim=OptimConfig(name="muon", lr=2e-2, warmup=6),
        data=ChatDataConfig(),
        eval=ChatEvalConfig(every=30, batches=2, sample_tokens=24),
        checkpoint=CheckpointConfig(every=30),
        log=LogConfig(every=10),
        chat_template="plain",
    )


def tuned(model: DecoderConfig) -> ChatsConfig:
    """The recipe for fine-tuning given weights (presets.recipe), on chats."""
    shared = presets.recipe(model.max_positions)
    return ChatsConfig(model=model, eval=ChatEvalConfig(every=50, batches=4), **shared)


PRESETS = {"chat": chat}


def take_chats(base: ChatsConfig, typed: Mapping[str, Any], read: Mapping[str, Any]) -> ChatsConfig:
    """Returns `base` with the model and the tokenizer of init_from, if it is given.

    Without --preset or --config the rest is the recipe for fine-tuning.
    Args: typed: {dotted name: value} of the flags; read: of the file. Both go over the folder's.
    """
    source = typed.get("init_from", base.init_from)
    over = typed if "init_from" in typed else {**read, **typed}
    if source is None:
        return fit_vocabulary(base, typed, read, _tokenizer_of)
    if all(name in over for name in presets.SHAPE):
        return base
    model = model_of(source)
    if not isinstance(model, DecoderConfig):
        raise UserError(
            f"{source} holds no decoder; chats are learnt by decoders, labels and hidden tokens by "
            "encoders: --preset=nano (--init_from)"
        )
    base = base if config.start_given() else tuned(model)
    changes = {k: v for k, v in over.items() if k.startswith("model.")}
    if "data.tokenizer" not in over:
        gguf = _is_gguf(source)
        changes["data.tokenizer"] = (
            source if gguf else str(need_tokenizer(source, "init_from", "--data.tokenizer"))
        )
    template = base.chat_template if config.start_given() and "chat_template" in read else None
    return config.override(dataclasses.replace(base, model=model, chat_template=template), changes)


# ---- tokenizer and template


def open_chat(cfg: ChatsConfig, tokenizer: Tokenizer) -> Chat:
    """Returns the chat template of a run, which can be learnt from.

    Raises: UserError where there is none, or it has no answers that can be told from the rest.
    """
    begin, end = bos_and_eos(tokenizer)
    named = cfg.chat_template
    if named is None:
        whose = f"the tokenizer {tokenizer.name}"
        inside = getattr(tokenizer, "chat_template", None) if _is_gguf(cfg.data.tokenizer) else None
        template = (
            ChatTemplate(inside, begin, end)
            if inside
            else chat_template(expand(cfg.data.tokenizer), tokenizer)
        )
        if template is None:
            raise UserError(
                f"{whose} has no chat template, as base models have none; choose one: {NAMED} "
                "(--chat_template)"
            )
    else:
        whose = f"chat_template={named}"
        source = TEMPLATES.get(named)
        if source is None:
            source = read_template(expand(named, "chat_template"), "chat_template")
        template = ChatTemplate(source, begin, end)
    made = Chat(template, tokenizer)
    if reason := made.problem or made.refusal:
        raise UserError(f"{whose}: {reason}; choose another: {NAMED} (--chat_template)")
    try:
        rows(PROBE, tokenizer, made)
    except UserError as error:
        raise UserError(
            f"{whose} cannot be learnt from: {error}; choose another: {NAMED} (--chat_template)"
        ) from None
    return made


def tokenizer_of(
    cfg: ChatsConfig, sources: Sequence[tuple[str, float, Any]], cache: Path
) -> Tokenizer:
    """Returns the tokenizer of a run; bpe:N is trained on its sources. Raises: UserError."""
    name = cfg.data.tokenizer
    if bpe_size(name) is not None:
        name = str(chats_.trained_tokenizer(cfg.data, sources, cache))
    made = _tokenizer_of(name)
    check_vocabulary(made, cfg.model.vocab)
    return made


def keep_template(run_dir: RunDir, chat: Chat, tokenizer: Tokenizer, console: Console) -> None:
    """Writes the chat template into the folder of a run, if that can be written."""
    if jax.process_index() == 0:
        try:
            write_template(run_dir.path, chat, tokenizer)
        except OSError as error:
            console.say(f"cannot write the chat template to {run_dir.path}: {error.strerror}")


def show_masks(row: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Prints a row, what is learnt of it in green or in brackets, and ends the process."""
    print(marked(row, tokenizer, COLOURS if sys.stdout.isatty() else ("[", "]")))
    raise SystemExit(0)


def write_template(folder: Path, chat: Chat, tokenizer: Tokenizer) -> None:
    """Writes the template beside the tokenizer of a run, and the token that ends its answers among
    those at which generation stops. Raises: OSError."""
    assert chat.template is not None
    file = folder / tokenizer_.TEMPLATE
    source = chat.template.source.encode()
    if not file.is_file() or file.read_bytes() != source:
        files.write_whole(file, source)
    made = rows(PROBE, tokenizer, chat)
    end = int(made["tokens"][made["mask"]][-1])
    if end in tokenizer.ends:
        return
    file = folder / GENERATION
    said = files.read_object(file, 2**20) if file.is_file() else {}
    said["eos_token_id"] = [end, *tokenizer.ends]
    files.write_whole(file, json.dumps(said, indent=2) + "\n")


# ---- what a run reads and measures


class ChatMeasure(Measure):
    """Held-out loss, that of each source too, and the answer to a question."""

    def __init__(self, cfg: ChatsConfig, reading: "ChatReading", *args: Any):
        """args: of Measure, behind its configuration."""
        self._reading = reading
        super().__init__(cfg, *args)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Measures a loaded model before its first step, beside which training is judged."""
        if not finished and self._cfg.init_from and (row := self.figures(state)):
            self._recorder.emit(0, row)
        return state

    def prompt(self) -> tuple[str, list[int]] | None:
        """Returns the prompt of eval.prompt, or of the first held-out conversation."""
        reading, asked = self._reading, self._cfg.eval.prompt
        if asked:
            messages = [{"role": "user", "content": asked}]
            return reading.chat.prompt(messages), reading.chat.encode(messages)
        held = next((s.held_out for s in reading.sets if s.held_out is not None), None)
        tokens, mask = (held or reading.sets[0].train).read(0)
        ids = tokens[: int(np.argmax(mask))].tolist()
        return reading.tokenizer.decode(ids, special=True), ids

    def figures(self, state: TrainState) -> dict[str, float | int | None]:
        """Returns eval_loss and others, and of several sources eval_loss/NAME of each."""
        weights, like = self._step.weights(state), self._step.abstract_eval_batch
        order, reading = self._step.storage.tokens, self._reading
        parts: dict[str, Any] = {}
        for name, held in reading.held(evaluated_rows(self._cfg)).items():
            figures = evaluate(self._step, weights, finite_batches(held, like, order), None)
            if figures:
                parts[name] = figures
        if len(parts) < 2:
            return next(iter(parts.values()), {})
        counts = {name: f["eval_tokens"] for name, f in parts.items()}
        total = sum(counts.values())
        means = {
            key: total
            if key == "eval_tokens"
            else sum(f[key] * counts[n] for n, f in parts.items()) / total
            for key in next(iter(parts.values()))
        }
        return means | {f"eval_loss/{name}": f["eval_loss"] for name, f in parts.items()}


class ChatReading:
    """The conversations of a run (systems/job.py: Reading)."""

    labels: tuple[str, ...] = ()

    def __init__(self, cfg: ChatsConfig, console: Console, run_dir: RunDir):
        """Opens what the run reads, and says what it holds."""
        cache = expand(cfg.cache_dir, "cache_dir")
        sources = chats_.open_sources(cfg.data)
        self._cfg, self._console = cfg, console
        self.tokenizer: Tokenizer = tokenizer_of(cfg, sources, cache)
        self.chat = open_chat(cfg, self.tokenizer)
        seq_len, seed = cfg.train.seq_len, cfg.train.seed
        self.sets: list[ChatSet] = chats_.open_chats(
            cfg.data, sources, self.tokenizer, self.chat, seq_len, cache, console.say
        )
        self.rows: Any = chats_.training_rows(self.sets, seq_len, seed)
        if cfg.show_masks:
            show_masks(self.rows[0], self.tokenizer)
        for s in self.sets:
            self._describe(s)
        self.identity = {
            "chats": [f"{s.name}:{s.weight:g}:{s.fingerprint}" for s in self.sets],
            "tokenizer": self.tokenizer.identity,
            "seq_len": seq_len,
            "seed": seed,
        }

    def _describe(self, s: ChatSet) -> None:
        counts = dict(s.counts)
        total, learnt = counts.pop("tokens", 0), counts.pop("tokens that are learnt", 0)
        read, held = counts.pop("conversations", 0), 0 if s.held_out is None else len(s.held_out)
        rows = ChatRows(s.train, self._cfg.train.seq_len, self._cfg.train.seed)
        say = self._console.say
        say(
            f"{s.name}: {quantity(read)} conversations, {quantity(held)} held out; "
            f"{quantity(learnt)} of {quantity(total)} tokens are learnt ({learnt / total:.0%}); "
            f"{quantity(rows.rows_per_epoch)} rows an epoch, {rows.fill:.0%} full"
        )
        for what, count in counts.items():
            say(f"{s.name}: {count:,} {what}")

    def held(self, most: int) -> dict[str, list[tuple[Rows, int]]]:
        """Returns {name of a source: its held-out rows that are evaluated}, `most` in all."""
        seq_len, made = self._cfg.train.seq_len, {}
        for s in self.sets:
            if s.held_out is None:
                continue
            rows = ChatRows(s.held_out, seq_len, 0, shuffle=False)
            count = min(rows.rows_per_epoch, -(-most // len(self.sets)))
            name = Path(s.name).name
            made[s.name if name in made else name] = [(rows, i) for i in range(count)]
        return made

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> Measure:
        """Returns the evaluations of a run; writes the chat template beside its tokenizer."""
        keep_template(run_dir, self.chat, self.tokenizer, console)
        corpora: Sequence[Any] = ()
        nothing = functools.partial(iter, ())
        more = corpora, self.tokenizer, recorder, console, run_dir, nothing
        return ChatMeasure(self._cfg, self, train_step, *more)
