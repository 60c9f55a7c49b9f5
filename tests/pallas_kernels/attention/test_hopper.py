"""The Hopper kernels in the interpreter, race detection on, against the float64 loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import interpret
from pallas_kernels.attention import guard, hopper_backward, hopper_forward, ranges
from pallas_kernels.attention.reference import Spec
from tests.attention_oracle import Case, attention, visible

SLOW = pytest.mark.slow
CASES = [
    # A segment that spans tiles, one without tokens, a dead tail, a group of two heads.
    Case((50, 0, 60), causal=True, heads=(2, 1), width=64, spare=18),
    pytest.param(Case((50, 0, 70, 9), causal=True, heads=(2, 1), width=64, spare=60), marks=SLOW),
    pytest.param(Case((1, 127), width=64, heads=(1, 1)), marks=SLOW),
    pytest.param(Case((100, 60), window=(20, 9), width=64, heads=(1, 1), spare=7), marks=SLOW),
    pytest.param(
        Case((90, 30), causal=True, softcap=1.5, alibi=True, heads=(2, 2), width=64), marks=SLOW
    ),
    pytest.param(
        Case((20, 0, 60, 16), (90, 70, 130, 3), causal=True, heads=(2, 1), width=64), marks=SLOW
    ),
    pytest.param(Case((7, 20), (300, 40), window=(3, 2), width=64, heads=(1, 1)), marks=SLOW),
    pytest.param(Case((80, 40), causal=True, heads=(1, 1), width=96), marks=SLOW),
    pytest.param(Case((80, 40), causal=True, heads=(1, 1), width=128), marks=SLOW),
    # dkv has no room for its second product beside the weights.
    pytest.param(Case((80, 40), softcap=1.5, heads=(1, 1), width=128), marks=SLOW),
    pytest.param(Case((70, 20), causal=True, heads=(2, 1), width=256), marks=SLOW),
]


def rounded(case, seed, dtype):
    """The case's arrays as the dtype holds them."""
    return [np.asarray(jnp.asarray(x, dtype), np.float64) for x in case.arrays(seed)[:4]]


def problem(case, seed, dtype=jnp.bfloat16):
    arrays = rounded(case, seed, dtype)
    q, k, v, dout = (jnp.asarray(x, dtype) for x in arrays)
    rows = ranges.packed_rows(
        jnp.asarray(case.cu_q), jnp.asarray(case.cu_k), q.shape[0], case.causal, case.window
    )
    slopes = None if case.slopes is None else jnp.asarray(case.slopes)
    expected = attention(case, *arrays, np.zeros((case.heads[0], q.shape[0])))
    return (q, k, v, rows, slopes), dout, Spec(case.width**-0.5, case.softcap), expected


def spoil(case, inputs, bad):
    """Puts Inf into the last head's v at token `bad`, as the public function passes it on.

    Returns: (inputs, the query rows that see it).
    """
    q, k, v, *others = inputs
    if bad is None:
        return inputs, np.zeros(q.shape[0], bool)
    k, v = guard.keys(k, v.at[bad, -1, 5].set(jnp.inf))
    return (q, k, v, *others), visible(case)[:, bad]


def run_forward(case, seed, tile=hopper_forward.Tile(64, 2), bad=None):
    inputs, _, spec, expected = problem(case, seed)
    inputs, spoiled = spoil(case, inputs, bad)
    run = functools.partial(hopper_forward.forward, spec=spec, tile=tile, interpret=True)
    with interpret.checked():
        out, lse = jax.block_until_ready(jax.jit(run)(*inputs))
    assert np.isnan(out[spoiled]).all() and np.isnan(lse[:, spoiled]).all()
    # bf16 weights and output: half a unit of 2**-8 each, of values up to 4.
    fine = ~spoiled
    np.testing.assert_allclose(np.asarray(out, np.float64)[fine], expected[0][fine], atol=0.03)
    np.testing.assert_allclose(lse[:, fine], expected[1][:, fine], atol=1e-4)


def run_backward(case, seed, tile=None, dtype=jnp.bfloat16, bad=None):
    inputs, dout, spec, (out, lse, *grads) = problem(case, seed, dtype)
    (q, k, *others), spoiled = spoil(case, inputs, bad)
    lse = np.where(spoiled, np.nan, lse)
    live = (inputs[3].lo < inputs[3].hi)[:, None, None]
    dout = jnp.where(live, dout, jnp.zeros((), dtype))
    delta = jnp.asarray((out * np.asarray(dout, np.float64)).sum(-1).T, jnp.float32)
    lse = jnp.asarray(lse, jnp.float32)
    q, dout, lse, delta = guard.queries(q, dout, lse.T, delta.T)
    inputs = (q, guard.finite(k), *others)
    tile = tile or hopper_backward.heuristic(case.width)
    tile = dataclasses.replace(tile, stages_dq=2, stages_dkv=2)
    run = functools.partial(hopper_backward.backward, spec=spec, tile=tile, interpret=True)
    with interpret.checked():
        got = jax.block_until_ready(jax.jit(run)(*inputs, lse.T, delta.T, dout))
    keys = (spoiled @ visible(case)) > 0
    for name, x, want in zip(("dq", "dk", "dv"), got, grads, strict=True):
        lost = spoiled if name == "dq" else keys
        assert np.isnan(x[lost]).all(), name
        error = np.abs(np.asarray(x, np.float64) - want)[~lost].max()
        assert error <= 0.01 * max(1.0, np.abs(want).max()), (name, error)


