"""The exchange in few bits: a mesh beside vmap, the rule in NumPy, drift, faults, replicas."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.parallel import zero
from megajax.quant import codec
from tests import zero_oracle
from tests.xla_options import with_options
from tests.zero_run import buffers, compare, sharded, virtual

ROOT = pathlib.Path(__file__).parent.parent.parent
SHAPE = 2, 4, 1003  # nodes, ranks, elements; pieces of 126, the last 5 elements are none


@functools.cache
def summed(name, rounding=None):
    """The exchange of gradients under vmap, compiled: (x, key) -> pieces."""
    used = codec(name, rounding=rounding)
    return virtual(lambda x, key: zero.reduce_scatter(x, used, key=key), (0, None))


# ---- a mesh and vmap


@pytest.mark.parametrize(
    ("nodes", "ranks", "name", "n", "check_vma"),
    [
        (2, 4, "sdp4bit", 1003, False),
        (4, 2, "loco", 517, False),
        (1, 8, "zeropp", 1003, True),
        (3, 1, "none", 10, True),
        (1, 1, "sdp4bit", 7, True),
    ],
)
def test_a_mesh_and_vmap_have_the_same_bits(nodes, ranks, name, n, check_vma):
    pieces, copy, (x, main, before) = compare(nodes, ranks, name, n, check_vma)
    assert pieces.shape == (nodes, ranks, -(-n // (nodes * ranks)))
    assert not pieces.ravel()[n:].any()
    total = x.astype(np.float64).sum((0, 1))
    assert np.linalg.norm(pieces.ravel()[:n] - total) < 0.4 * np.linalg.norm(total)
    assert np.abs(copy - main.ravel()[:n]).max() < 0.2 * np.abs(before - main.ravel()[:n]).max()


@pytest.mark.slow
def test_every_mesh_of_32_devices():
    env = os.environ | {"XLA_FLAGS": with_options(""), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.zero_run"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 12


# ---- the sum


@pytest.mark.parametrize(("nodes", "ranks", "n"), [SHAPE, (2, 1, 4096), (2, 2, 4 * 4090 - 3)])
def test_the_rule_to_nearest(nodes, ranks, n):
    x, _, _ = buffers(nodes, ranks, n, seed=1)
    pieces = np.asarray(summed("sdp4bit", "nearest")(x, None), np.float64)
    expected, bound = zero_oracle.reduce_scatter(x)
    expected.reshape(-1)[n:] = 0
    # A sum that lies between two codes may be rounded to either: the transform adds in another
    # order than a matrix does.
    off = np.abs(pieces - expected) > 1e-4
    assert off.mean() < 0.05 and np.abs(pieces - expected).max() < 1
    check_bound(pieces, x, bound)


def check_bound(pieces, x, bound):
    """The L2 error of each block is within what its quantizers may drop."""
    nodes, ranks, length = pieces.shape
    total = np.zeros(pieces.size)
    total[: x.shape[-1]] = x.astype(np.float64).sum((0, 1))
    error = pieces - total.reshape(pieces.shape)
    error = np.pad(error, ((0, 0), (0, 0), (0, -length % zero_oracle.BLOCK)))
    error = np.sqrt((error.reshape(nodes, ranks, -1, zero_oracle.BLOCK) ** 2).sum(-1))
    assert (error <= bound * 1.00001).all()
    assert (error > 0.05 * bound).any()  # a bound that says something


def test_stochastic_sums():
    """Within their bound, unbiased, another draw for each key, independent between ranks."""
    nodes, ranks, n = SHAPE
    x = np.broadcast_to(buffers(1, 1, n, seed=2)[0], (nodes, ranks, n))
    run = summed("sdp4bit")
    pieces = np.stack([run(x, jax.random.key(i)) for i in range(24)])
    np.testing.assert_array_equal(pieces[3], run(x, jax.random.key(3)))
    assert not pieces.reshape(24, -1)[:, n:].any()
    _, bound = zero_oracle.reduce_scatter(x, rounding=1)
    check_bound(pieces[0].astype(np.float64), x, bound)
    error = pieces.reshape(24, -1)[:, :n] - nodes * ranks * x[0, 0].astype(np.float64)
    spread = error.std(0).mean()
    assert np.abs(error.mean(0)).mean() < 1.5 * spread / np.sqrt(24)
    # Both nodes' sums are equal before the second level: one noise for both would double the error
    # of a node, independent ones make it sqrt(2) times as large (variance of a code: 1/6).
    second = zero_oracle.quantize(scaled_sum(x), 4, 128)[1]
    assert spread < 1.15 * np.sqrt(2 / 6) * second.mean()


def scaled_sum(x):
    """What a node has before the second level, transformed: (all pieces, their row)."""
    nodes, ranks, n = x.shape
    length = -(-n // (nodes * ranks))
    total = np.pad(ranks * x[0, 0].astype(np.float64), (0, nodes * ranks * length - n))
    rows = np.pad(total.reshape(-1, length), ((0, 0), (0, -length % zero_oracle.BLOCK)))
    return zero_oracle.hadamard(rows)


def test_float_sums_add_in_the_order_of_ranks():
    """Unequal numbers of tokens: the caller weighs, the exchange adds up and divides by nothing."""
    nodes, ranks, n = 2, 4, 10
    gradients = buffers(nodes, ranks, n, seed=3)[0]
    tokens = np.arange(1, 9).reshape(nodes, ranks, 1)
    x = np.float32(gradients * (tokens / tokens.sum()))
    pieces = np.asarray(summed("none")(x, None))
    by_node = zero_oracle.in_order(x.swapaxes(0, 1))
    np.testing.assert_array_equal(pieces.ravel()[:n], zero_oracle.in_order(by_node))
    assert pieces.shape == (2, 4, 2) and not pieces.ravel()[n:].any()
    mean = (gradients.astype(np.float64) * tokens).sum((0, 1)) / tokens.sum()
    np.testing.assert_allclose(pieces.ravel()[:n], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_nan_everywhere(value):
    nodes, ranks, n = SHAPE
    for where in ((0, 0, 0), (1, 3, n - 1)):
        x = buffers(nodes, ranks, n)[0]
        x[where] = value
        assert np.isnan(summed("sdp4bit", "nearest")(x, None)).all()
    x = buffers(1, 1, 7)[0]
    x[0, 0, 3] = value
    assert np.isnan(summed("sdp4bit", "nearest")(x, None)).all()


def test_a_sum_beyond_float32_is_nan_everywhere():
    x = np.zeros((2, 2, 7), np.float32)
    x[0, :, 5] = 2e38
    assert np.isnan(summed("int8")(x, None)).all()


def test_sizes_on_the_wire():
    sdp4bit, n = codec("sdp4bit"), 2**22
    nbytes = zero.wire_bytes(n, sdp4bit, 2, 4)
    assert {k: 8 * v / n for k, v in nbytes.items()} == {
        "inside": 8.25,
        "between": 4.25 / 4,
        "weights": 4 + 32 / 2048,
    }
    assert zero.wire_bytes(7, sdp4bit, 1, 1) == {"inside": 0, "between": 0, "weights": 0}
    # A piece of 126 travels as 4 blocks of the transform; 2 of them and 2 scales to each rank.
    nbytes = zero.wire_bytes(1003, sdp4bit, 2, 4)
    assert nbytes == {"inside": 4 * (256 + 8), "between": 2 * (64 + 4), "weights": 8 * (63 + 4)}


# ---- errors that come back


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1)])
def test_feedback(nodes, ranks):
    """At both levels gradients too small for 4 bits beside a large one arrive in the end, and not
    without."""
    n, steps = 64, 300
    loco = codec("loco")
    x = np.full((nodes, ranks, n), 0.01, np.float32)
    x[..., ::8] = 1.0

    def run(x, keep):
        def step(state, _):
            piece, after = zero.reduce_scatter(x, loco, state=state)
            return (after if keep else state), piece

        state = zero.start(n, loco, nodes, ranks)
        return jax.lax.scan(step, state, None, length=steps)

    state, pieces = virtual(functools.partial(run, keep=True))(x)
    small = np.asarray(pieces).swapaxes(2, 3).reshape(-1, steps)[1]
    # What is missing is at most half a code of each of two senders, over beta (feedback.py).
    missing = 2 * 0.5 / 7 / 0.2
    assert not small[0] and abs(small.sum() - 0.02 * steps) < missing < 0.25 * 0.02 * steps
    assert (np.asarray(state.step) == steps).all()
    _, without = virtual(functools.partial(run, keep=False))(x)
    assert not np.asarray(without).swapaxes(2, 3).reshape(-1, steps)[1].any()

    # A step that will be skipped leaves no trace.
    one = virtual(lambda x, state: zero.reduce_scatter(x, loco, state=state))
    x[-1, -1, 0] = np.inf
    piece, after = one(x, state)
    assert np.isnan(piece).all()
    jax.tree.map(np.testing.assert_array_equal, after, state)


# ---- weights


def drift(rule, steps=500, ranks=2, length=256, rate=1e-4):
    """Returns (|main - copy|, moves of the masters, relative errors of the quantizer in NumPy) at
    each step of `rule(main, before, copy) -> copy`, L2 norms of all ranks together."""
    random = np.random.default_rng(5)
    start = np.float32(random.normal(size=(1, ranks, length)))
    moves = np.float32(rate * random.normal(size=(1, ranks, steps, length)))

    def run(main, moves):
        begin = jax.lax.axis_index("data") * length
        piece_of = lambda copy: jax.lax.dynamic_slice(copy, (begin,), (length,))  # noqa: E731

        def step(carry, move):
            main, copy = carry
            after = main + move
            new = rule(after, main, copy)
            return (after, new), (after - piece_of(new), after - piece_of(copy))

        copy = jax.lax.all_gather(main, "data", tiled=True)
        return jax.lax.scan(step, (main, copy), moves)[1]

    errors, expected = (np.asarray(x)[0].swapaxes(0, 1) for x in virtual(run)(start, moves))
    norm = lambda x: np.sqrt((x.astype(np.float64) ** 2).sum((1, 2)))  # noqa: E731
    dropped = norm(expected - zero_oracle.quantize(expected, 4, 2048)[0]) / norm(expected)
    return norm(errors), norm(moves[0].swapaxes(0, 1)), dropped


def against_copy(main, before, copy):
    return zero.gather_difference(main, copy, codec("sdp4bit"))


def against_old_master(main, before, copy):
    old = jax.lax.all_gather(before, "data", tiled=True)
    return copy + (zero.gather_difference(main, old, codec("sdp4bit")) - old)


def in_bfloat16(main, before, copy):
    start = jax.lax.axis_index("data") * main.shape[0]
    piece = jax.lax.dynamic_slice(copy, (start,), main.shape).astype(jnp.bfloat16)
    difference = (main.astype(jnp.bfloat16) - piece).astype(jnp.float32)
    zeros = jnp.zeros_like(copy)
    return copy + zero.gather_difference(difference, zeros, codec("sdp4bit"))


def test_the_copy_does_not_drift():
    """sup|e| <= q / (1 - q) sup|delta|, q the largest relative error of the quantizer: from
    e' = (1 - Q)(e + delta). Without the difference to the copy, or in bfloat16, it is broken."""
    errors, moves, dropped = drift(against_copy)
    q = dropped.max()
    assert 0.08 < q < 0.2
    assert errors.max() <= q / (1 - q) * moves.max() * 1.001
    assert errors[-100:].max() < 1.2 * errors[50:150].max()
    for broken in (against_old_master, in_bfloat16):
        errors, moves, _ = drift(broken, steps=200)
        assert errors[-1] > 2 * q / (1 - q) * moves.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathered_differences(dtype):
    """The rule in NumPy, for pieces that are no whole groups; the copy keeps its type."""
    nodes, ranks, n = SHAPE
    _, main, copy = buffers(nodes, ranks, n, seed=4)
    copy = jnp.asarray(copy).astype(dtype)
    copies = virtual(lambda m, c: zero.gather_difference(m, c, codec("sdp4bit")), (0, None))
    after = np.asarray(copies(main, copy).astype(jnp.float32))
    assert (after == after[0, 0]).all()
    before = np.asarray(copy.astype(jnp.float32))
    padded = np.pad(before, (0, main.size - n)).reshape(nodes, ranks, -1)
    moved = zero_oracle.quantize(main - padded, 4, 2048)[0].reshape(-1)[:n]
    expected = np.asarray(jnp.asarray(before + moved).astype(dtype).astype(jnp.float32))
    np.testing.assert_array_equal(after[0, 0], expected)


