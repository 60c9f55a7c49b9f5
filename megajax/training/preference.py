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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.tree import Tree
from megajax.data.chat import Chat, learnt_row
from megajax.data.pack import IGNORED, mix, permute
from megajax.data.tokenizer import Tokenizer
from megajax.layers.losses import LossSums
from megajax.models import decoder, heads
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import Batch
from megajax.training import scores
from megajax.training.config import TrainConfig
from megajax.training.task import Leaf, Task, token_rows

Objective = Literal["sft", "dpo", "reward"]
Messages = list[dict[str, Any]]
REFERENCE = ("reference_chosen", "reference_rejected")  # members of a row


@dataclass(frozen=True)
class DpoConfig(Checked, section="dpo"):
    """Direct preference optimisation."""

    beta: float = option(
        0.1,
        "weight of the distance from the reference: the larger, the less the model may change",
        at_least=1e-6,
    )


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
    and of the rejected answer by the model before training. beta: as of DpoConfig."""

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
