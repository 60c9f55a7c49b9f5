"""Schedules as data: every tile once, waits that end, rotation, closed forms under tracing."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.reports import overlap_simulator
from pallas_kernels import aot
from pallas_kernels.hopper import schedule as s
from tests import collective_oracle as oracle

# (m, ranks, tile, chunk): divides, ragged last chunk, chunk < tile, ragged ranks, empty last ranks.
SPLITS = [
    (64, 4, 8, 8),
    (64, 4, 8, 12),
    (64, 4, 8, 4),
    (48, 2, 7, 9),
    (37, 8, 4, 3),
    (9, 8, 4, 4),
    (8, 8, 16, 1),
    (30, 3, 4, 100),
    (5, 1, 2, 2),
]
KINDS = {
    "gather": overlap_simulator.all_gather_gemm,
    "scatter": overlap_simulator.gemm_reduce_scatter,
}


def dense(kind, split, columns, band=1, **options):
    return [KINDS[kind](r, split, columns, band, **options) for r in range(split.ranks)]


def shape(split):
    return {
        (p, 0): len(range(p * split.shard, min((p + 1) * split.shard, split.m)))
        for p in range(split.ranks)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", SPLITS, ids=str)
def test_every_tile_once_and_every_wait_ends(kind, numbers, seed):
    split, rng = s.Split(*numbers), np.random.default_rng(seed)
    for columns, band, swizzle in ((1, 1, True), (3, 1, True), (3, 2, True), (2, 1, False)):
        for schedule in dense(kind, split, columns, band, swizzle=swizzle):
            oracle.check(schedule, shape(split), columns, split.tile)
            assert oracle.run(schedule, int(rng.integers(1, 9)), int(rng.integers(1, 4)), rng) == 0


def test_one_block_of_each_kind_is_enough():
    for kind, numbers in itertools.product(KINDS, SPLITS):
        for schedule in dense(kind, s.Split(*numbers), 2, 2):
            assert oracle.run(schedule, 1, 1) == 0


def test_a_wait_that_nobody_answers_is_seen():
    """The oracle itself: one chunk less, and the tiles that wait for it never run."""
    schedule = overlap_simulator.all_gather_gemm(1, s.Split(64, 4, 8, 8), 2)
    cut = s.Chunk(*(x[:-1] for x in schedule.chunks))
    assert oracle.run(dataclasses.replace(schedule, chunks=cut), 3, 1) > 0


def planted(name):
    """A schedule with one fault."""
    split = s.Split(37, 4, 4, 3)
    gather, scatter = (
        overlap_simulator.all_gather_gemm(1, split, 2),
        overlap_simulator.gemm_reduce_scatter(1, split, 2),
    )
    tiles, chunks = gather.tiles, gather.chunks
    last = np.array(chunks.rows)
    last[-1] -= 1
    faults = {
        "dropped wait": (gather, {"tiles": tiles._replace(last_flag=tiles.first_flag)}),
        "short ragged chunk": (gather, {"chunks": chunks._replace(rows=last)}),
        "early flag": (scatter, {"need_F": scatter.need_F - 1}),
        "wrong flags": (gather, {"chunks": chunks._replace(flag=np.roll(chunks.flag, -1))}),
    }
    schedule, change = faults[name]
    return dataclasses.replace(schedule, **change)


@pytest.mark.parametrize(
    "name", ["dropped wait", "short ragged chunk", "early flag", "wrong flags"]
)
def test_planted_faults_are_caught(name, seed):
    rng = np.random.default_rng(seed)
    with pytest.raises(AssertionError):  # in one of twenty orders
        for _ in range(20):
            oracle.run(planted(name), 5, 1, rng)


@pytest.mark.parametrize(("kind", "first"), [("gather", 0), ("scatter", 1)])
def test_rotation_is_a_permutation_of_the_ranks_at_each_step(kind, first):
    split = s.Split(64, 4, 8, 8)
    peers = np.array([schedule.tiles.peer for schedule in dense(kind, split, 3)])
    assert (np.sort(peers, axis=0) == np.arange(4)[:, None]).all()
    assert peers[:, 0].tolist() == [(r + first) % 4 for r in range(4)]
    assert peers[:, -1].tolist() == [(r + 3 + first) % 4 for r in range(4)]
    copies = np.array([schedule.chunks.peer for schedule in dense(kind, split, 3)])
    assert (np.sort(copies, axis=0) == np.arange(4)[:, None]).all()
    plain = np.array([schedule.tiles.peer for schedule in dense(kind, split, 3, swizzle=False)])
    assert (plain == plain[0]).all() and (np.diff(plain[0]) >= 0).all()


def test_a_gather_takes_tiles_in_the_order_in_which_chunks_come():
    schedule = overlap_simulator.all_gather_gemm(2, s.Split(64, 4, 8, 8), 3, 1)
    place = {f: i for i, f in enumerate(schedule.chunks.flag.tolist())}
    flags = zip(schedule.tiles.first_flag, schedule.tiles.last_flag, strict=True)
    last = [max([place[f] for f in range(a, b)], default=-1) for a, b in flags]
    assert last == sorted(last)
    assert last.count(-1) == 2 * 3  # own rows: no wait


def test_by_hand():
    """7 rows on 2 ranks (4 and 3), tiles of 2, chunks of 3: rank 0."""
    split = s.Split(7, 2, 2, 3)
    assert (split.shard, split.row_tiles, split.chunks) == (4, 2, 2)
    gather = overlap_simulator.all_gather_gemm(0, split, 1)
    assert oracle.rows_of(gather.tiles) == [
        (0, 0, 0, 2, 0, 0, 0),
        (0, 0, 2, 2, 0, 0, 0),
        (1, 0, 0, 2, 0, 2, 3),
        (1, 0, 2, 1, 0, 2, 3),
    ]
    assert oracle.rows_of(gather.chunks) == [(1, 0, 3, 0, 0, 2)]  # the last chunk has no row
    scatter = overlap_simulator.gemm_reduce_scatter(1, split, 5)
    assert oracle.rows_of(scatter.chunks) == [(0, 0, 3, 0, 5, 0), (0, 3, 1, 0, 5, 1)]
    # Rows 0..2 lie in two tiles of rows, row 3 in the second: 5 columns each.
    assert scatter.need_F.tolist() == [10, 5, 10, 0]
    assert s.chunk_tiles(scatter.chunks, split, 5).tolist() == [10, 5]


@pytest.mark.parametrize("numbers", SPLITS, ids=str)
def test_the_arrivals_of_a_chunk_in_closed_form(numbers):
    split = s.Split(*numbers)
    for schedule in dense("scatter", split, 3):
        assert (
            s.chunk_tiles(schedule.chunks, split, 3) == schedule.need_F[schedule.chunks.flag]
        ).all()


def test_closed_forms_take_ints_and_traced_values():
    split, rank = s.Split(37, 4, 4, 6), 3
    for function in (s.gather_tile, s.scatter_tile, s.scatter_chunk):
        i = np.arange(3 * split.chunks, dtype=np.int32)
        table = oracle.rows_of(function(i, rank, split, 2))
        assert [tuple(map(int, function(int(j), rank, split, 2))) for j in i] == table
        traced = jax.jit(lambda i, r, f=function: f(i, r, split, 2))(i, jnp.int32(rank))
        assert oracle.rows_of(traced) == table
    traced = jax.jit(lambda i, r: s.gather_chunk(i, r, split))(i, jnp.int32(rank))
    assert oracle.rows_of(traced) == oracle.rows_of(s.gather_chunk(i, rank, split))


@pytest.mark.aot
def test_closed_forms_compile_inside_a_kernel():
    split = s.Split(1000, 8, 128, 96)

    def body(rank_ref, out_ref):
        i = jax.lax.axis_index("sm")
        tile = s.gather_tile(i, rank_ref[0], split, 6, 2)
        chunk = s.scatter_chunk(i, rank_ref[0], split, 6)
        for j, value in enumerate((*tile, *chunk, s.chunk_tiles(chunk, split, 6))):
            out_ref[i, j] = jnp.asarray(value, jnp.int32)

    out = jax.ShapeDtypeStruct((12, 14), jnp.int32)
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())
    rank = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=sharding)
    run = plgpu.kernel(body, out_type=out, grid=(12,), grid_names=("sm",))
    assert "mosaic_gpu" in aot.compile(jax.jit(run).lower(rank)).as_text()


def test_raster():
    order = [s.raster(i, 3, 2, 2) for i in range(6)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert [s.raster(i, 2, 2) for i in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_is_refused():
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        s.Split(8, 2, 4, 0)
    with pytest.raises(ValueError, match=r"rank=2 must be one of 0 \.\. 1"):
        overlap_simulator.all_gather_gemm(2, s.Split(8, 2, 4, 4), 1)
