"""Every tile of the Hopper kernels that is shipped, and its deviceless compile.

A configuration is a kernel at a head width with the tile that `heuristic` gives, plain and with all
that adds registers (softcap, ALiBi); 'medium' and 'short' are the tiles for segments of at most 256
and 128 rows, 'grouped' those for several heads of a group. Causal order and windows are data: one
program serves them.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.attention import hopper_backward, hopper_forward, reference, tiling
from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.attention.ranges import Rows, packed_rows
from pallas_kernels.attention.reference import Spec
from pallas_kernels.tuned import Tuning

WIDTHS = (64, 96, 128, 256)
CONFIGS = (
    *(f"{kind} d{width}" for kind in ("forward", "backward") for width in WIDTHS),
    *(f"{kind} d{width} softcap alibi" for kind in ("forward", "backward") for width in WIDTHS),
    *(f"forward d{width} medium" for width in (64, 96, 128)),
    *(f"{kind} d{width} short" for kind in ("forward", "backward") for width in WIDTHS),
    *(f"forward d{width} short grouped softcap alibi" for width in (64, 128)),
    *(f"fused d{width}" for width in hopper_backward.FUSED_WIDTHS),
    *(f"fused d{width} softcap alibi" for width in hopper_backward.FUSED_WIDTHS),
)
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration."""
    kind, width = name.split()[0], int(name.split()[1][1:])
    T, H, G = 1024, 8, 2
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = Rows(*(array(T, dtype=jnp.int32),) * 3)
    slopes = array(H, dtype=jnp.float32) if "alibi" in name else None
    spec = Spec(width**-0.5, 30.0 if "softcap" in name else None)
    q, k, sums = array(T, H, width), array(T, G, width), array(H, T, dtype=jnp.float32)
    longest = 128 if "short" in name else 256 if "medium" in name else None
    if kind == "forward":
        tile = hopper_forward.heuristic(width, H // G if "grouped" in name else 1, longest)
        run = functools.partial(hopper_forward.forward, spec=spec, tile=tile)
        return run, (q, k, k, rows, slopes), dataclasses.asdict(tile)
    tile = hopper_backward.heuristic(width, longest, deterministic=kind == "backward")
    run = functools.partial(hopper_backward.backward, spec=spec, tile=tile)
    return run, (q, k, k, rows, slopes, sums, sums, q), dataclasses.asdict(tile)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernels."""
    backward = () if name.startswith("forward") else ("hopper_backward.py",)
    return tuple(FOLDER / file for file in ("hopper_forward.py", *backward))


def tunings(cases: Sequence[Case] = CASES, dtype: Any = jnp.bfloat16) -> Iterator[Tuning]:
    """What scripts/tune.py times: each case forward, and backward with and without fixed order.

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
    """Of the backward kernel; the first five are the forward's."""
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
