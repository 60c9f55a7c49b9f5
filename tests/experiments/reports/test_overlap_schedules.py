"""Tables of what a rank does: every expert's tiles once, and waits that end."""

import numpy as np
import pytest

from experiments.reports import overlap_simulator
from tests import collective_oracle as oracle


@pytest.mark.parametrize(
    ("tiles", "blocks", "most"),
    [(1536, 132, 4), (96, 132, 36), (132, 132, 0), (133, 132, 65), (768, 132, 4), (3072, 132, 4)],
)
def test_most_comm_blocks(tiles, blocks, most):
    """1536 tiles: 12 waves of 132, and of 128, but 13 of 127."""
    assert overlap_simulator.most_comm_blocks(tiles, blocks) == most
    waves = -(-tiles // blocks)
    assert -(-tiles // (blocks - most)) == waves
    assert most == blocks - 1 or -(-tiles // (blocks - most - 1)) > waves


def counts_of(rng, ranks, experts):
    counts = rng.integers(0, 9, (ranks, experts)) * rng.integers(0, 2, (ranks, experts))
    if rng.random() < 0.3:
        counts[:, rng.integers(experts)] = 0  # an expert without rows
    if rng.random() < 0.3:
        counts[rng.integers(ranks)] = 0  # a source without rows
    return counts.astype(np.int32)


def slow_tiles(counts, tile):
    """(expert, row, rows, stage) of every tile, from a list of the rows' distances."""
    tiles = []
    for e in range(counts.shape[1]):
        distances = [d for d in range(len(counts)) for _ in range(counts[d, e])]
        for row in range(0, len(distances), tile):
            part = distances[row : row + tile]
            tiles.append((e, row, len(part), max(part)))
    return tiles


def test_expert_tiles_against_a_loop(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        counts = counts_of(rng, 4, 5)
        oracle_tiles = slow_tiles(counts, 4)
        staged = sorted(oracle_tiles, key=lambda t: (t[3], t[0], t[1]))
        for by_stage, order in ((True, staged), (False, oracle_tiles)):
            tiles = oracle.rows_of(overlap_simulator.expert_tiles(counts, 4, by_stage=by_stage))
            assert tiles == order


def test_dispatch_has_every_tile_once_and_waits_for_its_stages(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        counts = counts_of(rng, 4, 3)
        for rank in range(4):
            schedule = overlap_simulator.dispatch_gemm(rank, counts, 4, 2, chunk=5)
            live = {(rank, e): int(counts[:, e].sum()) for e in range(3)}
            oracle.check(schedule, live, 2, 4)
            assert oracle.run(schedule, 3, 2, rng) == 0
            # The rows of a tile that waits for nothing are the rank's own.
            for _, e, row, rows, _, _, last in oracle.rows_of(schedule.tiles):
                local_rows = int(counts[rank, e])
                assert (last == 1) == (row + rows <= local_rows)
            assert schedule.chunks.rows.sum() == counts.sum() - counts[rank].sum()
            assert (np.diff(schedule.tiles.last_flag) >= 0).all()


def test_combine_goes_block_of_columns_by_block_of_columns(seed):
    rng = np.random.default_rng(seed)
    for columns, width in ((5, 2), (4, 4), (3, 1), (3, 8)):
        rows_E, tokens_R = counts_of(rng, 1, 4)[0], rng.integers(0, 9, 3)
        for rank in range(3):
            schedule = overlap_simulator.gemm_combine(
                rank, rows_E, tokens_R, 4, columns, width=width, chunk=4
            )
            oracle.check(schedule, {(rank, e): int(n) for e, n in enumerate(rows_E)}, columns, 4)
            assert oracle.run(schedule, 4, 2, rng, oracle.columns_stored) == 0
            assert (np.diff(schedule.tiles.column // width) >= 0).all()
            if schedule.chunks.peer.size:
                sent = np.zeros((3, columns), int)
                for peer, _, rows, column, wide, _ in oracle.rows_of(schedule.chunks):
                    sent[peer, column : column + wide] += rows
                assert (sent == tokens_R[:, None]).all()


def test_no_rows_at_all():
    schedule = overlap_simulator.dispatch_gemm(0, np.zeros((2, 3), np.int32), 4, 2, chunk=5)
    assert schedule.tiles.row.size == schedule.chunks.row.size == 0
    schedule = overlap_simulator.gemm_combine(
        0, np.zeros(3, int), np.zeros(2, int), 4, 2, width=1, chunk=5
    )
    assert schedule.tiles.row.size == schedule.chunks.row.size == 0
