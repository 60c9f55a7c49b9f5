"""The exchange of data parallelism run twice: on a mesh of devices, and on one device under vmap.

`python -m tests.zero_run` compares the two on 32 emulated devices, mesh by mesh.
"""

import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from megajax.core.mesh import make_mesh
from megajax.parallel import zero
from megajax.quant import codec

KEY = 11


def virtual(function, in_axes=0):
    """The function on the ranks of two leading dimensions (nodes, ranks), one device, compiled."""
    inner = jax.vmap(function, in_axes, axis_name="data")
    return jax.jit(jax.vmap(inner, in_axes, axis_name="node"))


def sharded(function, nodes, ranks, out_specs, check_vma=False):
    """The same, a device for each rank. Arguments beyond the first two are the same everywhere."""
    mesh, cut = make_mesh(jax.devices()[: nodes * ranks], {"node": nodes, "data": ranks}), P()
    cut = P("node", "data")

    def local(x, main, *same):
        result = function(x[0, 0], main[0, 0], *same)
        lead = lambda y, spec: y[None, None] if spec == cut else y  # noqa: E731
        return jax.tree.map(lead, result, out_specs)

    def run(x, main, *same):
        place = lambda y, spec: jax.device_put(y, jax.NamedSharding(mesh, spec))  # noqa: E731
        specs = (cut, cut, *[P()] * len(same))
        with jax.set_mesh(mesh):
            call = jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma
            )
            return jax.jit(call)(*map(place, (x, main, *same), specs))

    return run


def buffers(nodes, ranks, n, seed=0):
    """Gradients of every rank, heavy-tailed, masters and a copy near them; exact multiples of
    powers of two, so that no compiler option changes them."""
    random = np.random.default_rng(seed)
    x = np.float32(random.standard_t(3, (nodes, ranks, n)))
    length = zero.piece_length(n, nodes * ranks)
    main = np.zeros((nodes * ranks * length,), np.float32)
    main[:n] = random.normal(size=n)
    copy = main[:n] + np.float32(1e-3 * random.normal(size=n))
    return x, main.reshape(nodes, ranks, length), np.float32(copy)


def step(name, x, main, copy, state=None):
    """One exchange of gradients and weights; with the state if there is one."""
    used, key = codec(name), jax.random.key(KEY)
    piece = zero.reduce_scatter(x, used, key=key, state=state)
    return piece, zero.gather_difference(main, copy, used)


def compare(nodes, ranks, name, n, check_vma=False):
    """Runs both ways and demands the same bits; returns (pieces, copy, buffers)."""
    used, operands = codec(name), buffers(nodes, ranks, n)
    state = zero.start(n, used, nodes, ranks)
    cut = P("node", "data")
    out = ((cut if state is None else (cut, jax.tree.map(lambda _: cut, state))), P())

    def function(x, main, copy):
        return step(name, x, main, copy, zero.start(n, used, nodes, ranks))

    one = virtual(function, (0, 0, None))(*operands)
    many = sharded(function, nodes, ranks, out, check_vma)(*operands)
    for a, b in zip(jax.tree.leaves(one[0]), jax.tree.leaves(many[0]), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
    for rank in np.ndindex(nodes, ranks):
        np.testing.assert_array_equal(bits(one[1][rank]), bits(many[1]))
    pieces = one[0] if state is None else one[0][0]
    return np.asarray(pieces), np.asarray(many[1]), operands


def bits(x):
    """The bits of an array of 4-byte numbers; others as they are."""
    x = np.asarray(x)
    return x.view(np.uint32) if x.dtype == np.float32 else x


def main():
    """Every mesh of 1, 2, 4 nodes of 1, 2, 4, 8 ranks, an odd number of elements in each."""
    for nodes in (1, 2, 4):
        for ranks in (1, 2, 4, 8):
            n = 1 + 997 * nodes + 31 * ranks
            pieces, _, (x, _, _) = compare(nodes, ranks, "sdp4bit", n)
            total = x.astype(np.float64).sum((0, 1))
            error = np.linalg.norm(pieces.ravel()[:n] - total) / np.linalg.norm(total)
            assert error < (0.25 if nodes * ranks > 1 else 1e-7), (nodes, ranks, error)
            assert not pieces.ravel()[n:].any()
            print(nodes, ranks, n, f"{error:.3f}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 32)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    sys.exit(main())
