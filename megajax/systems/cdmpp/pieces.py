"""Pieces of networks to time: attention, products, convolutions and single operations.

Each function draws one computation with random shapes and its arguments; families.py puts them into
programs.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from megajax.systems.cdmpp.draw import Draw

Built = tuple[Callable, tuple]


def several(piece: Callable[[Draw], Built], most: int) -> Callable[[Draw], Built]:
    """Returns a function that draws 1, most / 2 or most independent computations in one program.

    A program of one operation gives one measured row, for which a compilation is much work.
    """

    def drawn(draw: Draw) -> Built:
        built, elements = [], 0
        for _ in range(draw.pick(1, max(most // 2, 1), most)):
            built.append(piece(draw))
            elements += sum(math.prod(x.shape) for x in built[-1][1])
            draw.limit(elements)  # before the next arrays take memory

        def all_of(*args: tuple) -> tuple:
            return tuple(f(*mine) for (f, _), mine in zip(built, args, strict=True))

        return all_of, tuple(args for _, args in built)

    return drawn


def attention(draw: Draw) -> Built:
    """Draws attention as XLA computes it, or its gradients."""
    rows, heads, width = draw.pick(1, 2, 4), draw.count(2, 4, 8), draw.pick(16, 32, 64, 128)
    queries = draw.size(16, 384, 8)
    draw.limit(rows, heads, queries, queries)
    keys, is_causal = queries, draw.pick(True, False)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
        if is_causal:
            seen = jnp.arange(queries)[:, None] >= jnp.arange(keys)
            scores = jnp.where(seen, scores, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    args = tuple(draw.floats(rows, n, heads, width) for n in (queries, keys, keys))
    if draw.pick(True, False):
        return attend, args
    return jax.grad(lambda *a: attend(*a).sum(), argnums=(0, 1, 2)), args


def mlp(draw: Draw) -> Built:
    """Draws two products with an activation and a residual, or the weights' gradients."""
    rows, width, hidden = (draw.size(16, 512, 4), draw.size(32, 512, 8), draw.size(64, 1536, 16))
    draw.limit(rows, hidden)
    act = draw.pick(jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh)

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return x + act(x @ up) @ down

    args = draw.floats(rows, width), draw.floats(width, hidden), draw.floats(hidden, width)
    if draw.pick(True, False):
        return block, args
    return jax.grad(lambda *a: block(*a).sum(), argnums=(1, 2)), args


def product(draw: Draw) -> Built:
    """Draws a product or a batch of products, of any layout, with or without a bias."""
    m, k, n = draw.size(1, 1024), draw.size(8, 1024), draw.size(8, 1024)
    batch = draw.pick(1, 1, 2, 4, 8)
    spelled = draw.pick("mk,kn->mn", "km,kn->mn", "mk,nk->mn")
    if batch > 1:
        m, k, n = m // 4 + 1, k // 2 + 1, n // 2 + 1
        spelled = draw.pick("bmk,bkn->bmn", "bkm,bkn->bmn", "bmk,bnk->bmn")
    sizes = {"b": batch, "m": m, "k": k, "n": n}
    draw.limit(batch, m, n)
    args = [draw.floats(*(sizes[c] for c in a)) for a in spelled.split("->")[0].split(",")]
    if draw.pick(True, False):
        return functools.partial(jnp.einsum, spelled), tuple(args)
    return lambda x, w, bias: jnp.einsum(spelled, x, w) + bias, (*args, draw.floats(n))


