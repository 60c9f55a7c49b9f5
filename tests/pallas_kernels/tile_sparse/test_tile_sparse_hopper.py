"""The tile-sparse kernels in Pallas' interpreter, with race detection, against float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import TileSparse, aot, interpret, tile_sparse_matmul
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.tile_sparse import hopper, hopper_weights
from pallas_kernels.tile_sparse.cases import Case
from tests.gemm_oracle import activate, relative
from tests.tile_sparse_oracle import arrays, of_lengths, oracle, tilewise

SLOW = pytest.mark.slow


def Tile(rows, stages=6, columns=64, **more):
    """Its columns are the format's."""
    return tiles.Tile(rows, columns, stages=stages, **more)


Weights = Tile
SMALL, LANES = Tile(128, 2), Tile(64, 2, pingpong=True)
PLAIN = Spec(None, "bfloat16")
# (M, K, N), (tile, chunk), chunks of each tile or shares of tilewise, tile, thread blocks.
CASES = {
    # Tails in all three sizes, an empty tile, every length different, two warpgroups.
    "tails": ((72, 136, 160), (64, 64), [1, 0, 3], SMALL, 2),
    "cluster": ((200, 128, 128), (64, 64), [2, 1], Tile(128, 2, cluster=2), 2),
    "ping-pong": ((200, 128, 192), (64, 64), [1, 2, 0], LANES, 1),
    "strips": ((400, 64, 128), (64, 64), [1, 0], Tile(128, 3, snake=2), 2),
    "128 rows a warpgroup": ((256, 128, 128), (128, 64), [2], Tile(256, 2), 1),
    "32 rows": ((40, 96, 128), (64, 32), [3, 1], SMALL, 1),
    "8 rows": ((72, 100, 128), (64, 8), [11, 3], SMALL, 1),
    "16 rows": ((40, 96, 192), (64, 16), [6, 0, 1], Tile(64, 2, cluster=2, pingpong=True), 2),
    "wide": ((40, 64, 256), (256, 64), [1], SMALL, 1),
    "gathered, single entries": ((72, 128, 160), (64, 64), (0.7, 0.6, 0.8), SMALL, 2),
    "an empty matrix": ((72, 64, 128), (64, 64), [0, 0], SMALL, 2),
    "one row": ((1, 5, 3), (64, 64), [1], LANES, 1),
}
WEIGHTS = {
    "tails": ((136, 136, 160), (64, 64), [1, 0, 3], Weights(128, 2, splits=2), 2),
    "cluster": ((72, 320, 128), (64, 64), [5, 1], Weights(128, 2, cluster=2), 2),
    "more splits than rows": ((136, 64, 128), (64, 64), [1, 1], Weights(128, 2, splits=4), 1),
    "128 rows a warpgroup": ((64, 256, 64), (64, 64), [4], Weights(256, 2), 1),
    "32 rows": ((72, 128, 128), (64, 32), [4, 1], Weights(128, 2, splits=2), 1),
    "8 rows": ((72, 100, 128), (64, 8), [11, 3], Weights(128, 2, splits=2), 1),
    "16 rows": ((40, 96, 192), (64, 16), [6, 0, 1], Weights(128, 2, cluster=2), 2),
    "wide": ((40, 128, 256), (256, 64), [2], Weights(128, 2), 1),
    "gathered, single entries": ((72, 128, 160), (64, 64), (0.7, 0.6, 0.8), Weights(128, 2), 1),
    "an empty matrix": ((72, 64, 128), (64, 64), [0, 0], Weights(128, 2), 2),
}


def cases(table):
    return [pytest.param(n, marks=() if n == "tails" else SLOW) for n in table]


def problem(case, seed, dtype="bfloat16"):
    """(weight, mask, x, dy), pruned weights NaN; and x, w, dy as rounded, in float64."""
    (M, K, N), (tile, chunk), shares, *_ = case
    make = of_lengths if isinstance(shares, list) else functools.partial(tilewise, 1)
    args = (shares,) if isinstance(shares, list) else shares
    mask = make(K, N, tile, chunk, *args)
    x, w, _, dy = (jnp.asarray(a, dtype) for a in arrays(seed, M, K, N))
    weight = TileSparse.from_dense(jnp.where(mask, w, jnp.nan), mask, tile=tile, chunk=chunk)
    exact = (np.asarray(a, np.float64) for a in (x, w, dy))
    return weight, mask, x, dy, *exact


