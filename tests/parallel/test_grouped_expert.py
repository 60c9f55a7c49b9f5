"""Tokens at their experts over ranks, both products and all gradients, against a float64 loop."""

import functools
import re
import types
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.parallel import expert_matmul
from megajax.parallel.expert_matmul import (
    Routing,
    dispatch_grouped_matmul,
    grouped_matmul_combine,
)
from pallas_kernels import aot
from pallas_kernels.expert import api as kernels
from pallas_kernels.expert import fusions
from tests import tables

D, F = 8, 8
ROWS = P(("data", "expert", "tensor"))


@dataclass(frozen=True)
class Case:
    """experts: of the model. tokens, top: of a rank, of a token. data: copies of all experts.

    cut: over tensor as well, the tokens; else every tensor rank has the same ones.
    """

    expert: int
    tensor: int
    experts: int = 8
    tokens: int = 3
    top: int = 2
    capacity: int | None = None
    check_vma: bool = True
    data: int = 1
    cut: bool = True
    implementation: str | None = None

    @property
    def ranks(self):
        """That have tokens for one copy of the experts."""
        return self.expert * (self.tensor if self.cut else 1)

    @property
    def rows(self):
        return P(("data", "expert", "tensor") if self.cut else ("data", "expert"))

    @property
    def mesh(self):
        sizes = self.data, self.expert, self.tensor
        devices = np.array(jax.devices()[: np.prod(sizes)])
        return Mesh(devices.reshape(sizes), ("data", "expert", "tensor"))


def silu(z):
    s = 1 / (1 + np.exp(-z))
    return z * s, s * (1 + z * (1 - s))


