"""The norm's kernels in the interpreter, race detection on, against float64 and plain bf16.

The oracle multiplies each row's gradient by its whole Jacobian, r (I - 1/D - n n^T / D).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import aot, interpret
from pallas_kernels.norm import hopper
from pallas_kernels.norm.reference import Spec

SLOW = pytest.mark.slow
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """A problem and its tile. lengths: of sequences of at most `longest`, when y is unpacked."""

    T: int
    D: int
    tile: hopper.Tile
    kind: str = "layer"
    parts: str = "residual bias offset"
    dtype: str = "bfloat16"
    dh: bool = True
    lengths: tuple[int, ...] = ()
    longest: int = 8

    def __str__(self):
        return f"{self.T}x{self.D} {self.kind} {self.parts} {self.dtype} {self.lengths}"


# More steps than slots for some block, so that slots are filled again.
CASES = [
    Shape(6, 256, hopper.Tile(2, 2, 1)),
    pytest.param(Shape(20, 256, hopper.Tile(2, 3, 3)), marks=SLOW),
    pytest.param(Shape(9, 200, hopper.Tile(1, 3, 2), kind="rms", parts="", dh=False), marks=SLOW),
    pytest.param(Shape(24, 512, hopper.Tile(4, 2, 2), parts="residual offset"), marks=SLOW),
    pytest.param(Shape(10, 264, hopper.Tile(2, 4, 1, False), parts="bias"), marks=SLOW),
    pytest.param(Shape(8, 768, hopper.Tile(8, 2, 1), kind="rms", parts="residual"), marks=SLOW),
    pytest.param(Shape(6, 256, hopper.Tile(1, 2, 2), dtype="float16"), marks=SLOW),
    pytest.param(Shape(6, 100, hopper.Tile(2, 2, 1), dtype="float32", dh=False), marks=SLOW),
    pytest.param(Shape(4, 8192, hopper.Tile(1, 2, 2), parts="residual offset"), marks=SLOW),
    pytest.param(Shape(4, 5120, hopper.Tile(1, 2, 1), parts="offset"), marks=SLOW),
]
UNPACKED = [
    Shape(4, 256, hopper.Tile(2, 2, 1), parts="", lengths=(1, 0, 2), longest=2),
    pytest.param(Shape(14, 256, hopper.Tile(2, 2, 3), lengths=(3, 0, 5, 1)), marks=SLOW),
    pytest.param(Shape(9, 200, hopper.Tile(1, 2, 2), lengths=(8, 0, 1)), marks=SLOW),
    pytest.param(Shape(8, 256, hopper.Tile(4, 2, 2), parts="", lengths=(2, 6)), marks=SLOW),
    pytest.param(Shape(16, 256, hopper.Tile(8, 2, 1), parts="bias", lengths=(0, 0)), marks=SLOW),
]


def problem(shape, seed):
    """Returns (named arrays, dy, dh, spec); 16-bit values are exact."""
    random, dtype = np.random.default_rng(seed), jnp.dtype(shape.dtype)
    names = {"x", "scale", *shape.parts.split()}
    sizes = {"x": (shape.T, shape.D), "residual": (shape.T, shape.D)}
    arrays = {
        name: jnp.asarray(
            random.standard_normal(sizes.get(name, (shape.D,))) + (name == "x"),
            dtype if name in sizes else jnp.float32,
        )
        for name in ("x", "residual", "bias", "scale", "offset")
        if name in names
    }
    dy, dh = (jnp.asarray(random.standard_normal(sizes["x"]), dtype) for _ in range(2))
    writes = bool({"residual", "bias"} & names) or bool(shape.lengths)
    length = shape.longest if shape.lengths else None
    spec = Spec(shape.kind == "layer", EPS, "bias" in names, "offset" in names, writes, length)
    return arrays, dy, dh if shape.dh else None, spec


def exact(arrays, kind, dy=None, dh=None):
    """Returns (y, h) and, with dy, (dx, dbias, dscale, doffset), float64."""
    a = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    h = a["x"] + a.get("residual", 0.0) + a.get("bias", 0.0)
    D = h.shape[1]
    centred = h - h.mean(1, keepdims=True) if kind == "layer" else h
    rate = 1 / np.sqrt((centred**2).mean(1, keepdims=True) + EPS)
    n = centred * rate
    y = n * a["scale"] + a.get("offset", 0.0)
    if dy is None:
        return y, h
    dy = np.asarray(dy, np.float64)
    dx = np.zeros_like(h) if dh is None else np.asarray(dh, np.float64)
    for t in range(h.shape[0]):
        jacobian = np.eye(D) - np.outer(n[t], n[t]) / D - (1 / D if kind == "layer" else 0.0)
        dx[t] += rate[t] * jacobian @ (dy[t] * a["scale"])
    return y, h, dx, dx.sum(0), (dy * n).sum(0), dy.sum(0)


def plain(arrays, kind):
    """What one writes without a kernel: sums in the arrays' type, the norm in float32."""
    h = arrays["x"]
    if "bias" in arrays:
        h = h + arrays["bias"].astype(h.dtype)[None]
    if "residual" in arrays:
        h = h + arrays["residual"]
    exact = h.astype(jnp.float32)
    n = exact - exact.mean(1, keepdims=True) if kind == "layer" else exact
    n = n * jax.lax.rsqrt((n * n).mean(1, keepdims=True) + EPS)
    y = n * arrays["scale"][None]
    if "offset" in arrays:
        y += arrays["offset"][None]
    return y.astype(h.dtype), h