def run(call, *args):
    with interpret.checked():
        results = jax.block_until_ready(jax.jit(call)(*args))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), results)


def product(case, seed, spec=PLAIN):
    """y, and z where the specification keeps it."""
    weight, mask, x, dy, *exact = problem(case, seed)
    pattern, N = weight.pattern, weight.shape[1]
    bias = jnp.asarray(arrays(seed, 1, 1, N)[2], jnp.float32) if spec.keep else None
    call = functools.partial(
        hopper.forward, spec=spec, tile=case[3], interpret=True, blocks=case[4]
    )
    bias_P = None if bias is None else pattern.pack_columns(bias)
    y_P, z_P = run(call, x, weight.values, bias_P, pattern)
    z = exact[0] @ np.where(mask, exact[1], 0) + (0 if bias is None else np.asarray(bias))
    live = np.asarray(pattern.places) < pattern.columns.size
    for got, want in ((y_P, activate(spec.activation, z)[0]), (z_P, z)):
        if got is not None:
            result = np.asarray(pattern.unpack_columns(jnp.asarray(got, jnp.float32)))
            assert np.abs(result - want)[:, live].max() <= 2**-6  # one rounding, below 2**3


def gradient(case, seed):
    weight, mask, x, dy, _, w, exact = problem(case, seed)
    call = functools.partial(hopper.gradient, tile=case[3], interpret=True, blocks=case[4])
    dy_P = weight.pattern.pack_columns(dy)
    result = run(call, dy_P, weight.values, weight.pattern)
    want = exact @ np.where(mask, w, 0).T
    assert np.abs(result - want).max() <= 2**-7 * max(np.abs(want).max(), 1)


def weights(case, seed):
    weight, mask, x, dy, exact, _, exact_dy = problem(case, seed)
    call = functools.partial(hopper_weights.weights, tile=case[3], interpret=True, blocks=case[4])
    values = run(call, x, weight.pattern.pack_columns(dy), weight.pattern)
    result = weight.replace(values=jnp.asarray(values, jnp.float32)).to_dense()
    want = np.where(mask, exact.T @ exact_dy, 0)
    assert np.abs(result - want).max() <= 2**-7 * max(np.abs(want).max(), 1)
    assert np.count_nonzero(values) <= mask.sum()


