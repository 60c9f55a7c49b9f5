"""What tune.py times of attention: each case forward, and backward with and without fixed order."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import hopper_backward, hopper_forward, reference, tiling
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.attention.ranges import packed_rows
from pallas_kernels.attention.reference import Spec
from pallas_kernels.tuned import Tuning


def tunings(cases: Sequence[Case] = CASES, dtype: Any = jnp.bfloat16) -> Iterator[Tuning]:
    """Yields the tunings of all cases.

    Cases that differ in causal order only have one key; the first stands for both.
    """
    seen = set()
    for case in cases:
        (H, G), longest = case.heads, max(case.lengths)
        key = tiling.key(dtype, case.width, H // G, case.tokens, longest)
        if tuple(key.values()) in seen:
            continue
        seen.add(tuple(key.values()))
        inputs = functools.partial(_inputs, case, dtype)
        tiles = tiling.forward_tiles(dtype, case.width, H // G, longest)
        run = functools.partial(_run, hopper_forward.forward, case)
        spec = Spec(case.width**-0.5)
        plain = functools.partial(reference.forward, spec=spec)
        first = lambda rng, f=inputs: f(rng)[:5]  # noqa: E731
        cudnn = {
            "cudnn": (functools.partial(_cudnn, case), functools.partial(_padded, case, dtype))
        }
        yield Tuning(tiling.FORWARD, key, tiles, run, first, plain, cudnn)
        run = functools.partial(_run, hopper_backward.backward, case)
        for fixed in (True, False):
            tiles = tiling.backward_tiles(dtype, case.width, longest, fixed)
            plain = functools.partial(reference.backward, spec=spec)
            about = key | {"deterministic": fixed}
            yield Tuning(tiling.BACKWARD, about, tiles, run, inputs, plain)


def _run(kernel: Callable[..., Any], case: Case, tile: Any, interpret: bool) -> Callable[..., Any]:
    return functools.partial(kernel, spec=Spec(case.width**-0.5), tile=tile, interpret=interpret)


def _cudnn(case: Case, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """cuDNN's attention of the same segments, padded to rows of the longest."""
    lengths = jnp.asarray(case.lengths, jnp.int32)
    return jax.nn.dot_product_attention(
        q_BSHK, k_BSGK, v_BSGK, is_causal=case.causal, implementation="cudnn",
        query_seq_lengths=lengths, key_value_seq_lengths=lengths,
    )  # fmt: skip


def _padded(case: Case, dtype: Any, rng: jax.Array) -> tuple[jax.Array, ...]:
    (H, G), rows = case.heads, (len(case.lengths), max(case.lengths))
    keys = jax.random.split(rng, 3)
    return tuple(
        jax.random.normal(key, (*rows, heads, case.width), dtype)
        for key, heads in zip(keys, (H, G, G), strict=True)
    )


def _inputs(case: Case, dtype: Any, rng: jax.Array) -> tuple[Any, ...]:
    """Returns the inputs of the backward kernel; the first five are the forward's."""
    T, (H, G), K = case.tokens, case.heads, case.width
    q, k, v, dout = (
        jax.random.normal(one, (T, heads, K), dtype)
        for one, heads in zip(jax.random.split(rng, 4), (H, G, G, H), strict=True)
    )
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(case.lengths)]), jnp.int32)
    rows = packed_rows(cu, cu, T, case.causal, None)
    # Logits are normal too: a row's sum of n exponentials is about n sqrt(e).
    lse_T = jnp.log((rows.hi - rows.lo).astype(jnp.float32)) + 0.5
    lse_HT = jnp.broadcast_to(lse_T, (H, T))
    return q, k, v, rows, None, lse_HT, jnp.zeros((H, T)), dout