def loop(case, x, weights, index, weight, dy):
    """((y, dx, dgate, dup, ddown, dweight) in float64, dropped of each rank)."""
    gate, up, down = weights
    y, dx, dweight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    dgate, dup, ddown = (np.zeros_like(w) for w in weights)
    taken, dropped = np.zeros(case.experts, int), np.zeros(len(x) // case.tokens, int)
    for n, token in enumerate(x):
        for a, e in enumerate(index[n]):
            if not 0 <= e < case.experts:
                continue
            taken[e] += 1
            if case.capacity is not None and taken[e] > case.capacity:
                dropped[n // case.tokens] += 1
                continue
            (g, dg), u = silu(token @ gate[e]), token @ up[e]
            row = (g * u) @ down[e]
            y[n] += weight[n, a] * row
            dweight[n, a] = dy[n] @ row
            drow = weight[n, a] * dy[n]
            ddown[e] += np.outer(g * u, drow)
            dh = down[e] @ drow
            dgate[e] += np.outer(token, dh * u * dg)
            dup[e] += np.outer(token, dh * g)
            dx[n] += gate[e] @ (dh * u * dg) + up[e] @ (dh * g)
    return (y, dx, dgate, dup, ddown, dweight), dropped


@jax.custom_vjp
def poison(h, live):
    """NaN past the splits, in h and in its gradient."""
    return jnp.where(live, h, jnp.nan)


poison.defvjp(lambda h, live: (poison(h, live), live), lambda live, d: (poison(d, live), None))


@functools.cache
def layer(case):
    """f(x, gate, up, down, index, weight, dy) -> (y, dropped, dx, dgate, dup, ddown, dweight)."""

    rows = case.rows

    def local(x, gate, up, down, weight, index):
        h, dispatch = dispatch_grouped_matmul(
            x,
            [gate, up],
            Routing(index, weight),
            expert_axis="expert",
            tensor_axis="tensor" if case.cut else None,
            activation="swiglu",
            capacity=case.capacity,
            implementation=case.implementation,
        )
        bound = case.ranks * case.tokens * case.top
        if case.capacity is not None:
            bound = min(bound, case.experts // case.expert * case.capacity)
        assert len(h) == bound
        h = poison(h, (jnp.arange(bound) < dispatch.splits_RE.sum())[:, None])
        y = grouped_matmul_combine(
            h, down, dispatch, weights=weight, implementation=case.implementation
        )
        return y if case.cut else jax.lax.psum(y, "tensor"), dispatch.dropped[None]

    cut = jax.shard_map(
        local,
        mesh=case.mesh,
        out_specs=(rows, rows),
        check_vma=case.check_vma,
        in_specs=(rows, *[P("expert", None, "tensor")] * 2, P("expert", "tensor"), rows, rows),
    )

    @jax.jit
    def run(x, gate, up, down, index, weight, dy):
        def of(*arrays):
            return cut(*arrays, index)

        y, pull, dropped = jax.vjp(of, x, gate, up, down, weight, has_aux=True)
        return y, dropped, *pull(dy)

    return run


def arrays(case, seed):
    """(x, (gate, up, down), index, weight, dy), all different choices."""
    random = np.random.default_rng(seed)
    tokens, E = case.data * case.ranks * case.tokens, case.experts
    x, dy = random.standard_normal((2, tokens, D))
    weights = [random.standard_normal(s) / 3 for s in ((E, D, F), (E, D, F), (E, F, D))]
    index = np.argsort(random.random((tokens, E)), axis=1)[:, : case.top].astype(np.int32)
    return x, weights, index, random.standard_normal((tokens, case.top)), dy


def routings(case, index, weight):
    """Name -> (index, weight): the cases that the routing alone makes."""
    first = np.arange(len(index)) < case.tokens
    return {
        "as it comes": (index, weight),
        "one hot expert": (np.full_like(index, case.experts - 1), weight),
        "empty experts": (index % 2, weight),  # which makes twice the same of many as well
        "an empty rank": (np.where(first[:, None], -1, index), weight),
        "nobody": (np.full_like(index, case.experts), weight),
        "zero and negative": (index, -np.abs(weight) * (np.arange(case.top) > 0)),
    }


def check(case, seed, names=None):
    x, weights, index, weight, dy = arrays(case, seed)
    for name, (chosen, factor) in routings(case, index, weight).items():
        if names is not None and name not in names:
            continue
        want, dropped = loop(case, x, weights, chosen, factor, dy)
        nowhere = (chosen < 0) | (chosen >= case.experts)
        padding = np.all(nowhere, axis=1)[:, None]
        operands = [np.where(padding, np.nan, x), *weights, np.where(nowhere, np.nan, factor)]
        operands.append(np.where(padding, np.nan, dy))
        *operands, f, d = (jnp.asarray(a, jnp.float32) for a in operands)
        y, lost, *grads = layer(case)(*operands, jnp.asarray(chosen), f, d)
        np.testing.assert_array_equal(lost, dropped, err_msg=name)
        for got, value in zip((y, *grads), want, strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=3e-5, err_msg=name)
        again = layer(case)(*operands, jnp.asarray(chosen), f, d)
        chex.assert_trees_all_equal(again, (y, lost, *grads))


CASES = {
    "one rank": Case(1, 1, tokens=5, check_vma=False),
    "2 x 2": Case(2, 2, check_vma=False),
    "4 x 2, lanes": Case(4, 2, top=1),
    "2 x 2, capacity": Case(2, 2, top=3, capacity=2),
    "4 x 1, ring": Case(4, 1, implementation="ring"),
}
SLOW = {
    "4 x 2": Case(4, 2),
    "2 x 2, tokens not cut, twice": Case(2, 2, data=2, cut=False),
    "4 x 1, one token, same expert twice": Case(4, 1, tokens=1, experts=4, top=4),
    "8 x 1, lanes": Case(8, 1, top=3, tokens=4),
    "4 x 2, lanes, capacity": Case(4, 2, top=1, tokens=9, capacity=3, check_vma=False),
    "8 x 1, lanes, slots below tokens": Case(8, 1, top=2, tokens=9, capacity=4),
    "1 x 2, top 10": Case(1, 2, experts=64, top=10),
    "4 x 1, 512 experts": Case(4, 1, experts=512, top=8, tokens=9),
    "2 x 1, 512 experts, capacity 1": Case(2, 1, experts=512, top=10, tokens=33, capacity=1),
    "2 x 2, 130 rows": Case(2, 2, tokens=130, top=5),
    "1 x 1, ring": Case(1, 1, tokens=5, implementation="ring"),
    "2 x 2, ring, unchecked": Case(2, 2, check_vma=False, implementation="ring"),
    "4 x 2, ring, where lanes would send less": Case(4, 2, top=1, implementation="ring"),
    "8 x 1, ring, capacity": Case(8, 1, top=3, tokens=4, capacity=3, implementation="ring"),
    "4 x 1, ring, one token, same expert twice": Case(
        4, 1, tokens=1, experts=4, top=4, implementation="ring"
    ),
    "2 x 2, ring, tokens not cut, twice": Case(2, 2, data=2, cut=False, implementation="ring"),
    "2 x 2, ring, 130 rows": Case(2, 2, tokens=130, top=5, implementation="ring"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name, seed):
    """With NaN past the splits both ways, and in all that belongs to choices of no expert."""
    check(CASES[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_equals_the_loop_widely(name, seed):
    check(SLOW[name], seed)


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 1, top=3, capacity=3, implementation="fused"),
        Case(2, 2, top=3, capacity=3, implementation="fused"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(4, 1, check_vma=False, implementation="fused"),
                Case(1, 4, check_vma=False, implementation="fused"),
                Case(4, 2, top=1, implementation="fused"),
                Case(2, 2, data=2, implementation="fused"),
                Case(2, 2, cut=False, implementation="fused"),
            )
        ),
    ],
)
def test_fused_gradients_equal_the_loop(case, seed, monkeypatch):
    """Around the kernels: everything but the kernels themselves, which are for GPUs."""
    monkeypatch.setattr(expert_matmul, "fused_reasons", lambda *_: ())
    calls = []

    ops = "dispatch_grouped_matmul", "grouped_matmul_combine"

    def there(x, ws, routes, *, axis, spec, turned):
        calls.append(ops[0])
        assert spec.activation is None
        options = {"axis": axis, "return_rows": True, "transpose_w": turned}
        return kernels.dispatch_grouped_matmul(x, ws, routes, implementation="xla", **options)

    def back(hs, ws, routes, weights, *, axis, acc, turned):
        calls.append(ops[1])
        options = {"axis": axis, "acc_dtype": acc, "transpose_w": turned}
        return kernels.grouped_matmul_combine(
            hs, ws, routes, weights, implementation="xla", **options
        )

    stand_in = types.SimpleNamespace(fused_dispatch=there, fused_combine=back)
    monkeypatch.setattr(expert_matmul, "kernels", stand_in)
    check(case, seed, ("as it comes", "an empty rank"))
    assert calls == [*ops, *ops]  # the way back is a dispatch, then a combine


LANES = pytest.param(Case(4, 2, top=1, capacity=2), marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [Case(2, 2, top=3), LANES])
def test_rows_lie_by_expert_then_by_source_from_the_own_rank_on(case, seed):
    """x is the identity, so that h names the token of every row."""
    tokens, E = case.ranks * case.tokens, case.experts // case.expert
    random = np.random.default_rng(seed)
    index = random.integers(-1, case.experts, (tokens, case.top), np.int32)

    def local(x, w, index, weight):
        h, dispatch = dispatch_grouped_matmul(
            x,
            w,
            Routing(index, weight),
            expert_axis="expert",
            tensor_axis="tensor",
            capacity=case.capacity,
        )
        return h[None], dispatch.splits_RE[None]

    run = jax.shard_map(
        local, mesh=case.mesh, in_specs=(ROWS, P("expert"), ROWS, ROWS), out_specs=(ROWS, ROWS)
    )
    w = jnp.broadcast_to(jnp.arange(1.0, tokens + 1)[:, None], (case.experts, tokens, 1))
    rows, splits = jax.jit(run)(jnp.eye(tokens), w, index, jnp.ones(index.shape))
    for rank in range(case.ranks):
        want, counts = [], np.zeros((case.ranks, E), int)
        for e in range(E):
            expert = rank // case.tensor * E + e
            chose = [n for n in range(tokens) for a in range(case.top) if index[n, a] == expert]
            for source in np.roll(np.arange(case.ranks), -rank):
                expected = [n + 1 for n in chose[: case.capacity] if n // case.tokens == source]
                counts[source, e] = len(expected)
                want += expected
        np.testing.assert_array_equal(splits[rank], counts)
        row = np.asarray(rows[rank, :, 0])
        np.testing.assert_array_equal(row, want + [0] * (len(row) - len(want)))


def seldom(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "implementation", "acc_dtype"),
    [
        (4, None, "float32"),
        seldom(8, None, "float32"),
        seldom(4, "ring", "float32"),
        seldom(4, "ring", "bfloat16"),
        seldom(4, "xla", "bfloat16"),
    ],
)
def test_bfloat16_is_added_up_in_float32_over_ranks(ranks, implementation, acc_dtype):
    """256 + 1 of one rank - 256 of another, in y and in the gradient of x, is 0 in bfloat16."""
    options = {"implementation": implementation, "acc_dtype": acc_dtype}
    case = Case(ranks, 1, experts=2 * ranks, tokens=1, top=3)

    def local(x, w, index, weight):
        def both(x):
            h, dispatch = dispatch_grouped_matmul(
                x, w[0], Routing(index, weight), expert_axis="expert", **options
            )
            return grouped_matmul_combine(h, w[1], dispatch, weights=weight, **options)

        y, pull = jax.vjp(both, x)
        return y, *pull(y)

    factors = np.array([[256.0, 1.0, -256.0]], np.float32).repeat(ranks, 0)
    index = np.arange(3, dtype=np.int32)[None].repeat(ranks, 0)
    one = jnp.eye(D, dtype=jnp.bfloat16)[None, None].repeat(2 * ranks, 1).repeat(2, 0)
    run = jax.shard_map(
        local, mesh=case.mesh, in_specs=(ROWS, P(None, "expert"), ROWS, ROWS), out_specs=(ROWS,) * 2
    )
    y, dx = jax.jit(run)(jnp.ones((ranks, D), jnp.bfloat16), one, index, factors)
    assert y.dtype == dx.dtype == jnp.bfloat16
    if acc_dtype == "float32":
        np.testing.assert_array_equal(y, np.ones((ranks, D)))
        np.testing.assert_array_equal(dx, np.ones((ranks, D)))
    else:  # a ring's last addition is in float32 in any case
        assert (y == 0).any() and (dx == 0).all()


GOOD = dict(
    x=jnp.zeros((2, D)),
    w=jnp.zeros((4, D, F)),
    index=jnp.zeros((2, 3), jnp.int32),
    weight=jnp.zeros((2, 3)),
    activation=None,
    capacity=None,
)
BAD = {
    "with a token and": dict(x=jnp.zeros((0, D))),
    "the same for several w": dict(w=[jnp.zeros((4, D, F)), jnp.zeros((2, D, F))]),
    "one type and one d": dict(w=jnp.zeros((4, D, F), jnp.bfloat16)),
    "with k above 0": dict(index=jnp.zeros((3, 3), jnp.int32)),
    "must be integers": dict(index=jnp.zeros((2, 3))),
    "must be float32": dict(weight=jnp.zeros((2, 2))),
    "Did you mean silu": dict(activation="sillu"),
    "takes w=": dict(activation="swiglu"),
    "at least 1": dict(capacity=0),
    "capacity=1.7 must be a whole number.*nearest: 2": dict(capacity=1.7),
    "rows of the dispatch": dict(h=jnp.zeros((5, F))),
    "= .2, 3.": dict(weights=jnp.zeros((3, 2))),
    "of the 4 experts of": dict(down=jnp.zeros((3, F, D))),
    "must be two axes": dict(tensor_axis="expert"),
    "acc_dtype=int32 must be": dict(acc_dtype="int32"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_explained(message):
    arguments = GOOD | BAD[message]

    def local():
        h, dispatch = dispatch_grouped_matmul(
            arguments["x"],
            arguments["w"],
            Routing(arguments["index"], arguments["weight"]),
            expert_axis="expert",
            activation=arguments["activation"],
            capacity=arguments["capacity"],
            tensor_axis=arguments.get("tensor_axis"),
            acc_dtype=arguments.get("acc_dtype", "float32"),
        )
        down = arguments.get("down", jnp.zeros((4, F, D)))
        weights = arguments.get("weights", arguments["weight"])
        return grouped_matmul_combine(arguments.get("h", h), down, dispatch, weights=weights)

    with pytest.raises(UserError, match=message):
        jax.eval_shape(jax.shard_map(local, mesh=Case(1, 1).mesh, in_specs=(), out_specs=P()))


REFUSED = {
    "'rings'; there are": (ValueError, ["rings"] * 2),
    "dispatch_grouped_matmul: .*'fused' cannot run here: needs Hopper GPUs, found cpu.*'ring'": (
        NotImplementedError,
        ["fused"] * 2,
    ),
    "grouped_matmul_combine: .*Hopper GPUs, found cpu.*--overlap=auto": (
        NotImplementedError,
        ["xla", "fused"],
    ),
    "this one, by 'xla', sent its tokens in lanes": (UserError, ["xla", "ring"]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused(message):
    error, words = REFUSED[message]
    lanes = "lanes" in message  # of one choice a token on four ranks

    def local(x, w, index, weight):
        h, dispatch = dispatch_grouped_matmul(
            x, w, Routing(index, weight), expert_axis="expert", implementation=words[0]
        )
        return grouped_matmul_combine(h, w, dispatch, weights=weight, implementation=words[1])

    mesh = Case(4, 1).mesh
    args = jnp.zeros((8, D)), jnp.zeros((8, D, D)), jnp.zeros((8, 1 if lanes else 2), jnp.int32)
    run = jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    with jax.set_mesh(mesh), pytest.raises(error, match=message):
        jax.eval_shape(run, *args, args[2].astype(jnp.float32))


def test_nodes_keep_their_own_collectives():
    """A ring runs where the ranks lie within 8 devices that are numbered one after the other."""
    axes = "expert", "tensor"
    for sizes, far in (
        ({"data": 2, "expert": 4, "context": 1, "tensor": 2}, False),
        ({"data": 2, "expert": 4, "context": 2, "tensor": 2}, True),
        ({"data": 16, "expert": 1, "context": 4, "tensor": 2}, False),
        ({"data": 1, "expert": 16, "context": 1, "tensor": 1}, True),
        ({"data": 4, "expert": 1, "context": 1, "tensor": 1}, False),
    ):
        assert expert_matmul.crosses_nodes(sizes, axes) == far


def test_a_choice_has_a_reason(monkeypatch, tmp_path):
    """Wide experts of many tokens gain by a ring; narrow ones, few tokens, other nodes do not."""
    dispatch, combine = expert_matmul.HALVES

    def best(halves=(dispatch, combine), mesh=(), kind=tables.H100, **changes):
        layer = expert_matmul.Layer(8192, 2, 4096, 1, (14336, 14336), 8, 8, "bfloat16", 7)
        layer = layer._replace(**changes)
        both = {dispatch: layer, combine: layer._replace(hidden=layer.hidden[:1])}
        groups = {"expert": layer.groups, "tensor": layer.ranks // layer.groups}
        sizes = {"data": 1} | groups | dict(mesh)
        answers = {op: both[op] for op in halves}
        return expert_matmul.best(answers, ("expert", "tensor"), tables.mesh(kind, **sizes))

    word, why = best()
    assert word == "ring" and why.startswith("simulated, not measured")
    assert best(tokens=64)[0] == best(hidden=(128, 128), width=2048)[0] == "xla"
    assert best(reached=2)[0] == "xla"  # lanes send less than a ring
    assert best(mesh={"tensor": 2}) == ("xla", "experts on several nodes: XLA's collectives")
    assert best(ranks=1, groups=1)[1] == "one rank: nothing travels"
    assert best(kind=tables.CPU) == ("xla", "a CPU has nothing to hide")

    def table(first, second, link="real", choices=2 * 8192):
        sizes = (dispatch, first, 4096, 28672), (combine, second, 14336, 4096)
        rows = [
            tables.row(op, fusions.key(op, 8, choices, 1, K, N), fastest=fastest, link=link)
            for op, fastest, K, N in sizes
        ]
        tables.write(monkeypatch, tmp_path, *rows)

    table("fused", "fused")
    assert best() == ("fused", "measured across ranks of this kind")
    assert best(dtype="float32")[0] != "fused"
    assert best(groups=4)[1].startswith("simulated")  # cut over tensor: nobody measured that
    half = {"ranks": 4, "groups": 4}
    assert best(**half)[0] == "fused"
    assert best(mesh={"data": 2}, **half)[0] != "fused"  # data may communicate beside the kernel
    table("fused", "fused", link="emulated")
    assert best()[0] == "ring"
    table("fused", "xla")
    assert best()[0] == "ring"  # no word for the whole layer
    assert best(halves=(dispatch,))[0] == "fused"
    table("fused", "fused", choices=64)
    assert best()[0] == "ring"  # another problem was measured


def test_kernels_run_over_the_ranks_of_both_axes():
    """With the columns of a rank, to which every choice of its group of ranks comes."""
    layer = expert_matmul.Layer(8192, 2, 4096, 1, (1792, 1792), 8, 1, "bfloat16", 7)
    node = tables.mesh(tables.H100, expert=1, tensor=8)
    for op in expert_matmul.HALVES:
        assert not expert_matmul.fused_reasons(op, layer, node)
        (why,) = expert_matmul.fused_reasons(op, layer._replace(ranks=16, groups=8), node)
        assert why == "needs 2 to 8 ranks, those of a node, found 16"
        (why,) = expert_matmul.fused_reasons(op, layer._replace(hidden=(1440,)), node)[:1]
        assert why.startswith("needs a multiple of 64 columns of") and why.endswith("found 1440")
    key = {"ranks": 8, "choices": 8192 * 2 * 8, "experts": 1, "K": 4096, "N": 2 * 1792}
    assert expert_matmul.key(expert_matmul.DISPATCH, layer) == key


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", None])
def test_activation_is_of_every_product(activation, seed):
    case = Case(1, 1)
    x, weights, index, weight, _ = arrays(case, seed)
    x, gate, up = (jnp.asarray(a, jnp.float32) for a in (x, *weights[:2]))
    kinds = {
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "silu": jax.nn.silu,
        "gelu_tanh": jax.nn.gelu,
        None: lambda z: z,
    }

    def local(x, *weights):
        routing = Routing(jnp.asarray(index), jnp.asarray(weight, jnp.float32))
        h, _ = dispatch_grouped_matmul(
            x, weights, routing, expert_axis="expert", activation=activation
        )
        return h

    run = jax.shard_map(local, mesh=case.mesh, in_specs=P(), out_specs=P("expert"))
    order = np.argsort(index.reshape(-1), kind="stable")
    for h, w in zip(jax.jit(run)(x, gate, up), (gate, up), strict=True):
        z = jnp.einsum("nd,ndf->nf", x[order // case.top], w[index.reshape(-1)[order]])
        np.testing.assert_allclose(h, kinds[activation](z), rtol=1e-5, atol=1e-5)


@pytest.mark.aot
@pytest.mark.slow
def test_gpus_send_lanes_of_what_is_needed():
    """Forward: tokens in bfloat16, sums in float32 back; the same again backward."""
    T, D, F, E, A = 8, 64, 128, 16, 2
    mesh = Mesh(np.array(aot.devices(1, 8)), "expert")
    ranks = P("expert")

    def local(x, up, down, index, weight):
        h, dispatch = dispatch_grouped_matmul(x, up, Routing(index, weight), expert_axis="expert")
        return grouped_matmul_combine(h, down, dispatch, weights=weight)

    def step(x, up, down, index, weight):
        cut = jax.shard_map(local, mesh=mesh, in_specs=ranks, out_specs=ranks)
        y, pull = jax.vjp(lambda *a: cut(*a[:3], index, a[3]), x, up, down, weight)
        return y, pull(y)

    shapes = ((8 * T, D), (E, D, F), (E, F, D), (8 * T, A), (8 * T, A))
    dtypes = (*[jnp.bfloat16] * 3, jnp.int32, jnp.float32)
    like = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, ranks))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    text = aot.compile(jax.jit(step).lower(*like)).as_text()
    sent = re.findall(r"= \(*(\w+)\[[\d,]*\].* (ragged-all-to-all|all-to-all)(?:-start)?\(", text)
    assert sorted(sent) == [(t, "ragged-all-to-all") for t in ("bf16", "bf16", "f32", "f32")]
    gathered = re.findall(r"= (.*) all-gather(?:-start)?\(", text)
    assert gathered and not any("bf16" in result for result in gathered)  # choices and weights


def test_rows_are_sorted_by_expert_then_from_the_own_rank_on():
    expert = jnp.array([1, 0, 1, 0, 2, 1, 0], jnp.int32)
    source = jnp.array([0, 1, 2, 2, 0, 2, 0], jnp.int32)
    # Rank 2's order of sources is 2, 0, 1.
    order = jax.jit(expert_matmul.sort_rows, static_argnums=3)(expert, source, jnp.int32(2), 3)
    assert order.tolist() == [3, 6, 1, 2, 5, 0, 4]