def test_a_codec_that_drops_nothing_gives_the_masters():
    nodes, ranks, n = 2, 2, 9
    _, main, copy = buffers(nodes, ranks, n)
    copies = virtual(lambda m, c: zero.gather_difference(m, c, codec("none")), (0, None))
    np.testing.assert_array_equal(copies(main, copy)[1, 1], main.ravel()[:n])


# ---- replicas


def test_copies_that_differ_are_found():
    nodes, ranks = 2, 4
    x = np.arange(nodes * ranks * 6, dtype=np.float32).reshape(nodes, ranks, 6)
    same = np.ones((nodes, ranks, 6), np.float32)
    bit = np.array(same)
    bit.view(np.uint32)[1, 2, 3] ^= 1

    def local(odd, one, both):
        return zero.copies_agree({"odd": odd, "one": (one, both)}, ("node", "data"))

    replicas = virtual(lambda o, b: local(o, b, jnp.ones(3, jnp.bfloat16)))(x, bit)
    expected = {"odd": False, "one": (False, True)}
    for answers, answer in zip(jax.tree.leaves(replicas), jax.tree.leaves(expected), strict=True):
        assert (np.asarray(answers) == answer).all()  # the same answer on every rank
    out = {"odd": P(), "one": (P(), P())}
    replicas = sharded(lambda o, b: local(o, b, jnp.zeros((), jnp.int32)), nodes, ranks, out)(
        x, bit
    )
    assert jax.tree.map(bool, replicas) == expected
    # Equal numbers in another order are no copies.
    turned = np.array(x[:1, :1])
    pair = np.concatenate([turned, turned[..., ::-1]], axis=1)
    assert not virtual(lambda y: zero.copies_agree(y, ("node", "data")))(pair).any()


# ---- what is refused


def test_wrong_input_is_explained():
    x, main, copy = buffers(1, 1, 8)
    run = lambda function, *args: virtual(function)(*args)  # noqa: E731
    with pytest.raises(UserError, match="flat, floating"):
        run(lambda y: zero.reduce_scatter(y, codec("none")), x[..., None])
    with pytest.raises(UserError, match="flat, floating"):
        run(lambda y: zero.reduce_scatter(y, codec("none")), x.astype(np.int32))
    with pytest.raises(UserError, match="keeps no errors"):
        state = zero.start(8, codec("loco"), 1, 1)
        run(lambda y: zero.reduce_scatter(y, codec("int8"), state=state), x)
    with pytest.raises(UserError, match=r"is float32\(8,\)"):
        run(lambda y: zero.gather_difference(y[1:], jnp.asarray(copy), codec("none")), main)
    assert zero.start(8, codec("sdp4bit"), 1, 1) is None
