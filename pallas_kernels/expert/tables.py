"""The tables from which the expert kernels read their work, made of the routes on the device.

Two kinds. Visits: up to a tile's rows of one expert, where they lie, and which flags tell that they
have come. Jobs: up to `chunk` rows that go to one rank under one flag, read here and written there,
row by row; in the order in which they are to leave, so that at every time the ranks send to
different ranks, and that what a rank's tiles wait for first comes first. A combine counts jobs, so
their own flags are a dispatch's only.

A table's length is the worst case of any routing: a program has one shape, however tokens choose.

Legend: as in routes.py; D distances between ranks, V visits, C jobs, W entries of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.expert.routes import Routes, segments
from pallas_kernels.hopper import visits

Array = jax.Array
ALIGN = 8  # rows of a piece of a tile's tiling
GROUP, ROW, LO, HI, NEAR, FAR, FLAGS = range(7)  # of a visit; first flag, past the last, of each D
PEER, ROWS, FLAG, UNUSED, PAIRS = range(5)  # of a job; then (row read, row written) of its rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """A rank's work. visits_VW, jobs_CW: int32, see above. totals: int32 (5,), the constants below.

    Near and far: distances of the sources that a visit waits for, the latter not included.
    """

    visits_VW: Array
    jobs_CW: Array
    totals: Array


VISITS, END, OWN, JOBS, ARRIVALS = range(5)  # visits; rows; jobs that stay, and all; jobs that come


def dispatch(routes: Routes, *, chunk: int, block: int, staged: bool = True) -> Tables:
    """Returns the tables of a dispatch: visits wait for the rows of the sources that they need.

    Own jobs come first. Flag d chunks + i is the i-th job from the rank d after this one, chunks
    those of a rank at most (`flags`). block: rows of a visit. staged: visits are in the order of
    their farthest source; False: of their rows, to see what that is worth.
    """
    R, E, (T, A) = routes.ranks, routes.experts, routes.expert_TA.shape
    rank, first_HDE = routes.rank, segments(routes.counts_RX)
    distance_D = jnp.arange(R, dtype=jnp.int32)
    each = flags(routes, chunk) // R
    # Own choices, by distance of the rank that they go to: that is this rank's distance there.
    peer_D = (rank - distance_D) % R
    counts_DE = routes.counts_RX[rank].reshape(R, E)[peer_D]
    base_DE = (jnp.cumsum(counts_DE.reshape(-1)) - counts_DE.reshape(-1)).reshape(R, E)
    expert_S, row_S = routes.expert_TA.reshape(-1), routes.row_TA.reshape(-1)
    home_S, own_S = expert_S // E, expert_S % E
    far_S = (rank - home_S) % R
    index_S = base_DE[far_S, own_S] + row_S - first_HDE[home_S, far_S, own_S]
    token_S = jnp.arange(T * A, dtype=jnp.int32) // A
    jobs_CW, jobs_D = _jobs(
        jnp.where(expert_S >= 0, index_S, -1),
        (token_S, row_S),
        counts_DE.sum(1),
        peer_D,
        each * distance_D,
        chunk,
    )
    visits_VW, count, end = _visits(routes, first_HDE[rank], chunk, each, block, staged)
    totals = jnp.stack([count, end, jobs_D[0], jobs_D.sum(), jnp.int32(0) * end])
    return Tables(visits_VW, jobs_CW, totals.astype(jnp.int32))


def combine(routes: Routes, *, chunk: int, block: int) -> Tables:
    """Returns the tables of a combine: answers go to the place of their choice at its owner.

    A page of answers holds the owner's S choices, then this rank's N rows: what stays is read where
    it is. Visits are in the order of their rows.
    """
    R, E, S, N = routes.ranks, routes.experts, routes.expert_TA.size, routes.rows
    rank, first_DE = routes.rank, segments(routes.counts_RX)[routes.rank]
    distance_D = jnp.arange(R, dtype=jnp.int32)
    peer_D = (rank + distance_D) % R
    counts_DE = jnp.where(distance_D[:, None] == 0, 0, routes.counts_RE[peer_D])
    base_DE = (jnp.cumsum(counts_DE.reshape(-1)) - counts_DE.reshape(-1)).reshape(R, E)
    row_N = jnp.arange(N, dtype=jnp.int32)
    ends_E = jnp.cumsum(routes.sizes_E)
    expert_N = jnp.minimum((row_N[:, None] >= ends_E[None]).sum(1, dtype=jnp.int32), E - 1)
    far_N = (routes.choice_N // S - rank) % R
    index_N = base_DE[far_N, expert_N] + row_N - first_DE[far_N, expert_N]
    goes_N = (row_N < ends_E[-1]) & (far_N > 0)
    jobs_CW, jobs_D = _jobs(
        jnp.where(goes_N, index_N, -1),
        (S + row_N, routes.choice_N % S),
        counts_DE.sum(1),
        peer_D,
        jnp.zeros_like(peer_D),
        chunk,
    )
    steps = visits.visits(routes.sizes_E, N, block, ALIGN)
    sent_R = routes.counts_RX[rank].reshape(R, E).sum(1)
    arrivals = jnp.where(jnp.arange(R) == rank, 0, -(-sent_R // chunk)).sum()
    totals = jnp.stack([steps.count, steps.end, 0 * steps.end, jobs_D.sum(), arrivals])
    return Tables(steps.table, jobs_CW, totals.astype(jnp.int32))


def places(routes: Routes) -> Array:
    """Returns int32 (T, A): the row of a page of answers with each own choice's; -1: none."""
    S = routes.expert_TA.size
    slot_TA = jnp.arange(S, dtype=jnp.int32).reshape(routes.expert_TA.shape)
    own_TA = routes.dest_TA == routes.rank
    return jnp.where(routes.expert_TA < 0, -1, jnp.where(own_TA, S + routes.row_TA, slot_TA))


