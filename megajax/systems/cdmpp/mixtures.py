"""Random mixtures of operations to time, so that a predictor knows fusions of unknown networks.

The compiler's fusions of a network mix elementwise operations, movements, reductions and products
in ways that no list of pieces foresees: sums of padded slices, reductions of computed values,
updates in a loop. A mixture draws such a graph step by step. Each step makes one more array from
one of the last arrays before it; all arrays have three dimensions, and the last one is the result.
(CDMPP's data set, Tenset, holds random schedules of real operators; here the operators are random
and the schedule is the compiler's.)
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from megajax.systems.cdmpp.draw import Draw
from megajax.systems.cdmpp.pieces import Built

Step = Callable[[Sequence[jax.Array]], jax.Array]
# (chosen) bounds of a mixture's steps, and of the elements of one array at scale 1
STEPS = (2, 3, 5, 8, 12, 16)
LARGE = 2**18
TURNS = (2, 4, 8, 16)  # (chosen) of a mixture that is the body of a loop
_UNARY: Sequence[Callable] = (
    jnp.tanh, jnp.exp, jnp.abs, jax.nn.sigmoid, jax.nn.relu, jnp.negative, jnp.square,
    lambda v: jnp.sqrt(jnp.abs(v) + 1.0), lambda v: jnp.log1p(jnp.abs(v)),
    lambda v: v * 0.5, lambda v: v + 1.0,
    lambda v: v.astype(jnp.bfloat16).astype(v.dtype),
    lambda v: jax.lax.rsqrt(v * v + 1e-6),
    lambda v: (v.astype(jnp.int32) >> 3).astype(v.dtype),
)  # fmt: skip
_BINARY: Sequence[Callable] = (
    jnp.add, jnp.add, jnp.multiply, jnp.multiply, jnp.subtract, jnp.maximum, jnp.minimum,
    lambda a, b: a / (jnp.abs(b) + 1.0), lambda a, b: jnp.where(a > b, a, 0.0),
)  # fmt: skip
_SUMS: Sequence[Callable] = (
    jnp.sum,
    jnp.mean,
    jnp.max,
    lambda v, axis, keepdims: jnp.sum(v * v, axis, keepdims=keepdims),
)


def mixture(draw: Draw) -> Built:
    """Draws a mixture, its gradient by the inputs, or a loop with a mixture as its body."""
    shapes: list[tuple[int, ...]] = [_shape(draw)]
    shapes += [
        draw.pick(shapes[0], (1, *shapes[0][1:]), (*shapes[0][:2], 1))
        for _ in range(draw.pick(0, 1, 2))
    ]
    count = len(shapes)
    steps: list[Step] = []
    for _ in range(draw.pick(*STEPS)):
        step, shape = _step(draw, shapes)
        steps.append(step)
        shapes.append(shape)

    def run(*args: jax.Array) -> jax.Array:
        values = list(args)
        for step in steps:
            values.append(step(values))
        return values[-1]

    args = tuple(draw.floats(*shape) for shape in shapes[:count])
    how = draw.pick("forward", "forward", "gradient", "gradient", "loop")
    if how == "gradient":
        return jax.grad(lambda *a: jnp.tanh(run(*a)).sum(), argnums=tuple(range(count))), args
    if how == "loop":
        turns = draw.pick(*TURNS)

        def body(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
            found = run(*carry)
            scale = jnp.tanh(found.mean())
            return (carry[0] * scale, *carry[1:]), found[:1]

        return lambda *a: jax.lax.scan(body, a, None, length=turns), args
    return run, args


def _shape(draw: Draw) -> tuple[int, int, int]:
    most = LARGE * draw.scale
    while True:
        found = draw.size(1, 64), draw.size(2, 256), draw.size(4, 512)
        if math.prod(found) <= most:
            return found


def _step(draw: Draw, shapes: Sequence[tuple[int, ...]]) -> tuple[Step, tuple[int, ...]]:
    """Draws one operation on some of the values so far; returns it and its result's shape."""
    recent = max(len(shapes) - 3, 0)
    at = int(draw.rng.integers(recent, len(shapes)))  # mostly chains: fusions are chains
    shape, axis = shapes[at], draw.pick(0, 1, 2)
    kind = draw.pick(
        "unary", "unary", "binary", "binary", "binary", "sum", "norm", "move", "move", "dot"
    )
    fits = [i for i, other in enumerate(shapes) if i != at and _broadcast(shape, other)]
    if kind == "binary" and fits:  # of two values: XLA would simplify one of a value with itself
        other, how = fits[int(draw.rng.integers(len(fits)))], draw.pick(*_BINARY)
        return lambda v: how(v[at], v[other]), jnp.broadcast_shapes(shape, shapes[other])
    if kind == "sum":
        how = draw.pick(*_SUMS)
        return lambda v: how(v[at], axis=axis, keepdims=True), (
            *shape[:axis],
            1,
            *shape[axis + 1 :],
        )
    if kind == "norm":
        how = draw.pick(*_SUMS)
        return lambda v: v[at] - how(v[at], axis=axis, keepdims=True), shape
    if kind == "move":
        return _move(draw, at, shape, axis)
    if kind == "dot":
        width = draw.size(4, 256)
        if math.prod(shape[:2]) * width <= LARGE * draw.scale and shape[2] > 1:
            weight = draw.floats(shape[2], width) * shape[2] ** -0.5
            return lambda v: v[at] @ weight, (*shape[:2], width)
    how = draw.pick(*_UNARY)
    return lambda v: how(v[at]), shape