# Inf in a value of the first segment reaches its last rows, not the segment in the same tile.
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, seed):
    run_forward(case, seed, bad=45 if case is CASES[0] else None)


def test_overlap_changes_no_bit(seed):
    """The products are started earlier; each sum has the order that it had."""
    inputs, _, spec, _ = problem(CASES[0], seed)
    results = []
    for overlap in (True, False):
        tile = hopper_forward.Tile(32, 2, overlap=overlap)
        run = functools.partial(hopper_forward.forward, spec=spec, tile=tile, interpret=True)
        with interpret.checked():
            results.append(jax.block_until_ready(jax.jit(run)(*inputs)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case, seed):
    run_backward(case, seed, bad=45 if case is CASES[0] else None)


GQA = Case((50, 0, 60), causal=True, heads=(4, 1), width=64, spare=18)
SHORT = [
    (hopper_forward.Tile(32, 2, heads=2), dataclasses.replace(GQA, heads=(2, 1))),
    pytest.param(hopper_forward.Tile(32, 2), GQA, marks=SLOW),
    pytest.param(
        hopper_forward.Tile(64, 2, heads=4),
        dataclasses.replace(GQA, heads=(8, 2), alibi=True, softcap=2.0),
        marks=SLOW,
    ),
    pytest.param(
        hopper_forward.Tile(32, 2, heads=8), Case((9, 30), heads=(8, 1), width=128), marks=SLOW
    ),
]


@pytest.mark.parametrize(("tile", "case"), SHORT, ids=str)
def test_forward_tiles_of_short_segments(tile, case, seed):
    """Few keys in a tile, and several heads of a group in its rows."""
    run_forward(case, seed, tile)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 256])
def test_backward_tiles_of_short_segments(width, seed):
    run_backward(dataclasses.replace(GQA, width=width), seed, hopper_backward.heuristic(width, 64))


@pytest.mark.parametrize(
    "case",
    [
        # Tiles that one warpgroup of a thread block sees and the other does not.
        Case((50, 0, 60), causal=True, heads=(2, 1), width=64, spare=18),
        pytest.param(Case((100, 60), window=(20, 9), width=64, heads=(1, 1), spare=7), marks=SLOW),
        pytest.param(
            Case((90, 30), causal=True, softcap=1.5, alibi=True, heads=(2, 2), width=96), marks=SLOW
        ),
        pytest.param(Case((80, 40), causal=True, heads=(2, 1), width=128), marks=SLOW),
    ],
    ids=str,
)
def test_fused_backward(case, seed):
    tile = hopper_backward.heuristic(case.width, deterministic=False)
    run_backward(case, seed, tile, bad=45 if case == CASES[0] else None)


@pytest.mark.slow
def test_public_function_with_gradients(seed):
    """Through custom_vjp and vmap, with NaN in the dead tail."""
    case = Case((60, 30), causal=True, width=64, heads=(1, 1), spare=30)
    clean, dirty = case.arrays(seed), case.arrays(seed, np.nan)
    q, k, v, dout = (jnp.asarray(x, jnp.float16)[None] for x in dirty[:4])

    @jax.vmap
    def attend(q, k, v):
        return pallas_kernels.varlen_attention(
            q, k, v, cu_seqlens_q=jnp.asarray(case.cu_q), causal=True, implementation="interpret"
        )

    with interpret.checked():
        out, pull = jax.vjp(attend, q, k, v)
        grads = jax.block_until_ready(pull(dout))
    expected = attention(case, *clean[:4], np.zeros((1, 120)))
    for x, want in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        np.testing.assert_allclose(np.asarray(x[0], np.float64), want, atol=0.02)


BAD_TILES = {
    "block": (hopper_forward.Tile(48, 2), "block_k=48 must be a multiple of 32 .*nearest: 32, 64"),
    "ring": (hopper_forward.Tile(128, 8), r"shared memory.*k_smem bfloat16\[8, 128, 128\]"),
    "heads": (hopper_forward.Tile(64, 2, heads=4), "heads=4 .* the 2 heads of a group; nearest: 2"),
    "overlap": (hopper_forward.Tile(64, 1), "stages=1 deadlocks with overlap; nearest: 2"),
    "registers": (hopper_forward.Tile(256, 1), "registers of a thread"),
    "block dq": (hopper_backward.Tile(16, 2, 64, 2), "block_dq=16 must be a multiple of 32"),
    "ring dq": (hopper_backward.Tile(64, 6, 64, 2), r"\(dq\).*shared memory.*k_smem"),
    "ring dkv": (hopper_backward.Tile(64, 2, 64, 5), r"\(dkv\).*shared memory.*q_smem"),
    "sums": (hopper_backward.Tile(64, 2, 128, 2), r"\(dkv\).*registers of a thread"),
    "fused": (hopper_backward.Tile(64, 2, 32, 2, True), "fused needs block_dkv=64, got 32"),
}


@pytest.mark.parametrize("name", BAD_TILES)
def test_a_tile_that_does_not_fit_is_refused_before_tracing(name):
    tile, message = BAD_TILES[name]
    inputs, _, spec, _ = problem(Case((64,), width=128, heads=(2, 1)), 0)
    with pytest.raises(ValueError, match=message):
        if isinstance(tile, hopper_forward.Tile):
            hopper_forward.forward(*inputs, spec=spec, tile=tile)
        else:
            sums = jnp.zeros((2, 64))
            hopper_backward.backward(*inputs, sums, sums, inputs[0], spec=spec, tile=tile)
