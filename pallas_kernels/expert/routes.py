"""Where every choice of a token goes, and where every row of an expert comes from.

Every rank knows everyone's choices (A integers a token), so both sides of a copy agree without a
word. The rows of a rank's experts lie together expert by expert, inside an expert sorted by the
distance of the rank that they came from: own rows first, then those of rank + 1, rank + 2, ...
(COMET, arXiv 2502.19811, section 3.1), of one rank in the order of token and choice.

Experts whose columns are cut over ranks are routed as more of them, whole ones (`cut`).

Legend: R ranks, T tokens of a rank, A choices a token, S = T A choices of a rank, E experts of a
rank, X = R E of all, N rows of a rank's experts, at most.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import arguments
from pallas_kernels.collective.api import ranks_of
from pallas_kernels.hopper.peers import Axis

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """What one rank knows of the routing; made by `route`.

    counts_RX: int32, rows that each rank sends to each expert.
    expert_TA: int32, the expert of an own choice, of all; -1: none.
    row_TA: int32, its row where the expert is; of a choice of none anything.
    choice_N: int32, the choice behind each row of this rank's experts, as (rank, token, place among
      the token's choices) in one number; past the rows that came anything.
    rank: int32 (), this one.
    """

    counts_RX: Array
    expert_TA: Array
    row_TA: Array
    choice_N: Array
    rank: Array

    @property
    def ranks(self) -> int:
        """R."""
        return self.counts_RX.shape[0]

    @property
    def experts(self) -> int:
        """E, of a rank."""
        return self.counts_RX.shape[1] // self.ranks

    @property
    def rows(self) -> int:
        """N."""
        return self.choice_N.shape[0]

    @property
    def dest_TA(self) -> Array:
        """The rank that an own choice goes to; -1: to none."""
        return self.expert_TA // self.experts

    @property
    def counts_RE(self) -> Array:
        """Rows of each of this rank's experts, by the rank that they came from."""
        E = self.experts
        return lax.dynamic_slice_in_dim(self.counts_RX, self.rank * E, E, 1)

    @property
    def sizes_E(self) -> Array:
        """Rows of each of this rank's experts; rows past their sum are nobody's."""
        return self.counts_RE.sum(0, dtype=jnp.int32)


def cut(expert_TA: Array, *, experts: int, parts: int) -> Array:
    """Returns integers (T, A parts): each choice as one of every part of its expert.

    For experts whose columns are cut over `parts` ranks that lie one after the other, `experts` on
    each: what `route` takes, over all ranks, is the part of expert e on the t-th of its ranks,
    expert e % `experts` of rank e // `experts` * parts + t. A token then travels to each of them,
    and their answers, of which each has its part of the sum over columns, are added up as those of
    a token's choices are, all of them with the choice's weight. No expert stays none.

    Raises: ValueError for what are no integers (T, A), and counts below 1.
    """
    expert_TA = _choices("cut", expert_TA)
    experts = arguments.integer("cut", "experts", experts, 1)
    parts = arguments.integer("cut", "parts", parts, 1)
    part_11P = jnp.arange(parts, dtype=jnp.int32)[None, None]
    rank_TAP = (expert_TA // experts * parts)[:, :, None] + part_11P
    expert_TAP = rank_TAP * experts + (expert_TA % experts)[:, :, None]
    return expert_TAP.reshape(len(expert_TA), -1)


def route(expert_TA: Array, *, experts: int, axis: Axis, rows: int | None = None) -> Routes:
    """Returns the Routes of this rank, for code inside a shard_map over `axis`.

    Expert e of the model is expert e % `experts` of rank e // `experts`.

    Args: expert_TA: integers (T, A), this rank's choices; one outside 0 .. R experts - 1 goes
      nowhere (padding, what a capacity drops: -1), and the same expert may come twice.
      experts: E, of a rank. rows: N, at most R T A; rows past it are left out as if not chosen.
    Raises: ValueError for what breaks the above, and outside a shard_map over `axis`.
    """
    expert_TA = _choices("route", expert_TA)
    experts = arguments.integer("route", "experts", experts, 1)
    rows = None if rows is None else arguments.integer("route", "rows", rows, 0)
    (T, A), R, rank = expert_TA.shape, ranks_of("route", axis), lax.axis_index(axis)
    S, X = T * A, R * experts
    N = R * S if rows is None else min(rows, R * S)
    expert_RS = lax.all_gather(expert_TA.reshape(S), axis)
    valid_RS = (expert_RS >= 0) & (expert_RS < X)
    home_RS = jnp.where(valid_RS, expert_RS // experts, 0)
    from_R1 = jnp.arange(R, dtype=jnp.int32)[:, None]
    key_RS = jnp.where(valid_RS, expert_RS * R + (from_R1 - home_RS) % R, X * R)
    order_P = jnp.argsort(key_RS.reshape(-1), stable=True).astype(jnp.int32)
    place_P = (
        jnp.zeros_like(order_P)
        .at[order_P]
        .set(jnp.arange(R * S, dtype=jnp.int32), unique_indices=True)
    )
    of_R = jnp.where(valid_RS, home_RS, R).reshape(-1)
    ends_R = jnp.cumsum(jnp.zeros(R, jnp.int32).at[of_R].add(1, mode="drop"))
    first_R = jnp.concatenate([jnp.zeros_like(ends_R[:1]), ends_R[:-1]])
    row_RS = place_P.reshape(R, S) - first_R[home_RS]
    kept_RS = valid_RS & (row_RS < N)
    to_RS = jnp.where(kept_RS, expert_RS, X)
    counts_RX = jnp.zeros((R, X), jnp.int32).at[from_R1, to_RS].add(1, mode="drop")
    own_RS = jnp.where(kept_RS, expert_RS, -1)
    expert_S, row_S = (lax.dynamic_index_in_dim(a, rank, keepdims=False) for a in (own_RS, row_RS))
    choice_N = lax.dynamic_slice_in_dim(jnp.pad(order_P, (0, N)), first_R[rank], N)
    return Routes(counts_RX, expert_S.reshape(T, A), row_S.reshape(T, A), choice_N, rank)


def _choices(op: str, expert_TA: Array) -> Array:
    """Returns choices in int32, in which an expert's number over all ranks fits.

    Raises: ValueError.
    """
    arguments.check_arrays(op, expert_TA=expert_TA)
    if expert_TA.ndim != 2 or not jnp.issubdtype(expert_TA.dtype, jnp.integer):
        raise ValueError(
            f"{op}: expert_TA {expert_TA.dtype}{expert_TA.shape} must be integers (tokens, choices)"
        )
    return jnp.asarray(expert_TA).astype(jnp.int32)


def segments(counts_RX: Array) -> Array:
    """Returns int32 (R, R, E): of rank h, the first row of its expert e from rank (h + d) % R."""
    R, X = counts_RX.shape
    counts_HRE = counts_RX.reshape(R, R, X // R).swapaxes(0, 1)  # home, source, expert
    home, distance = jnp.arange(R)[:, None], jnp.arange(R)[None]
    counts_HDE = counts_HRE[home, (home + distance) % R]
    sizes_HE = counts_HDE.sum(1)
    start_HE = jnp.cumsum(sizes_HE, axis=1) - sizes_HE
    return (start_HE[:, None] + jnp.cumsum(counts_HDE, axis=1) - counts_HDE).astype(jnp.int32)
