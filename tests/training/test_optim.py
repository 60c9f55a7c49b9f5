"""Optimizers against float64 NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models.parts import FEATURES
from megajax.parallel.sharding import layout
from megajax.training.optim import (
    OptimConfig,
    is_hidden_matrix,
    is_matrix,
    make_optimizer,
    make_schedule,
    orthogonalise,
    phases,
    route,
    scale_by_muon,
    shortened,
    spread,
)

L, D, H, K = 4, 8, 4, 2
AXES = {
    "query": ("layers", "embed", "heads", None),
    "out": ("layers", "heads", None, "embed"),
    "bias": ("layers", "heads", None),
    "norm": (None,),
    "tokens": ("vocab", "embed"),
}
SHAPES = {
    "query": (L, D, H, K),
    "out": (L, H, K, D),
    "bias": (L, H, K),
    "norm": (D,),
    "tokens": (16, D),
}


def draw(seed):
    """Parameters whose layers differ a hundredfold in size, and gradients of three steps."""
    random = np.random.default_rng(seed)
    params = {k: random.normal(size=s) for k, s in SHAPES.items()}
    for name in ("query", "out", "bias"):
        params[name] *= np.array([0.01, 0.1, 1.0, 10.0]).reshape(-1, *[1] * (params[name].ndim - 1))
    grads = [{k: random.normal(size=s) for k, s in SHAPES.items()} for _ in range(3)]
    return params, grads


def run(cfg, params, grads, place=lambda tree: tree, lo=None):
    optimizer = make_optimizer(cfg, 10, AXES, lo)
    params = place({k: jnp.asarray(v, jnp.float32) for k, v in params.items()})
    state = optimizer.init(params)
    for g in grads:
        g = place({k: jnp.asarray(v, jnp.float32) for k, v in g.items()})
        updates, state = jax.jit(optimizer.update)(g, state, params)
        params = optax.apply_updates(params, updates)
    return {k: np.asarray(v) for k, v in params.items()}


def lamb_oracle(cfg, params, grads):
    """arXiv 1904.00962 algorithm 2, slice by slice, in float64."""
    schedule = make_schedule(cfg, 10)
    params = {k: v.copy() for k, v in params.items()}
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(x) for k, x in params.items()}
    for t, g in enumerate(grads, 1):
        for k in params:
            m[k] = cfg.beta1 * m[k] + (1 - cfg.beta1) * g[k]
            v[k] = cfg.beta2 * v[k] + (1 - cfg.beta2) * g[k] ** 2
            r = m[k] / (1 - cfg.beta1**t) / (np.sqrt(v[k] / (1 - cfg.beta2**t)) + cfg.eps)
            scaled = cfg.lamb_scope == "all" or k in ("query", "out", "tokens")
            u = r + (cfg.weight_decay * params[k] if scaled else 0)
            slices = range(L) if k in ("query", "out", "bias") else [slice(None)]
            for i in slices if scaled else []:
                size = np.linalg.norm(params[k][i])
                u[i] = u[i] * (size / np.linalg.norm(u[i]) if size else 1)
            params[k] = params[k] - float(schedule(t - 1)) * u
    return params


LAMB = OptimConfig(name="lamb", lr=0.1, schedule="constant", warmup=0, weight_decay=0.1)


@pytest.mark.parametrize("scope", ["matrices", "all"])
def test_lamb_against_numpy(scope, seed):
    """all: algorithm 2 as it stands, norms and biases too; a zero bias takes Adam's step."""
    cfg = dataclasses.replace(LAMB, lamb_scope=scope)
    params, grads = draw(seed)
    params["bias"][0] = 0.0
    got, want = run(cfg, params, grads), lamb_oracle(cfg, params, grads)
    for k in params:
        np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=1e-7, err_msg=k)
    other = lamb_oracle(LAMB, params, grads)
    differs = {k for k in params if np.abs(other[k] - want[k]).max() > 1e-3}
    assert differs == ({"bias", "norm"} if scope == "all" else set())


