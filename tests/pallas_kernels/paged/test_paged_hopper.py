"""The paged kernels in the interpreter, race detection on, against the float64 loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import interpret
from pallas_kernels.attention.reference import Spec
from pallas_kernels.paged import hopper, passes
from pallas_kernels.paged.reference import Pages
from pallas_kernels.paged.tile import Tile
from tests.paged_oracle import Case, attention, draw, lay_out, quantize

SLOW = pytest.mark.slow
INT8, FLOAT8 = (np.dtype(np.int8), 127), (np.dtype(ml_dtypes.float8_e4m3fn), 448)
# Decoding: contexts that end inside a page and at one's end, a sequence without rows, one without
# keys before its own; the second sequence's keys are cut between thread blocks.
DECODE = Case((1, 300, 0, 128), (1, 1, 0, 1), heads=(4, 2), width=64, spare=2)
# A piece of a prompt beside sequences that decode.
MIXED = Case((140, 0, 90, 3), (1, 0, 40, 3), heads=(4, 1), width=64, page=32, spare=3)
ALL = dataclasses.replace(MIXED, window=(50, 0), softcap=2.0, sinks=True)
CASES = {
    "decode": (DECODE, Tile(1, 128, 2), None),
    "all": (ALL, Tile(32, 64, 2), None),
    "int8": (dataclasses.replace(DECODE, sinks=True), Tile(1, 64, 2), INT8),
}
MORE = {
    "mixed": (MIXED, Tile(32, 64, 2), None),
    "one warpgroup": (ALL, Tile(16, 64, 2), None),
    "window": (dataclasses.replace(DECODE, window=(130, 0)), Tile(1, 64, 3), None),
    "small pages": (dataclasses.replace(DECODE, page=8), Tile(1, 64, 2), None),
    "large pages": (dataclasses.replace(DECODE, page=128), Tile(1, 64, 2), None),
    "a head each": (dataclasses.replace(MIXED, heads=(2, 2)), Tile(64, 64, 2), None),
    "uneven groups": (dataclasses.replace(ALL, heads=(6, 1)), Tile(21, 64, 2), None),
    "width 96": (dataclasses.replace(ALL, width=96), Tile(8, 64, 2), None),
    "width 128": (dataclasses.replace(DECODE, width=128), Tile(1, 128, 2), None),
    "width 256": (dataclasses.replace(ALL, width=256), Tile(16, 64, 2), None),
    "int8, two warpgroups": (ALL, Tile(32, 128, 2), INT8),
    "float8": (dataclasses.replace(ALL, page=8), Tile(16, 64, 2), FLOAT8),
    "nothing": (Case((0, 0), (0, 0), heads=(2, 1), width=64, spare=4), Tile(1, 64, 2), None),
}


def problem(case, seed, dtype=jnp.bfloat16, small=None):
    """(q, pages, sinks) of a layout with NaN in all that nobody owns, and the float64 result."""

    def held(x):
        return np.float64(jnp.asarray(x, dtype))

    sequences = draw(case, seed)
    sequences = dataclasses.replace(
        sequences,
        q=held(sequences.q),
        k=[held(x) for x in sequences.k],
        v=[held(x) for x in sequences.v],
    )
    if small is not None:
        sequences = quantize(sequences, *small)
    k, v, *scales, table, start, count, context = lay_out(case, sequences, seed)
    if small is not None and small[0].kind == "i":  # integers know no NaN
        k, v = (np.where(np.isnan(x), 101, x) for x in (k, v))
    page_dtype = dtype if small is None else small[0]
    k, v = (jnp.asarray(x.astype(page_dtype)) for x in (k, v))
    scales = [None if x is None else jnp.asarray(x) for x in scales]
    pages = Pages(k, v, *scales, *map(jnp.asarray, (table, start, count, context)))
    sinks = None if sequences.sinks is None else jnp.asarray(sequences.sinks, jnp.float32)
    return (jnp.asarray(sequences.q, dtype), pages, sinks), attention(case, sequences)


def run(case, seed, tile, small=None, blocks=2, dtype=jnp.bfloat16):
    """The kernels' result is near the definition."""
    inputs, want = problem(case, seed, dtype, small)
    spec = Spec(case.width**-0.5, case.softcap)
    function = functools.partial(
        passes.forward,
        spec=spec,
        window=case.window,
        tile=tile,
        interpret=True,
        blocks=blocks,
    )
    with interpret.checked():
        got = np.asarray(jax.block_until_ready(jax.jit(function)(*inputs)), np.float64)
    # Weights and results have 8 bits, as have values up to 4 and logits' factors.
    np.testing.assert_allclose(got, want, atol=0.02)
    assert not got[sum(case.counts) :].any()


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=SLOW) for n in MORE)])
def test_the_kernels_are_the_definition(name, seed):
    """All that nobody owns holds NaN."""
    case, tile, small = (CASES | MORE)[name]
    run(case, seed, tile, small)


