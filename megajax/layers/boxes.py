"""Boxes of a detector: overlap, codes, anchors, suppression, pooling and matching.

A two-stage detector (Faster R-CNN, arXiv 1506.01497) uses these functions between its network and
its loss. Shapes are static: lists of unknown length are padded, and an index of -1 says "none".
All arithmetic is in float32, because IoU in bfloat16 has an error of 0.4 %, which moves boxes over
a threshold. Conventions and results are those of torchvision 0.29 unless a docstring says more.
A box is (x0, y0, x1, y1) in pixels, the second corner exclusive. For a batch, use `jax.vmap`.

Legend: N M boxes, A anchors (rows), G true boxes (columns), H W rows and columns of a feature map,
C channels, K anchors a cell, P bins a side of a pooled box.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# The longest side that a code may give, as a factor of its anchor's (torchvision's BoxCoder).
LARGEST_LOG = math.log(1000 / 16)

# The shortest side that codes see, in pixels (chosen: float32 coordinates above 16 have coarser
# steps, so that a box that has a width there keeps it).
SHORTEST = 1e-6


def iou(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the intersection over the union of all pairs, float32 (N, M).

    A box without area, or with a coordinate that is not a number, overlaps nothing.

    Args: a: (N, 4). b: (M, 4).
    """
    a_N14, b_1M4 = _float32(a)[:, None], _float32(b)[None]
    sides_NM2 = jnp.minimum(a_N14[..., 2:], b_1M4[..., 2:])
    sides_NM2 = jnp.maximum(sides_NM2 - jnp.maximum(a_N14[..., :2], b_1M4[..., :2]), 0)
    overlap_NM = sides_NM2[..., 0] * sides_NM2[..., 1]
    union_NM = _area(a_N14) + _area(b_1M4) - overlap_NM
    # The inner select keeps 0 / 0 out of the gradient.
    some_NM = union_NM > 0
    return jnp.where(some_NM, overlap_NM / jnp.where(some_NM, union_NM, 1), 0)


def encode(boxes: jax.Array, anchors: jax.Array, weights: Sequence[float]) -> jax.Array:
    """Returns the codes that turn each anchor into its box, float32 (..., 4).

    A code is (dx, dy, dw, dh): the shift of the centre in sides of the anchor, and the logarithms
    of the ratios of the sides, each times its weight. Sides below `SHORTEST` count as `SHORTEST`:
    codes and their gradients are finite for boxes and anchors without a width.

    Args: boxes, anchors: (..., 4). weights: of dx, dy, dw, dh.
    """
    centre, sides = _centre(_float32(boxes))
    anchor_centre, anchor_sides = _centre(_float32(anchors))
    shift = (centre - anchor_centre) / anchor_sides
    codes = jnp.concatenate([shift, jnp.log(sides / anchor_sides)], -1)
    return codes * _weights(weights, codes)


def decode(deltas: jax.Array, anchors: jax.Array, weights: Sequence[float]) -> jax.Array:
    """Returns the boxes that codes make of anchors, float32 (..., 4); the inverse of `encode`.

    A side becomes at most 1000 / 16 times its anchor's. Anchors without a width are treated as by
    `encode`.

    Args: deltas, anchors: (..., 4). weights: of dx, dy, dw, dh.
    """
    codes = _float32(deltas)
    codes = codes / _weights(weights, codes)
    anchor_centre, anchor_sides = _centre(_float32(anchors))
    centre = codes[..., :2] * anchor_sides + anchor_centre
    half = 0.5 * jnp.exp(jnp.minimum(codes[..., 2:], LARGEST_LOG)) * anchor_sides
    return jnp.concatenate([centre - half, centre + half], -1)


def clip(boxes: jax.Array, size: Sequence[int] | jax.Array) -> jax.Array:
    """Returns boxes cut at the borders of an image, float32 (..., 4).

    Args: boxes: (..., 4). size: (height, width), numbers or an array.
    """
    boxes = _float32(boxes)
    limits_4 = jnp.stack([jnp.asarray(size[i], jnp.float32) for i in (1, 0, 1, 0)])
    return jnp.clip(boxes, 0, limits_4.reshape((1,) * (boxes.ndim - 1) + (4,)))