def test_lamb_takes_one_ratio_a_layer_not_a_stack(seed):
    """Four layers one by one give what the stack of four gives; optax.lamb would not."""
    params, grads = draw(seed)
    stacked = run(LAMB, params, grads)["query"]
    for i in range(L):
        alone = lamb_oracle(
            LAMB,
            {"tokens": params["query"][i]},
            [{"tokens": g["query"][i]} for g in grads],
        )
        np.testing.assert_allclose(stacked[i], alone["tokens"], rtol=2e-5, atol=1e-7)
    theirs = optax.lamb(0.1, b1=LAMB.beta1, b2=LAMB.beta2, eps=LAMB.eps, weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"):
        leaf = {"query": jnp.asarray(params["query"], jnp.float32)}
        first = {"query": jnp.asarray(grads[0]["query"], jnp.float32)}
        update = np.asarray(theirs.update(first, theirs.init(leaf), leaf)[0]["query"])
    ours = run(LAMB, params, grads[:1])["query"] - params["query"]
    assert np.abs(update[0] / ours[0]).mean() > 10  # its ratio is that of the largest layer


def sharded(lo):
    def place(tree):
        return {
            k: jax.device_put(v, lo.named(lo.stored(*AXES[k]))) if v.shape else v
            for k, v in tree.items()
        }

    return place


@pytest.mark.parametrize("name", ["lamb", "muon", "adamw"])
def test_sharded_and_unsharded_agree(name, seed):
    scope = "all" if name == "lamb" else "matrices"
    cfg = OptimConfig(name=name, lr=0.1, schedule="constant", warmup=0, lamb_scope=scope)
    params, grads = draw(seed)
    mesh = MeshSpec(node=2, tensor=2).build()
    lo = layout(mesh)
    with jax.set_mesh(mesh):
        cut = run(cfg, params, grads, sharded(lo), lo)
    one_device = run(cfg, params, grads)
    for k in params:
        np.testing.assert_allclose(cut[k], one_device[k], rtol=1e-5, atol=1e-6, err_msg=k)


def adamw_oracle(cfg, params, grads):
    params = {k: v.copy() for k, v in params.items()}
    m = {k: 0.0 for k in params}
    v = {k: 0.0 for k in params}
    for t, g in enumerate(grads, 1):
        for k in params:
            m[k] = cfg.beta1 * m[k] + (1 - cfg.beta1) * g[k]
            v[k] = cfg.beta2 * v[k] + (1 - cfg.beta2) * g[k] ** 2
            u = m[k] / (1 - cfg.beta1**t) / (np.sqrt(v[k] / (1 - cfg.beta2**t)) + cfg.eps)
            decay = cfg.weight_decay if k in ("query", "out", "tokens") else 0.0
            params[k] = params[k] - cfg.lr * (u + decay * params[k])
    return params


def test_adamw_against_numpy(seed):
    """Biases and norms do not decay, though a bias (heads, head width) has two dimensions."""
    cfg = OptimConfig(lr=0.1, schedule="constant", warmup=0, weight_decay=0.5)
    params, grads = draw(seed)
    got, want = run(cfg, params, grads), adamw_oracle(cfg, params, grads)
    for k in params:
        np.testing.assert_allclose(got[k], want[k], rtol=2e-5, atol=1e-6, err_msg=k)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 8, 8)])
