"""What tune.py times of paged attention: each case, over rows and keys of a tile."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import paged_bench, paged_passes, paged_reference, paged_tiling
from pallas_kernels.attention.paged_cases import CASES, SERVED, Case
from pallas_kernels.attention.paged_reference import Pages
from pallas_kernels.attention.paged_tile import OP, Shape, Tile
from pallas_kernels.attention.reference import Spec
from pallas_kernels.tuned import Tuning


def tunings(cases: Sequence[Case] = (*CASES, *SERVED)) -> Iterator[Tuning]:
    """Yields the tunings of all cases; contexts are data, so cases of one key count once."""
    seen = set()
    for case in cases:
        (H, G), K = case.heads, case.width
        shape = Shape(G, H // G, K, case.page, jnp.dtype(jnp.bfloat16), jnp.dtype(case.pages))
        key = paged_tiling.key(shape, case.tokens, len(case.contexts), case.room)
        if tuple(key.values()) in seen:
            continue
        seen.add(tuple(key.values()))
        options: dict[str, Any] = {"spec": Spec(K**-0.5), "window": None}

        def function(tile: Tile, interpret: bool, options: Any = options) -> Callable[..., Any]:
            return functools.partial(
                paged_passes.forward, tile=tile, interpret=interpret, **options
            )

        yield Tuning(
            OP, key, paged_tiling.candidates(shape, case.tokens, len(case.contexts)), function,
            functools.partial(_inputs, case), functools.partial(paged_reference.forward, **options),
        )  # fmt: skip


def _inputs(case: Case, rng: jax.Array) -> tuple[Any, ...]:
    """Queries, pages and no sinks."""
    keys = jax.random.split(rng, 3)
    like = paged_bench.like(case)
    q, k, v = (jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, like, strict=True))
    scale = None
    if case.pages != "bfloat16":
        k, v = (paged_bench._narrow(x, case.pages) for x in (k, v))
        scale = jnp.full(k.shape[:3], 1 / 32 if case.pages == "int8" else 1.0, jnp.float32)
    return q, Pages(k, v, scale, scale, *map(jnp.asarray, paged_bench.table_of(case))), None