def _broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(one, other, strict=True))


def _move(draw: Draw, at: int, shape: tuple[int, ...], axis: int) -> tuple[Step, tuple[int, ...]]:
    """Draws an operation that moves elements."""
    size = shape[axis]
    start = int(draw.rng.integers(size))
    stop = int(draw.rng.integers(start + 1, size + 1))
    kind = draw.pick("transpose", "roll", "slice", "pad", "join", "sliced sum", "lookup", "update")
    if kind == "transpose":
        order = draw.pick((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
        return lambda v: v[at].transpose(order), tuple(shape[i] for i in order)
    if kind == "roll":
        return lambda v: jnp.roll(v[at], start, axis), shape
    if kind == "slice":
        found = (*shape[:axis], stop - start, *shape[axis + 1 :])
        return lambda v: jax.lax.slice_in_dim(v[at], start, stop, axis=axis), found
    if kind == "pad":
        pads = [(0, 0, 0)] * 3
        pads[axis] = (start, size - stop, 0)

        def padded(v: Sequence[jax.Array]) -> jax.Array:
            part = jax.lax.slice_in_dim(v[at], start, stop, axis=axis)
            return jax.lax.pad(part * 2.0, jnp.zeros((), part.dtype), pads)

        return padded, shape
    if kind == "join":

        def joined(v: Sequence[jax.Array]) -> jax.Array:
            low, high = jnp.split(v[at], [start], axis)
            return jnp.concatenate([-high, low], axis)

        return joined, shape
    if kind == "sliced sum":  # as a product over a short dimension is written out
        few = min(size, draw.pick(2, 4, 8, 16))

        def summed(v: Sequence[jax.Array]) -> jax.Array:
            parts = [jax.lax.slice_in_dim(v[at], i, i + 1, axis=axis) for i in range(few)]
            return sum(part * (0.5 + i) for i, part in enumerate(parts)) * jnp.ones_like(v[at])

        return summed, shape
    if kind == "lookup":
        count = draw.pick(max(size // 2, 1), size)
        places = draw.below(size, count)
        found = (*shape[:axis], count, *shape[axis + 1 :])
        return lambda v: jnp.take(v[at], places, axis), found

    def updated(v: Sequence[jax.Array]) -> jax.Array:
        part = jax.lax.slice_in_dim(v[at], 0, stop - start, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(v[at], part * 2.0, start, axis)

    return updated, shape