def test_orthogonalise_flattens_the_spectrum(shape, seed):
    """Five quintic steps bring every singular value near 1 and keep the singular vectors."""
    x = np.random.default_rng(seed).normal(size=shape)
    out = np.asarray(orthogonalise(jnp.asarray(x, jnp.float32)), np.float64)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    polar = u @ vt
    values = np.linalg.svd(out, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3
    cosine = (out * polar).sum() / np.linalg.norm(out) / np.linalg.norm(polar)
    assert cosine > 0.95


def test_muon_updates_matrices_layer_by_layer_and_adam_the_rest(seed):
    cfg = OptimConfig(name="muon", lr=0.1, schedule="constant", warmup=0, weight_decay=0.0)
    params, grads = draw(seed)
    got = run(cfg, params, grads[:1])
    for k, shape in (("query", (D, H * K)), ("out", (H * K, D))):
        for i in range(L):
            g = 1.9 * grads[0][k][i].reshape(
                shape
            )  # Nesterov: g + 0.9 g (any factor: scale is divided out)
            want = np.asarray(orthogonalise(jnp.asarray(g, jnp.float32))) * 0.2 * max(shape) ** 0.5
            step = (params[k][i] - got[k][i]).reshape(shape)
            np.testing.assert_allclose(step, 0.1 * want, atol=2e-5)
    for k in ("tokens", "bias", "norm"):  # Adam's first step is the sign of the gradient
        np.testing.assert_allclose(params[k] - got[k], 0.1 * np.sign(grads[0][k]), atol=1e-5)


def test_muon_takes_a_kernel_as_a_matrix_of_inputs_by_outputs(seed):
    words = {"kernel": (None, None, None, FEATURES), "scale": (None,)}
    random = np.random.default_rng(seed)
    params = {"kernel": random.normal(size=(3, 3, 4, 6)), "scale": random.normal(size=6)}
    params = {n: jnp.asarray(x, jnp.float32) for n, x in params.items()}
    grads = jax.tree.map(lambda x: x + 1, params)
    cfg = OptimConfig(name="muon", lr=0.1, schedule="constant", warmup=0, weight_decay=0.0)
    optimizer = make_optimizer(cfg, 10, words)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    matrix = orthogonalise(grads["kernel"].reshape(36, 6)) * 0.2 * 36**0.5
    np.testing.assert_allclose(updates["kernel"].reshape(36, 6), -0.1 * matrix, atol=2e-5)
    np.testing.assert_allclose(updates["scale"], -0.1 * np.sign(grads["scale"]), atol=1e-5)


def test_muon_orthogonalises_each_expert_alone(seed):
    """On a mesh whose devices hold different experts, against one matrix at a time."""
    words = ("layers", "expert", "embed", "mlp")
    grad = np.random.default_rng(seed).normal(size=(2, 4, 8, 6)).astype(np.float32)
    lo = layout(MeshSpec(expert=2, tensor=2).build())
    with jax.set_mesh(lo.mesh):
        placed = {"up": jax.device_put(grad, lo.named(lo.stored(*words)))}
        muon = scale_by_muon(0.9, {"up": words}, lo)
        got = jax.jit(lambda g: muon.update(g, muon.init(g))[0])(placed)["up"]
    assert got.sharding.spec == lo.stored(*words)
    for i in np.ndindex(2, 4):
        want = 0.2 * 8**0.5 * np.asarray(orthogonalise(jnp.asarray(grad[i])))
        np.testing.assert_allclose(np.asarray(got)[i], want, atol=2e-5)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_muon_never_gathers_a_whole_stack(sizes, seed):
    """Two layers on 2 nodes of 4 devices, and on 4 of 2: the layers take one of the two axes that
    cut a matrix. In one reshard XLA gathers both layers of every matrix on every device."""
    words = ("layers", "embed", "mlp")
    grad = np.random.default_rng(seed).normal(size=(2, 16, 24)).astype(np.float32)
    lo = layout(MeshSpec(node=sizes[0], data=sizes[1]).build())
    with jax.set_mesh(lo.mesh):
        placed = {"up": jax.device_put(grad, lo.named(lo.stored(*words)))}
        muon = scale_by_muon(0.9, {"up": words}, lo)
        update = jax.jit(lambda g: muon.update(g, muon.init(g))[0]).lower(placed).compile()
        got = update(placed)["up"]
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", update.as_text())
    assert shapes and max(np.prod([int(n) for n in s.split(",")]) for s in shapes) < grad.size
    assert got.sharding.spec == lo.stored(*words)
    for i in range(2):
        want = 0.2 * 24**0.5 * np.asarray(orthogonalise(jnp.asarray(grad[i])))
        np.testing.assert_allclose(np.asarray(got)[i], want, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "target", "between"),
    [
        ((None, ("node", "data"), None), ("node",), [(None, "node", None), ("node", None, None)]),
        (
            (None, ("node", "data"), None),
            ("data",),
            [(None, ("node", "data"), None), ("data", "node", None)],
        ),
        (
            (None, "tensor", ("node", "data", "context")),
            ("data",),
            [(None, "tensor", ("node", "data")), ("data", "tensor", "node")],
        ),
        ((None, ("node", "data"), None), (("node", "data"),), []),
        (("pipe", "tensor", ("node", "data")), ("pipe",), []),
    ],
)
def test_the_way_of_a_matrix_to_its_layer(spec, target, between):
    target = P(*target, *[None] * (len(spec) - len(target)))
    assert route(P(*spec), target, 1) == [*(P(*s) for s in between), target]


