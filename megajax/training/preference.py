"""Learning from preferences: DPO and reward models, as tasks of the one trainer.

A pair is two answers to the same conversation, of which people preferred the first. A row of a
batch holds one pair: the conversation with the chosen answer as segment 0, with the rejected one as
segment 1. Losses are sums over pairs, so micro-batches and devices add them up.

dpo     Direct preference optimisation (Rafailov et al., arXiv 2305.18290, equation 7): the loss of
        a pair is -log sigmoid(beta ((p_c - r_c) - (p_r - r_r))), where p are the log probabilities
        of the answers' tokens and r those of the reference, the model before training. The
        references are computed once and stored with the run.
reward  A model with one number a sequence, by Bradley and Terry: -log sigmoid(s_c - s_r), where s
        is the value at the last token (models/heads.py).

Legend: B rows, S positions, 2 sides: chosen, rejected; N pairs.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.tree import Tree
from megajax.data import chats, quiz
from megajax.data.chat import Chat, learnt_row
from megajax.data.documents import is_held_out, token_key
from megajax.data.loader import finite_batches
from megajax.data.pack import IGNORED, mix, parse, permute
from megajax.data.tokenizer import Tokenizer
from megajax.layers.losses import LossSums
from megajax.models import decoder, heads, lora
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import Batch
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder
from megajax.training import chats as chats_
from megajax.training import scores
from megajax.training.config import TrainConfig
from megajax.training.evaluate import evaluated_rows
from megajax.training.finetune import Accuracy
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep
from megajax.training.task import Leaf, Task, TrainState, token_rows

Messages = list[dict[str, Any]]
REFERENCE = ("reference_chosen", "reference_rejected")  # members of a row


STORED = "reference.npz"  # in the folder of a run of DPO


# ---- the losses


def is_pair(batch: Batch) -> jax.Array:
    """Tells for each row whether it holds a pair; rows that fill a batch do not."""
    return (batch["targets"] >= 0).any(-1)


def count_pairs(batch: Batch) -> jax.Array:
    """Returns the number of pairs of a batch."""
    return is_pair(batch).sum()


def of_sides(x_BS: jax.Array, counts_BS: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the sums over the counted places of the chosen and of the rejected side, (B,) each.
    Values elsewhere do not count, NaN included."""
    sides = (counts_BS & (batch["segments"] == side) for side in (0, 1))
    chosen_B, rejected_B = (jnp.where(side, x_BS, 0.0).sum(-1) for side in sides)
    return chosen_B, rejected_B


def pair_sums(chosen_B: jax.Array, rejected_B: jax.Array, batch: Batch) -> LossSums:
    """Returns the sums of Bradley and Terry's loss of two scores a pair, and what is reported."""
    margin_B, counts_B = chosen_B - rejected_B, is_pair(batch)
    terms = {
        "preference": -jax.nn.log_sigmoid(margin_B),
        "right": (margin_B > 0).astype(jnp.float32),
        "chosen": chosen_B,
        "rejected": rejected_B,
    }
    sums = {name: jnp.where(counts_B, x, 0.0).sum() for name, x in terms.items()}
    return LossSums(sums, counts_B.sum())


def metrics(sums: LossSums, total: Any) -> dict[str, Any]:
    """Returns what a step reports: the loss, the share of pairs whose chosen answer has the larger
    reward, and the mean rewards."""
    return {
        "loss": sums.preference / total,
        "accuracy": sums.terms["right"] / total,
        "rewards/chosen": sums.chosen / total,
        "rewards/rejected": sums.rejected / total,
        "rewards/margin": (sums.chosen - sums.rejected) / total,
    }


def _task(parts: Any, batch: Mapping[str, Leaf]) -> Task:
    def objective(sums: LossSums, total: jax.Array) -> jax.Array:
        return sums.preference / total

    return Task(parts, batch, objective, metrics, count_pairs, unit="pairs", row_units=1)


def dpo_task(model: DecoderConfig, train: TrainConfig, beta: float) -> Task:
    """Returns what DPO trains. A row has the members REFERENCE: the log probabilities of the chosen
    and of the rejected answer by the model before training. beta: as of chats.DpoConfig."""

    def loss(logprobs_BS: jax.Array, entropy_BS: jax.Array, batch: Batch) -> LossSums:
        chosen_B, rejected_B = of_sides(logprobs_BS, batch["targets"] >= 0, batch)
        chosen_B, rejected_B = chosen_B - batch[REFERENCE[0]], rejected_B - batch[REFERENCE[1]]
        return pair_sums(beta * chosen_B, beta * rejected_B, batch)

    parts = functools.partial(
        decoder.parts,
        model,
        dtype=train.dtype,
        loss_chunks=max(train.loss_chunks, 1),
        loss=loss,
    )
    return _task(parts, token_rows(train.seq_len) | dict.fromkeys(REFERENCE, Leaf(dtype="float32")))


