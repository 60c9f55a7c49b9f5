"""Rows of experts whose columns are cut over ranks, against loops over tokens and choices."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.expert.routes import cut, route
from tests import expert_oracle as oracle


@pytest.mark.parametrize(("each", "parts"), [(3, 1), (1, 4), (3, 2)])
def test_a_choice_becomes_one_of_every_part(each, parts, seed):
    """The same expert three times too; what is none of the model's is none of the ranks'."""
    total = 2 * each
    experts = np.random.default_rng(seed).integers(-3, total + 3, (9, 3)).astype(np.int32)
    experts[:3] = experts[:3, :1]
    parts_of = np.asarray(jax.jit(functools.partial(cut, experts=each, parts=parts))(experts))
    assert parts_of.dtype == np.int32
    nowhere = (parts_of < 0) | (parts_of >= total * parts)
    chosen = np.where(experts < total, experts, -1)
    np.testing.assert_array_equal(np.where(nowhere, -1, parts_of), oracle.cut(chosen, each, parts))


# Groups of ranks, parts of an expert, copies of the mesh, the bound on rows.
SIZES = [(2, 2, 2, None), (1, 4, 1, 23)]
SELDOM = [(4, 2, 1, 16), (4, 1, 1, None), (2, 4, 1, None)]


@pytest.mark.parametrize(
    ("groups", "parts", "copies", "rows"),
    SIZES + [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SELDOM],
)
def test_all_ranks_of_a_group_have_its_experts_rows(groups, parts, copies, rows, seed):
    """In the order of the distance over both axes; past a bound the last ones are left out."""
    T, A, E, R = 5, 3, 2, groups * parts
    experts = np.random.default_rng(seed).integers(-1, groups * E, (R * T, A)).astype(np.int32)
    experts[:2] = experts[:2, :1]
    axis, spec = ("expert", "tensor"), P(("expert", "tensor"))

    def made(experts):
        routes = route(cut(experts, experts=E, parts=parts), experts=E, axis=axis, rows=rows)
        return routes.choice_N, routes.sizes_E, routes.expert_TA, routes.rank[None]

    devices = np.array(jax.devices()[: copies * R]).reshape(groups, copies, parts)
    mesh = Mesh(devices, ("expert", "other", "tensor"))
    run = jax.shard_map(made, mesh=mesh, in_specs=spec, out_specs=spec)
    choices, sizes, routed, ranks = map(np.asarray, jax.jit(run)(experts))
    np.testing.assert_array_equal(ranks, np.arange(R))
    by_rank, left = experts.reshape(R, T, A), np.zeros((R, T, A, parts), bool)
    for rank in range(R):
        first = rank // parts * E
        want = [
            (e, source, t, a * parts + rank % parts)
            for e in range(first, first + E)
            for source in np.roll(np.arange(R), -rank)
            for t in range(T)
            for a in range(A)
            if by_rank[source, t, a] == e
        ]
        for _, source, t, a in want[rows:] if rows else []:
            left[source, t, a // parts, a % parts] = True
        want = want[:rows]
        sizes_E = [sum(row[0] == e for row in want) for e in range(first, first + E)]
        np.testing.assert_array_equal(sizes.reshape(R, E)[rank], sizes_E)
        choice_N = choices.reshape(R, -1)[rank, : len(want)]
        np.testing.assert_array_equal(
            np.stack(np.unravel_index(choice_N, (R, T, A * parts)), 1).reshape(-1, 3),
            np.array([row[1:] for row in want]).reshape(-1, 3),
        )
    virtual = oracle.cut(experts, E, parts)
    np.testing.assert_array_equal(routed, np.where(left.reshape(virtual.shape), -1, virtual))
    assert left.any() == (rows is not None)
