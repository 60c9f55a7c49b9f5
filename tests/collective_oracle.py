"""What must hold of every schedule of tiles and chunks; brute force, tile by tile."""

import numpy as np


def rows_of(table):
    """A table of columns as a list of tuples."""
    return list(zip(*(np.asarray(column).tolist() for column in table), strict=True))


def check(schedule, shape, columns, tile):
    """Every live element of the work once, flags in range and set by exactly who should.

    shape: {(peer, group): live rows}.
    """
    covered = {key: np.zeros((rows, columns), int) for key, rows in shape.items()}
    arrivals = np.zeros(len(schedule.need_F), int)
    waited = set()
    for peer, group, row, rows, column, first, last in rows_of(schedule.tiles):
        assert 0 < rows <= tile and row % tile == 0
        assert row + rows <= shape[peer, group]
        covered[peer, group][row : row + rows, column] += 1
        flags = range(first, last)
        assert all(0 <= f < len(arrivals) for f in flags)
        if schedule.kind == "gather":
            waited |= set(flags)
        else:
            assert flags
            arrivals[first:last] += 1
    for _, _, rows, _, _, flag in rows_of(schedule.chunks):
        assert rows > 0
        if schedule.kind == "gather":
            arrivals[flag] += 1
        else:
            waited.add(flag)
    assert all((c == 1).all() for c in covered.values())  # every tile once
    assert (arrivals == schedule.need_F).all()  # a flag is fulfilled exactly by all its arrivals
    # Waits only on flags that somebody sets, but for a source that sends nothing.
    assert all(arrivals[f] > 0 for f in waited if schedule.need_F[f])


def run(schedule, tile_blocks, comm_blocks, rng=None, needs=None):
    """Runs the blocks in turn (or at random), each at most a step; returns what never finished.

    Asserts that a tile of a gather finds its rows landed, and a chunk of a scatter the tiles
    stored that it needs (needs: of a chunk and all tiles), whatever the flags say.
    """
    tiles, chunks = rows_of(schedule.tiles), rows_of(schedule.chunks)
    need, flags = schedule.need_F, np.zeros(len(schedule.need_F), int)
    queues = [tiles[j::tile_blocks] for j in range(tile_blocks)]
    copies = [chunks[j::comm_blocks] for j in range(comm_blocks)]
    at = [0] * (tile_blocks + comm_blocks)
    done_tiles, done_chunks = set(), set()

    def step(j):
        work = queues[j] if j < tile_blocks else copies[j - tile_blocks]
        if at[j] == len(work):
            return False
        item, is_tile = work[at[j]], j < tile_blocks
        if is_tile == (schedule.kind == "gather"):
            wants = range(*item[-2:]) if is_tile else [item[-1]]
            if any(flags[f] < need[f] for f in wants):
                return False
        before = flags.copy()
        if schedule.kind == "gather" and not is_tile:
            flags[item[-1]] += 1
        if schedule.kind == "scatter" and is_tile:
            flags[item[-2] : item[-1]] += 1
        assert (flags >= before).all()  # monotone
        (done_tiles if is_tile else done_chunks).add(item)
        if is_tile and schedule.kind == "gather" and schedule.rank != item[0]:
            assert landed(item, done_chunks)
        if not is_tile and schedule.kind == "scatter":
            assert set((needs or rows_stored)(item, tiles)) <= done_tiles
        at[j] += 1
        return True

    while True:
        order = range(len(at)) if rng is None else rng.permutation(len(at))
        if not any([step(j) for j in order]):
            return len(tiles) - len(done_tiles) + len(chunks) - len(done_chunks)


def landed(tile, chunks):
    """Whether each row of a tile is in some chunk that has come."""
    peer, _, row, rows = tile[:4]
    there = {r for c in chunks if c[0] == peer for r in range(c[1], c[1] + c[2])}
    return set(range(row, row + rows)) <= there


def rows_stored(chunk, tiles):
    """The tiles that hold a row of a scatter's chunk."""
    peer, row, rows = chunk[:3]
    return [t for t in tiles if t[0] == peer and t[2] < row + rows and row < t[2] + t[3]]


def columns_stored(chunk, tiles):
    """The tiles that hold a column of a combine's chunk, of every expert."""
    column, wide = chunk[3:5]
    return [t for t in tiles if column <= t[4] < column + wide]
