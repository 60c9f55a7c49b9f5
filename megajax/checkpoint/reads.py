"""How a leaf is read when its stored chunks and its wanted shards do not match.

Storage gives whole chunks, so a chunk that two shards share is read twice. Such a leaf is read cut
along its chunks instead, every byte once, and the devices exchange the pieces among themselves
(ByteCheckpoint section 4.3: read once, distribute over the idle interconnect).
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from megajax.core.boxes import Box

TOLERANCE = 1.05  # bytes read for each byte that is there, up to which nothing is done (chosen)
SHARE = 0.1  # of the state's bytes that may exist twice while pieces are exchanged (chosen)


def stored_chunks(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape of its chunks} of a step, as far as it is known."""
    found: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("state/array_metadatas/process_*"):
        try:
            for entry in json.loads(path.read_text())["array_metadatas"]:
                array = entry["array_metadata"]
                found[array["param_name"]] = tuple(array["chunk_shape"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the arrays can be read all the same
    return found


def amplification(shape: Sequence[int], chunk: Sequence[int], boxes: Sequence[Box]) -> float:
    """Returns the elements of the chunks that reading these boxes touches over the boxes' own."""
    read = sum(
        math.prod(
            min(-(-b // c) * c, n) - a // c * c
            for a, b, c, n in zip(box.start, box.stop, chunk, shape, strict=True)
        )
        for box in boxes
    )
    return read / max(sum(box.size for box in boxes), 1)


def aligned(like: jax.ShapeDtypeStruct, chunk: Sequence[int]) -> NamedSharding | None:
    """Returns how to read a leaf instead of as wanted; None: as wanted is as good.

    Every axis of the mesh cuts the dimension with most chunks left, along chunks; None too when
    that would take more than twice the memory of a wanted shard.
    """
    wanted = like.sharding
    if not isinstance(wanted, NamedSharding) or len(chunk) != len(like.shape):
        return None
    places = wanted.devices_indices_map(like.shape).values()
    boxes = list({Box.of(index, like.shape) for index in places})
    if amplification(like.shape, chunk, boxes) <= TOLERANCE:
        return None
    left = [n // c if n % c == 0 else 1 for n, c in zip(like.shape, chunk, strict=True)]
    cuts: list[list[str]] = [[] for _ in like.shape]
    for axis, ways in sorted(wanted.mesh.shape.items(), key=lambda item: -item[1]):
        d = max(range(len(left)), key=lambda d: (left[d] % ways == 0, left[d]))
        if left[d] % ways == 0:
            cuts[d].append(axis)
            left[d] //= ways
    # An axis that cuts nothing leaves copies; the wanted shards may have the same ones.
    sharding = NamedSharding(wanted.mesh, PartitionSpec(*(tuple(c) or None for c in cuts)))
    sizes = [math.prod(s.shard_shape(like.shape)) for s in (sharding, wanted)]
    return sharding if sizes[0] <= 2 * sizes[1] else None


def groups(sizes: Sequence[int], total: int) -> Iterator[list[int]]:
    """Yields the numbers of leaves of these sizes in groups of at most SHARE of `total`."""
    group: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if group and filled + size > SHARE * total:
            yield group
            group, filled = [], 0
        group.append(i)
        filled += size
    if group:
        yield group


def place(x: jax.Array, wanted: Any) -> jax.Array:
    """Returns an array under another sharding of the same devices; the former's memory is freed."""
    moved = jax.device_put(x, wanted, donate=True)
    moved.block_until_ready()
    return moved
