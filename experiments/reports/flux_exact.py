"""What flux.py claims to be exact: a feed-forward layer and all gradients against NumPy.

The models' layers on 8 devices, widths divided by 64, float32, with biases and the residual: plain
collectives and rings, one way and both, against whole products in float64; and that a second run
gives the same bits. Times of emulated devices would say nothing, so there are none.

Legend: m rows of all ranks, D model width, F width of the layer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments.reports.overlap import Row
from megajax.parallel.tensor import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.collective.cases import DENSE, RANKS, Dense

NARROWER = 64
ROWS = (RANKS, 25 * RANKS)  # one row a rank; a number that no tile divides
WAYS = {"xla": ("xla", False), "ring": ("ring", False), "ring, both ways": ("ring", True)}
RESULTS = ("y", "dx", "dups", "dup_biases", "ddown", "ddown_bias")


def rows(models: Sequence[str]) -> Iterator[Row]:
    """Yields a row for each model, number of rows and way: the largest errors.

    An error is the largest difference over the largest value of NumPy's.
    """
    for model in models:
        case = DENSE[model]
        gated = case.inputs == 2
        for m in ROWS:
            arrays = draw(case, m)
            want = exact(arrays, gated)
            for way, (implementation, both_ways) in WAYS.items():
                run = layer(implementation, both_ways, gated)
                first, again = (jax.tree.map(np.asarray, run(*arrays)) for _ in range(2))
                yield {
                    "part": "exact", "model": model, "way": way, "m": m,
                    "width": case.width // NARROWER, "hidden": case.hidden // NARROWER,
                } | {
                    f"{name}_error": float(np.abs(got - value).max() / np.abs(value).max())
                    for name, got, value in zip(RESULTS, first, want, strict=True)
                } | {"same_bits": all(map(np.array_equal, first, again))}  # fmt: skip


def draw(case: Dense, m: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns (x_mD, ups_IDF, up_biases_IF, down_FD, down_bias_D, dy_mD), float32; I inputs."""
    random = np.random.default_rng(seed)
    D, F, inputs = case.width // NARROWER, case.hidden // NARROWER, case.inputs

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    ups, up_biases = normal(inputs, D, F, scale=D**-0.5), normal(inputs, F)
    return normal(m, D), ups, up_biases, normal(F, D, scale=F**-0.5), normal(D), normal(m, D)


def layer(implementation: Any, both_ways: bool, gated: bool) -> Callable[..., tuple]:
    """Returns f(*arrays) -> RESULTS, on RANKS devices."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("tensor",))
    how = {"axis": "tensor", "implementation": implementation, "both_ways": both_ways}
    cut = P("tensor"), P(None, None, "tensor"), P(None, "tensor"), P("tensor"), P()

    def local(x: Any, ups: Any, up_biases: Any, down: Any, down_bias: Any) -> Any:
        h = all_gather_matmul(
            x, list(ups), bias=list(up_biases), activation="swiglu" if gated else "gelu_tanh", **how
        )  # fmt: skip
        return matmul_reduce_scatter(h if gated else h[0], down, bias=down_bias, residual=x, **how)

    whole: Any = jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=P("tensor"))

    @jax.jit
    def both(*arrays: jax.Array) -> tuple:
        y, pull = jax.vjp(whole, *arrays[:-1])
        return y, *pull(arrays[-1])

    return both


def exact(arrays: tuple[np.ndarray, ...], gated: bool) -> tuple[np.ndarray, ...]:
    """Returns RESULTS in float64."""
    x, ups, up_biases, down, down_bias, dy = (a.astype(np.float64) for a in arrays)
    zs = x @ ups + up_biases[:, None]
    dh = dy @ down.T
    if gated:
        gate, up = zs
        s = 1 / (1 + np.exp(-gate))
        h, dzs = gate * s * up, np.stack([dh * up * s * (1 + gate * (1 - s)), dh * gate * s])
    else:
        c, cube = (2 / np.pi) ** 0.5, 0.044715
        (z,) = zs
        t = np.tanh(c * (z + cube * z**3))
        h = z * (1 + t) / 2
        dzs = dh * ((1 + t) / 2 + z * (1 - t * t) * c * (1 + 3 * cube * z * z) / 2)[None]
    dx = dy + (dzs @ ups.transpose(0, 2, 1)).sum(0)
    return h @ down + down_bias + x, dx, x.T @ dzs, dzs.sum(1), h.T @ dy, dy.sum(0)
