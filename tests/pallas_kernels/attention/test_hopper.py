"""The Hopper kernels in the interpreter, race detection on, against the float64 loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import interpret
from pallas_kernels.attention import hopper_backward, hopper_forward, ranges
from pallas_kernels.attention.reference import Spec
from tests.attention_oracle import Case, attention

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
    wanted = attention(case, *arrays, np.zeros((case.heads[0], q.shape[0])))
    return (q, k, v, rows, slopes), dout, Spec(case.width**-0.5, case.softcap), wanted


def run_forward(case, seed):
    inputs, _, spec, wanted = problem(case, seed)
    tile = hopper_forward.Tile(64, 2)
    run = functools.partial(hopper_forward.forward, spec=spec, tile=tile, interpret=True)
    with interpret.checked():
        out, lse = jax.block_until_ready(jax.jit(run)(*inputs))
    # bf16 weights and output: half a unit of 2**-8 each, of values up to 4.
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted[0], atol=0.03)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-4)


def run_backward(case, seed, dtype=jnp.bfloat16):
    inputs, dout, spec, (out, lse, *grads) = problem(case, seed, dtype)
    live = (inputs[3].lo < inputs[3].hi)[:, None, None]
    dout = jnp.where(live, dout, jnp.zeros((), dtype))
    delta = jnp.asarray((out * np.asarray(dout, np.float64)).sum(-1).T, jnp.float32)
    tile = dataclasses.replace(hopper_backward.heuristic(case.width), stages_dq=2, stages_dkv=2)
    run = functools.partial(hopper_backward.backward, spec=spec, tile=tile, interpret=True)
    with interpret.checked():
        got = jax.block_until_ready(
            jax.jit(run)(*inputs, jnp.asarray(lse, jnp.float32), delta, dout)
        )
    for name, x, want in zip(("dq", "dk", "dv"), got, grads, strict=True):
        error = np.abs(np.asarray(x, np.float64) - want).max()
        assert error <= 0.01 * max(1.0, np.abs(want).max()), (name, error)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, seed):
    run_forward(case, seed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case, seed):
    run_backward(case, seed)


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
    wanted = attention(case, *clean[:4], np.zeros((1, 120)))
    for x, want in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
        np.testing.assert_allclose(np.asarray(x[0], np.float64), want, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("barrier", "run"), [("k_free", run_forward), ("free", run_backward)])
def test_a_deleted_barrier_is_found(barrier, run, seed, monkeypatch):
    """Without the producer's wait for a free buffer, the interpreter reports the race."""
    module = hopper_forward if run is run_forward else hopper_backward
    names = {"k_free": "_body", "free": "_varlen_attention_dq"}
    body = getattr(module, names[barrier])

    def without(*refs, **named):
        wait = module.plgpu.barrier_wait
        stages = named[barrier]

        def skip(ref):
            if getattr(ref, "ref", None) is not stages:
                wait(ref)

        with monkeypatch.context() as patch:
            patch.setattr(module.plgpu, "barrier_wait", skip)
            body(*refs, **named)

    without.__name__ = body.__name__
    monkeypatch.setattr(module, names[barrier], without)
    with pytest.raises(Exception, match="race|phase|observed"):
        run(Case((256,), width=64, heads=(1, 1)), seed)  # twice as many tiles as buffers