def reward_task(model: DecoderConfig, train: TrainConfig) -> Task:
    """Returns what trains a reward model: a critic whose value at the last token of a side is its
    score. A row has the member `ends`, which is 1 at these tokens."""

    def loss(values_BS: jax.Array, batch: Batch) -> LossSums:
        return pair_sums(*of_sides(values_BS, batch["ends"] > 0, batch), batch)

    parts = functools.partial(heads.critic_parts, model, dtype=train.dtype, loss=loss)
    return _task(parts, token_rows(train.seq_len, "ends"))


# ---- pairs of files: TRL's forms


@dataclass(frozen=True)
class Pair:
    """where: its file and place, for messages. chosen, rejected: conversations that end with the
    assistant's answer. shared: the number of messages with which both begin. tools: for the chat
    template, or None."""

    where: str
    chosen: Messages
    rejected: Messages
    shared: int
    tools: list[Any] | None = None

    @property
    def messages(self) -> Messages:
        """The texts from which a tokenizer is trained."""
        return [*self.chosen, *self.rejected[self.shared :]]


def pair(value: Any, where: str, place: Any = None) -> Pair:
    """Returns the pair that a value of JSON, or a row of a table, describes.

    `chosen` and `rejected` are whole conversations, or answers to `prompt`, which is a text or
    messages. An answer is a text or messages. Raises: UserError that begins with `where`.
    """
    try:
        if not isinstance(value, Mapping):
            raise UserError(f"it must be an object with chosen and rejected, not {value!r:.60}")
        lacks = [name for name in ("chosen", "rejected") if value.get(name) in (None, "", [])]
        if lacks:
            members = ", ".join(f"{k!r:.40}" for k in list(value)[:8]) or "none"
            raise UserError(f"it has no {' and no '.join(lacks)}; its members: {members}")
        asked = _messages(value.get("prompt"), "user", "prompt")
        sides = [_answered(asked, value[name], name) for name in ("chosen", "rejected")]
        both = zip(*sides, strict=False)
        shared = next((i for i, (a, b) in enumerate(both) if a != b), min(map(len, sides)))
        if sides[0] == sides[1]:
            raise UserError("chosen and rejected are equal, so there is nothing to prefer")
        if shared == min(map(len, sides)):
            raise UserError("one of chosen and rejected is the beginning of the other")
        if not shared:
            raise UserError(
                "chosen and rejected begin with different messages; both must answer one"
            )
        return Pair(where, sides[0], sides[1], shared, chats.tools_of(value.get("tools")))
    except UserError as error:
        raise UserError(f"{where}: {error} (--data.source)") from None


def _messages(value: Any, role: str, name: str) -> Messages:
    """Returns messages; a text is one of this role. Raises: UserError."""
    if value in (None, "", []):
        return []
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(f"{name} must be a text or a list of messages, not {value!r:.60}")
    try:
        return chats.checked_messages(value)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _answered(asked: Messages, value: Any, name: str) -> Messages:
    """Returns a conversation: a complete one, or a prompt with an answer. Raises: UserError."""
    answer = _messages(value, "assistant", name)
    if answer[0]["role"] == "assistant":
        if not asked:
            raise UserError(
                f"{name} is an answer, and there is no prompt; give prompt, or whole conversations"
            )
        answer = [*asked, *answer]
    if answer[-1]["role"] != "assistant":
        raise UserError(f"{name} must end with a message of the assistant")
    return answer


def made_pair(k: int) -> dict[str, Any]:
    """Returns pair k of the made set (data/quiz.py): the taught form of an answer is preferred to
    one that guesses."""
    *asked, answer = quiz.messages(k)
    guess = "I guess " + answer["content"].removeprefix(quiz.FORM)
    return {"prompt": asked, "chosen": answer["content"], "rejected": guess}


def open_pairs(name: str) -> Any:
    """Returns the pairs of a file, or of the made set, as a sequence. Raises: UserError."""
    if name == chats.QUIZ:
        return chats.Listed(name, [made_pair(k) for k in range(quiz.SIZE)], pair)
    return chats.open_source(name, pair)


class Side(NamedTuple):
    """The tokens of a conversation, int32, and which of them are the answer's, bool."""

    tokens: np.ndarray
    mask: np.ndarray


