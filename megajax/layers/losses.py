"""Cross-entropy that never holds all logits and never gathers the vocabulary.

The sequence is cut into chunks; each chunk's logits are made, reduced and thrown away (the backward
pass makes them again). With a vocabulary cut over devices only (B, S) maxima and sums travel: the
compiler sees to it, or inside a shard_map `VocabCut` (Megatron, arXiv 1909.08053 section 3).
z-loss: PaLM (arXiv 2204.02311) section 5, keeps log Z near 0.

Legend: B rows, S positions, D model width, V vocabulary, L layers, E experts, C classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # (chosen: exp gives exactly 0 in float32, and no inf - inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoeSums:
    """What the router of one block reports of a batch.

    If the sums of all blocks are stacked, the first dimension of each member is L.

    Three members are float32 scalars and means over the tokens of the batch. penalty: the term that
    the objective adds, a weighted sum of the other two. aux: the load-balance loss, 1 if the
    experts have equal loads. z: the squared log-sum-exp of the scores. Two members are counts.
    dropped: int32, the pairs of token and expert for which the expert had no slot left. load_E:
    int32, the pairs that chose each expert.

    MoeSums of micro-batches are added member by member. The sum of a mean over k micro-batches is
    divided by k where it is used: penalty in the objective of training/step.py, aux and z in its
    metrics.
    """

    penalty: jax.Array
    aux: jax.Array
    z: jax.Array
    dropped: jax.Array
    load_E: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """The sums that a model's loss returns for a batch.

    LossSums of micro-batches are added member by member; `moe` says how its means are treated.

    terms: {name: array}, named by the model. `sums.NAME` is `sums.terms["NAME"]`. count: int32, how
    many predictions the sums are over: tokens, images, whatever the model counts. moe: of all
    blocks, stacked; None in a dense model.

    The terms of a model that predicts tokens are `cross_entropy` and `z_squared` (log(Z)^2),
    float32; `right`, int32, the targets that no other id has a larger logit than, where it was
    asked for; and `classes_3C`, int32, of each class of a classifier how often it is the target, is
    predicted, and is both. `sums.right` and `sums.classes_3C` are None where nobody asked for them.
    """

    terms: Mapping[str, jax.Array]
    count: jax.Array
    moe: MoeSums | None = None

    def __getattr__(self, name: str) -> Any:
        """Returns the term of this name. Raises: AttributeError that lists the terms."""
        terms = self.__dict__.get("terms")
        if name in ("right", "classes_3C") and isinstance(terms, Mapping):
            return terms.get(name)
        if not isinstance(terms, Mapping) or name not in terms:
            has = ", ".join(terms) if isinstance(terms, Mapping) else "none"
            raise AttributeError(f"these sums have no term {name!r}; they have: {has}")
        return terms[name]

    def __add__(self, other: "LossSums") -> "LossSums":
        """Returns the sums of two micro-batches together: every array is the sum of both arrays.

        The members of `moe` that are means become sums of means (see MoeSums).
        """
        return jax.tree.map(jnp.add, self, other)


@dataclasses.dataclass(frozen=True)
class VocabCut:
    """How local code sees a vocabulary that these mesh axes cut, the first one outermost.

    No axes: it is whole, or its cut is the compiler's business.
    """

    axes: tuple[str, ...] = ()

    def ids(self, rows: int) -> jax.Array:
        """Returns the token ids of this device's rows of the vocabulary."""
        ids_V = jnp.arange(rows)
        return ids_V + jax.lax.axis_index(self.axes) * rows if self.axes else ids_V

    def logsumexp(self, z_BSV: jax.Array) -> jax.Array:
        """Returns log_z_BS over the whole vocabulary."""
        if not self.axes:
            return jax.nn.logsumexp(z_BSV, -1)
        top_BS = self.max(z_BSV)
        return top_BS + jnp.log(self.sum(jnp.exp(z_BSV - top_BS[..., None]).sum(-1)))

    def max(self, z_BSV: jax.Array) -> jax.Array:
        """Returns the largest logit over the whole vocabulary; it has no gradient."""
        top_BS = jax.lax.stop_gradient(z_BSV.max(-1))
        return jax.lax.pmax(top_BS, self.axes) if self.axes else top_BS

    def sum(self, x: jax.Array) -> jax.Array:
        """Adds what the devices found in their rows."""
        return jax.lax.psum(x, self.axes) if self.axes else x


def mask_padding(logits: jax.Array, vocab: int, cut: VocabCut = VocabCut()) -> jax.Array:
    """Returns logits with the rows that only pad the vocabulary sent to minus infinity."""
    if logits.shape[-1] == vocab:
        return logits
    real_V = cut.ids(logits.shape[-1]) < vocab
    return jnp.where(jnp.expand_dims(real_V, (0, 1)), logits, NEGATIVE)


