"""Tokens to their experts and back, on one device: the compute behind the seam `Ops.expert`.

Dropless (MegaBlocks, arXiv 2211.15841): pairs of token and expert are sorted by expert, one grouped
matmul runs over them, and each token adds up its experts' answers. Capacity (GShard, arXiv
2006.16668 section 3.2): every row of the batch has a fixed number of slots at every expert, given
out in the order of the tokens, so that no token can push out one before it; a pair without a slot
counts nothing. A group is a row, hence what is dropped does not depend on the mesh.

Both work on a span of the experts, so that parallel/expert.py can call them with a device's own.

Legend: B rows, S positions, T tokens, D model width, F width of an expert, E experts, A active
experts a token, N pairs of token and expert in the experts' order, Q slots an expert has for a row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A routing result.

    experts_BSA: int32, all different for one token. weights_BSA: float32, of their answers.
    """

    experts_BSA: Array
    weights_BSA: Array


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Feed-forward weights stacked over experts: nnx.Params at rest, or arrays in use.

    inputs: each (E,D,F). down: (E,F,D). activate: from the products with `inputs`, each (...,F), to
    the hidden values. biases: of the products with `inputs`, each (E,F); (): there are none.
    """

    inputs: tuple[Any, ...]
    down: Any
    activate: Callable[[tuple[Array, ...]], Array]
    biases: tuple[Any, ...] = ()

    def map(self, function: Callable[[Any], Any]) -> "ExpertWeights":
        """Returns the weights with a function applied to each."""
        inputs, biases = tuple(map(function, self.inputs)), tuple(map(function, self.biases))
        return dataclasses.replace(self, inputs=inputs, down=function(self.down), biases=biases)

    def hidden(self, products: Sequence[Array], bias_of: Callable[[Array], Array]) -> Array:
        """Returns the hidden values of the products with `inputs`. bias_of(bias_EF): the bias of
        each row of a product."""
        if self.biases:
            products = [x + bias_of(b) for x, b in zip(products, self.biases, strict=True)]
        return self.activate(tuple(products))


def expert(
    x_BSD: Array,
    dispatch: Dispatch,
    params: ExpertWeights,
    slots_of: Callable[[int], int | None],
    grouped: Callable,
) -> tuple[Array, Array | None]:
    """Every token's weighted sum of its experts' answers.

    Args: params: holds nnx.Params. slots_of: positions of a whole row -> Q; None: dropless.
      grouped: (N,D), (E,D,F), int32 sizes (E,) -> (N,F).
    Returns: (y_BSD in x's dtype; kept_BSA, False for the pairs that found no slot, or None).
    """
    weights = params.map(lambda w: w[...].astype(x_BSD.dtype))
    slots = slots_of(x_BSD.shape[1])
    if slots is None:
        return dropless(x_BSD, dispatch, weights, grouped), None
    places_BSA = queue(dispatch.experts_BSA)
    kept_BSA = places_BSA < slots
    E = weights.down.shape[0]
    x_END, index_BSA = fill(x_BSD, dispatch.experts_BSA, kept_BSA, places_BSA, slots, E)
    return drain(answer(x_END, weights), index_BSA, dispatch, kept_BSA), kept_BSA


def dropless(
    x_BSD: Array, dispatch: Dispatch, weights: ExpertWeights, grouped: Callable, first: Any = 0
) -> Array:
    """Returns y_BSD, the part of each token's sum that experts first..first+E-1 give.

    Nothing is lost: a token's experts differ, so the span can get T min(A, E) pairs at most, and
    there is room for all of them.
    """
    B, S, A = dispatch.experts_BSA.shape
    T, E = B * S, weights.down.shape[0]
    own_N = dispatch.experts_BSA.reshape(T * A) - first
    own_N = jnp.where((own_N >= 0) & (own_N < E), own_N, E)  # pairs of other spans go last
    order_N = jnp.argsort(own_N, stable=True)
    sizes_E = (own_N[:, None] == jnp.arange(E)[None]).sum(0, dtype=jnp.int32)
    x_ND = x_BSD.reshape(T, -1)[order_N[: T * min(A, E)] // A]
    products = tuple(grouped(x_ND, w, sizes_E) for w in weights.inputs)
    # Rows behind the span's last pair have any expert's bias: nothing reads them.
    hidden_NF = weights.hidden(
        products, lambda b_EF: b_EF[jnp.minimum(own_N[order_N[: len(x_ND)]], E - 1)]
    )
    y_ND = grouped(hidden_NF, weights.down, sizes_E)
    here_BSA = (own_N < E).reshape(B, S, A)
    index_BSA = jnp.argsort(order_N).reshape(B, S, A)  # the inverse permutation
    return combine(y_ND, index_BSA, dispatch.weights_BSA, here_BSA)


def queue(experts_BSA: Array) -> Array:
    """Returns places_BSA: how many pairs of the same row and expert come before, in token order."""
    B, S, A = experts_BSA.shape
    experts_BN = experts_BSA.reshape(B, S * A)
    order_BN = jnp.argsort(experts_BN, axis=1, stable=True)
    sorted_BN = jnp.take_along_axis(experts_BN, order_BN, axis=1)
    new_BN = sorted_BN[:, 1:] != sorted_BN[:, :-1]
    step_BN = jnp.broadcast_to(jnp.arange(S * A)[None], (B, S * A))
    start_BN = jnp.where(jnp.pad(new_BN, ((0, 0), (1, 0))), step_BN, 0)
    place_BN = step_BN - jax.lax.cummax(start_BN, axis=1)
    return jnp.take_along_axis(place_BN, jnp.argsort(order_BN, axis=1), axis=1).reshape(B, S, A)


def fill(
    x_BSD: Array, experts_BSA: Array, kept_BSA: Array, places_BSA: Array, slots: int, experts: int
) -> tuple[Array, Array]:
    """Puts tokens into slots, row by row inside each expert.

    Args: experts: of the model. kept_BSA, places_BSA: which pairs have a slot, and which one.
    Returns: (x_END with N = B Q and zeros in empty slots; index_BSA into its first two dimensions
      as one, for the kept pairs).
    """
    B, S, D = x_BSD.shape
    A = experts_BSA.shape[-1]
    rows_B11 = jnp.arange(B)[:, None, None]
    index_BSA = (experts_BSA * B + rows_B11) * slots + places_BSA
    index_BSA = jnp.where(kept_BSA, index_BSA, experts * B * slots)  # beyond the end: not written
    token_N = jnp.arange(B * S * A) // A
    source_N = (
        jnp.full(experts * B * slots, B * S).at[index_BSA.reshape(-1)].set(token_N, mode="drop")
    )
    x_ND = jnp.concatenate([x_BSD.reshape(B * S, D), jnp.zeros((1, D), x_BSD.dtype)])[source_N]
    return x_ND.reshape(experts, B * slots, D), index_BSA


def answer(x_END: Array, weights: ExpertWeights) -> Array:
    """Returns y_END: every expert on all of its slots."""

    def product(x: Array, w: Array) -> Array:
        return jax.lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))

    products = tuple(product(x_END, w) for w in weights.inputs)
    return product(weights.hidden(products, lambda b_EF: b_EF[:, None]), weights.down)


def drain(y_END: Array, index_BSA: Array, dispatch: Dispatch, kept_BSA: Array) -> Array:
    """Returns y_BSD from the slots that `fill` gave; a pair without one adds nothing."""
    y_ND = y_END.reshape(-1, y_END.shape[-1])
    return combine(y_ND, index_BSA, dispatch.weights_BSA, kept_BSA)


def combine(y_ND: Array, index_BSA: Array, weights_BSA: Array, here_BSA: Array) -> Array:
    """Returns the weighted sum over A of the rows of y, added in float32, in y's dtype.

    What lies in y where no pair of ours is does not matter.
    """
    y_BSAD = y_ND[jnp.where(here_BSA, index_BSA, 0)].astype(jnp.float32)
    y_BSAD = jnp.where(here_BSA[..., None], y_BSAD, 0.0) * weights_BSA[..., None]
    return y_BSAD.sum(2).astype(y_ND.dtype)