def test_spread_uses_axes_that_divide():
    lo = layout(MeshSpec(node=2, tensor=2).build())
    assert lo.ways(spread(8, lo)) == 8
    assert lo.ways(spread(6, lo)) == 2
    assert spread(7, lo) == ()
    assert spread(8, None) == ()


def test_what_counts_as_a_matrix():
    assert is_matrix(("layers", "embed", "mlp")) and is_matrix(("vocab", "embed"))
    assert not is_matrix(("layers", "heads", None)) and not is_matrix((None,))
    assert is_hidden_matrix(("layers", "embed", "mlp"))
    assert not is_hidden_matrix(("vocab", "embed"))
    assert not is_hidden_matrix(("positions", "embed"))
    assert not is_hidden_matrix((None, None, None, FEATURES))  # which nobody prunes by tiles


def rates(**settings):
    cfg = OptimConfig(lr=1.0, final=0.1, **settings)
    with jax.numpy_dtype_promotion("standard"):
        return [float(make_schedule(cfg, 100)(s)) for s in range(100)]


def test_schedules():
    for name in ("cosine", "linear", "wsd", "constant"):
        got = rates(schedule=name, warmup=10)
        np.testing.assert_allclose(got[:10], np.arange(1, 11) / 10, atol=1e-6)
    cosine = rates(schedule="cosine", warmup=10)
    want = 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(90) / 90)) / 2
    np.testing.assert_allclose(cosine[10:], want, atol=1e-6)
    np.testing.assert_allclose(
        rates(schedule="linear", warmup=10)[10:], 1 - 0.9 * np.arange(90) / 90, atol=1e-6
    )
    wsd = rates(schedule="wsd", warmup=10, decay=0.2)
    assert wsd[10:80] == [1.0] * 70
    np.testing.assert_allclose(wsd[80:], 1 - 0.9 * np.arange(20) / 20, atol=1e-6)
    assert rates(schedule="constant", warmup=0) == [1.0] * 100


@pytest.mark.parametrize(
    "values, steps, phases_, said",
    [
        (dict(warmup=10), 10, (10, 0), []),
        (dict(warmup=10), 4, (4, 0), ["warmup=10 is longer than train.steps=4: .* to 4 steps"]),
        (dict(warmup=6, decay=0.5, schedule="wsd"), 10, (6, 4), ["decay is shortened to 4 steps"]),
        (dict(warmup=5, decay=0.5, schedule="wsd"), 10, (5, 5), []),
        (dict(warmup=20, decay=0.5, schedule="wsd"), 10, (10, 1), ["warmup=20 is", "to 1 steps"]),
    ],
)
def test_a_schedule_longer_than_its_run_is_shortened_and_says_so(values, steps, phases_, said):
    """The rates by hand: up to the peak in `warmup` steps, down to `final` in `decay` steps."""
    cfg = OptimConfig(lr=1.0, final=0.0, **values)
    assert phases(cfg, steps) == phases_
    notes = shortened(cfg, steps)
    assert len(notes) == len(said)
    assert all(re.search(word, sentence) for word, sentence in zip(said, notes, strict=True))
    warmup, decay = phases_
    got = [float(make_schedule(cfg, steps)(s)) for s in range(steps + 1)]
    np.testing.assert_allclose(got[:warmup], (np.arange(warmup) + 1) / warmup, rtol=1e-6)
    if cfg.schedule == "wsd" and warmup < steps:
        fall = 1 - np.arange(decay + 1) / decay
        np.testing.assert_allclose(got[steps - decay :], fall, atol=1e-6)


def test_settings_out_of_range_are_refused():
    with pytest.raises(UserError, match=r"optim.beta1=1.5 must be in \[0, 0.99999\]"):
        OptimConfig(beta1=1.5)
    with pytest.raises(UserError, match="--optim.lr"):
        OptimConfig(lr=-1.0)