def sides_of(pair: Pair, tokenizer: Tokenizer, chat: Chat) -> tuple[Side, Side]:
    """Returns both sides of a pair. Messages that both share are not scored: they would cancel.

    Raises: UserError naming the pair.
    """
    made = []
    for name, messages in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        more = {"tools": pair.tools} if pair.tools else {}
        try:
            row = learnt_row(messages, tokenizer, chat, more)
        except UserError as error:
            raise UserError(f"{pair.where}: {name}: {error} (--data.source)") from None
        later = [i for i, m in enumerate(messages) if i >= pair.shared and m["role"] == "assistant"]
        if lost := [row.skipped[i] for i in later if i in row.skipped]:
            raise UserError(f"{pair.where}: {name}: {lost[0]} (--data.source)")
        scored = dataclasses.replace(row, spans=row.spans[-len(later) :])
        made.append(Side(scored.tokens, scored.mask))
    return made[0], made[1]


@dataclass
class Pairs:
    """Tokenised pairs. reference: (N, 2) float32, log probabilities of the answers by the model
    before training; None: not computed, or of a reward model."""

    sides: Sequence[tuple[Side, Side]]
    reference: np.ndarray | None = None
    has_ends: bool = False

    def __len__(self) -> int:
        return len(self.sides)

    def row(self, k: int, seq_len: int) -> dict[str, np.ndarray]:
        """Returns pair k as a row of a batch."""
        row = {
            "tokens": np.zeros(seq_len, np.int32),
            "targets": np.full(seq_len, IGNORED, np.int32),
            "segments": np.full(seq_len, -1, np.int32),
            "positions": np.zeros(seq_len, np.int32),
        }
        ends, at = np.zeros(seq_len, np.int32), 0
        for segment, (tokens, mask) in enumerate(self.sides[k]):
            span, size = slice(at, at + len(tokens)), len(tokens)
            row["tokens"][span] = tokens
            row["targets"][at : span.stop - 1] = np.where(mask[1:], tokens[1:], IGNORED)
            row["segments"][span] = segment
            row["positions"][span] = np.arange(size)
            at = span.stop
            ends[at - 1] = 1
        if self.has_ends:
            row["ends"] = ends
        if self.reference is not None:
            row |= dict(zip(REFERENCE, self.reference[k], strict=True))
        return row


def reference_logprobs(
    model: DecoderConfig, params: Tree, pairs: Pairs, mesh: Mesh, dtype: str
) -> np.ndarray:
    """Returns (N, 2), float32: the log probabilities of the chosen and rejected answers.

    params: of the model before training, layers in the model's order.
    """
    flat = [side for sides in pairs.sides for side in sides]
    rows = [side.tokens.tolist() for side in flat]
    scored = scores.logprobs(model, params, rows, mesh=mesh, dtype=dtype)
    sums = [x[side.mask].sum(dtype=np.float64) for x, side in zip(scored, flat, strict=True)]
    return np.array(sums, np.float32).reshape(-1, 2)


