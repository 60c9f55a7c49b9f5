"""Collective matmuls against float64 NumPy: values and gradients, on any mesh, of any rows."""

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.parallel import collective_matmul, overlap
from megajax.parallel.collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.collective import api as kernels


class Case(NamedTuple):
    """A mesh, the rows of one rank, k, the columns of one rank, and how it is computed."""

    implementation: str
    mesh: dict
    check_vma: bool = True
    both_ways: bool = False
    activation: str | None = None
    rows: int = 3
    k: int = 5
    n: int = 2


CASES = {
    "ring": Case("ring", {"tensor": 8}),
    "ring, both ways, odd": Case("ring", {"tensor": 4}, both_ways=True, activation="gelu"),
    "ring, unchecked": Case("ring", {"tensor": 2, "data": 2}, False, False, "swiglu"),
    "ring, one row and column": Case("ring", {"tensor": 2}, True, True, None, 1, 1, 1),
    "ring, one rank": Case("ring", {"tensor": 1}, True, True, "silu"),
    "loop, both ways": Case("ring", {"data": 2, "tensor": 4}, True, True, "swiglu"),
    "xla": Case("xla", {"data": 2, "tensor": 4}, activation="gelu_tanh"),
    "xla, unchecked": Case("xla", {"tensor": 2}, False, activation="swiglu"),
}


def make_mesh(sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))


def arrays(seed, *shapes):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def value_and_cotangents(mesh, function, inputs, cotangents, in_specs, out_specs, check_vma=True):
    """Returns (results, the inputs' gradients), twice the same bits, as NumPy arrays."""
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )

    @jax.jit
    def both(inputs, cotangents):
        outputs, back = jax.vjp(sharded, *inputs)
        return outputs, back(cotangents)

    def place(tree, specs):
        leaf = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        return jax.tree.map(leaf, tree, specs)

    with jax.set_mesh(mesh):
        args = place(inputs, in_specs), place(cotangents, out_specs)
        one, two = (jax.tree.map(np.asarray, both(*args)) for _ in range(2))
    chex.assert_trees_all_equal(one, two)
    return one


def close(actual, expected):
    def leaf(a, b):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1, np.abs(b).max()))

    jax.tree.map(leaf, actual, expected)


def double(tree):
    return jax.tree.map(lambda a: a.astype(np.float64), tree)


