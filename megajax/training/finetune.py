"""Fine-tuning and masked-token pretraining of encoders: configuration, presets, start.

`--model.head` is the objective: `classify` learns the label of a text from its first token, `mlm`
hidden tokens (BERT, arXiv 1810.04805). Everything else is as in pretraining.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import config
from megajax.core.config import group, option, other_than
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.data.config import LabelledConfig
from megajax.data.corpus import open_corpora
from megajax.data.labelled import (
    Classes,
    FixedRows,
    MaskedRows,
    ShuffledRows,
    majority,
    open_labelled,
    shown,
)
from megajax.data.loader import Rows, finite_batches, held_out, training_rows
from megajax.data.tokenizer import need_tokenizer, tokenizer_file
from megajax.models import encoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import PRESETS as MODELS
from megajax.models.encoder_config import EncoderConfig, Head
from megajax.models.parts import Batch
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder
from megajax.training import chats, presets, report, resume
from megajax.training.config import (
    CheckpointConfig,
    Config,
    HeldOutConfig,
    JobConfig,
    LogConfig,
    TrainConfig,
)
from megajax.training.evaluate import evaluate, evaluated_rows
from megajax.training.optim import OptimConfig
from megajax.training.presets import fit_vocabulary
from megajax.training.run_dir import RunDir, saved_labels
from megajax.training.step import TrainStep
from megajax.training.task import Task, TrainState, mean_loss, token_rows


@dataclass(frozen=True)
class FinetuneConfig(JobConfig):
    """A whole run of an encoder: labels or hidden tokens, by its head."""

    model: EncoderConfig = group(EncoderConfig)
    data: LabelledConfig = group(LabelledConfig)
    new_head: bool = option(
        False,
        "begin the head from random weights, whichever head the folder of init_from has",
        needs=other_than("init_from", None),
    )

    def task(self) -> Task:
        """Returns the encoder with its head's targets."""
        train = self.train
        parts = functools.partial(
            encoder.parts, self.model, dtype=train.dtype, loss_chunks=max(train.loss_chunks, 1)
        )
        return Task(parts, token_rows(train.seq_len), mean_loss(train.z_loss))

    def given_params(self, layout: Layout, fresh: Tree) -> Tree:
        """Reads the parameters as JobConfig does; with `new_head` the head begins anew."""
        from megajax.foreign import hf

        assert self.init_from is not None
        theirs = hf.load_config(self.init_from)
        if not isinstance(theirs, EncoderConfig):
            return super().given_params(layout, fresh)
        self.check_head(theirs)
        if not self.new_head:
            return super().given_params(layout, fresh)
        like = {name: getattr(theirs, name) for name in ("head", "labels", "pooler")}
        params = hf.load_params(self.init_from, dataclasses.replace(self.model, **like), layout)
        return fresh | {name: x for name, x in params.items() if name not in encoder.HEAD}

    def check_head(self, theirs: EncoderConfig) -> None:
        """Refuses to leave the head of the folder of init_from out unless `new_head` says so.

        theirs: the configuration of that folder. Raises: UserError.
        """
        if self.new_head or _head(theirs) == _head(self.model):
            return
        shown = [f"{h} with {n} labels" if n else h for h, n in map(_head, (theirs, self.model))]
        has = "has no head" if theirs.head == "none" else f"has the head {shown[0]}"
        raise UserError(
            f"{self.init_from} {has}, and the run has the head {shown[1]}, which would begin from "
            "random weights; say so with --new_head=true, or train the folder's head (--new_head, "
            "--model.head, --model.labels)"
        )

    def check(self, sizes: Mapping[str, int]) -> None:
        """Checks what JobConfig checks, and what an encoder cannot do. Raises: UserError."""
        for axis in ("pipe", "context"):
            if sizes[axis] > 1:
                raise UserError(
                    f"mesh.{axis}={sizes[axis]}: encoders are cut over node, data and tensor only; "
                    f"use 1 (--mesh.{axis})"
                )
        super().check(sizes)
        model, train = self.model, self.train
        if model.head == "none":
            raise UserError(
                "model.head=none has no loss; train with mlm or classify (--model.head)"
            )
        if train.seq_len > model.max_positions - model.position_offset:
            raise UserError(
                f"train.seq_len={train.seq_len} is beyond the rows of the position table that are "
                f"left; at most {model.max_positions - model.position_offset} (--train.seq_len, "
                "--model.max_positions, --model.position_offset)"
            )


def _head(model: EncoderConfig) -> tuple[str, int]:
    """Returns what must be equal for a head to fit: its kind, and the classes of a classifier."""
    return model.head, model.labels if model.head == "classify" else 0


def nano() -> FinetuneConfig:
    """Two blocks learn from which package of Python's library a passage of 48 tokens comes."""
    return FinetuneConfig(
        model=EncoderConfig(
            layers=2,
            vocab=1152,
            max_positions=128,
            types=0,
            dropout=0.1,
            head="classify",
            labels=8,
            pooler="relu",  # with which a run is exported as DistilBERT
        ),
        mesh=MeshSpec(tensor=2),
        train=TrainConfig(steps=60, global_batch=64, seq_len=48),
        optim=OptimConfig(name="muon", lr=2e-2, warmup=6, weight_decay=0.01),
        data=LabelledConfig(tokenizer="bpe:1024", holdout=0.2),
        eval=HeldOutConfig(every=30, batches=12),
        checkpoint=CheckpointConfig(every=30),
        log=LogConfig(every=6),
        emulate_without_gpu=8,
    )


