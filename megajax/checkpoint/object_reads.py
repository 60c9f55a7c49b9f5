"""How the arrays of a step in an object store come to the devices: tensorstore reads them there.

What each process needs for its own shards and no more, each part once however many of its devices
hold it, a bounded number of bytes on the way: nothing is staged on a disk. Leaves whose stored
chunks do not match the wanted shards are read along the chunks and exchanged, as local ones are.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import reads, store
from megajax.checkpoint.store import ObjectPath
from megajax.core.tree import Tree, named_leaves

WINDOW = 512 * 2**20  # bytes on the way at once, unless one leaf is more (chosen)
# Chunks that lie side by side come in one answer: one each would be dozens a leaf.
MERGED = {
    "experimental_read_coalescing_threshold_bytes": 2**20,
    "experimental_read_coalescing_merged_bytes": 4 * 2**20,
    "experimental_read_coalescing_interval": "1ms",
}
RATE = 4e6  # bytes a second that a store must give at least, beyond PATIENCE_S (chosen)
WORKERS = 16  # leaves asked for at once; a store answers late, and many at a time
Parts = dict[str, np.ndarray]  # by the place in the leaf


def load(folder: ObjectPath, like: Tree) -> Tree:
    """Returns the arrays of a step, placed as `like` says; `like` may leave leaves out.

    Raises: StoreError when the store fails; what tensorstore does when the stored bytes do.
    """
    chunks = reads.stored_chunks(folder)
    ocdbt = {"driver": "ocdbt", "base": store.kvstore(folder / "state"), **MERGED}
    leaves = named_leaves(like)
    room = min(WINDOW, reads.SHARE * sum(_bytes(x) for _, x in leaves))
    found: list[Any] = []
    todo = deque(leaves)
    pending: deque[tuple[Any, Any, Future[Parts], int]] = deque()
    filled = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            while todo or pending:
                if todo and (not pending or filled + _bytes(todo[0][1]) <= room):
                    name, x = todo.popleft()
                    way = _way(x, chunks.get(name))
                    part = pool.submit(_read, folder, ocdbt | {"path": f"{name}/"}, x, way)
                    pending.append((x, way, part, _bytes(x)))
                    filled += _bytes(x)
                else:
                    x, way, part, size = pending.popleft()
                    found.append(_place(x, way, part.result()))
                    filled -= size
        finally:
            pool.shutdown(cancel_futures=True)
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _bytes(x: Any) -> int:
    """Returns the bytes of a leaf that this process reads, copies left out."""
    return sum(_volume(i, x.shape) for i in _indices(x, None).values()) * x.dtype.itemsize


def _volume(index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    return int(np.prod([len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]))


def _way(x: Any, chunk: tuple[int, ...] | None) -> Any:
    """Returns the sharding to read under: the wanted one, or one along the chunks."""
    if isinstance(x, np.ndarray):
        return None
    known = chunk is not None and 0 not in x.shape
    return (reads.aligned(x, chunk) if known else None) or x.sharding


def _indices(x: Any, way: Any) -> dict[str, tuple[slice, ...]]:
    """Returns the different parts of a leaf that the devices of this process hold."""
    sharding = way or getattr(x, "sharding", None)
    if isinstance(x, np.ndarray) or sharding is None:
        return {str((slice(None),) * x.ndim): (slice(None),) * x.ndim}
    return {str(i): i for i in sharding.addressable_devices_indices_map(x.shape).values()}


def _read(folder: ObjectPath, ocdbt: dict[str, Any], x: Any, way: Any) -> Parts:
    if 0 in x.shape:
        return {}
    import tensorstore as ts

    try:
        spec = {"driver": "zarr3", "kvstore": ocdbt}
        array: Any = ts.open(spec, open=True, read=True).result(timeout=store.PATIENCE_S)
        if tuple(array.shape) != tuple(x.shape):
            raise ValueError(f"leaf {ocdbt['path'][:-1]} is of shape {array.shape}, not {x.shape}")
        futures = {key: array[index].read() for key, index in _indices(x, way).items()}
        patience = store.PATIENCE_S + _bytes(x) / RATE
        return {key: _cast(f.result(timeout=patience), x) for key, f in futures.items()}
    except Exception as error:  # tensorstore raises many kinds
        raise store.explained(folder, error) from error


def _cast(part: Any, x: Any) -> np.ndarray:
    return np.asarray(part).astype(x.dtype, copy=False)


def _place(x: Any, way: Any, parts: Parts) -> Any:
    if isinstance(x, np.ndarray):
        return next(iter(parts.values()), np.zeros(x.shape, x.dtype))
    if 0 in x.shape:
        return jnp.zeros(x.shape, x.dtype, device=x.sharding)
    placed = jax.make_array_from_callback(x.shape, way, lambda index: parts[str(index)])
    return placed if way is x.sharding else reads.place(placed, x.sharding)