def assert_as_good(result, rough, want, slack, name):
    """The error is at most twice that of plain arithmetic of the same type, plus slack."""
    result, rough, want = (np.asarray(x, np.float64) for x in (result, rough, want))
    error, allowed = np.abs(result - want).max(), 2 * np.abs(rough - want).max() + slack
    assert error <= allowed, (name, error, allowed)


def run_forward(shape, seed):
    arrays, _, _, spec = problem(shape, seed)
    inputs = [arrays.get(name) for name in ("x", "residual", "bias", "scale", "offset")]
    run = functools.partial(hopper.forward, spec=spec, tile=shape.tile, interpret=True)
    with interpret.checked():
        y, h, mean, rate = jax.block_until_ready(jax.jit(run)(*inputs, None))
    expected = exact(arrays, shape.kind)
    for name, *sides in zip("yh", (y, h), plain(arrays, shape.kind), expected, strict=True):
        assert_as_good(*sides, 1e-3, name)
    centre = expected[1].mean(1) * (shape.kind == "layer")
    np.testing.assert_allclose(mean[:, 0], centre, atol=1e-5)
    spread = np.sqrt(((expected[1] - centre[:, None]) ** 2).mean(1) + EPS)
    np.testing.assert_allclose(rate[:, 0], 1 / spread, rtol=1e-5)


def run_backward(shape, seed):
    arrays, dy, dh, spec = problem(shape, seed)
    y, h, *expected = exact(arrays, shape.kind, dy, dh)
    centre = h.mean(1, keepdims=True) * (shape.kind == "layer")
    rate = 1 / np.sqrt(((h - centre) ** 2).mean(1, keepdims=True) + EPS)
    statistics = (jnp.asarray(s, jnp.float32) for s in (centre, rate))
    run = functools.partial(hopper.backward, spec=spec, tile=shape.tile, interpret=True)
    with interpret.checked():
        results = jax.block_until_ready(
            jax.jit(run)(jnp.asarray(h, dy.dtype), *statistics, arrays["scale"], dy, dh)
        )

    def rough(arrays):  # without jit, for XLA would leave out what rounds h to 16 bits
        cotangent = jnp.zeros_like(dy) if dh is None else dh
        return jax.vjp(functools.partial(plain, kind=shape.kind), arrays)[1]((dy, cotangent))[0]

    others = rough(arrays)
    for name, x, want in zip(("x", "bias", "scale", "offset"), results, expected, strict=True):
        assert (x is None) == (name not in arrays)
        if x is not None:
            assert_as_good(x, others[name], want, 2e-3, name)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_forward(shape, seed):
    run_forward(shape, seed)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_backward(shape, seed):
    run_backward(shape, seed)