def nano_mlm() -> FinetuneConfig:
    """nano's encoder learns hidden bytes of the text that pretraining reads."""
    base = nano()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab=512, head="mlm"),
        train=dataclasses.replace(base.train, steps=120, global_batch=32, seq_len=64),
        data=LabelledConfig(),
    )


def large(name: str) -> FinetuneConfig:
    """Returns the fine-tuning of a published encoder as a classifier.

    The settings are those of BERT (arXiv 1810.04805, appendix A.3): rows of 128 tokens, 32 rows a
    step, a learning rate of 2e-5 that rises over the first 10 % of 1,000 steps and then decays
    linearly to 0. name: of an encoder in models/encoder_config.py, PRESETS.
    """
    return FinetuneConfig(
        model=dataclasses.replace(MODELS[name](), head="classify"),
        train=TrainConfig(steps=1000, global_batch=32, seq_len=128, dtype="bfloat16"),
        optim=OptimConfig(
            lr=2e-5,
            warmup=100,
            schedule="linear",
            final=0.0,
            weight_decay=0.01,
            beta2=0.999,
            eps=1e-6,
        ),
        data=LabelledConfig(holdout=0.1),
        eval=HeldOutConfig(every=250),
    )


def tuned(model: EncoderConfig) -> FinetuneConfig:
    """The recipe for fine-tuning given weights (presets.finetune), for an encoder."""
    shared = presets.recipe(model.max_positions - model.position_offset)
    head: Head = "classify"
    evaluation = HeldOutConfig(every=50, batches=4)
    model = dataclasses.replace(model, head=head)
    return FinetuneConfig(model=model, eval=evaluation, **shared)


PRESETS: dict[str, Callable[[], Any]] = {"nano": nano, "nano_mlm": nano_mlm, **chats.PRESETS} | {
    name: (lambda name=name: large(name)) for name in MODELS if name != "nano"
}


def load_run(run_dir: str | Path) -> Any:
    """Returns the configuration of a run's folder: an encoder's model has a head, a vision-language
    model has a tower, and a decoder has neither; one that learns chats has a chat_template beside
    its model. Raises: UserError naming the file."""
    file = expand(run_dir, "run_dir") / "config.json"
    said = config.read(file, "run_dir")
    read = said.get("model")
    model = read if isinstance(read, Mapping) else {}
    if "chat_template" in said:
        return config.load_json(chats.ChatsConfig, file, "run_dir")
    if "tower" not in model:
        return config.load_json(FinetuneConfig if "head" in model else Config, file, "run_dir")
    from megajax.training.vision import VisionConfig  # whose modules the other runs do not need

    return config.load_json(VisionConfig, file, "run_dir")


# The flags that --help describes; the others it names.
FIRST = (
    "preset", "config", "run_dir", "init_from", "model.head", "data.source", "data.label_key",
    "data.tokenizer", "chat_template", "show_masks", "train.steps", "train.global_batch",
    "train.seq_len", "optim.lr",
)  # fmt: skip


def take(base: Any, typed: Mapping[str, Any], read: Mapping[str, Any]) -> Any:
    """Returns `base` with what init_from says, of an encoder or of a decoder that learns chats.

    Which of them is trained follows from the preset or the file; without these from the model of
    init_from. Args: as of take_encoder.
    """
    source = typed.get("init_from")
    if isinstance(base, FinetuneConfig) and source is not None and not config.start_given():
        model = chats.model_of(source)
        if isinstance(model, DecoderConfig):
            return chats.tuned(model)
    if isinstance(base, chats.ChatsConfig):
        return chats.take_chats(base, typed, read)
    return take_encoder(base, typed, read)


def open_reading(cfg: Any, console: Console, run_dir: RunDir) -> Any:
    """Opens the data of a run: conversations, pairs of them, labelled texts, or text with hidden
    tokens."""
    if isinstance(cfg, chats.ChatsConfig) and cfg.objective != "sft":
        from megajax.training.preference import PreferenceReading  # which measures as this does

        return PreferenceReading(cfg, console, run_dir)
    kind = chats.ChatReading if isinstance(cfg, chats.ChatsConfig) else Examples
    return kind(cfg, console, run_dir)