def by_class(hit_BSV: jax.Array, z_BSV: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """Returns LossSums.classes_3C. hit_BSV: True at the targets. The first of equal logits wins."""
    best_BS1 = jnp.argmax(z_BSV, -1)[..., None]
    chosen_BSV = (best_BS1 == jnp.arange(z_BSV.shape[-1])[None, None]) & valid_BS[..., None]
    counted = (hit_BSV, chosen_BSV, hit_BSV & chosen_BSV)
    return jnp.stack([x.sum((0, 1), dtype=jnp.int32) for x in counted])


@dataclasses.dataclass(frozen=True)
class _Logits:
    """One piece's logits z_BSV with what every loss of targets reads of them: valid_BS, hit_BSV
    (True at the targets), target_BS (their logits) and log_z_BS."""

    z_BSV: jax.Array
    valid_BS: jax.Array
    hit_BSV: jax.Array
    target_BS: jax.Array
    log_z_BS: jax.Array

    @classmethod
    def of(cls, h_BSD: jax.Array, t_BS: jax.Array, logits: Callable, cut: VocabCut) -> "_Logits":
        # A product sums over rows, and 0 times a NaN that a row held would be NaN.
        valid_BS = t_BS >= 0
        # (jax 0.11.2 refuses the select where a type says `reduced`: there nothing is left out.)
        if not jax.typeof(h_BSD).sharding.spec.reduced:
            h_BSD = jnp.where(valid_BS[..., None], h_BSD, jnp.zeros((), h_BSD.dtype))
        z_BSV = logits(h_BSD)
        # A select and a sum: take_along_axis would gather a vocabulary that is cut.
        hit_BSV = t_BS[..., None] == cut.ids(z_BSV.shape[-1])[None, None]
        target_BS = cut.sum(jnp.where(hit_BSV, z_BSV, 0.0).sum(-1))
        return cls(z_BSV, valid_BS, hit_BSV, target_BS, cut.logsumexp(z_BSV))


def _strided(x: jax.Array, chunks: int) -> jax.Array:
    """(B, S, ...) -> (chunks, B, S / chunks, ...), strided, so that a cut S stays the outermost
    part of what each chunk holds."""
    x = x.reshape(x.shape[0], x.shape[1] // chunks, chunks, *x.shape[2:])
    return jnp.moveaxis(x, 2, 0)


def cross_entropy(
    hidden_BSD: jax.Array,
    targets_BS: jax.Array,
    logits: Callable,
    chunks: int = 1,
    cut: VocabCut = VocabCut(),
    accuracy: bool = False,
    classes: int = 0,
) -> LossSums:
    """Sums -log p(target) and log(Z)^2; with `accuracy` also how many predictions are right.

    Args: targets_BS: int32, negative: not predicted, and what hidden holds there, NaN too, reaches
      neither a sum nor a gradient, unless the type of hidden names reduced axes. logits: (B,s,D) ->
      float32 (B,s,V), pads masked. chunks: pieces of the sequence; must divide S. cut: of the
      vocabulary. classes: of a classifier, whose predictions are counted by class; 0: they are not.
    """

    def piece(h_BSD: jax.Array, t_BS: jax.Array) -> LossSums:
        at = _Logits.of(h_BSD, t_BS, logits, cut)
        terms = {
            "cross_entropy": jnp.where(at.valid_BS, at.log_z_BS - at.target_BS, 0.0).sum(),
            "z_squared": jnp.where(at.valid_BS, at.log_z_BS**2, 0.0).sum(),
        }
        if accuracy:
            terms["right"] = (at.valid_BS & (at.target_BS >= cut.max(at.z_BSV))).sum()
        if classes:
            terms["classes_3C"] = by_class(at.hit_BSV, at.z_BSV, at.valid_BS)
        return LossSums(terms, at.valid_BS.sum())

    if chunks == 1:  # no reshape: a dim of size 1 cannot be added to an array with reduced axes
        return piece(hidden_BSD, targets_BS)

    def step(total: LossSums, chunk: tuple) -> tuple[LossSums, None]:
        return total + jax.checkpoint(piece)(*chunk), None

    # No sum's shape depends on the positions, so those of the whole sequence are those of a piece.
    sums = jax.eval_shape(piece, hidden_BSD, targets_BS)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    pieces = _strided(hidden_BSD, chunks), _strided(targets_BS, chunks)
    return jax.lax.scan(step, zeros, pieces)[0]


def token_logprobs(
    hidden_BSD: jax.Array,
    targets_BS: jax.Array,
    logits: Callable,
    chunks: int = 1,
    cut: VocabCut = VocabCut(),
) -> tuple[jax.Array, jax.Array]:
    """Returns (log p(target), entropy of the prediction) of each position, float32 (B, S).

    Both are 0 where a target is negative. Losses of reinforcement learning are built on these;
    `cross_entropy` is minus the sum of the first. Nothing of the size of the logits is kept for the
    backward pass when chunks > 1. Args: as of `cross_entropy`.
    """

    def piece(h_BSD: jax.Array, t_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = _Logits.of(h_BSD, t_BS, logits, cut)
        # -sum p log p = log Z - sum p z; the padding of the vocabulary has p = 0 and a finite z.
        p_BSV = jnp.exp(at.z_BSV - at.log_z_BS[..., None])
        entropy_BS = at.log_z_BS - cut.sum((p_BSV * at.z_BSV).sum(-1))
        both = at.target_BS - at.log_z_BS, entropy_BS
        return tuple(jnp.where(at.valid_BS, x, 0.0) for x in both)  # type: ignore[bad-return]

    if chunks == 1:
        return piece(hidden_BSD, targets_BS)

    def step(_: None, chunk: tuple) -> tuple[None, tuple]:
        return None, jax.checkpoint(piece)(*chunk)

    pieces = _strided(hidden_BSD, chunks), _strided(targets_BS, chunks)
    _, chunked = jax.lax.scan(step, None, pieces)

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 2).reshape(targets_BS.shape)

    return joined(chunked[0]), joined(chunked[1])
