"""The public functions: plain collectives against float64, and what is refused, with reasons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.expert import api
from tests.expert_oracle import answers, order, routings

R, T, A, E, K, F = 4, 5, 2, 3, 8, 16


def on(function, in_specs=P("x"), out_specs=P("x"), ranks=R):
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("x",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def layer(x, w, v, experts, weights, *, E=E):
    routes = api.route(experts, experts=E, axis="x")
    h, x_NK = api.dispatch_grouped_matmul(x, w, routes, axis="x", return_rows=True)
    # What lies past the rows that came reaches nothing.
    came = (jnp.arange(len(h)) < routes.sizes_E.sum())[:, None]
    h = jnp.where(came, h, jnp.nan)
    y = api.grouped_matmul_combine(h, v, routes, weights, axis="x")
    return y, routes.choice_N, routes.sizes_E, x_NK


@functools.cache
def compiled():
    return on(layer)


def values(seed):
    random = np.random.default_rng(seed)
    shapes = (R * T, K), (R * E, K, F), (R * E, F, K), (R * T, A)
    return random, [random.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("name", list(routings(R, T, A, R * E, np.random.default_rng(0))))
def test_a_layer_against_float64(name, seed):
    random, (x, w, v, weights) = values(seed)
    experts = routings(R, T, A, R * E, random)[name].astype(np.int32)
    y, choices, sizes, rows = compiled()(x, w, v, experts, weights)
    np.testing.assert_allclose(y, answers(x, w, v, experts, weights), atol=1e-4)
    for rank, (choice_N, x_NK) in enumerate(
        zip(np.split(np.asarray(choices), R), np.split(np.asarray(rows), R), strict=True)
    ):
        want = order(experts, R, E, rank)
        assert np.asarray(sizes).reshape(R, E)[rank].sum() == len(want)
        received = choice_N[: len(want)]
        assert [(c // (T * A), c % (T * A) // A, c % A) for c in received] == want
        np.testing.assert_array_equal(
            x_NK[: len(want)], x[[source * T + t for source, t, _ in want]].reshape(-1, K)
        )


def test_rows_past_a_bound_are_left_out(seed):
    """The last experts' rows, as if they had not been chosen."""
    _, (x, w, v, weights) = values(seed)
    experts = np.zeros((R * T, A), np.int32)
    experts[:, 1] = 1

    def bounded(x, w, v, experts, weights):
        routes = api.route(experts, experts=E, axis="x", rows=R * T + 3)
        h = api.dispatch_grouped_matmul(x, w, routes, axis="x")
        return api.grouped_matmul_combine(h, v, routes, weights, axis="x"), routes.dest_TA

    y, dest = on(bounded)(x, w, v, experts, weights)
    assert (np.asarray(dest)[:, 0] == 0).all() and (np.asarray(dest)[:, 1] == 0).sum() == 3
    routed = np.where(np.asarray(dest) >= 0, experts, -1)
    np.testing.assert_allclose(y, answers(x, w, v, routed, weights), atol=1e-4)


def test_experts_cut_over_a_second_axis(seed):
    """Two on each of two groups, whose two ranks have half of the columns; a third axis between."""
    random, (x, w, v, weights) = values(seed)
    experts = random.integers(-1, 2 * E, (R * T, A)).astype(np.int32)
    w, v = w[: 2 * E], v[: 2 * E]
    axis = ("expert", "tensor")

    def cut_layer(x, w, v, experts, weights):
        routes = api.route(api.cut(experts, experts=E, parts=2), experts=E, axis=axis)
        h = api.dispatch_grouped_matmul(x, w, routes, axis=axis)
        return api.grouped_matmul_combine(h, v, routes, weights.repeat(2, 1), axis=axis)

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("expert", "other", "tensor"))
    rows = P(axis)
    specs = rows, P("expert", None, "tensor"), P("expert", "tensor"), rows, rows
    step = jax.shard_map(cut_layer, mesh=mesh, in_specs=specs, out_specs=rows)
    y = jax.jit(step)(x, w, v, experts, weights)
    np.testing.assert_allclose(y, answers(x, w, v, experts, weights), atol=1e-4)


@pytest.mark.slow
def test_several_weights_transposed(seed):
    """Two first products share a dispatch; two second ones add their answers."""
    random, (x, w, v, weights) = values(seed)
    experts = random.integers(0, R * E, (R * T, A)).astype(np.int32)

    def turned(x, w, v, experts, weights):
        routes = api.route(experts, experts=E, axis="x")
        one, two = api.dispatch_grouped_matmul(
            x, [w.mT, 2 * w.mT], routes, axis="x", transpose_w=True
        )
        back = [v.mT, v.mT]
        return api.grouped_matmul_combine(
            [one, two], back, routes, weights, axis="x", transpose_w=True
        )

    y = on(turned)(x, w, v, experts, weights)
    np.testing.assert_allclose(y, 3 * answers(x, w, v, experts, weights), atol=4e-4)


def test_a_cpu_is_refused_with_every_reason():
    x, w, experts = jnp.ones((R, 16)), jnp.ones((R, 16, 8)), jnp.zeros((R, 1), jnp.int32)

    def fused(x, w, experts):
        routes = api.route(experts, experts=1, axis="x")
        return api.dispatch_grouped_matmul(x, w, routes, axis="x", implementation="fused")

    with pytest.raises(NotImplementedError) as error:
        on(fused)(x, w, experts)
    for reason in (
        "needs Hopper GPUs, found cpu",
        "found float32",
        "columns of x, found 16",
        "columns of w, found 8",
    ):
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("w float32\\(1, 8, 8\\) must be \\(1, 16, N\\) of float32", {"w": jnp.ones((1, 8, 8))}),
        ("activation='relu'", {"activation": "relu"}),
        ("implementation='ring'", {"implementation": "ring"}),
        ("x has 3 tokens, routes 1", {"x": jnp.ones((3, 16))}),
    ],
)
def test_bad_input_is_a_clear_error(message, change):
    call = {"x": jnp.ones((1, 16)), "w": jnp.ones((1, 16, 8)), "axis": "x"} | change

    def wrong(experts):
        routes = api.route(experts, experts=1, axis="x")
        return api.dispatch_grouped_matmul(call.pop("x"), call.pop("w"), routes, **call)

    with pytest.raises(ValueError, match=message):
        on(wrong)(jnp.zeros((R, 1), jnp.int32))
