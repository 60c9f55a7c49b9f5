"""The products inside the fused kernels, in Mosaic GPU's interpreter with race detection.

It knows no flags, so all rows are there already: which tile goes where, for every rank, with ragged
rows, several weights, clusters, epilogues. Who waits for whom: test_collective_threads.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret as interpreter
from pallas_kernels.collective.all_gather_gemm import all_gather_gemm
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.fused import Fusion
from pallas_kernels.hopper.peers import ReadyPeer
from pallas_kernels.hopper.tiles import Tile

R = 2


def values(*shapes, seed):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.integers(-2, 3, shape), jnp.bfloat16) for shape in shapes]


# rank, tile (rows, columns, warpgroups, cluster), live rows of a rank, rotated, type of the result:
# in 16 bits a tile of 64 columns is one piece, whose buffer the next tile's shares
GATHERS = [
    pytest.param(1, (64, 64, 1, 1), 72, True, "bfloat16"),
    pytest.param(0, (64, 64, 1, 2), 136, True, "float32", marks=pytest.mark.slow),
    pytest.param(1, (128, 64, 2, 1), 136, False, "float32", marks=pytest.mark.slow),
]


def gathered(me, tile, rows, rotated, out_dtype, seed, K=64):
    m, n, warpgroups, cluster = tile
    widths = [64, 128]
    x, w, v = values((R, rows, K), (1, K, widths[0]), (1, K, widths[1]), seed=seed)
    bias = jnp.arange(192, dtype=jnp.float32)[None]
    fusion = Fusion(Tile(m, n, 64, 2, warpgroups, cluster), 0, 72, rotated)
    with interpreter.checked():
        ys, _ = all_gather_gemm(
            x,
            (w, v),
            bias,
            rows=rows,
            peers=ReadyPeer(R, me),
            fusion=fusion,
            spec=Spec(None, out_dtype),
            blocks=2 * cluster,
            interpret=True,
        )
        jax.block_until_ready(ys)
    first = 0
    for y, weight in zip(ys, (w, v), strict=True):
        want = np.asarray(x, np.float64) @ np.asarray(weight[0], np.float64)
        width = weight.shape[2]
        want += np.asarray(bias[0, first : first + width])
        np.testing.assert_array_equal(y, jnp.asarray(want, out_dtype))
        first += width


@pytest.mark.parametrize(("me", "tile", "rows", "rotated", "out_dtype"), GATHERS)
def test_gathered_product(me, tile, rows, rotated, out_dtype, seed):
    gathered(me, tile, rows, rotated, out_dtype, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("me", "cluster"), [(1, 1), (0, 2)])
def test_scattered_product(me, cluster, seed):
    """Two products by transposed weights, added.

    Sums for other owners leave from one buffer, own ones are where the others' will arrive.
    """
    rows, K, N = 72 * cluster, 64, 128
    x, w, v, u = values((R, rows, K), (1, N, K), (R, rows, 2 * K), (1, N, 2 * K), seed=seed)
    fusion = Fusion(Tile(64, 128, 64, 2, 1, cluster), 0, 72)
    with interpreter.checked():
        _, outbox, inbox = jax.block_until_ready(
            gemm_reduce_scatter(
                (x, v),
                (w, u),
                rows=rows,
                peers=ReadyPeer(R, me),
                fusion=fusion,
                spec=Spec(None, "float32"),
                blocks=2 * cluster,
                turned=True,
                interpret=True,
            )
        )
    x, w, v, u = (np.asarray(a, np.float64) for a in (x, w, v, u))
    want = x @ w[0].T + v @ u[0].T
    np.testing.assert_array_equal(inbox[me * R + me], want[me])
    np.testing.assert_array_equal(outbox[1 - me], want[1 - me])
