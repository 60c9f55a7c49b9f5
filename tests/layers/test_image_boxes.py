"""Boxes: against closed forms, loops in NumPy, finite differences and frozen results."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers import boxes

# Compiled once for each shape: operation by operation, most of the time would go to compiling.
iou, encode, decode, clip = (
    jax.jit(f) for f in (boxes.iou, boxes.encode, boxes.decode, boxes.clip)
)
nms = jax.jit(boxes.nms, static_argnames="limit")
match = jax.jit(boxes.match, static_argnames="best")
roi_align = jax.jit(boxes.roi_align, static_argnames=("size", "sampling", "aligned"))
roi_pool = jax.jit(boxes.roi_pool, static_argnames="size")
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "detection_boxes.npz"


@functools.cache
def frozen(group: str) -> dict[str, np.ndarray]:
    """Returns the members of one case of torchvision's results (tests/golden/make_detection.py)."""
    with np.load(GOLDEN) as cases:
        names = [name for name in cases if name.startswith(f"{group}/")]
        return {name.removeprefix(f"{group}/"): cases[name] for name in names}


def scene(rng: np.random.Generator, count: int, side: float = 100) -> np.ndarray:
    """Returns boxes (count, 4) in groups that overlap."""
    centres = np.repeat(rng.uniform(0, side, (-(-count // 6), 2)), 6, 0)[:count]
    centres = centres + rng.normal(0, side / 30, centres.shape)
    sides = rng.uniform(side / 20, side / 3, (count, 2))
    return np.concatenate([centres - sides / 2, centres + sides / 2], 1).astype(np.float32)


def pair_iou(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the IoU of two boxes by the definition, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    across = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    down = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return across * down / (areas - across * down) if areas > 0 else 0.0


def greedy(candidates, scores, threshold, limit, labels=None) -> list[int]:
    """Returns what greedy suppression leaves, box by box, padded with -1."""
    taken: list[int] = []
    for i in np.argsort(-scores, kind="stable"):
        if scores[i] == -np.inf:
            continue
        rivals = [j for j in taken if labels is None or labels[i] == labels[j]]
        if all(pair_iou(candidates[i], candidates[j]) <= threshold for j in rivals):
            taken.append(int(i))
    return (taken + [-1] * limit)[:limit]


@pytest.mark.parametrize("count,limit", [(1, 1), (40, 10), (40, 40), (90, 120)])
@pytest.mark.parametrize("classes", [None, 3])
def test_suppression_is_the_greedy_one(count, limit, classes, seed):
    """In every padding, with labels and without, with absent boxes and equal scores."""
    rng = np.random.default_rng(seed)
    candidates = scene(rng, count)
    scores = np.round(rng.normal(size=count), 1).astype(np.float32)
    scores[rng.random(count) < 0.1] = -np.inf
    labels = None if classes is None else rng.integers(0, classes, count)
    expected = greedy(candidates, scores, 0.4, limit, labels)
    result = nms(candidates, scores, 0.4, limit, labels)
    assert result.dtype == jnp.int32
    assert result.tolist() == expected


def test_suppression_in_a_batch_and_far_from_the_origin(seed):
    """A label is no offset: boxes at 1e6 pixels keep their quarter pixels."""
    rng = np.random.default_rng(seed)
    candidates = np.round(np.stack([scene(rng, 60), scene(rng, 60) + 1e6]) * 4) / 4
    scores, labels = rng.normal(size=(2, 60)), rng.integers(0, 4000, (2, 60)) % 3 * 1000
    result = jax.jit(jax.vmap(lambda b, s, c: nms(b, s, 0.5, 30, c)))(
        candidates.astype(np.float32), scores.astype(np.float32), labels
    )
    for i in range(2):
        assert result[i].tolist() == greedy(candidates[i], scores[i], 0.5, 30, labels[i])


# ---- results of torchvision


def test_iou_codes_and_clipping_equal_torchvision():
    case = frozen("iou")
    np.testing.assert_allclose(iou(case["a"], case["b"]), case["result"], atol=1e-6)
    case, weights = frozen("codes"), tuple(frozen("codes")["weights"].tolist())
    encoded = encode(case["boxes"], case["anchors"], weights)
    np.testing.assert_allclose(encoded, case["encoded"], rtol=1e-5, atol=1e-5)
    decoded = decode(case["deltas"], case["anchors"], weights)
    np.testing.assert_allclose(decoded, case["decoded"], rtol=1e-5, atol=1e-4)
    case = frozen("clip")
    np.testing.assert_array_equal(clip(case["boxes"], (60, 90)), case["result"])
    np.testing.assert_array_equal(clip(case["boxes"], case["size"]), case["result"])


@pytest.mark.parametrize("level", range(3))
def test_anchors_equal_torchvision(level):
    case = frozen(f"anchors{level}")
    shape = (int(case["shape"][0]), int(case["shape"][1]))
    result = boxes.anchors(shape, case["stride"].tolist(), case["sizes"], case["ratios"])
    np.testing.assert_array_equal(result, case["result"])


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("labels", ["plain", "by_label"])
def test_suppression_equals_torchvision(number, labels):
    case = frozen(f"nms{number}")
    of_boxes = case["labels"] if labels == "by_label" else None
    expected = case[labels].tolist()
    result = nms(
        case["boxes"], case["scores"], float(case["threshold"]), len(case["boxes"]), of_boxes
    )
    assert result.tolist() == expected + [-1] * (len(case["boxes"]) - len(expected))


POOLS = {
    "align_aligned": lambda f, b, s: roi_align(f, b, 4, s, 2, True),
    "align_plain": lambda f, b, s: roi_align(f, b, 4, s, 2, False),
    "align_three": lambda f, b, s: roi_align(f, b, 3, s, 3, True),
    "pool": lambda f, b, s: roi_pool(f, b, 4, s),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_its_gradient_equal_torchvision(name):
    """Boxes inside, partly and entirely outside of the map, of no size and turned inside out."""
    case = frozen("roi")
    result, back = jax.vjp(
        lambda f: POOLS[name](f, case["boxes"], float(case["scale"])), jnp.array(case["features"])
    )
    np.testing.assert_allclose(result, case[name], atol=1e-5)
    (gradient,) = back(jnp.array(case[f"{name}_cotangent"]))
    np.testing.assert_allclose(gradient, case[f"{name}_gradient"], atol=1e-4)


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_matching_equals_torchvision(best, far):
    """Columns of -1, wherever they stand, change nothing but the numbers of the others."""
    case = frozen("match")
    overlaps = case["iou"] if far else case["iou"][:, :7]
    expected = case[f"{'far' if far else 'near'}_{'best' if best else 'plain'}"]
    result = match(overlaps, 0.5, 0.3, best)
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, expected)
    padded = np.full((len(overlaps), 2 * overlaps.shape[1] + 1), -1, np.float32)
    padded[:, 1::2] = overlaps
    expected = np.where(expected >= 0, 2 * expected + 1, expected)
    np.testing.assert_array_equal(match(padded, 0.5, 0.3, best), expected)


# ---- properties


def test_matching_without_true_boxes():
    for columns in (0, 3):
        result = match(np.full((5, columns), -1, np.float32), 0.7, 0.3, True)
        assert result.tolist() == [-1] * 5


def test_a_code_turns_its_anchor_into_its_box(seed):
    rng = np.random.default_rng(seed)
    targets, from_anchors = scene(rng, 50), scene(rng, 50)
    weights = (10.0, 10.0, 5.0, 5.0)
    decoded = decode(encode(targets, from_anchors, weights), from_anchors, weights)
    np.testing.assert_allclose(decoded, targets, atol=1e-3)


DEGENERATE = np.array(
    [[5, 5, 5, 9], [5, 5, 5, 5], [7, 3, 2, 1], [1e6, 1e6, 1e6, 1e6], [0, 0, 10, 10]], np.float32
)


def test_boxes_without_a_width_have_finite_codes_and_gradients():
    """As a true box, as an anchor and as both; the gradient of a masked loss is finite too."""
    pairs = [(a, b) for a in DEGENERATE for b in DEGENERATE]
    targets, from_anchors = (jnp.array(np.stack(x)) for x in zip(*pairs, strict=True))
    masked = jnp.ones(len(pairs)).at[0].set(0)[:, None]
    weights = (10.0, 10.0, 5.0, 5.0)

    def total(code, x, y):
        return (code(x, y, weights) * masked).sum()

    for code, first in ((encode, targets), (decode, targets * 0.1)):
        value, gradients = jax.value_and_grad(functools.partial(total, code), (0, 1))(
            first, from_anchors
        )
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in gradients)
    gradients = jax.grad(lambda x, y: iou(x, y).sum(), (0, 1))(targets, from_anchors)
    assert all(np.isfinite(g).all() for g in gradients)


def test_a_box_without_area_overlaps_nothing():
    overlaps = np.asarray(iou(DEGENERATE, DEGENERATE))
    assert overlaps.tolist() == np.diag([0.0, 0, 0, 0, 1]).tolist()
    scores = jnp.arange(5.0)
    assert nms(DEGENERATE, scores, 0.5, 5).tolist() == [4, 3, 2, 1, 0]


def test_what_is_not_a_number_is_not_a_box():
    candidates = np.array([[0, 0, 9, 9], [0, 0, np.nan, 9], [0, 0, 9, 9], [50, 50, 60, 60]])
    scores = np.array([1, 2, np.nan, -np.inf])
    result = nms(candidates.astype(np.float32), scores.astype(np.float32), 0.5, 4)
    assert result.tolist() == [1, 0, -1, -1]
    pooled = roi_align(jnp.ones((4, 4, 1)), jnp.full((1, 4), jnp.nan), 2, 1.0, 2, True)
    assert pooled.tolist() == [[[[0], [0]], [[0], [0]]]]


def test_suppression_stands_in_the_longest_chain():
    """Each box overlaps its neighbours only, so every second one stays: as many sweeps as boxes."""
    start = np.arange(90, dtype=np.float32) * 4
    chain = np.stack([start, start * 0, start + 10, start * 0 + 10], 1)
    assert pair_iou(chain[0], chain[1]) > 0.4 > pair_iou(chain[0], chain[2])
    result = nms(chain, -start, 0.4, 90)
    assert result.tolist() == list(range(0, 90, 2)) + [-1] * 45


def test_an_iou_of_the_threshold_does_not_suppress():
    pair = np.array([[0, 0, 10, 1], [0, 0, 3, 1]], np.float32)
    for threshold, left in ((0.3, [0, 1]), (0.29, [0, -1])):
        assert nms(pair, np.array([1, 0], np.float32), threshold, 2).tolist() == left


def test_low_precision_is_not_seen_inside():
    """Results are those of the same numbers as float32: an IoU in bfloat16 is 0.4 % off."""
    rng = np.random.default_rng(0)
    low = jnp.asarray(scene(rng, 40), jnp.bfloat16)
    same = low.astype(jnp.float32)
    assert iou(low, low).dtype == jnp.float32
    np.testing.assert_array_equal(iou(low, low), iou(same, same))
    weights = (1.0, 1.0, 1.0, 1.0)
    np.testing.assert_array_equal(
        encode(low, low[::-1], weights), encode(same, same[::-1], weights)
    )
    features = jnp.asarray(rng.normal(size=(9, 13, 2)), jnp.bfloat16)
    for pool in POOLS.values():
        result = pool(features, low, 1 / 8)
        assert result.dtype == jnp.bfloat16
        exact = pool(features.astype(jnp.float32), low, 1 / 8)
        np.testing.assert_array_equal(result, exact.astype(jnp.bfloat16))


def test_gradients_with_respect_to_boxes_are_differences(seed):
    """IoU, codes and RoIAlign at points without a kink."""
    rng = np.random.default_rng(seed)
    first, second = jnp.array(scene(rng, 6)), jnp.array(scene(rng, 6))
    features = jnp.array(rng.normal(size=(9, 13, 2)), jnp.float32)
    weights = (10.0, 10.0, 5.0, 5.0)
    functions = [
        lambda b: iou(b, second),
        lambda b: encode(b, second, weights),
        lambda b: encode(second, b, weights),
        lambda b: decode(first * 0.01, b, weights) * 0.01,
        lambda b: roi_align(features, b, 3, 1 / 8, 2, True),
    ]
    direction = jnp.array(rng.normal(size=first.shape), jnp.float32)
    step = 2e-3
    for compute in functions:
        compute = jax.jit(compute)
        _, slope = jax.jvp(compute, (first,), (direction,))
        difference = compute(first + step * direction) - compute(first - step * direction)
        error = np.abs(np.asarray(slope - difference / (2 * step)))
        assert np.median(error) < 1e-3
        assert (error > 0.05).mean() < 0.05  # a kink lies between some of the two points


@pytest.mark.parametrize("size,sampling", [(0, 2), (7, 0), (7, -1)])
def test_pooling_refuses_what_has_no_bins(size, sampling):
    features, box = jnp.ones((4, 4, 1)), jnp.ones((1, 4))
    with pytest.raises(ValueError, match=f"size={size} and sampling={sampling} must be at least 1"):
        roi_align(features, box, size, 1.0, sampling, True)
    if size < 1:
        with pytest.raises(ValueError, match="size=0 must be at least 1"):
            roi_pool(features, box, size, 1.0)


@pytest.mark.parametrize("aligned", [True, False])
def test_boxes_of_several_maps_read_each_its_own(aligned):
    """The same as `roi_align` of that map, outside of it too, with the same gradients."""
    rng = np.random.default_rng(7)
    scales = (1 / 4, 1 / 8, 1 / 16)
    levels = [jnp.float32(rng.standard_normal((int(64 * s), int(96 * s), 5))) for s in scales]
    candidates = jnp.array(scene(rng, 30, 110) - 10)
    level = jnp.int32(rng.integers(0, 3, 30))
    weights = jnp.float32(rng.standard_normal((30, 4, 4, 5)))

    def gathered(levels):
        pooled = boxes.roi_align_levels(levels, candidates, level, 4, scales, 2, aligned)
        return (pooled * weights).sum(), pooled

    def one_by_one(levels):
        maps = [
            boxes.roi_align(x, candidates, 4, scale, 2, aligned)
            for x, scale in zip(levels, scales, strict=True)
        ]
        pooled = jnp.stack(maps)[level, jnp.arange(30)]
        return (pooled * weights).sum(), pooled

    (_, ours), gradients = jax.jit(jax.value_and_grad(gathered, has_aux=True))(levels)
    (_, theirs), expected = jax.jit(jax.value_and_grad(one_by_one, has_aux=True))(levels)
    assert np.asarray(theirs == 0).any((1, 2, 3)).any()  # some points are outside
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