def anchors(
    shape: tuple[int, int],
    stride: int | Sequence[int],
    sizes: Sequence[float],
    ratios: Sequence[float],
) -> jax.Array:
    """Returns the anchors of a feature map, float32 (H W K, 4), with K = len(sizes) len(ratios).

    The anchors of a cell are centred on its first pixel; their corners are rounded, half to even.
    Cells are ordered by row; of a cell's anchors, the sizes of the first ratio come first.

    Args: shape: (H, W). stride: pixels a cell, one number or (down, across). sizes: square roots of
        areas, pixels. ratios: heights over widths.
    """
    down, across = np.broadcast_to(np.asarray(stride), (2,))
    # float32 throughout: float64 would round other corners than torchvision does.
    tall_R1 = np.sqrt(np.asarray(ratios, np.float32))[:, None]
    sizes_1S = np.asarray(sizes, np.float32)[None]
    heights_K = (tall_R1 * sizes_1S).reshape(-1)
    widths_K = ((np.float32(1) / tall_R1) * sizes_1S).reshape(-1)
    cell_K4 = np.stack([-widths_K, -heights_K, widths_K, heights_K], 1) / np.float32(2)
    y_H, x_W = np.arange(shape[0]) * down, np.arange(shape[1]) * across
    y_HW, x_HW = np.meshgrid(y_H, x_W, indexing="ij")
    shift_HW4 = np.stack([x_HW, y_HW, x_HW, y_HW], -1).astype(np.float32)
    return jnp.asarray((shift_HW4[:, :, None] + np.round(cell_K4)[None, None]).reshape(-1, 4))


def nms(
    boxes: jax.Array,
    scores: jax.Array,
    threshold: float | jax.Array,
    limit: int,
    labels: jax.Array | None = None,
) -> jax.Array:
    """Returns the boxes that greedy non-maximum suppression leaves: indices, int32 (limit,).

    In the order of scores, a box is taken unless a box that was taken before it, of the same label,
    overlaps it with an IoU greater than the threshold. Equal scores are ordered by index. The
    indices of at most `limit` boxes, best first, are followed by -1.

    The result is exact. All pairs are compared at once, and the rule is then repeated on all boxes
    until nothing changes; the only set of boxes that the rule does not change is the greedy one.
    Proposals need 1 to 60 sweeps of this kind. The alternative is a loop of `limit` steps, each of
    which takes the best box that is left. In milliseconds on two busy CPU cores (2026-11-29), the
    sweeps took 1.2 for 16 images of 128 -> 24 boxes, 1.4 for 1000 -> 300 and 5.5 for 2000 -> 1000,
    the loop 0.2, 7.1 and 31; for 4 images of 2000 -> 1000 boxes they took 270 and 64. On a GPU,
    where every step of a loop costs several launches, the sweeps should win; not measured.

    Args: boxes: (N, 4). scores: (N,); a box with a score of -inf or NaN is not there. threshold: of
        IoU. limit: static. labels: int (N,); without them all boxes have one label.
    """
    total = boxes.shape[0]
    scores_N = _float32(scores)
    order_N = jnp.argsort(scores_N, stable=True, descending=True).astype(jnp.int32)
    there_N = scores_N[order_N] > -jnp.inf  # False for NaN
    boxes_N4 = boxes[order_N]
    # suppresses[i, j]: box i, if it is taken, excludes the later box j.
    suppresses_NN = iou(boxes_N4, boxes_N4) > threshold
    suppresses_NN &= jnp.arange(total)[:, None] < jnp.arange(total)[None]
    if labels is not None:
        suppresses_NN &= labels[order_N][:, None] == labels[order_N][None]

    def sweep(taken_N: jax.Array) -> jax.Array:
        return there_N & ~(taken_N[:, None] & suppresses_NN).any(0)

    taken_N = sweep(there_N)
    taken_N, _ = jax.lax.while_loop(
        lambda pair: (pair[0] != pair[1]).any(),
        lambda pair: (sweep(pair[0]), pair[0]),
        (sweep(taken_N), taken_N),
    )
    place_N = jnp.sort(jnp.where(taken_N, jnp.arange(total, dtype=jnp.int32), total))[:limit]
    picked_N = jnp.where(place_N < total, order_N[jnp.minimum(place_N, total - 1)], -1)
    return jnp.pad(picked_N, (0, limit - picked_N.shape[0]), constant_values=-1)


def roi_align(
    features: jax.Array,
    boxes: jax.Array,
    size: int,
    scale: float,
    sampling: int,
    aligned: bool,
) -> jax.Array:
    """Returns the features of boxes, read between cells: (N, size, size, C) in features' dtype.

    RoIAlign (Mask R-CNN, arXiv 1703.06870 section 3). A box is cut into size x size bins; a bin is
    the mean of sampling x sampling points; a point is interpolated from its four cells. A point
    more than one cell outside of the map is 0, one less far outside takes the border's value. The
    interpolation is a matrix a side, and the result two products with them: there is no gather,
    and the gradient is exact.

    Args: features: (H, W, C). boxes: (N, 4), pixels. size: bins a side. scale: cells a pixel.
        sampling: points a side of a bin. aligned: cells have their values at their centres;
        otherwise at their first corners, and boxes are at least one cell long.
    Raises: ValueError if size or sampling is less than 1.
    """
    if size < 1 or sampling < 1:
        raise ValueError(f"size={size} and sampling={sampling} must be at least 1; nearest: 1")
    height, width, _ = features.shape
    boxes_N4 = _float32(boxes) * scale - (0.5 if aligned else 0.0)
    x_NPW = _interpolation(boxes_N4[:, 0], boxes_N4[:, 2], width, size, sampling, aligned)
    y_NPH = _interpolation(boxes_N4[:, 1], boxes_N4[:, 3], height, size, sampling, aligned)
    exact = jax.lax.Precision.HIGHEST
    rows_NPWC = jnp.einsum("nyh,hwc->nywc", y_NPH, _float32(features), precision=exact)
    # A product and a sum, and no batched product of small matrices: with gradients it takes less
    # than half the time on a CPU.
    pooled = (x_NPW[:, None, :, :, None] * rows_NPWC[:, :, None]).sum(3)
    return pooled.astype(features.dtype)