def take_encoder(
    base: FinetuneConfig, typed: Mapping[str, Any], read: Mapping[str, Any]
) -> FinetuneConfig:
    """Returns `base` with the model and the tokenizer of the folder of init_from, if there is one.

    Without --preset or --config the rest is the recipe for fine-tuning. The head stays that of
    `base`; the number of a classifier's labels is the folder's, if it has one that is trained on.
    Args: typed: {dotted name: value} of the flags; read: of the file. Both go over the folder's.
    """
    folder = typed.get("init_from", base.init_from)
    over = typed if "init_from" in typed else {**read, **typed}
    if folder is None:
        return fit_vocabulary(base, typed, read)
    if {"model.layers", "model.width", "model.vocab"} <= over.keys():
        return base
    from megajax.foreign import hf

    model = hf.load_config(folder)
    if not isinstance(model, EncoderConfig):
        raise UserError(
            f"{folder} holds a decoder, and the preset an encoder; --preset=chat teaches it chats, "
            "experiments/pretrain.py text (--init_from, --preset)"
        )
    base = base if config.start_given() else tuned(model)
    changes = {k: v for k, v in over.items() if k.startswith("model.")}
    head = changes.get("model.head", base.model.head)
    new = over.get("new_head", base.new_head)
    loaded = not new and head == model.head == "classify"
    labels = model.labels if loaded else base.model.labels
    base = dataclasses.replace(base, model=dataclasses.replace(model, head=head, labels=labels))
    if "data.tokenizer" not in {**read, **typed}:
        changes["data.tokenizer"] = str(need_tokenizer(folder, "init_from", "--data.tokenizer"))
    elif "data.tokenizer" not in over and (
        tokenizer := tokenizer_file(model_folder(folder, "init_from"))
    ):
        changes["data.tokenizer"] = str(tokenizer)
    base = config.override(base, changes)
    dataclasses.replace(base, init_from=folder, new_head=new).check_head(model)
    return base


# ---- examples
#
# What an encoder's run reads and measures: labelled texts, or text with hidden tokens.
#
# Accuracy is the fraction of held-out targets that no other label or token has a larger logit than.
# Beside that of a classifier stands what one answer for all examples would get right, and by the
# name of each class its precision and recall. The classes of a run are those of the classifier that
# it goes on from (its own labels.json, or the folder of init_from), else the labels of its data.


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
        first: bool = False,
    ):
        """every: steps between evaluations; 0: at the end. batches: the same ones at every call.
        more: what is recorded beside each evaluation. labels: the names of a classifier's classes.
        first: evaluate before the first step too.
        """
        self._first = first
        self._step, self._recorder, self._every = train_step, recorder, every
        self._batches, self._more, self._labels = batches, more, labels

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        return last or (self._every > 0 and finished % self._every == 0)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """If `first` says so, evaluates what a run begins with, before its first step."""
        return self(state, 0) if self._first and not finished else state

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Evaluates and records."""
        weights = self._step.weights(state)
        if figures := evaluate(self._step, weights, self._batches(), None, labels=self._labels):
            self._recorder.emit(finished, figures | self._more)
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
        examples = open_labelled(cfg.data, seq_len, cfg.cache_dir, console.say, classes)
        self.tokenizer, self.labels = examples.tokenizer, examples.labels
        if cfg.model.labels != len(examples.labels):
            whose = f"data.source={cfg.data.source}" if classes is None else classes.whose
            raise UserError(
                f"model.labels={cfg.model.labels} must be the {len(examples.labels)} of {whose}: "
                f"{shown(examples.labels)} (--model.labels={len(examples.labels)})"
            )
        if cfg.model.vocab < examples.vocab:
            raise UserError(
                f"model.vocab={cfg.model.vocab} is fewer than the {examples.vocab} of data.source="
                f"{cfg.data.source}; nearest: {examples.vocab} (--model.vocab)"
            )
        self._held_labels = examples.held_out.labels_N
        console.say(
            f"{cfg.data.source}: {quantity(len(examples.train))} examples to learn, "
            f"{quantity(len(examples.held_out))} held out ({self.tokenizer.name})"
        )
        whose = "of the data" if classes is None else f"of {classes.whose}"
        named = [f"{i} {name}" for i, name in enumerate(examples.labels)]
        console.say(f"classes {whose}: {shown(named)}")
        counts = np.bincount(examples.train.labels_N, minlength=len(examples.labels))
        if unseen := [name for name, n in zip(examples.labels, counts, strict=True) if not n]:
            console.say(f"classes without an example to learn: {shown(unseen)}")
        self.rows: Rows = ShuffledRows(examples.train, seq_len, cfg.train.seed)
        self._held: Callable[[int], list[tuple[Rows, int]]] = lambda most: [
            (FixedRows(examples.held_out, seq_len), i)
            for i in range(min(most, len(examples.held_out)))
        ]
        self.identity = {
            "examples": examples.fingerprint,
            "tokenizer": self.tokenizer.identity,
            "seq_len": seq_len,
            "seed": cfg.train.seed,
        }

    def _open_text(self, console: Console) -> None:
        cfg, seq_len, seed = self._cfg, self._cfg.train.seq_len, self._cfg.train.seed
        corpora, self.tokenizer = open_corpora(
            cfg.data, cfg.cache_dir, console.say, cfg.model.vocab - 1
        )
        report.show_data(console, cfg, corpora, self.tokenizer)
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
    from megajax.foreign import hf

    remedy = "Name the labels as its classes, or begin a new head with --new_head=true"
    return Classes(hf.load_labels(cfg.init_from), cfg.init_from, remedy)
