"""Paged attention in plain JAX against a float64 loop, and its bits against its own."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels.paged import reference as paged_reference
from tests.paged_oracle import Case, attention, draw, lay_out, quantize

# Contexts around the blocks' ends (128), empty segments, pieces of prompts beside decoding.
RAGGED = Case((1, 300, 128, 0, 129, 77), (1, 1, 1, 0, 1, 1), spare=3)
MIXED = Case((140, 260, 0, 33, 200), (1, 60, 0, 33, 1), page=8, spare=5)
CASES = {
    "decode": RAGGED,
    "mixed": MIXED,
    "nothing": Case((0, 0), (0, 0), spare=4),
    "multi-query": dataclasses.replace(RAGGED, heads=(6, 1), page=32),
    "a head each": dataclasses.replace(RAGGED, heads=(3, 3), width=24, page=128),
    "window": dataclasses.replace(MIXED, window=(40, None)),
    "window, decode": dataclasses.replace(RAGGED, window=(130, 0)),
    "softcap": dataclasses.replace(RAGGED, softcap=1.5),
    "sinks": dataclasses.replace(RAGGED, sinks=True),
    "all": dataclasses.replace(MIXED, window=(100, 0), softcap=2.0, sinks=True, page=64),
}


@functools.cache
def program(**options):
    return jax.jit(functools.partial(pallas_kernels.paged_attention, **options))


def run(case, sequences, seed, dtype=jnp.float32, kv=None, **options):
    """The public function of a layout of these sequences, jitted."""
    k, v, k_scale, v_scale, *numbers = lay_out(case, sequences, seed)
    if kv is not None:  # numbers of 8 bits; integers know no NaN
        k, v = (np.where(np.isnan(x), 101, x) for x in (k, v))
        k, v = (x.astype(kv) for x in (k, v))
    kv = kv or dtype
    options = {"window": case.window, "softcap": case.softcap, **options}
    arrays = {"k_scale_PNG": k_scale, "v_scale_PNG": v_scale, "sinks_H": sequences.sinks}
    arrays = {n: jnp.asarray(x, jnp.float32) for n, x in arrays.items() if x is not None}
    q, k, v = jnp.asarray(sequences.q, dtype), *(jnp.asarray(x, kv) for x in (k, v))
    out = program(**options)(q, k, v, *numbers, **arrays)
    assert out.dtype == dtype
    return np.asarray(out)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_the_definition(name, seed):
    """All that nobody owns holds NaN."""
    case = CASES[name]
    sequences = draw(case, seed)
    np.testing.assert_allclose(run(case, sequences, seed), attention(case, sequences), atol=2e-6)


def test_bfloat16_is_as_near_as_its_inputs(seed):
    case = dataclasses.replace(MIXED, sinks=True)
    sequences = draw(case, seed)
    held = dataclasses.replace(
        sequences,
        **{n: np.float64(jnp.asarray(getattr(sequences, n), jnp.bfloat16)) for n in ("q",)},
        **{
            n: [np.float64(jnp.asarray(x, jnp.bfloat16)) for x in getattr(sequences, n)]
            for n in ("k", "v")
        },
    )
    want = attention(case, held)
    # Half a unit of the output's 8 bits: all sums are float32.
    got = run(case, held, seed, jnp.bfloat16).astype(np.float64)
    assert (np.abs(got - want) <= 2.0**-8 * np.abs(want) + 1e-6).all()


@pytest.mark.parametrize(("kv", "largest"), [("int8", 127), ("float8_e4m3fn", 448)])
def test_pages_of_8_bits(kv, largest, seed):
    case = dataclasses.replace(MIXED, softcap=3.0)
    kind = np.dtype(np.int8) if kv == "int8" else np.dtype(ml_dtypes.float8_e4m3fn)
    exact = draw(case, seed)
    held = quantize(exact, kind, largest)
    got = run(case, held, seed, kv=kind)
    np.testing.assert_allclose(got, attention(case, held), atol=3e-6)
    assert np.abs(got - attention(case, exact)).max() < 0.15  # the scales do what scales do


def test_scale(seed):
    case = Case((40,), (3,))
    sequences = draw(case, seed)
    twice = dataclasses.replace(sequences, q=sequences.q * 2)
    np.testing.assert_array_equal(
        run(case, sequences, seed, scale=2 * 16**-0.5), run(case, twice, seed)
    )


# One sequence of 300 tokens: what each token's row gives, however it is computed.
WHOLE = Case((300,), (300,), window=(200, 0), softcap=5.0, sinks=True)


def by_token(tokens, pieces, page, others, sequences, seed):
    """Rows of WHOLE's tokens in steps of T rows, (token: row); other sequences share the batch.

    pieces: (start, count) of each step.
    """
    rows = {}
    for i, (start, count) in enumerate(pieces):
        contexts, counts = [start + count], [count]
        front = others if i % 2 else 0
        for n in range(others):
            contexts.insert(0 if n < front else len(contexts), 5 + 37 * n + 150 * i)
            counts.insert(0 if n < front else len(counts), 1 + n % 3)
        case = dataclasses.replace(
            WHOLE, contexts=tuple(contexts), counts=tuple(counts), page=page, more=1 + i % 3
        )
        case = dataclasses.replace(case, spare=tokens - sum(counts))
        step, number = draw(case, seed + i), front
        first = sum(counts[:number])
        step.q[first : first + count] = sequences.q[start : start + count]
        step.k[number] = sequences.k[0][: start + count]
        step.v[number] = sequences.v[0][: start + count]
        step.sinks = sequences.sinks
        result = run(case, step, seed + i)
        rows |= {start + j: result[first + j] for j in range(count)}
    return rows


# (tokens of a piece, tokens of a page, other sequences in the batch)
FEW = ((33, 8, 3), (1, 32, 5))
MORE = (*FEW, (7, 128, 2), (19, 16, 4), (1, 8, 0))


def check_bits(seed, tokens, cuts):
    """A prompt in pieces of T tokens, and every third piece of other cuts."""
    sequences = draw(WHOLE, seed)
    piece = min(tokens, 300)
    pieces = [(a, min(piece, 300 - a)) for a in range(0, 300, piece)]
    base = by_token(tokens, pieces, 16, 0, sequences, seed)
    want = attention(WHOLE, sequences)
    np.testing.assert_allclose([base[t] for t in range(300)], want, atol=2e-6)
    for chunk, page, others in cuts:
        starts = range(0, 300, chunk) if chunk > 1 else range(100, 300, 20)
        pieces = [(a, min(chunk, 300 - a)) for a in starts][:: 1 if chunk == 1 else 3]
        again = by_token(tokens, pieces, page, others, sequences, seed)
        for t, row in again.items():
            np.testing.assert_array_equal(row, base[t], err_msg=f"{tokens} {page} token {t}")


# The rows of a tile by T, and the other way to cut.
@pytest.mark.parametrize(
    ("tokens", "rows", "cuts"),
    [
        (40, 1, FEW),
        (104, 8, FEW),
        pytest.param(40, 8, MORE, marks=pytest.mark.slow),
        pytest.param(320, 8, MORE, marks=pytest.mark.slow),
        pytest.param(320, 1, MORE, marks=pytest.mark.slow),
    ],
)
def test_a_token_has_the_same_bits_however_it_is_served(tokens, rows, cuts, seed, monkeypatch):
    """Any page size, table, batch and chunking, exactly, in programs of as many rows."""
    if rows != paged_reference.tile_rows(tokens):
        monkeypatch.setattr(paged_reference, "tile_rows", lambda tokens: rows)
    program.cache_clear()
    check_bits(seed, tokens, cuts)
    program.cache_clear()


@pytest.mark.slow
@pytest.mark.process
def test_the_same_bits_with_xlas_own_options():
    """The suite turns XLA's optimisation off; a user's process has it on."""
    code = (
        "import os; os.environ['JAX_PLATFORMS'] = 'cpu'; os.environ['XLA_FLAGS'] = ''\n"
        "from tests.pallas_kernels.paged import test_paged\n"
        "for tokens in (40, 104, 320): test_paged.check_bits(3, tokens, test_paged.MORE)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_other_sequences_may_hold_nan(seed):
    case = MIXED
    clean, dirty = draw(case, seed), draw(case, seed)
    for x in (dirty.k[1], dirty.v[1]):
        x[100:130] = np.nan
    got, want = run(case, dirty, seed), run(case, clean, seed)
    rows = np.arange(case.rows)
    poisoned = (rows >= 1) & (rows < 61)
    np.testing.assert_array_equal(got[~poisoned], want[~poisoned])
    assert np.isnan(got[poisoned]).all()


def test_inside_a_shard_map(seed):
    """Heads over two devices."""
    case = dataclasses.replace(RAGGED, sinks=True)
    sequences = draw(case, seed)
    k, v, _, _, *numbers = lay_out(case, sequences, seed)
    q, k, v, sinks = (jnp.asarray(x, jnp.float32) for x in (sequences.q, k, v, sequences.sinks))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(q, k, v, sinks, *numbers):
        return pallas_kernels.paged_attention(q, k, v, *numbers, sinks_H=sinks)

    heads = P(None, "x")
    split = jax.shard_map(
        step,
        mesh=mesh,
        out_specs=heads,
        in_specs=(heads, P(None, None, "x"), P(None, None, "x"), P("x"), P(), P(), P(), P()),
    )
    numbers = [jnp.asarray(x) for x in numbers]
    np.testing.assert_allclose(
        jax.jit(split)(q, k, v, sinks, *numbers), attention(case, sequences), atol=2e-6
    )


def test_no_rows_and_no_pages():
    q = jnp.zeros((0, 2, 8))
    k = jnp.zeros((3, 8, 1, 8))
    one = jnp.zeros(1, jnp.int32)
    table = jnp.zeros((1, 2), jnp.int32)
    assert pallas_kernels.paged_attention(q, k, k, table, one, one, one).shape == (0, 2, 8)
    none = jnp.zeros(0, jnp.int32)
    out = pallas_kernels.paged_attention(
        jnp.ones((4, 2, 8)), k, k, jnp.zeros((0, 2), jnp.int32), none, none, none
    )
    assert not out.any()


def like(**changes):
    """Arguments that are right but for the changes."""
    arguments = {
        "q_THK": jnp.zeros((4, 4, 16)),
        "k_PNGK": jnp.zeros((5, 16, 2, 16)),
        "v_PNGK": jnp.zeros((5, 16, 2, 16)),
        "table_BM": np.array([[1, 2], [3, 4]]),
        "start_B": [0, 3],
        "count_B": [3, 1],
        "context_B": [20, 1],
    }
    return arguments | changes


INT8 = jnp.zeros((5, 16, 2, 16), jnp.int8)
BAD = {
    "shapes": ({"q_THK": jnp.zeros((4, 4, 8))}, r"must be \(T, H, K\)"),
    "heads": ({"q_THK": jnp.zeros((4, 3, 16))}, r"3 query heads must be a multiple of 2"),
    "page": (
        dict.fromkeys(("k_PNGK", "v_PNGK"), jnp.zeros((5, 12, 2, 16))),
        "a size that divides 128",
    ),
    "type": ({"q_THK": jnp.zeros((4, 4, 16), jnp.int32)}, "q int32 must be one of bfloat16"),
    "types": ({"v_PNGK": INT8}, "one type of these or of int8"),
    "no scale": (
        {"k_PNGK": INT8, "v_PNGK": INT8},
        r"k_scale_PNG must be float32\(5, 16, 2\).*got None",
    ),
    "a scale": ({"v_scale_PNG": jnp.zeros((5, 16, 2))}, "v_scale_PNG must be None with pages of"),
    "table": ({"table_BM": np.array([[1, 2], [3, 5]])}, "holds 1 to 5; there are pages 0 to 4"),
    "segments": ({"count_B": [3]}, r"count_B \(1,\) must be one per row of table_BM \(2, 2\)"),
    "overlap": ({"start_B": [0, 2]}, "segment 1 has start 2, count 1, context 1; it must lie in"),
    "past q": ({"start_B": [0, 4]}, "segment 1 has start 4"),
    "short": ({"context_B": [2, 1]}, r"segment 0 has .* context 2; .*count <= context <= 32"),
    "long": ({"context_B": [33, 1]}, "segment 0 has .* context 33"),
    "window": ({"window": 4}, r"window=4 must be \(left, right\)"),
    "softcap": ({"softcap": 0.0}, "softcap=0.0 must be a finite number above 0"),
    "scale": ({"scale": -1.0}, "scale=-1.0 must be a finite number above 0"),
    "sinks": ({"sinks_H": jnp.zeros(2)}, r"sinks_H float32\(2,\) must be a float per query head"),
    "float32": ({"start_B": jnp.zeros(2)}, "start_B .* must be integers with 1 dimension"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_attention(**like(**changes))


def test_what_cannot_run():
    with pytest.raises(NotImplementedError, match="hopper"):
        pallas_kernels.paged_attention(**like(), implementation="hopper")
    assert not pallas_kernels.paged_attention(**like()).any()
