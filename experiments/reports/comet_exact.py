"""What comet.py claims to be exact: both products of a layer and all gradients against a loop.

The models' experts, top-k and layouts on 8 devices, widths divided by 16, float32, against float64
NumPy that goes through the tokens and their choices one by one; and that a second run gives the
same bits. Times of emulated devices would say nothing, so there are none.

Legend: T tokens, A active experts a token, D model width, F width of an expert, E experts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments.reports.overlap import Row, draw_routing
from megajax.parallel.expert import Routing, dispatch_grouped_matmul, grouped_matmul_combine
from megajax.parallel.overlap import Implementation
from pallas_kernels.collective.cases import RANKS
from pallas_kernels.expert.cases import MIXTURES, Mixture

NARROWER = 16
WAYS: tuple[Implementation, ...] = ("xla", "ring")
RESULTS = ("y", "dx", "dgate", "dup", "ddown", "dweights")


def rows(
    models: Sequence[str], layouts: Sequence[tuple[int, int]], tokens: int, stds: Sequence[float]
) -> Iterator[Row]:
    """Yields a row for each model, imbalance, layout (tensor, expert) and way: the largest errors.

    tokens: of all ranks, a multiple of RANKS. An error is the largest difference over the largest
    value of the loop.
    """
    for model in models:
        case = MIXTURES[model]
        for std in stds:
            arrays, index_TA, reached = draw(case, tokens, std)
            want = loop(arrays, index_TA)
            for (tensor, expert), way in itertools.product(layouts, WAYS):
                run = layer(tensor, expert, way)
                first, again = (jax.tree.map(np.asarray, run(arrays, index_TA)) for _ in range(2))
                errors = {
                    f"{name}_error": float(np.abs(got - value).max() / np.abs(value).max())
                    for name, got, value in zip(RESULTS, first, want, strict=True)
                }
                yield {
                    "part": "exact", "model": model, "tensor": tensor, "expert": expert, "way": way,
                    "tokens": tokens, "experts": case.experts, "active": case.active,
                    "width": case.width // NARROWER, "hidden": case.hidden // NARROWER,
                    "std_reached": reached,
                } | errors | {
                    "same_bits": all(map(np.array_equal, first, again)),
                }  # fmt: skip


def draw(
    case: Mixture, tokens: int, std: float, seed: int = 0
) -> tuple[tuple[np.ndarray, ...], np.ndarray, float]:
    """Returns ((x_TD, gate_EDF, up_EDF, down_EFD, weight_TA, dy_TD) float32, index_TA, the std)."""
    index_TA, reached = draw_routing(tokens, case.experts, case.active, std, seed)
    random = np.random.default_rng(seed)
    D, F, E = case.width // NARROWER, case.hidden // NARROWER, case.experts

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    weight_TA = random.dirichlet(np.ones(case.active), tokens).astype(np.float32)
    x_TD, dy_TD = normal(tokens, D), normal(tokens, D)
    inputs = normal(E, D, F, scale=D**-0.5), normal(E, D, F, scale=D**-0.5)
    down_EFD = normal(E, F, D, scale=F**-0.5)
    return (x_TD, *inputs, down_EFD, weight_TA, dy_TD), index_TA.astype(np.int32), reached


def layer(tensor: int, expert: int, way: Implementation) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns f(arrays, index_TA) -> RESULTS of the two halves on tensor x expert devices."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]).reshape(expert, tensor), ("expert", "tensor"))
    ranks, cut, back = P(("expert", "tensor")), P("expert", None, "tensor"), P("expert", "tensor")

    def local(x: Any, gate: Any, up: Any, down: Any, weight: Any, index: Any) -> Any:
        h, dispatch = dispatch_grouped_matmul(
            x, [gate, up], Routing(index, weight), expert_axis="expert", tensor_axis="tensor",
            activation="swiglu", implementation=way,
        )  # fmt: skip
        return grouped_matmul_combine(h, down, dispatch, weights=weight, implementation=way)

    whole: Any = jax.shard_map(
        local, mesh=mesh, in_specs=(ranks, cut, cut, back, ranks, ranks), out_specs=ranks
    )

    @jax.jit
    def both(arrays: tuple[jax.Array, ...], index: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda *a: whole(*a, index), *arrays[:-1])
        return y, *pull(arrays[-1])

    return both


def loop(arrays: tuple[np.ndarray, ...], index_TA: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns RESULTS in float64, one choice of one token after the other."""
    x, gate, up, down, weight, dy = (a.astype(np.float64) for a in arrays)
    y, dx, dgate, dup, ddown, dweight = (np.zeros_like(a) for a in (x, x, gate, up, down, weight))
    for t, chosen in enumerate(index_TA):
        for a, e in enumerate(chosen):
            g, u = x[t] @ gate[e], x[t] @ up[e]
            s = 1 / (1 + np.exp(-g))
            answer = (g * s * u) @ down[e]
            y[t] += weight[t, a] * answer
            dweight[t, a] = dy[t] @ answer
            ddown[e] += np.outer(g * s * u, weight[t, a] * dy[t])
            dh = down[e] @ (weight[t, a] * dy[t])
            dg, du = dh * u * s * (1 + g * (1 - s)), dh * g * s
            dgate[e] += np.outer(x[t], dg)
            dup[e] += np.outer(x[t], du)
            dx[t] += gate[e] @ dg + up[e] @ du
    return y, dx, dgate, dup, ddown, dweight