def flags(routes: Routes, chunk: int) -> int:
    """Returns how many jobs may come to a rank from all others and itself."""
    return routes.ranks * -(-min(routes.expert_TA.size, routes.rows) // chunk)


def _jobs(
    index_P: Array,
    pairs: tuple[Array, Array],
    rows_D: Array,
    peer_D: Array,
    flag_D: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """Returns jobs_CW, and how many there are at each distance.

    index_P: the place of each row in the list of all that go, by distance; -1: it does not go.
    rows_D: rows of the list. peer_D, flag_D: their destination and the flag of the first job.
    """
    C = len(index_P) // chunk + len(rows_D)
    ends_D, jobs_D = jnp.cumsum(rows_D), -(-rows_D // chunk)
    first_D, after_D = ends_D - rows_D, jnp.cumsum(jobs_D)
    before_D = after_D - jobs_D
    far_P = (index_P[:, None] >= ends_D[None]).sum(1)
    within_P = index_P - first_D[far_P]
    job_P = jnp.where(index_P >= 0, before_D[far_P] + within_P // chunk, C)
    pairs_CJ2 = jnp.zeros((C, chunk, 2), jnp.int32)
    pairs_CJ2 = pairs_CJ2.at[job_P, within_P % chunk].set(jnp.stack(pairs, 1), mode="drop")
    job_C = jnp.arange(C, dtype=jnp.int32)
    far_C = jnp.minimum((job_C[:, None] >= after_D[None]).sum(1), len(rows_D) - 1)
    within_C = job_C - before_D[far_C]
    live_C = jnp.clip(rows_D[far_C] - within_C * chunk, 0, chunk)
    head = (peer_D[far_C], live_C, flag_D[far_C] + within_C, jnp.zeros_like(job_C))
    jobs_CW = jnp.concatenate([jnp.stack(head, 1), pairs_CJ2.reshape(C, -1)], axis=1)
    return jobs_CW.astype(jnp.int32), jobs_D


def _visits(
    routes: Routes, first_DE: Array, chunk: int, each: int, block: int, staged: bool
) -> tuple[Array, Array, Array]:
    """Returns (visits_VW, how many are live, rows that came)."""
    R, rank = routes.ranks, routes.rank
    steps = visits.visits(routes.sizes_E, routes.rows, block, ALIGN)
    counts_DE = routes.counts_RE[(rank + jnp.arange(R)) % R]
    base_DE = jnp.cumsum(counts_DE, axis=1) - counts_DE  # in the list that a source sends here
    group_V, _, lo_V, hi_V = steps.table.T
    first_VD, counts_VD, base_VD = (a[:, group_V].T for a in (first_DE, counts_DE, base_DE))
    from_VD = jnp.maximum(lo_V[:, None], first_VD)
    to_VD = jnp.minimum(hi_V[:, None], first_VD + counts_VD)
    live_VD = from_VD < to_VD
    distance_1D = jnp.arange(R, dtype=jnp.int32)[None]
    far_V = jnp.where(live_VD, distance_1D + 1, 0).max(1)
    near_V = jnp.where(live_VD, distance_1D, R).min(1)
    begin_VD = (base_VD + from_VD - first_VD) // chunk
    stop_VD = (base_VD + to_VD - first_VD - 1) // chunk + 1
    flags_VD2 = jnp.stack([begin_VD, stop_VD], 2) + each * distance_1D[:, :, None]
    flags_VD2 = jnp.where(live_VD[:, :, None], flags_VD2, 0)
    dead_V = lo_V >= hi_V
    visits_VW = jnp.concatenate(
        [steps.table, near_V[:, None], far_V[:, None], flags_VD2.reshape(len(lo_V), -1)], axis=1
    )
    order_V = jnp.argsort(jnp.where(dead_V, R + 1, far_V if staged else 0), stable=True)
    return visits_VW[order_V].astype(jnp.int32), steps.count, steps.end
