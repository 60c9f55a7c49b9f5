"""The tables of jobs and visits, carried out by hand for all ranks.

A dispatch as the kernels do it: every job is copied row by row and raises its flag, every visit may
look at no row whose flags it did not wait for. A combine likewise, to the places of the choices.
"""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.expert import tables
from pallas_kernels.expert.routes import route
from pallas_kernels.expert.tables import FAR, FLAG, FLAGS, HI, LO, NEAR, PAIRS, PEER, ROW, ROWS
from tests.expert_oracle import order, routings

# Ranks, tokens, choices, experts of a rank.
SIZES = 4, 13, 3, 3
CHUNK, BLOCK = 8, 16
CASES = [(SIZES, name) for name in routings(*SIZES[:3], 12, np.random.default_rng(0))]
CASES += [
    pytest.param(sizes, "spread", marks=pytest.mark.slow)
    for sizes in ((8, 3, 10, 64), (2, 1, 1, 1))
]


@functools.cache
def compiled(E):
    def made(experts):
        routes = route(experts, experts=E, axis="x")
        return (
            tables.dispatch(routes, chunk=CHUNK, block=BLOCK),
            tables.combine(routes, chunk=CHUNK, block=BLOCK),
            tables.places(routes),
        )

    return jax.jit(jax.vmap(made, axis_name="x"))


def tables_of(sizes, name, seed):
    R, T, A, E = sizes
    experts = routings(R, T, A, R * E, np.random.default_rng(seed))[name].astype(np.int32)
    return experts, jax.tree.map(np.asarray, compiled(E)(experts.reshape(R, T, A)))


def jobs_of(work, rank, first, last):
    """(peer, flag, rows read, rows written) of a rank's jobs, in order."""
    for entries in work.jobs_CW[rank, first:last]:
        pairs = entries[PAIRS : PAIRS + 2 * entries[ROWS]].reshape(-1, 2)
        assert 0 < len(pairs) <= CHUNK
        yield entries[PEER], entries[FLAG], pairs[:, 0], pairs[:, 1]


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_a_dispatch_brings_every_row_and_flags_tell(sizes, name, seed):
    (R, T, A, E), (experts, (work, _, _)) = sizes, tables_of(sizes, name, seed)
    N = R * T * A
    came = np.full((R, N), -1)  # the token (of all) in each row
    told = np.full((R, N), -1)  # by which flag
    raised = [set() for _ in range(R)]
    for rank in range(R):
        _, _, local_jobs, jobs, _ = work.totals[rank]
        for n, (peer, flag, tokens, rows) in enumerate(jobs_of(work, rank, 0, jobs)):
            assert (peer == rank) == (n < local_jobs) and flag not in raised[peer]
            assert (came[peer, rows] == -1).all()
            came[peer, rows], told[peer, rows] = rank * T + tokens, flag
            raised[peer].add(flag)
    for rank in range(R):
        visits, end = work.totals[rank, :2]
        want = [source * T + token for source, token, _ in order(experts, R, E, rank)]
        assert end == len(want)
        np.testing.assert_array_equal(came[rank, :end], want)
        seen = np.zeros(N, int)
        table = work.visits_VW[rank]
        assert (table[visits:, LO] == table[visits:, HI]).all()
        assert (np.diff(table[:visits, FAR]) >= 0).all()
        waited = set()
        for entries in table[:visits]:
            lo, hi = entries[LO], entries[HI]
            assert entries[ROW] <= lo < hi <= entries[ROW] + BLOCK and entries[ROW] % 8 == 0
            flags = set()
            for distance in range(entries[NEAR], entries[FAR]):
                flags |= set(range(*entries[FLAGS + 2 * distance : FLAGS + 2 * distance + 2]))
            # Exactly the jobs that hold its rows, so it depends on few sources.
            assert flags == set(told[rank, lo:hi])
            waited |= flags
            seen[lo:hi] += 1
        assert (seen[:end] == 1).all() and not seen[end:].any()
        assert waited == raised[rank]  # whoever is done has seen all that came


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_a_combine_brings_every_answer_home(sizes, name, seed):
    (R, T, A, E), (experts, (_, work, places)) = sizes, tables_of(sizes, name, seed)
    S, N = T * A, R * T * A
    page = np.full((R, S + N), -1)  # of answers: the choice (of all) in each row
    arrived = np.zeros(R, int)
    for rank in range(R):
        local = order(experts, R, E, rank)
        page[rank, S : S + len(local)] = [(s * T + t) * A + a for s, t, a in local]
        assert work.totals[rank, tables.END] == len(local)
    for rank in range(R):
        near = []
        for peer, _, rows, slots in jobs_of(work, rank, 0, work.totals[rank, tables.JOBS]):
            assert peer != rank and (page[peer, slots] == -1).all()
            page[peer, slots] = page[rank, rows]
            arrived[peer] += 1
            near.append((peer - rank) % R)
        assert near == sorted(near)  # the next rank's answers leave first
    np.testing.assert_array_equal(arrived, work.totals[:, tables.ARRIVALS])
    for rank in range(R):
        for t, a in np.ndindex(T, A):
            place, expert = places[rank, t, a], experts[rank * T + t, a]
            assert (place == -1) == (expert < 0)
            if place >= 0:
                assert page[rank, place] == (rank * T + t) * A + a