def activation_of(kind):
    """Returns (f, its derivative) in float64."""
    erf = np.vectorize(math.erf)
    normal = lambda z: np.exp(-z * z / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    c = math.sqrt(2 / math.pi)
    inner = lambda z: np.tanh(c * (z + 0.044715 * z**3))  # noqa: E731
    return {
        None: (lambda z: z, np.ones_like),
        "gelu": (
            lambda z: z * (1 + erf(z / math.sqrt(2))) / 2,
            lambda z: (1 + erf(z / math.sqrt(2))) / 2 + z * normal(z),
        ),
        "gelu_tanh": (
            lambda z: z * (1 + inner(z)) / 2,
            lambda z: (
                (1 + inner(z)) / 2 + z * (1 - inner(z) ** 2) * c * (1 + 3 * 0.044715 * z * z) / 2
            ),
        ),
        "silu": (
            lambda z: z * sigmoid(z),
            lambda z: sigmoid(z) * (1 + z * (1 - sigmoid(z))),
        ),
    }[kind]


def gather_oracle(inputs, cotangents, kind):
    """y_i = act(x w_i + b_i), and x itself; 'swiglu': silu(z_0) z_1."""
    x, ws, bias = double(inputs)
    dys, dgathered = double(cotangents)
    zs = [x @ ws[0] + bias, x @ ws[1]]
    if kind == "swiglu":
        f, df = activation_of("silu")
        ys = f(zs[0]) * zs[1]
        dzs = [dys * zs[1] * df(zs[0]), dys * f(zs[0])]
    else:
        f, df = activation_of(kind)
        ys = tuple(map(f, zs))
        dzs = [dy * df(z) for dy, z in zip(dys, zs, strict=True)]
    dx = dgathered + sum(dz @ w.T for dz, w in zip(dzs, ws, strict=True))
    dws = tuple(np.einsum("bmk,bmn->kn", x, dz) for dz in dzs)
    return (ys, x), (dx, dws, dzs[0].sum((0, 1)))


@pytest.mark.parametrize("name", CASES)
def test_gather_then_multiply(name, seed, monkeypatch):
    case = CASES[name]
    if name.startswith("loop"):
        monkeypatch.setattr(collective_matmul, "UNROLLED", 2)
    mesh, R = make_mesh(case.mesh), case.mesh["tensor"]
    batch = "data" if "data" in case.mesh else None
    m, N = case.rows * R, case.n * R
    shapes = (2, m, case.k), (case.k, N), (case.k, 2 * N), (N,), (2, m, N), (2, m, 2 * N)
    x, w, wide, bias, dy, dy_wide = arrays(seed, *shapes)
    gated = case.activation == "swiglu"
    inputs = x, ((w, w[:, ::-1].copy()) if gated else (w, wide)), bias
    dys, columns = (dy, dy_wide), P(batch, None, "tensor")
    cotangents = dy if gated else dys, arrays(seed + 1, x.shape)[0]

    def function(x, ws, bias):
        products, gathered = all_gather_matmul(
            x,
            ws,
            axis="tensor",
            bias=(bias, None),
            activation=case.activation,
            implementation=case.implementation,
            return_gathered=True,
            both_ways=case.both_ways,
        )
        # The gathered rows are equal on all ranks, each of which is given a part of their gradient.
        return products, gathered[:, None]

    weights = P(None, "tensor")
    in_specs = (P(batch, "tensor"), (weights, weights), P("tensor"))
    out_specs = (columns if gated else (columns, columns), P(batch, "tensor"))
    each = np.zeros((2, R, *x.shape[1:]), np.float32)
    each[:, -1] = cotangents[1]
    outputs, gradients = value_and_cotangents(
        mesh, function, inputs, (cotangents[0], each), in_specs, out_specs, case.check_vma
    )
    (ys, gathered), expected = gather_oracle(inputs, cotangents, case.activation)
    close(outputs[0], ys)
    assert (outputs[1] == x[:, None]).all()  # on every rank
    close(gradients, expected)


@pytest.mark.parametrize("name", CASES)
def test_multiply_then_scatter(name, seed, monkeypatch):
    case = CASES[name]
    if name.startswith("loop"):
        monkeypatch.setattr(collective_matmul, "UNROLLED", 2)
    mesh, R = make_mesh(case.mesh), case.mesh["tensor"]
    batch = "data" if "data" in case.mesh else None
    m, K = case.rows * R, case.k * R
    shapes = (2, m, K), (2, m, 2 * K), (K, case.n), (2 * K, case.n)
    x, wide, w, w_wide, bias, residual, dy = arrays(
        seed, *shapes, (case.n,), (2, m, case.n), (2, m, case.n)
    )
    inputs = (x, wide), (w, w_wide), bias, residual

    def function(xs, ws, bias, residual):
        return matmul_reduce_scatter(
            xs,
            ws,
            axis="tensor",
            bias=bias,
            residual=residual,
            implementation=case.implementation,
            both_ways=case.both_ways,
        )

    columns, rows = P(batch, None, "tensor"), P(batch, "tensor")
    in_specs = ((columns, columns), (P("tensor"), P("tensor")), P(), rows)
    outputs, gradients = value_and_cotangents(
        mesh, function, inputs, dy, in_specs, rows, case.check_vma
    )
    xs, ws, bias, residual = double(inputs)
    close(outputs, sum(x @ w for x, w in zip(xs, ws, strict=True)) + bias + residual)
    dxs = tuple(dy @ w.T for w in ws)
    dws = tuple(np.einsum("bmk,bmn->kn", x, dy) for x in xs)
    close(gradients, (dxs, dws, dy.sum((0, 1)), dy))


def stand_in(x, w, bias, residual, *, axis, acc):
    """The kernel's values, without a gradient."""
    options = {"axis": axis, "acc_dtype": acc, "implementation": "xla"}
    y = kernels.matmul_all_reduce(x, w, bias=bias, residual=residual, **options)
    return jax.lax.stop_gradient(y)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_multiply_then_reduce(implementation, check_vma, seed, monkeypatch):
    """Three rows on four ranks: nothing to scatter."""
    if implementation == "fused":
        monkeypatch.setattr(kernels, "fused_reduce", stand_in)
        monkeypatch.setattr(overlap, "fused_reasons", lambda *_: ())
    mesh = make_mesh({"data": 2, "tensor": 4})
    x, w, bias, residual, dy = arrays(seed, (2, 3, 8), (8, 5), (5,), (2, 3, 5), (2, 3, 5))

    def function(x, w, bias, residual):
        options = {"bias": bias, "residual": residual, "implementation": implementation}
        return matmul_all_reduce(x, w, axis="tensor", **options)

    in_specs = (P("data", None, "tensor"), P("tensor"), P(), P("data"))
    outputs, gradients = value_and_cotangents(
        mesh, function, (x, w, bias, residual), dy, in_specs, P("data"), check_vma
    )
    x, w, bias, residual, dy = double((x, w, bias, residual, dy))
    close(outputs, x @ w + bias + residual)
    close(gradients, (dy @ w.T, np.einsum("bmk,bmn->kn", x, dy), dy.sum((0, 1)), dy))


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_a_frozen_weight_and_one_input_of_any_rank(implementation, seed):
    """Gradients of the activations alone, rows without leading dimensions."""
    mesh = make_mesh({"tensor": 4})
    x, up, down, dy = arrays(seed, (8, 3), (3, 8), (8, 3), (8, 3))

    def function(x, up, down):
        h = all_gather_matmul(x, up, axis="tensor", implementation=implementation)
        return matmul_reduce_scatter(h, down, axis="tensor", implementation=implementation)

    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        up_, down_ = place(up, P(None, "tensor")), place(down, P("tensor"))
        sharded = jax.shard_map(
            function, in_specs=(P("tensor"), P(None, "tensor"), P("tensor")), out_specs=P("tensor")
        )

        @jax.jit
        def gradient(x, dy):
            return jax.vjp(lambda x: sharded(x, up_, down_), x)[1](dy)[0]

        dx = gradient(place(x, P("tensor")), place(dy, P("tensor")))
    close(np.asarray(dx), double(dy) @ double(down).T @ double(up).T)


@pytest.mark.parametrize("axes", ["tensor", ("data", "tensor"), ("tensor", "data")])
def test_a_hop_goes_to_the_neighbour_whatever_the_order_of_the_axes(axes):
    mesh = make_mesh({"data": 2, "tensor": 4})

    def local():
        rank, R = jax.lax.axis_index(axes), jax.lax.axis_size(axes)
        return jnp.stack(
            [collective_matmul.hop(axes)(rank, by) - (rank - by) % R for by in (1, -1)]
        )[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(axes))
    assert not jax.jit(mapped)().any()


# ---- what crosses ranks


@pytest.mark.parametrize(
    ("implementation", "acc_dtype"),
    [("xla", "float32"), ("ring", "float32"), ("ring", "bfloat16")],
)
def test_sums_cross_ranks_in_float32(implementation, acc_dtype):
    """Ranks give 257 and -256 in turn: 257 is 256 in bfloat16, so a sum in it would be 0."""
    mesh = make_mesh({"tensor": 4})
    w = np.array([[256], [1], [-256], [0]] * 2).astype(jnp.bfloat16)
    ones = np.ones((8, 8)).astype(jnp.bfloat16)
    options = {"axis": "tensor", "implementation": implementation, "acc_dtype": acc_dtype}
    columns, rows = P(None, "tensor"), P("tensor")

    def ends(x, up, xs, down):
        return (
            all_gather_matmul(x, up, **options),
            matmul_reduce_scatter(xs, down, **options),
        )

    (_, y), (dx, *_) = value_and_cotangents(
        mesh,
        ends,
        (ones[:, :1], w.T, ones, w),
        (ones, ones[:, :1]),
        (rows, columns, columns, rows),
        (columns, rows),
    )
    assert y.dtype == dx.dtype == w.dtype
    if acc_dtype == "float32":
        assert (y == 2).all() and (dx == 2).all()
    else:  # a ring's last addition is in float32 in any case
        assert (y == 0).any() and (dx == 0).all()


def test_bias_and_residual_are_rounded_once():
    """1025 - 1024 + 1/4, of which bfloat16 would make 1024 - 1024 + 1/4."""
    mesh = make_mesh({"tensor": 2})
    cast = lambda a: np.asarray(a).astype(jnp.bfloat16)  # noqa: E731
    w, residual = cast([[1024.0], [1.0]]), cast([[-1024.0]] * 2)
    for function, spec in ((matmul_reduce_scatter, P("tensor")), (matmul_all_reduce, P())):
        outputs, _ = value_and_cotangents(
            mesh,
            lambda x, w, b, r: function(x, w, axis="tensor", bias=b, residual=r),  # noqa: B023
            (cast(np.ones((2, 2))), w, np.full((1,), 0.25, np.float32), residual),
            residual,
            (P(None, "tensor"), P("tensor"), P(), spec),
            spec,
        )
        assert (outputs == 1.25).all(), function


# ---- refusals


def call(function, *shapes, dtype="float32", mesh=None, **options):
    """Traces a call on ranks that each have these shapes."""
    shapes_of = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    with jax.set_mesh(mesh or make_mesh({"tensor": 4})):
        jax.eval_shape(
            jax.shard_map(
                lambda *a: function(*a, axis="tensor", **options),
                in_specs=P(),
                out_specs=P(),
                check_vma=False,
            ),
            *shapes_of,
        )


def test_refusals_say_the_rule():
    for op, implementation, error, words in (
        (matmul_reduce_scatter, None, ValueError, "7 rows.*4 ranks.*nearest: 4, 8"),
        (matmul_all_reduce, "ring", NotImplementedError, "hide"),
        (all_gather_matmul, "fused", NotImplementedError, "Hopper GPUs, found cpu.*'ring'"),
        (matmul_reduce_scatter, "fused", NotImplementedError, "found cpu"),
        (matmul_all_reduce, "fused", NotImplementedError, "found cpu"),
        (all_gather_matmul, "rings", ValueError, "'rings'; there are"),
    ):
        rows = 7 if implementation is None else 8
        with pytest.raises(error, match=words):
            call(op, (rows, 2), (2, 3), implementation=implementation)
    for shapes, options, words in (
        (((8, 2), (3, 3)), {}, r"\(\.\.\., m, k\) and \(k, n\)"),
        (((8, 2), (2, 3)), {"dtype": "int32"}, "one type of bfloat16"),
        (((8, 2), (2, 3)), {"activation": "relu"}, "'relu'; there are"),
        (((8, 2), (2, 3)), {"activation": "gelu_tan"}, "Did you mean gelu_tanh"),
        (((8, 2), (2, 3)), {"activation": "swiglu"}, "gate, up"),
        (((8, 2), (2, 3)), {"acc_dtype": "int8"}, "int8 must be one of.*nearest: float32"),
        (((8, 2), (2, 3)), {"acc_dtype": "bf16"}, "bf16 must be one of"),
        (((8, 2), (2, 3)), {"bias": np.zeros(2, np.float32)}, r"floating, \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call(all_gather_matmul, *shapes, **options)
    several = lambda x, w, v, **o: all_gather_matmul(x, (w, v), **o)  # noqa: E731
    with pytest.raises(ValueError, match="2 weights and 1 biases"):
        call(several, (8, 2), (2, 3), (2, 3), bias=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"of one shape, got \[\(2, 3\), \(2, 4\)\]"):
        call(several, (8, 2), (2, 3), (2, 4), activation="swiglu")
    for shapes in (((8,), (8, 3)), ((8, 2), (2,))):
        with pytest.raises(ValueError, match=r"\(\.\.\., m, k\) and \(k, n\)"):
            call(matmul_reduce_scatter, *shapes)
    with pytest.raises(NotImplementedError, match="use 'xla', or None"):  # it has no ring
        call(matmul_all_reduce, (8, 2), (2, 3), implementation="fused")
    with pytest.raises(ValueError, match="must be like the result"):
        call(matmul_reduce_scatter, (8, 2), (2, 3), residual=np.zeros((8, 3), np.float32))
    with pytest.raises(ValueError, match="2 inputs and 1 weights"):
        call(lambda x, w, **o: matmul_reduce_scatter((x, x), w, **o), (8, 2), (2, 3))
