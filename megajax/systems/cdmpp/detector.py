"""The computation of a two-stage detector, to be timed (families.py).

The library has no detector. These are the operations of Faster R-CNN (arXiv 1506.01497) with a
feature pyramid (arXiv 1612.03144) and RoIAlign (arXiv 1703.06870), in that order: strided residual
convolutions, 1x1 laterals with upsampling, scores of anchors, the best boxes without their
overlaps, bilinear samples inside each box, and a dense head.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from megajax.systems.cdmpp.draw import Draw

STRIDES = (4, 8, 16)  # of the pyramid's levels
BOX = 4
CELLS = 7  # samples on each side of a box
OVERLAP = 0.7  # intersection over union from which the worse of two boxes is dropped


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a detector.

    side: pixels, a multiple of the last stride. depth: residual blocks of a level. boxes: kept
    proposals of an image. classes: with the background.
    """

    rows: int
    side: int
    width: int
    depth: int
    anchors: int
    boxes: int
    hidden: int
    classes: int

    @classmethod
    def of(cls, draw: Draw) -> "Sizes":
        """Draws sizes."""
        side = STRIDES[-1] * draw.count(3, 4, 6)
        anchors = draw.pick(1, 3)
        most = anchors * (side // STRIDES[-1]) ** 2  # the coarsest level alone has as many
        return cls(
            rows=draw.pick(1, 2),
            side=side,
            width=draw.size(8, 32, 4),
            depth=draw.pick(1, 2),
            anchors=anchors,
            boxes=min(draw.pick(8, 16, 32), most),
            hidden=draw.size(32, 256, 8),
            classes=draw.pick(2, 8, 21),
        )


def drawn(draw: Draw) -> tuple[Callable, tuple]:
    """Draws a detector's loss, or its gradient by the weights, with the arguments."""
    sizes = Sizes.of(draw)
    args = weights(draw, sizes), draw.floats(sizes.rows, sizes.side, sizes.side, 3)
    mine = functools.partial(loss, sizes=sizes)
    return (mine if draw.pick(False, True) else jax.grad(mine)), args


def weights(draw: Draw, sizes: Sizes) -> dict[str, jax.Array]:
    """Draws a detector's weights. Convolutions are (height, width, inner, outer)."""

    def matrix(*shape: int) -> jax.Array:
        return draw.floats(*shape) * float(np.prod(shape[:-1])) ** -0.5

    width, found = sizes.width, {"stem": matrix(3, 3, 3, sizes.width)}
    for level in range(len(STRIDES)):
        found[f"down{level}"] = matrix(3, 3, width, width)
        found[f"lateral{level}"] = matrix(1, 1, width, width)
        for block in range(sizes.depth):
            found[f"first{level}.{block}"] = matrix(3, 3, width, width)
            found[f"second{level}.{block}"] = matrix(3, 3, width, width)
            found[f"scale{level}.{block}"] = draw.floats(2, width)
    found["rpn"] = matrix(3, 3, width, width)
    found["rpn_out"] = matrix(1, 1, width, sizes.anchors * (1 + BOX))
    found["dense"] = matrix(CELLS * CELLS * width, sizes.hidden)
    found["head"] = matrix(sizes.hidden, sizes.classes * (1 + BOX))
    return found


def loss(weights: dict[str, jax.Array], images: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns a scalar of the head's and the anchors' outputs. images: (rows, side, side, 3)."""
    levels = _pyramid(weights, images, sizes)
    scores, boxes = _proposals(weights, levels, sizes)
    kept, best = jax.vmap(lambda s, b: _without_overlaps(s, b, sizes.boxes))(
        jax.lax.stop_gradient(scores), jax.lax.stop_gradient(boxes)
    )
    inside = jax.vmap(_samples)(levels[0], best / STRIDES[0])
    hidden = jax.nn.relu(inside.reshape(sizes.rows, sizes.boxes, -1) @ weights["dense"])
    out = hidden @ weights["head"]
    named, moved = out[..., : sizes.classes], out[..., sizes.classes :]
    apart = -jax.nn.log_softmax(named)[..., 0] + jnp.abs(moved).mean(-1)
    return (apart * kept).mean() + jax.nn.softplus(scores).mean() + jnp.tanh(boxes / 32).mean()


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=order
    )


def _pyramid(weights: dict[str, jax.Array], x: jax.Array, sizes: Sizes) -> list[jax.Array]:
    """Returns each level's features: (rows, side / stride, side / stride, width)."""
    x, levels = jax.nn.relu(_convolve(x, weights["stem"], 2)), []
    for level in range(len(STRIDES)):
        x = _convolve(x, weights[f"down{level}"], 2)
        for block in range(sizes.depth):
            scale, shift = weights[f"scale{level}.{block}"]  # a batch norm of fixed statistics
            y = jax.nn.relu(_convolve(x, weights[f"first{level}.{block}"]) * scale + shift)
            x = jax.nn.relu(x + _convolve(y, weights[f"second{level}.{block}"]))
        levels.append(_convolve(x, weights[f"lateral{level}"]))
    for level in range(len(STRIDES) - 1)[::-1]:
        coarse = jnp.repeat(jnp.repeat(levels[level + 1], 2, 1), 2, 2)
        levels[level] = levels[level] + coarse
    return levels


def _proposals(
    weights: dict[str, jax.Array], levels: Sequence[jax.Array], sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """Returns (rows, anchors) scores and (rows, anchors, BOX) corners in pixels, of all levels."""
    scores, boxes = [], []
    for stride, x in zip(STRIDES, levels, strict=True):
        out = _convolve(jax.nn.relu(_convolve(x, weights["rpn"])), weights["rpn_out"])
        out = out.reshape(sizes.rows, -1, 1 + BOX)
        grid = (np.arange(sizes.side // stride) + 0.5) * stride
        places = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 1, 2)
        edges = 2.0 * stride * 2.0 ** np.arange(sizes.anchors)
        centres = jnp.asarray(np.repeat(places, sizes.anchors, 1).reshape(-1, 2), x.dtype)
        edge = jnp.asarray(np.tile(edges, len(places)), x.dtype)[:, None]
        middle = centres + edge * jnp.tanh(out[..., 1:3])
        half = 0.5 * edge * jnp.exp(jnp.clip(out[..., 3:], -1.0, 1.0))
        scores.append(out[..., 0])
        boxes.append(jnp.clip(jnp.concatenate([middle - half, middle + half], -1), 0, sizes.side))
    return jnp.concatenate(scores, 1), jnp.concatenate(boxes, 1)


def _without_overlaps(
    scores: jax.Array, boxes: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (count,) 1 where a box stays, and the (count, BOX) best boxes, the best first."""
    best = boxes[jax.lax.top_k(scores, count)[1]]
    low = jnp.maximum(best[:, None, :2], best[None, :, :2])
    high = jnp.minimum(best[:, None, 2:], best[None, :, 2:])
    common = jnp.prod(jnp.maximum(high - low, 0), -1)
    area = jnp.prod(best[:, 2:] - best[:, :2], -1)
    overlap = common / jnp.maximum(area[:, None] + area - common, 1e-3)
    worse = (overlap > OVERLAP) & (jnp.arange(count)[:, None] < jnp.arange(count))

    def drop(place: jax.Array, kept: jax.Array) -> jax.Array:
        return kept & ~(worse[place] & kept[place])

    return jax.lax.fori_loop(0, count, drop, jnp.ones(count, bool)).astype(boxes.dtype), best


def _samples(x: jax.Array, boxes: jax.Array) -> jax.Array:
    """Returns (boxes, CELLS, CELLS, width) bilinear samples of one image's features."""
    cells = (jnp.arange(CELLS, dtype=x.dtype) + 0.5) / CELLS
    places = boxes[:, None, :2] + (boxes[:, None, 2:] - boxes[:, None, :2]) * cells[:, None]
    places = jnp.clip(places, 0, x.shape[0] - 1.001)
    corner = places.astype(jnp.int32)  # (boxes, CELLS, 2): row, column
    part = places - corner
    found = jnp.zeros((len(boxes), CELLS, CELLS, x.shape[-1]), x.dtype)
    for row in (0, 1):
        for column in (0, 1):
            down = part[..., 0] if row else 1 - part[..., 0]
            right = part[..., 1] if column else 1 - part[..., 1]
            value = x[corner[:, :, None, 0] + row, corner[:, None, :, 1] + column]
            found += value * down[:, :, None, None] * right[:, None, :, None]
    return found
