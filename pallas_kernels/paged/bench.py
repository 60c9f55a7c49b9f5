"""Paged attention on a GPU: correctness, and times beside plain JAX and a copy.

A result is right if its error against plain JAX in float32 is at most twice that of plain JAX in
the kernel's type, plus a little; pages of 8 bits hold the same numbers for both. The rival is plain
JAX; the bound is a copy that moves as many bytes.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.reference import Spec
from pallas_kernels.bench import Side
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged import passes, reference
from pallas_kernels.paged.api import paged_attention
from pallas_kernels.paged.cases import CASES as CASES
from pallas_kernels.paged.cases import SERVED, Case, ragged
from pallas_kernels.paged.reference import Pages
from pallas_kernels.paged.tile import OP, Shape, Tile, candidates
from pallas_kernels.paged.tile import key as tile_key
from pallas_kernels.tuned import Tuning

TINY_CASES = (Case("tiny", (70, 20), (1, 1), (2, 1), 64, room=128),)
MIXED = {"contexts": (300, 77, 2048, 129, 640), "counts": (1, 77, 1, 1, 500), "room": 2048}
CHECKED = (
    Case("decode", ragged(64, 2048), (1,) * 64, room=2048),
    Case("mixed", **MIXED),
    *(Case(f"mixed d{width}", **MIXED, width=width) for width in (64, 96, 256)),
    *(Case(f"mixed {pages}", **MIXED, pages=pages) for pages in ("int8", "float8_e4m3fn")),
    *(Case(f"decode page {n}", ragged(64, 2048), (1,) * 64, page=n, room=2048) for n in (8, 128)),
    Case("mixed, a head each", **MIXED, heads=(8, 8)),
    Case("mixed, 7 heads a group", **MIXED, heads=(14, 2)),
    Case("one long sequence", (32768,), (1,), room=32768),
)
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "all": {"window": (255, 0), "softcap": 20.0}}


def like(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes that are drawn: q, and keys and values as bfloat16."""
    (H, G), pool = case.heads, -(-sum(case.contexts) // case.page) + len(case.contexts) + 1
    keys = jax.ShapeDtypeStruct((pool, case.page, G, case.width), jnp.bfloat16)
    return [jax.ShapeDtypeStruct((case.tokens, H, case.width), jnp.bfloat16), keys, keys]


def table_of(case: Case) -> tuple[np.ndarray, ...]:
    """Returns (table, start, count, context), with pages in random order."""
    random = np.random.default_rng(0)
    used = [-(-n // case.page) for n in case.contexts]
    ids = random.permutation(np.arange(1, like(case)[1].shape[0]))
    table = np.zeros((len(used), case.room // case.page), np.int32)
    for row, last, n in zip(table, np.cumsum(used), used, strict=True):
        row[:n] = ids[last - n : last]
    count, context = (np.asarray(x, np.int32) for x in (case.counts, case.contexts))
    return table, (np.cumsum(count) - count).astype(np.int32), count, context


def numbers(case: Case) -> list[jax.Array]:
    """Returns `table_of` with values that XLA does not know, as the plan is timed too."""
    return [jax.lax.optimization_barrier(jnp.asarray(x)) for x in table_of(case)]


def call(case: Case, implementation: Implementation, **options: Any) -> Callable[..., jax.Array]:
    """Returns the function of a case; its arguments are those of `like`."""
    small = case.pages != "bfloat16"

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # A number of 8 bits for one of 16: values of a normal distribution, and a scale.
        pages = [_narrow(x, case.pages) if small else x for x in (k, v)]
        scale = jnp.full(k.shape[:3], 1 / 32 if case.pages == "int8" else 1.0, jnp.float32)
        scales: dict[str, Any] = {"k_scale_PNG": scale, "v_scale_PNG": scale} if small else {}
        return paged_attention(
            q, *pages, *numbers(case), implementation=implementation, **scales, **options
        )

    return run


def _narrow(x: jax.Array, pages: str) -> jax.Array:
    if pages == "int8":
        return jnp.clip(jnp.round(x.astype(jnp.float32) * 32), -127, 127).astype(jnp.int8)
    return x.astype(pages)


def copied(case: Case) -> Side:
    """Returns a copy that moves as many bytes as the case, half of them as reads."""
    array = jax.ShapeDtypeStruct((int(case.bytes()) // 8,), jnp.float32)
    return lambda x: x + 1.0, [array]


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel, plain JAX, and a copy."""
    return {
        "ours": lambda: timed(case, implementation),
        "reference": lambda: timed(case, "reference"),
        "copy": lambda: copied(case),
    }


def timed(case: Case, implementation: Implementation) -> Side:
    """Returns the function of a case and its arguments, which are pages as they are stored."""
    q, keys, _ = like(case)
    if case.pages == "bfloat16":
        return call(case, implementation), [q, keys, keys]
    # Any bits are numbers; those of pairs of bytes of random numbers of 16 bits have no NaN but in
    # e4m3, which takes as long.
    pairs = jax.ShapeDtypeStruct((*keys.shape[:3], case.width // 2), jnp.bfloat16)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        pages = [
            jax.lax.bitcast_convert_type(x, jnp.dtype(case.pages)).reshape(keys.shape)
            for x in (k, v)
        ]
        scale = jnp.full(keys.shape[:3], 1 / 32, jnp.float32)
        return paged_attention(
            q,
            *pages,
            *numbers(case),
            k_scale_PNG=scale,
            v_scale_PNG=scale,
            implementation=implementation,
        )

    return run, [q, pairs, pairs]


def errors(case: Case, implementation: Implementation, options: dict[str, Any]) -> dict[str, float]:
    """Returns error over bound; at most 1 is right."""
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, like(case), strict=True)]
    result = jax.jit(call(case, implementation, **options))(*inputs)
    plain = jax.jit(call(case, "reference", **options))
    wide = [inputs[0].astype(jnp.float32), *inputs[1:]]
    got, rough, want = (np.asarray(x, np.float64) for x in (result, plain(*inputs), plain(*wide)))
    # Weights in 16 bits add what a result in 16 bits loses.
    bound = 2 * np.abs(rough - want).max() + 2**-8 * np.abs(want).max() + 1e-3
    return {"out": float(np.abs(got - want).max() / bound)}


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns (name, a function that returns error over bound) for each check."""
    cases = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"paged {case.name}, {name}", functools.partial(errors, case, implementation, options))
        for case in cases
        for name, options in OPTIONS.items()
    ]


# ---- tunings
#
# What tune.py times of paged attention: each case, over rows and keys of a tile.


def tunings(cases: Sequence[Case] = (*CASES, *SERVED)) -> Iterator[Tuning]:
    """Yields the tunings of all cases; contexts are data, so cases of one key count once."""
    seen = set()
    for case in cases:
        (H, G), K = case.heads, case.width
        shape = Shape(G, H // G, K, case.page, jnp.dtype(jnp.bfloat16), jnp.dtype(case.pages))
        key = tile_key(shape, case.tokens, len(case.contexts), case.room)
        if tuple(key.values()) in seen:
            continue
        seen.add(tuple(key.values()))
        options: dict[str, Any] = {"spec": Spec(K**-0.5), "window": None}

        def function(tile: Tile, interpret: bool, options: Any = options) -> Callable[..., Any]:
            return functools.partial(passes.forward, tile=tile, interpret=interpret, **options)

        yield Tuning(
            OP,
            key,
            candidates(shape, case.tokens, len(case.contexts)),
            function,
            functools.partial(_inputs, case),
            functools.partial(reference.forward, **options),
        )


def _inputs(case: Case, rng: jax.Array) -> tuple[Any, ...]:
    """Returns queries, pages and no sinks."""
    keys = jax.random.split(rng, 3)
    shapes = like(case)
    q, k, v = (
        jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)
    )
    scale = None
    if case.pages != "bfloat16":
        k, v = (_narrow(x, case.pages) for x in (k, v))
        scale = jnp.full(k.shape[:3], 1 / 32 if case.pages == "int8" else 1.0, jnp.float32)
    return q, Pages(k, v, scale, scale, *map(jnp.asarray, table_of(case))), None
