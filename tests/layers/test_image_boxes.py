"""Boxes: against closed forms, loops in NumPy, finite differences and frozen results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers import boxes


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
    result = boxes.nms(candidates, scores, 0.4, limit, labels)
    assert result.dtype == jnp.int32
    assert result.tolist() == expected


def test_suppression_in_a_batch_and_far_from_the_origin(seed):
    """A label is no offset: boxes at 1e6 pixels keep their quarter pixels."""
    rng = np.random.default_rng(seed)
    candidates = np.round(np.stack([scene(rng, 60), scene(rng, 60) + 1e6]) * 4) / 4
    scores, labels = rng.normal(size=(2, 60)), rng.integers(0, 4000, (2, 60)) % 3 * 1000
    result = jax.jit(jax.vmap(lambda b, s, c: boxes.nms(b, s, 0.5, 30, c)))(
        candidates.astype(np.float32), scores.astype(np.float32), labels
    )
    for i in range(2):
        assert result[i].tolist() == greedy(candidates[i], scores[i], 0.5, 30, labels[i])