def norm(draw: Draw) -> Built:
    """Draws a norm or softmax, or its gradients."""
    rows, width = draw.size(8, 4096), draw.size(16, 2048)

    def rms(x: jax.Array, g: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g

    def layer(x: jax.Array, g: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * g

    def softmax(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.nn.softmax(x * g)

    def whole(x: jax.Array, g: jax.Array) -> jax.Array:  # as gradients are clipped
        return x * jax.lax.rsqrt((x * x).mean() + 1e-6) * g

    how = draw.pick(rms, layer, softmax, whole)
    args = draw.floats(rows, width), draw.floats(width)
    if draw.pick(True, False):
        return how, args
    return jax.grad(lambda *a: (how(*a) ** 2).sum(), argnums=(0, 1)), args


def convolution(draw: Draw) -> Built:
    """Draws a convolution of images with a ReLU, or its gradients."""
    side, rows, inner = draw.size(8, 64, 2), draw.pick(1, 2, 4), draw.size(3, 48)
    outer, kernel, stride = draw.size(4, 64), draw.pick(1, 3, 5), draw.pick(1, 2)
    draw.limit(rows, side, side, outer)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        order = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=order)
        return jax.nn.relu(y)

    args = draw.floats(rows, side, side, inner), draw.floats(kernel, kernel, inner, outer)
    if draw.pick(True, True, False):
        return convolve, args
    return jax.grad(lambda *a: convolve(*a).sum(), argnums=(0, 1)), args


def layout(draw: Draw) -> Built:
    """Draws an operation that moves elements: transpose, concatenate, pad, roll, slice, repeat."""
    a, b, c = draw.size(4, 512), draw.size(4, 512), draw.size(2, 16)
    x = draw.floats(a, b, c)
    moves: Sequence[Callable] = (
        lambda x: x.transpose(draw_order),
        lambda x: x.reshape(a, b * c).T + 1.0,
        lambda x: jnp.concatenate([x, x[::-1]], axis),
        lambda x: jnp.pad(x, ((1, 2), (3, 4), (0, 1))) * 2.0,
        lambda x: jnp.roll(x, 3, axis),
        lambda x: x[:, ::2] * x[:, : (b + 1) // 2],
        lambda x: jnp.repeat(x, 2, axis),
        lambda x: jnp.stack([x, x + 1.0], axis),
        lambda x: x.swapaxes(0, 1) + x.swapaxes(0, 1) * 2.0,
    )
    draw_order, axis = draw.pick((1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)), draw.pick(0, 1, 2)
    return draw.pick(*moves), (x,)


def elements(draw: Draw) -> Built:
    """Draws a chain of elementwise operations, some of whose values are results too."""
    rows, width = draw.size(4, 4096), draw.size(8, 2048)
    one: Sequence[Callable] = (
        jnp.tanh, jnp.exp, jnp.abs, jax.nn.gelu, jax.nn.silu, jnp.sqrt, jnp.sin, jnp.log1p,
        lambda v: jnp.maximum(v, 0.0), lambda v: v.astype(jnp.bfloat16).astype(jnp.float32),
    )  # fmt: skip
    two: Sequence[Callable] = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.divide)
    steps = [(draw.pick(*one), draw.pick(*two)) for _ in range(draw.pick(1, 1, 2, 3, 5, 8, 12))]
    # An optimizer's update reads and writes several arrays of one shape in one loop.
    is_kept = [draw.pick(False, False, True) for _ in steps]

    def chain(x: jax.Array, *others: jax.Array) -> list[jax.Array]:
        kept = []
        for place, (unary, binary) in enumerate(steps):
            x = binary(unary(x), others[place % len(others)])
            kept += [x] if is_kept[place] else []
        return [*kept, x]

    count = draw.pick(1, 2, 3, 5)
    shapes = [draw.pick((rows, width), (rows, width), (width,), (rows, 1)) for _ in range(count)]
    return chain, (draw.floats(rows, width), *(draw.floats(*s) for s in shapes))


def reduction(draw: Draw) -> Built:
    """Draws a reduction over some axes, or an argmax with a cumulative sum."""
    x = draw.floats(draw.size(4, 1024), draw.size(4, 512), draw.pick(1, 2, 4, 8))
    axes = draw.pick((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
    how: Callable = draw.pick(
        jnp.sum, jnp.max, jnp.mean, jnp.var, jax.nn.logsumexp, lambda x, axis: jnp.sum(x * x, axis)
    )
    if draw.pick(True, True, True, False):
        return lambda x: how(x, axis=axes), (x,)
    return lambda x: (jnp.argmax(x, axis=axes[0]), jnp.cumsum(x, axis=axes[0])), (x,)


def gather(draw: Draw) -> Built:
    """Draws a lookup of rows, their scatter, the largest values, or a sort."""
    table, width, count = draw.size(16, 8192), draw.size(4, 512), draw.size(8, 4096)
    draw.limit(count, width)
    x, places = draw.floats(table, width), draw.below(table, count)
    if draw.pick(True, False):
        return lambda x, i: x[i] * 2.0, (x, places)
    if draw.pick(True, False):
        return lambda x, i, y: x.at[i].add(y), (x, places, draw.floats(count, width))
    if draw.pick(True, False):
        return lambda x: jax.lax.top_k(x, min(4, width)), (x,)
    if draw.pick(True, False):
        return lambda x: jnp.argsort(x, axis=0), (x[:, 0],)
    return lambda x: jnp.sort(x, axis=0), (x[:1024, :64],)


def random(draw: Draw) -> Built:
    """Draws random numbers, or dropout."""
    shape = draw.size(4, 2048), draw.size(8, 512)
    draw.limit(*shape)
    make = draw.pick(jax.random.normal, jax.random.uniform)
    if draw.pick(True, False):
        return lambda key: make(key, shape), (jax.random.key(0),)

    def drop(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, shape), x / 0.9, 0.0)

    return drop, (jax.random.key(0), draw.floats(*shape))