def run_unpacked(shape, seed):
    arrays, _, _, spec = problem(shape, seed)
    tokens, S = sum(shape.lengths), shape.longest
    dead = (np.arange(shape.T) >= tokens)[:, None]
    wanted_y, wanted_h = exact(arrays, shape.kind)
    padded, t = np.zeros((len(shape.lengths), S, shape.D)), 0
    for b, n in enumerate(shape.lengths):
        padded[b, :n], t = wanted_y[t : t + n], t + n
    inputs = [arrays.get(name) for name in ("x", "residual", "bias", "scale", "offset")]
    inputs[0] = jnp.where(dead, jnp.nan, inputs[0])
    ends = jnp.asarray(np.concatenate([[0], np.cumsum(shape.lengths)]), jnp.int32)
    run = functools.partial(hopper.forward, spec=spec, tile=shape.tile, interpret=True)
    with interpret.checked():
        y, h, *_ = jax.block_until_ready(jax.jit(run)(*inputs, ends))
    np.testing.assert_allclose(np.asarray(y, np.float64), padded, atol=0.03)
    np.testing.assert_allclose(np.asarray(h, np.float64), np.where(dead, 0, wanted_h), atol=0.03)
    assert not np.asarray(y, np.float64)[padded == 0].any()


@pytest.mark.parametrize("shape", UNPACKED, ids=str)
def test_unpacked(shape, seed):
    """NaN in the dead tail; y in padded rows, 0 where they pad; h kept without the NaN."""
    run_unpacked(shape, seed)


@pytest.mark.slow
def test_public_functions_with_gradients(seed):
    """Through custom_vjp and vmap: the kernel's gradients are the reference's."""
    shape = Shape(6, 256, hopper.Tile(1, 2, 1), dtype="float32")
    arrays, dy, dh, _ = problem(shape, seed)

    @functools.partial(jax.jit, static_argnums=1)
    def grads(arrays, implementation):
        def norm(x, residual, others):
            return pallas_kernels.fused_layer_norm(
                x, residual=residual, implementation=implementation, **others
            )

        def loss(arrays):
            others = {k: v for k, v in arrays.items() if k not in ("x", "residual")}
            batch = (arrays[name].reshape(2, 3, 256) for name in ("x", "residual"))
            y, h = jax.vmap(norm, (0, 0, None))(*batch, others)
            return (y * dy.reshape(y.shape)).sum() + (h * dh.reshape(h.shape)).sum()

        return jax.grad(loss)(arrays)

    with interpret.checked():
        results = jax.block_until_ready(grads(arrays, "interpret"))
    for name, want in grads(arrays, "reference").items():
        np.testing.assert_allclose(results[name], want, atol=2e-5, err_msg=name)


@pytest.mark.aot
def test_cut_batches_run_the_kernel_and_sum_only_the_vectors():
    """Gradients through remat, scan and vmap, in a shard_map over two H100s: no collective over
    rows. The loop of each direction has its kernel, and the backward one makes the first anew."""
    mesh = Mesh(np.array(aot.devices(1, 2)), "x")

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def grads(x, residual, scale):
        @functools.partial(jax.vmap, in_axes=(0, 0, None))
        def norm(x, residual, scale):
            return pallas_kernels.fused_layer_norm(
                x, residual=residual, scale=scale, kind="rms", implementation="hopper"
            )

        def loss(x, residual, scale):
            @jax.checkpoint
            def layer(carry, _):
                return norm(*carry, scale), None

            y, h = jax.lax.scan(layer, (x, residual), length=3)[0]
            return ((y + h).astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(x, residual, scale)

    x, scale = array((2, 64, 512), jnp.bfloat16, P("x")), array((512,), jnp.float32, P())
    step = jax.shard_map(
        grads, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=(P("x"), P("x"), P())
    )
    text = aot.compile(jax.jit(step).lower(x, x, scale)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    summed = re.findall(r"= (\S+) all-reduce", text) + re.findall(r"= (\S+) all-reduce-start", text)
    assert summed and all(shape.startswith("f32[512]") for shape in summed)
    assert "all-gather" not in text