@SLOW
@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_any_number_of_thread_blocks(blocks, seed):
    """Items that are whole, and that are cut in up to five parts."""
    run(dataclasses.replace(ALL, sinks=True), seed, Tile(16, 64, 2), blocks=blocks)


@SLOW
def test_float16(seed):
    run(ALL, seed, Tile(16, 64, 2), dtype=jnp.float16)


def test_the_public_function(seed):
    (q, pages, sinks), want = problem(dataclasses.replace(DECODE, sinks=True), seed)
    with interpret.checked():
        got = pallas_kernels.paged_attention(
            q,
            pages.k,
            pages.v,
            pages.table_BM,
            pages.start_B,
            pages.count_B,
            pages.context_B,
            sinks_H=sinks,
            implementation="interpret",
        )
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=0.02)


def test_what_is_wrong_is_seen(seed, monkeypatch):
    """Values of nobody that are not set to 0 would reach the result, and a missing part as well."""
    monkeypatch.setattr(hopper._Warpgroup, "erase", lambda *args: None)
    with pytest.raises(AssertionError):
        run(DECODE, seed, Tile(1, 128, 2))


BAD_TILES = {
    "keys": (Tile(1, 96, 2), "keys=96 must be a multiple of 64 .*nearest: 64, 128"),
    "rows": (Tile(33, 64, 2), "tokens=33 of 4 heads must be 1 to 128 rows; nearest: 32"),
    "ring": (Tile(1, 128, 40), r"shared memory.*k_smem bfloat16\[40, 128, 64\]"),
}


@pytest.mark.parametrize("name", BAD_TILES)
def test_a_tile_that_does_not_fit_is_refused_before_tracing(name):
    tile, message = BAD_TILES[name]
    inputs, _ = problem(MIXED, 0)
    with pytest.raises(ValueError, match=message):
        passes.forward(*inputs, spec=Spec(0.125), window=None, tile=tile, interpret=True)


MISFITS = {
    "float32": ({"q": jnp.float32}, "needs bfloat16 or float16 queries, found float32"),
    "pages": ({"k": jnp.float32}, "needs pages of q's type or of 8 bits, found float32"),
    "width": ({"width": 80}, "needs a head width of 64, 96, 128, 256, found 80"),
    "page": ({"page": 4}, "needs pages of 8, 16, 32, 64, 128 tokens, found 4"),
    "group": ({"heads": 129}, "needs at most 128 query heads of a key-value head, found 129"),
    "wide": ({"heads": 65, "width": 256}, "needs at most 64 query heads"),
    "small": (
        {"k": jnp.int8, "width": 256},
        "needs a head width of 64, 128 with pages of 8 bits, found 256",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_the_kernel_cannot_take_is_said(name):
    changes, message = MISFITS[name]
    sizes = {"q": jnp.bfloat16, "k": jnp.bfloat16, "width": 64, "page": 16, "heads": 4} | changes
    q = jnp.zeros((2, sizes["heads"], sizes["width"]), sizes["q"])
    k = jnp.zeros((3, sizes["page"], 1, sizes["width"]), sizes["k"])
    scale = jnp.zeros(k.shape[:3]) if k.dtype == jnp.int8 else None
    with pytest.raises(NotImplementedError, match=message):
        pallas_kernels.paged_attention(
            q,
            k,
            k,
            [[1]],
            [0],
            [1],
            [1],
            k_scale_PNG=scale,
            v_scale_PNG=scale,
            implementation="interpret",
        )