def roi_align_levels(
    levels: Sequence[jax.Array],
    boxes: jax.Array,
    level: jax.Array,
    size: int,
    scales: Sequence[float],
    sampling: int,
    aligned: bool,
) -> jax.Array:
    """Returns what `roi_align` does of the map that each box reads, (N, size, size, C).

    Cells are gathered: the work does not grow with the maps, as that of products does, but a sum of
    gradients over cells has no fixed order on a GPU.

    Args: levels: maps (H, W, C) of different sizes. boxes: (N, 4), pixels. level: int (N,), which
        map. scales: of each map. The others: as of `roi_align`.
    """
    shapes = [x.shape[:2] for x in levels]
    first = np.cumsum([0, *(h * w for h, w in shapes[:-1])])
    height_N, width_N, first_N = (jnp.array(x)[level] for x in (*zip(*shapes, strict=True), first))
    cells_TC = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in levels])
    scale_N1 = jnp.array(scales, jnp.float32)[level][:, None]
    boxes_N4 = _float32(boxes) * scale_N1 - (0.5 if aligned else 0.0)

    def corners(side: int, cells_N: jax.Array) -> list[list[tuple[jax.Array, jax.Array]]]:
        """Returns, of each of a bin's points on a side, both cells and their weights (N, size)."""
        point_NPS, inside_NPS = _points(
            boxes_N4[:, side], boxes_N4[:, side + 2], cells_N, size, sampling, aligned
        )
        low_NPS = jnp.floor(point_NPS)
        part_NPS = point_NPS - low_NPS
        low_NPS = low_NPS.astype(jnp.int32)
        high_NPS = jnp.minimum(low_NPS + 1, cells_N[:, None, None] - 1)
        pairs = ((low_NPS, 1 - part_NPS), (high_NPS, part_NPS))
        weighted = [(at, jnp.where(inside_NPS, part, 0) / sampling) for at, part in pairs]
        return [[(at[..., s], part[..., s]) for at, part in weighted] for s in range(sampling)]

    total = jnp.zeros((), jnp.float32)
    down, across = corners(1, height_N), corners(0, width_N)
    for y_NP, down_NP in itertools.chain.from_iterable(down):
        for x_NP, across_NP in itertools.chain.from_iterable(across):
            cell_NPP = y_NP[:, :, None] * width_N[:, None, None] + x_NP[:, None]
            weight_NPP = down_NP[:, :, None] * across_NP[:, None]
            cells_NPPC = cells_TC[cell_NPP + first_N[:, None, None]]
            total = total + weight_NPP[..., None] * _float32(cells_NPPC)
    return total.astype(levels[0].dtype)


def roi_pool(features: jax.Array, boxes: jax.Array, size: int, scale: float) -> jax.Array:
    """Returns the largest features in size x size bins of boxes: (N, size, size, C).

    RoIPool (Fast R-CNN, arXiv 1504.08083 section 2.1). Corners are rounded to cells, half away from
    zero, and the last cell is part of the box. Bins share cells if the cells do not divide evenly.
    A bin outside of the map is 0. Cells that are equal share the gradient of their bin.

    Args: features: (H, W, C). boxes: (N, 4), pixels. size: bins a side. scale: cells a pixel.
    """
    if size < 1:
        raise ValueError(f"size={size} must be at least 1; nearest: 1")
    height, width, _ = features.shape
    scaled_N4 = _float32(boxes) * scale
    cells_N4 = jnp.sign(scaled_N4) * jnp.floor(jnp.abs(scaled_N4) + 0.5)
    x_NPW = _bins(cells_N4[:, 0], cells_N4[:, 2], width, size)
    y_NPH = _bins(cells_N4[:, 1], cells_N4[:, 3], height, size)
    least = jnp.array(-jnp.inf, features.dtype)
    # The gradient of a maximum looks for equal cells. Without the barrier, XLA may compute the
    # cells twice, with other roundings, and none is equal: 0 / 0.
    features = jax.lax.optimization_barrier(features)
    in_rows = y_NPH[:, :, :, None, None]
    rows_NPWC = jnp.where(in_rows, features[None, None], least).max(2)
    in_bins = x_NPW[:, None, :, :, None]
    pooled_NPPC = jnp.where(in_bins, rows_NPWC[:, :, None], least).max(3)
    some_NPP = y_NPH.any(2)[:, :, None] & x_NPW.any(2)[:, None]
    return jnp.where(some_NPP[..., None], pooled_NPPC, 0)