@pytest.mark.parametrize("name", cases(CASES))
def test_product(name, seed):
    product(CASES[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tails", "ping-pong", "32 rows", "gathered, single entries"])
@pytest.mark.parametrize("spec", [Spec("gelu", "bfloat16", True), Spec("silu", "float32", True)])
def test_epilogue(name, spec, seed):
    product(CASES[name], seed, spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("8 rows", "16 rows")])
def test_gradient_of_x(name, seed):
    gradient(CASES[name], seed)


@pytest.mark.parametrize("name", cases(WEIGHTS))
def test_gradient_of_the_weight(name, seed):
    weights(WEIGHTS[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1.0, 0.7])
def test_public_function_with_gradients(columns, seed):
    """Through custom_vjp, in float16, with bias and activation."""
    M, K, N = 72, 128, 160
    mask = tilewise(1, K, N, 64, 64, 0.6, columns, 0.9)
    x, w, bias, dy = arrays(seed, M, K, N)
    want, grads = oracle("gelu", dy, x, w, mask, bias)
    x, w, dy = (jnp.asarray(a, jnp.float16) for a in (x, w, dy))
    weight = TileSparse.from_dense(w, mask, tile=64)

    def all_of(x, values, bias, dy):
        def call(x, values, bias):
            return tile_sparse_matmul(
                x,
                weight.replace(values=values),
                bias=bias,
                activation="gelu",
                implementation="interpret",
            )

        y, pull = jax.vjp(call, x, values, bias)
        return y, *pull(dy)

    with interpret.checked():
        args = x, weight.values, jnp.asarray(bias, jnp.float32), dy
        y, dx, dvalues, dbias = jax.block_until_ready(jax.jit(all_of)(*args))
    dw = weight.replace(values=dvalues).to_dense()
    for got, value in zip((y, dx, dw, dbias), (want, *grads.values()), strict=True):
        assert relative(got, value) < 8e-3


@pytest.mark.slow
def test_a_wrong_list_is_found(seed, monkeypatch):
    """One chunk, or one slot, beside the right one."""
    multiply = hopper.multiply
    for column in (hopper.SOURCE, hopper.SLOT):

        def shifted(a, b, bias, jobs, entries, column=column, **named):
            most = entries[:, column].max()
            other = jnp.minimum(entries[:, column] + 1, most)
            return multiply(a, b, bias, jobs, entries.at[:, column].set(other), **named)

        with monkeypatch.context() as patch:
            patch.setattr(hopper, "multiply", shifted)
            with pytest.raises(AssertionError):
                product(CASES["tails"], seed)
            with pytest.raises(AssertionError):
                gradient(CASES["tails"], seed)


def test_strips_visit_every_tile_once_longest_first():
    corner = jax.vmap(functools.partial(hopper.corner, grid=(5, 3), snake=2))
    m, job = (np.asarray(x) for x in corner(jnp.arange(15)))
    assert len(set(zip(m, job, strict=True))) == 15
    assert m.tolist() == [0, 1, 1, 0, 0, 1, 2, 3, 3, 2, 2, 3, 4, 4, 4]
    assert job.tolist() == [0, 0, 1, 1, 2, 2] * 2 + [0, 1, 2]


def test_the_heuristics_give_legal_tiles():
    for tile, chunk, M in itertools.product(hopper.TILES, hopper.CHUNKS, (100, 65536)):
        pattern = Case(M, 128, 256, 50, tile=tile, chunk=chunk).abstract
        for transpose in (False, True) if chunk >= 32 else (False,):
            shape = hopper.shape_of(pattern, transpose)
            for spec in (PLAIN, Spec("gelu", "float32", True)):
                choice = hopper.heuristic(M, shape, 4, 10, spec)
                tiles.check("x", choice, hopper.GRAIN)
                tiles.check_shared("x", hopper.buffers(choice, shape, spec))
                assert choice.stages * choice.rings > 2
        choice = hopper_weights.heuristic(M, pattern)
        hopper_weights.check(choice, pattern.unit)
        assert choice.stages >= 3


BAD = {
    "block_m=96 must be a multiple of 128": (Tile(96), 128),
    "registers of a thread": (Tile(256), 256),
    "at least 2 stages": (Tile(128, 1), 64),
    "cluster of 1 or 2": (Tile(128, cluster=4), 64),
    "bytes of shared memory": (Tile(256, 6), 128),
}


@pytest.mark.parametrize("message", BAD)
def test_an_illegal_tile_is_refused(message):
    tile, width = BAD[message]
    weight = TileSparse.from_dense(
        jnp.zeros((64, width), jnp.bfloat16), np.ones((64, width), bool), tile=width
    )
    x = jnp.zeros((8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        hopper.forward(x, weight.values, None, weight.pattern, spec=PLAIN, tile=tile)


def test_an_illegal_tile_of_the_weights_is_refused():
    for message, tile in (
        ("block_m=64 must be a multiple of 128", Weights(64)),
        ("1 split or more", Weights(128, splits=0)),
        ("registers of a thread", Weights(256, columns=256)),
        ("bytes of shared memory", Weights(256, 6, 128)),
    ):
        with pytest.raises(ValueError, match=message):
            hopper_weights.check(tile, 64)


@pytest.mark.aot
@pytest.mark.slow
def test_devices_exchange_only_the_gradients_they_share():
    """In a shard_map over two H100s: a kernel for y, dx and dw each, sums of dw."""
    mesh = Mesh(np.array(aot.devices(1, 2)), "d")
    weight = TileSparse.from_dense(
        jnp.zeros((128, 128), jnp.bfloat16), of_lengths(128, 128, 64, 64, [2, 1]), tile=64
    )

    def array(like, spec):
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))

    def grads(x, weight, dy):
        def call(x, values):
            return tile_sparse_matmul(x, weight.replace(values=values), implementation="hopper")

        y, pull = jax.vjp(call, x, weight.values)
        return y, *pull(dy)

    rows = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    args = (
        array(rows, P("d")),
        jax.tree.map(lambda x: array(x, P()), weight),
        array(rows, P("d")),
    )
    step = jax.shard_map(
        grads, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P("d"), P())
    )
    text = aot.compile(jax.jit(step).lower(*args)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "collective-permute", "all-to-all"))