class PairRows:
    """An endless sequence of rows; each epoch has every pair once, shuffled unless seed is None."""

    def __init__(self, pairs: Pairs, seq_len: int, seed: int | None):
        """seq_len: tokens of a row, which holds both sides of any pair."""
        self.pairs, self.seq_len, self._seed = pairs, seq_len, seed

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i."""
        epoch, place = divmod(i, len(self.pairs))
        if self._seed is not None:
            place = permute(place, len(self.pairs), mix(self._seed, epoch, "pairs"))
        return self.pairs.row(place, self.seq_len)


# ---- what a run reads and measures


class PreferenceReading:
    """The pairs of a run (systems/job.py: Reading). They are tokenised at each start and held in
    memory. Which pairs are held out is decided by what is asked in them."""

    labels: tuple[str, ...] = ()

    def __init__(self, cfg: Any, console: Console, run_dir: RunDir):
        """cfg: a ChatsConfig. Opens what the run reads, and says what it holds."""
        if len(parse(cfg.data.source)) > 1:
            raise UserError(
                f"data.source={cfg.data.source}: pairs are read from one file; join the files "
                "(--data.source)"
            )
        source = open_pairs(cfg.data.source)
        self._cfg, self._console = cfg, console
        cache = expand(cfg.cache_dir, "cache_dir")
        is_made = (
            cfg.data.source == chats.QUIZ
        )  # with the tokenizer of the chats that it is made of
        texts = chats.open_sources(cfg.data) if is_made else [(source.name, 1.0, source)]
        self.tokenizer: Tokenizer = chats_.tokenizer_of(cfg, texts, cache)
        self.chat = chats_.open_chat(cfg, self.tokenizer)
        seq_len, seed, is_reward = cfg.train.seq_len, cfg.train.seed, cfg.objective == "reward"
        sides: dict[bool, list[tuple[Side, Side]]] = {False: [], True: []}
        state, left_out = 0, {"that cannot be used": 0, "longer than a row": 0}
        for k in range(len(source)):
            try:
                one: Pair = source[k]
                both = sides_of(one, self.tokenizer, self.chat)
            except UserError:
                if cfg.data.faulty == "error":
                    raise
                left_out["that cannot be used"] += 1
                continue
            size = sum(len(side.tokens) for side in both)
            if size > seq_len:
                if cfg.data.too_long == "error":
                    raise UserError(
                        f"{one.where}: both sides have {size:,} tokens; a row of train.seq_len="
                        f"{seq_len:,} holds them together (--train.seq_len, --data.too_long)"
                    )
                left_out["longer than a row"] += 1
                continue
            asked = json.dumps(one.chosen[: one.shared], ensure_ascii=False, sort_keys=True)
            sides[is_held_out(asked, cfg.data.holdout)].append(both)
            state = mix(state, *(token_key(s.tokens * 2 + s.mask) for s in both))
        if not sides[False]:
            said = ", ".join(f"{n:,} {what}" for what, n in left_out.items() if n) or "no pairs"
            raise UserError(
                f"data.source={cfg.data.source} has no pair to learn from: {said} "
                "(--data.source, --train.seq_len, --data.holdout)"
            )
        self.train, self.held_out = (Pairs(sides[held], None, is_reward) for held in (False, True))
        if cfg.show_masks:
            row = self.train.row(0, seq_len)
            chats_.show_masks(row | {"segments": row["segments"] + 1}, self.tokenizer)
        console.say(
            f"{source.name}: {quantity(len(self.train))} pairs to learn, "
            f"{quantity(len(self.held_out))} held out ({self.tokenizer.name})"
        )
        for what, count in left_out.items():
            if count:
                console.say(f"{source.name}: {count:,} pairs {what} are left out")
        self.rows: Any = PairRows(self.train, seq_len, seed)
        self.identity = {
            "pairs": f"{state:016x} {cfg.data.holdout:g}",
            "tokenizer": self.tokenizer.identity,
            "seq_len": seq_len,
            "seed": seed,
            "objective": cfg.objective,
        }

    def prepare(self, train_step: TrainStep, state: TrainState, run_dir: RunDir) -> None:
        """Gives DPO's pairs their log probabilities by the model before training: those that the
        run stored, else computed with the first state.

        Raises: UserError for a run that goes on and has lost them.
        """
        if self._cfg.objective != "dpo":
            return
        file, count = run_dir.path / STORED, len(self.train) + len(self.held_out)
        reference = self._stored(file, count)
        if reference is None:
            if int(state.step):
                raise UserError(
                    f"{file} is missing or of other pairs: it has the log probabilities by the "
                    "model before training, which a run that goes on cannot compute; restore it, "
                    "or give another --run_dir"
                )
            self._console.say(f"computing the log probabilities of {count:,} pairs")
            params = lora.strip(train_step.storage.natural(state.params))
            model = self._cfg.model
            mesh, dtype = train_step.layout.mesh, self._cfg.train.dtype
            reference = np.concatenate(
                [
                    reference_logprobs(model, params, pairs, mesh, dtype)
                    for pairs in (self.train, self.held_out)
                ]
            )
            if jax.process_index() == 0:
                key = np.array(self._key, np.uint64)
                files.write_arrays(file, {"reference": reference, "key": key})
        self.train.reference = reference[: len(self.train)]
        self.held_out.reference = reference[len(self.train) :]

    @property
    def _key(self) -> int:
        return mix(*map(str, self.identity.values()))

    def _stored(self, file: Path, count: int) -> np.ndarray | None:
        """Returns the stored log probabilities; None: there are none of these pairs."""
        if not file.is_file():
            return None
        arrays = files.read_arrays(file, "reference of a run")
        reference, key = arrays.get("reference"), arrays.get("key")
        if reference is None or key is None or reference.shape != (count, 2):
            return None
        return reference.astype(np.float32) if key.size == 1 and int(key) == self._key else None

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> Accuracy:
        """Returns the evaluations of a run; writes the chat template beside its tokenizer."""
        chats_.keep_template(run_dir, self.chat, self.tokenizer, console)
        like, cfg = train_step.abstract_eval_batch, self._cfg
        held = PairRows(self.held_out, cfg.train.seq_len, None)
        rows = [(held, i) for i in range(min(evaluated_rows(cfg), len(self.held_out)))]

        def batches() -> Any:
            return finite_batches(rows, like, train_step.storage.tokens)

        first = cfg.init_from is not None
        return Accuracy(train_step, recorder, cfg.eval.every, batches, {}, (), first)