def match(iou: jax.Array, high: float, low: float, best: bool) -> jax.Array:
    """Returns the true box of each anchor, int32 (A,): a column, -1 for none, or -2 for neither.

    An anchor gets the column of its largest IoU if that is at least `high`; -1 if it is below
    `low`; -2 between. With `best`, a row that has the largest IoU of some column gets the column of
    its own largest IoU, however small. A true box that overlaps no anchor is thereby matched by
    all rows without an overlap, as in torchvision: make the column of a box without area padding.

    Args: iou: (A, G); a column of -1 is padding. high, low: of IoU, low <= high.
    """
    if iou.shape[1] == 0:
        return jnp.full(iou.shape[0], -1, jnp.int32)
    iou_AG = _float32(iou)
    column_A = jnp.argmax(iou_AG, 1).astype(jnp.int32)
    largest_A = iou_AG.max(1)
    matched_A = jnp.where(largest_A < high, jnp.where(largest_A < low, -1, -2), column_A)
    if not best:
        return matched_A
    top_1G = iou_AG.max(0, keepdims=True)
    return jnp.where(((iou_AG == top_1G) & (top_1G >= 0)).any(1), column_A, matched_A)


def _float32(x: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)


def _weights(weights: Sequence[float], codes: jax.Array) -> jax.Array:
    return jnp.asarray(weights, jnp.float32).reshape((1,) * (codes.ndim - 1) + (4,))


def _area(boxes: jax.Array) -> jax.Array:
    sides = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return sides[..., 0] * sides[..., 1]


def _centre(boxes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns centres and sides (..., 2); sides below SHORTEST are SHORTEST, without a gradient."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * sides, jnp.where(sides > SHORTEST, sides, SHORTEST)


def _interpolation(
    start_N: jax.Array, stop_N: jax.Array, cells: int, size: int, sampling: int, aligned: bool
) -> jax.Array:
    """Returns (N, size, cells): how much of each cell of one side is in each bin's mean."""
    point_NPS, inside_NPS = _points(
        start_N, stop_N, jnp.full(start_N.shape, cells), size, sampling, aligned
    )
    cell_W = jnp.arange(cells, dtype=jnp.float32)
    part_NPSW = jnp.maximum(1 - jnp.abs(point_NPS[..., None] - cell_W[None, None, None]), 0)
    return jnp.where(inside_NPS[..., None], part_NPSW, 0).mean(2)


def _points(
    start_N: jax.Array,
    stop_N: jax.Array,
    cells_N: jax.Array,
    size: int,
    sampling: int,
    aligned: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns (N, size, sampling): where the points of each bin are on one side of a map, in cells,
    and which of them are not outside of the map. cells_N: of that side."""
    length_N = stop_N - start_N if aligned else jnp.maximum(stop_N - start_N, 1)
    # Torchvision's order of operations: the last bits decide which points are outside.
    step_N11 = (length_N / size)[:, None, None]
    offset_S = (jnp.arange(sampling, dtype=jnp.float32) + 0.5)[None, None]
    bin_P = jnp.arange(size, dtype=jnp.float32)[None, :, None]
    point_NPS = start_N[:, None, None] + bin_P * step_N11 + offset_S * step_N11 / sampling
    cells_N11 = _float32(cells_N)[:, None, None]
    inside_NPS = (point_NPS >= -1) & (point_NPS <= cells_N11)
    return jnp.clip(jnp.where(inside_NPS, point_NPS, 0), 0, cells_N11 - 1), inside_NPS


def _bins(first_N: jax.Array, last_N: jax.Array, cells: int, size: int) -> jax.Array:
    """Returns bool (N, size, cells): which cells of one side are in which bin."""
    step_N1 = (jnp.maximum(last_N - first_N + 1, 1) / size)[:, None]
    bin_1P = jnp.arange(size, dtype=jnp.float32)[None]
    start_NP1 = (jnp.floor(bin_1P * step_N1) + first_N[:, None])[..., None]
    stop_NP1 = (jnp.ceil((bin_1P + 1) * step_N1) + first_N[:, None])[..., None]
    cell_W = jnp.arange(cells, dtype=jnp.float32)[None, None]
    return (cell_W >= start_NP1) & (cell_W < stop_NP1)
