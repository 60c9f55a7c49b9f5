"""Expert parallelism against the loop over tokens: eight devices, and experts beside tensor.

Plain exchanges, and rings, which are what runs where they are asked for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.core.mesh import MeshSpec
from megajax.layers.moe import MoeConfig
from megajax.parallel import expert, sharding, tensor
from megajax.parallel.context import ContextSpec
from tests.moe_oracle import build, gradients, loop, tokens

CONFIGS = {
    f"top {k}": MoeConfig(experts=8, top_k=k, normalise=False, bias_rate=0.1) for k in range(1, 9)
} | {"capacity": MoeConfig(experts=8, top_k=3, mode="capacity", capacity_factor=0.7)}
MESHES = {"8": {"expert": 8}, "4": {"expert": 4}, "mixed": {"expert": 2, "context": 2, "tensor": 2}}
MESHES["tensor"] = {"data": 4, "tensor": 2}
OFTEN = {("top 1", "4", "ring"), ("capacity", "mixed", "xla")}
RINGS = (
    ("top 1", "4", "ring"),
    ("top 1", "8", "ring"),
    ("top 3", "mixed", "ring"),
    ("top 8", "mixed", "ring"),
    ("top 2", "tensor", "ring"),
)
CASES = [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow)
    for case in (*((name, mesh, "xla") for name in CONFIGS for mesh in ("8", "mixed")), *RINGS)
]


def under_mesh(cfg, overlap, trace=False, **mesh):
    """Returns f(params, x) -> (((y^2).sum(), (y, sums)), gradients) of the sharded layer, whose
    rows lie in the order of a ring. trace: it is traced only, and nothing returned."""
    lo = sharding.layout(MeshSpec(**mesh).build())
    ops = tensor.ops(lo, overlap=overlap)
    spec = lo.named(lo.act("batch", "seq", None, residual=True))
    with jax.set_mesh(lo.mesh):
        graph, _ = build(cfg, lo, ops)
        words = {k: v.get_metadata("axes") for k, v in nnx.state(nnx.merge(graph, _)).items()}

    def value(params, x):
        y, sums = nnx.merge(graph, params)(x)
        return (y**2).sum(), (y, sums)

    run = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))

    def call(params, x):
        order = ContextSpec().order_of(x.shape[1], lo.mesh.shape["context"])
        order = np.arange(x.shape[1]) if order is None else order
        placed = {k: jax.device_put(v, lo.named(lo.stored(*words[k]))) for k, v in params.items()}
        with jax.set_mesh(lo.mesh):
            x = jax.device_put(x[:, order], spec)
            outputs = jax.eval_shape(run, placed, x) if trace else run(placed, x)
        if trace:
            return None
        (value, (y, sums)), (dw, dx) = jax.tree.map(np.asarray, outputs)
        back = np.argsort(order)
        return (value, (y[:, back], sums)), (dw, dx[:, back])

    return call


@pytest.mark.parametrize(("name", "mesh", "overlap"), CASES)
def test_nothing_is_lost_and_drops_are_counted(name, mesh, overlap, seed, monkeypatch):
    cfg, ran = CONFIGS[name], []
    halves = expert._hidden
    monkeypatch.setattr(expert, "_hidden", lambda *a: ran.append(a[-1]) or halves(*a))
    graph, params = build(cfg)
    call = under_mesh(cfg, overlap, **MESHES[mesh])
    cases = {"as it comes": 0.0}
    if cfg.bias_rate:
        cases |= {
            "one expert": 100.0 * (np.arange(8) == 5),
            # As many as no token needs: float32 does not tell apart small scores beside -9.
            "some empty": -9.0 * (np.arange(8) < min(3, 8 - cfg.top_k)),
        }
    for case, bias in cases.items():
        if cfg.bias_rate:
            params["bias"] = jnp.zeros(8) + jnp.asarray(bias, "float32")
        x = tokens(seed)
        (_, (y, sums)), grads = call(params, x)
        want, dropped, load = loop(params, x, cfg)
        np.testing.assert_allclose(y, want, atol=1e-5, err_msg=case)
        assert int(sums.dropped) == dropped and (dropped > 0) == (name == "capacity")
        np.testing.assert_array_equal(sums.load_E, load)
        # The one-device gradients stand on finite differences (tests/layers/test_moe.py).
        plain = jax.tree.leaves(gradients(params, x, graph))
        for a, b in zip(jax.tree.leaves(grads), plain, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=case)
    assert set(ran) == ({"ring"} if overlap == "ring" else set())


@pytest.mark.parametrize("mesh", [{"data": 4, "tensor": 2}, {"context": 2, "tensor": 2}])
def test_rings_need_no_expert_axis(mesh, seed):
    """Weights are copies over some axes, and reduced ones over others."""
    cfg = CONFIGS["top 2"]
    _, params = build(cfg)
    under_mesh(cfg, "ring", trace=True, **mesh)(params, tokens(seed))
