"""Cross-entropy that never holds all logits and never gathers the vocabulary.

The sequence is cut into chunks; each chunk's logits are made, reduced and thrown away (the backward
pass makes them again). With a vocabulary cut over devices only (B, S) maxima and sums travel: the
compiler sees to it, or inside a shard_map `VocabCut` (Megatron, arXiv 1909.08053 section 3).
z-loss: PaLM (arXiv 2204.02311) section 5, keeps log Z near 0.

Legend: B rows, S positions, D model width, V vocabulary, L layers, E experts, C classes.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # (chosen: exp gives exactly 0 in float32, and no inf - inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoeSums:
    """How routing went in one block, over all tokens of a batch; members add up over batches.

    penalty: what the objective adds (weighted aux and z). aux: load-balance loss, 1 when balanced.
    z: mean squared log-sum-exp of the scores. These are float32 scalars. dropped: int32, pairs of
    token and expert that found no slot. load_E: int32, pairs that chose each expert. Stacked over
    the blocks every member has the layers first.
    """

    penalty: jax.Array
    aux: jax.Array
    z: jax.Array
    dropped: jax.Array
    load_E: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over the predicted tokens (targets >= 0), float32 scalars; count is int32.

    moe: of all blocks, stacked; None in a dense model. right: int32, targets that no other id has a
    larger logit than; None where nobody asked. classes_3C: int32, of each class of a classifier how
    often it is the target, is predicted, and is both; None for other models.
    """

    cross_entropy: jax.Array
    z_squared: jax.Array
    count: jax.Array
    moe: MoeSums | None = None
    right: jax.Array | None = None
    classes_3C: jax.Array | None = None

    def __add__(self, other: "LossSums") -> "LossSums":
        """Adds member by member."""
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
        # A product sums over rows, and 0 times a NaN that a row held would be NaN.
        valid_BS = t_BS >= 0
        # (jax 0.11.2 refuses the select where a type says `reduced`: there nothing is left out.)
        if not jax.typeof(h_BSD).sharding.spec.reduced:
            h_BSD = jnp.where(valid_BS[..., None], h_BSD, jnp.zeros((), h_BSD.dtype))
        z_BSV = logits(h_BSD)
        # A select and a sum: take_along_axis would gather a vocabulary that is cut.
        hit_BSV = t_BS[..., None] == cut.ids(z_BSV.shape[-1])[None, None]
        target_BS = cut.sum(jnp.where(hit_BSV, z_BSV, 0.0).sum(-1))
        log_z_BS = cut.logsumexp(z_BSV)
        right_BS = valid_BS & (target_BS >= cut.max(z_BSV)) if accuracy else None
        return LossSums(
            jnp.where(valid_BS, log_z_BS - target_BS, 0.0).sum(),
            jnp.where(valid_BS, log_z_BS**2, 0.0).sum(),
            valid_BS.sum(),
            right=None if right_BS is None else right_BS.sum(),
            classes_3C=by_class(hit_BSV, z_BSV, valid_BS) if classes else None,
        )

    if chunks == 1:  # no reshape: a dim of size 1 cannot be added to an array with reduced axes
        return piece(hidden_BSD, targets_BS)

    def pieces(x: jax.Array) -> jax.Array:  # strided, so that a cut S stays the outermost part
        x = x.reshape(x.shape[0], x.shape[1] // chunks, chunks, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0)

    def step(total: LossSums, chunk: tuple) -> tuple[LossSums, None]:
        return total + jax.checkpoint(piece)(*chunk), None

    zero = jnp.zeros((), jnp.float32)
    none = jnp.zeros((), jnp.int32)
    counts = jnp.zeros((3, classes), jnp.int32) if classes else None
    start = LossSums(zero, zero, none, right=none if accuracy else None, classes_3C=counts)
    return jax.lax.scan(step, start, (pieces(hidden_BSD), pieces(targets_BS)))[0]
