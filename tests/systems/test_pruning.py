"""Masks against a ranking by brute force: Python loops over units, one list for all layers."""

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.systems.pruning import densities, matrix_shape, prune, sparsity_of

SHAPES = {"a": (40, 24), "b": (24, 56), "c": (33, 21)}  # of which c has ragged ends
TILE = 8


def draw(seed: int, shapes=SHAPES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {n: random.gamma(0.5, size=s).astype(np.float32) for n, s in shapes.items()}


# ---- the oracle


def rank(scores, units, fraction, gone=(), power=0.5):
    """Prunes units, [(layer, [elements])], until `fraction` of all elements is gone.

    power: a unit of n elements ranks by L2 / n^power.
    """
    total = sum(s.size for s in scores.values())
    gone = set(gone)

    def importance(unit):
        layer, elements = unit
        squares = sum(0.0 if (layer, e) in gone else float(scores[layer][e]) ** 2 for e in elements)
        return squares**0.5 / len(elements) ** power

    pruned, goal = [], fraction * total - len(gone)
    weight = 0
    for unit in sorted(units, key=importance):
        more = len([e for e in unit[1] if (unit[0], e) not in gone])
        if abs(weight + more - goal) >= abs(weight - goal) and more:
            break
        pruned.append(unit)
        weight += more
    return gone | {(layer, e) for layer, elements in pruned for e in elements}


def blocks(shape, columns, height, width):
    K = shape[0]
    for k in range(0, K, height):
        for start in range(0, len(columns), width):
            picked = columns[start : start + width]
            yield [(i, int(j)) for i in range(k, min(k + height, K)) for j in picked]


def everywhere(scores, height, width, gone=()):
    units = []
    for layer, s in scores.items():
        dead = {
            j for j in range(s.shape[1]) if all((layer, (i, j)) in gone for i in range(s.shape[0]))
        }
        columns = [j for j in range(s.shape[1]) if j not in dead]
        units += [(layer, e) for e in blocks(s.shape, columns, height or s.shape[0], width)]
    return units


def vectors(scores, sparsity):
    gone, marginal = set(), []
    total = sum(s.size for s in scores.values())
    for layer, s in scores.items():
        for unit in blocks(s.shape, range(s.shape[1]), 1, 16):
            order = sorted(unit, key=lambda e: s[e])
            marginal += [(j / len(unit), s[e], layer, e) for j, e in enumerate(order)]
    for _, _, layer, e in sorted(marginal)[: round(sparsity * total)]:
        gone.add((layer, e))
    return gone


def brute(scores, sparsity, pattern, chunk, unit_score):
    power = {"rms": 0.5, "paper": 1.0}[unit_score]
    if pattern in ("tw2d", "tew"):
        goal = sparsity + 0.05 if pattern == "tew" else sparsity
        columns = rank(scores, everywhere(scores, None, 1), 1 - (1 - goal) ** 0.5, power=power)
        gone = rank(scores, everywhere(scores, chunk, TILE, columns), goal, columns, power)
        if pattern == "tew":
            total = sum(s.size for s in scores.values())
            back = sorted(gone, key=lambda unit: -scores[unit[0]][unit[1]])
            gone -= set(back[: len(gone) - round(sparsity * total)])
    elif pattern == "vw":
        gone = vectors(scores, sparsity)
    else:
        height, width = {"ew": (1, 1), "bw": (32, 32), "tw1d": (chunk, TILE)}[pattern]
        gone = rank(scores, everywhere(scores, height, width), sparsity, power=power)
    masks = {n: np.ones(s.shape, bool) for n, s in scores.items()}
    for layer, e in gone:
        masks[layer][e] = False
    return masks


@pytest.mark.parametrize("pattern", ["tw2d", "tw1d", "ew", "vw", "bw", "tew"])
@pytest.mark.parametrize(
    ("sparsity", "chunk", "unit_score"),
    [(0.25, 1, "paper"), (0.75, 1, "rms"), (0.6, 4, "rms"), (0.9, 4, "paper")],
)
def test_masks_equal_a_brute_force_ranking(pattern, sparsity, chunk, unit_score, seed):
    scores = draw(seed)
    masks = prune(
        scores, scores, sparsity, pattern=pattern, tile=TILE, chunk=chunk, unit_score=unit_score
    )
    ranked = brute(scores, sparsity, pattern, chunk, unit_score)
    for name in SHAPES:
        assert masks[name].dtype == bool
        np.testing.assert_array_equal(masks[name], ranked[name])


UNITS = {"tw2d": 8 * TILE, "tw1d": 8 * TILE, "ew": 1, "vw": 1, "bw": 32 * 32, "tew": 1}


@pytest.mark.parametrize("pattern", UNITS)
def test_stages_are_nested_and_hit_their_goals(pattern, seed):
    shapes = {"a": (96, 128), "b": (128, 90), "c": (2, 64, 64)}
    masks = former = None
    total = 96 * 128 + 128 * 90 + 2 * 64 * 64
    for stage, goal in enumerate((0.25, 0.5, 0.6, 0.75, 0.9, 0.95)):
        scores = draw(seed + stage, shapes)  # other scores at every stage
        options = {"pattern": pattern, "tile": TILE, "chunk": 8}
        masks = prune(scores, scores, goal, former=former, **options)
        assert abs(sparsity_of(masks) - goal) <= max(0.005, UNITS[pattern] / total / 2)
        if former is not None:
            assert all((masks[n] <= former[n]).all() for n in shapes)
        former = masks
    again = prune(scores, scores, 0.95, former=masks, **options)
    assert abs(sparsity_of(again) - 0.95) <= max(0.005, UNITS[pattern] / total / 2)


@pytest.mark.parametrize("pattern", UNITS)
def test_equal_scores_are_pruned_everywhere(pattern):
    shapes = {"a": (96, 96), "b": (96, 96)}
    ones = {n: np.ones(s) for n, s in shapes.items()}
    for goal in (0.25, 0.75):
        masks = prune(ones, None, goal, pattern=pattern, tile=TILE, chunk=8)
        assert (
            abs(sparsity_of(masks) - goal) <= max(0.005, UNITS[pattern] / (2 * 2 * 96 * 96)) + 1e-9
        )
        for n in shapes:
            assert abs(sparsity_of(masks[n]) - goal) < 0.15
        again = prune(ones, None, goal, pattern=pattern, tile=TILE, chunk=8)
        assert all((again[n] == masks[n]).all() for n in shapes)


# Of a block of nano; 512 rows are what a rule that counts rows starves. Ragged: 130, 100.
BLOCK = {"qkv": (128, 384), "out": (128, 128), "up": (128, 512), "down": (512, 128)}
RAGGED = {"a": (100, 512), "b": (512, 130), "c": (130, 100)}


@pytest.mark.parametrize("pattern", UNITS)
def test_matrices_of_any_shape_keep_as_much_of_equally_important_weights(pattern, seed):
    """Random scores of one distribution, and one score everywhere, 0.1: sums of it round apart."""
    for shapes, draws in ((BLOCK, True), (RAGGED, False)):
        scores = draw(seed, shapes)
        if not draws:
            scores = {n: np.full(s, 0.1, np.float32) for n, s in shapes.items()}
        fractions = densities(prune(scores, scores, 0.75, pattern=pattern, tile=128))
        assert fractions.keys() == shapes.keys()
        assert all(0.18 < x < 0.34 for x in fractions.values()), (shapes, fractions)


def test_the_papers_rule_prefers_short_columns(seed):
    """L2 / n of n equally important scores falls as 1 / sqrt(n)."""
    scores = draw(seed, BLOCK)
    fractions = densities(prune(scores, scores, 0.75, tile=128, unit_score="paper"))
    assert fractions["down"] < 0.01 and min(fractions[n] for n in ("qkv", "out", "up")) > 0.3


def test_densities_of_stacks_have_a_number_for_each_layer():
    masks = {"up": np.ones((2, 4, 6), bool), "q": np.ones((2, 4, 2, 3), bool), "w": np.eye(4) > 0}
    masks["up"][1, :2] = masks["q"][0, :, 0] = False
    axes = {"up": ("layers", "embed", "mlp"), "q": ("layers", "embed", "heads", None)}
    axes["w"] = ("embed", "mlp")
    fractions = {"up.0": 1.0, "up.1": 0.5, "q.0": 0.5, "q.1": 1.0, "w": 0.25}
    assert densities(masks, axes) == fractions


@pytest.mark.parametrize(("pattern", "chunk"), [("tw1d", 1), ("tw1d", 4), ("tw2d", 1)])
def test_planted_tiles_are_found(pattern, chunk, seed):
    """A model whose important weights form tiles, under noise."""
    random = np.random.default_rng(seed)
    planted, scores = {}, {}
    for name, (K, N) in {"a": (64, 96), "b": (96, 64), "c": (64, 128)}.items():
        mask = np.zeros((K, N), bool)
        columns = np.arange(N)
        if pattern == "tw2d":
            columns = np.sort(random.choice(N, N // 2, replace=False))
        for start in range(0, columns.size, TILE):
            rows = random.choice(K // chunk, K // chunk // 2, replace=False)
            for r in rows:
                picked = columns[start : start + TILE]
                mask[r * chunk : (r + 1) * chunk, picked] = True
        planted[name] = mask
        scores[name] = random.gamma(1.0, 0.3, (K, N)) + 4 * mask * random.gamma(8.0, 0.125, (K, N))
    goal = sparsity_of(planted)
    masks = prune(scores, scores, goal, pattern=pattern, tile=TILE, chunk=chunk)
    both = sum((masks[n] & planted[n]).sum() for n in planted)
    assert both / sum(m.sum() for m in planted.values()) >= 0.99


def test_apriori_tuning_keeps_heads_and_drops_tails():
    """A vector whose one huge element decides its norm is none of those that the element-wise
    result keeps most of; a vector of many middling elements is."""
    scores = np.full((32, TILE), 0.1)
    scores += np.arange(32)[:, None] * 1e-4
    scores[0] = 0.0
    scores[0, 0] = 9.0  # norm 9, one element of 8 kept
    scores[1] = 1.0  # norm 2.8, all kept
    scores[2:26, 0] = 5.0
    plain = prune(scores, scores, 0.75, pattern="tw1d", tile=TILE)
    tuned = prune(scores, scores, 0.75, pattern="tw1d", tile=TILE, apriori=0.05)
    assert not plain[1].any()
    assert tuned[1].all()
    assert sparsity_of(plain) == sparsity_of(tuned) == 0.75


@pytest.mark.parametrize("pattern", ["tw2d", "tw1d", "ew", "bw"])
def test_a_matrix_without_importance_keeps_its_remainder(pattern, seed):
    shapes = {"a": (96, 96), "b": (96, 96)}
    scores = draw(seed, shapes)
    scores["b"] *= 1e-6
    options = {"pattern": pattern, "tile": TILE, "chunk": 8}
    assert sparsity_of(prune(scores, scores, 0.6, **options)["b"]) == 1.0
    masks = prune(scores, scores, 0.6, remain=0.2, **options)
    assert abs(sparsity_of(masks) - 0.6) <= max(0.005, UNITS[pattern] / (4 * 96 * 96)) + 1e-9
    least = 0.01 if pattern == "tw2d" else 0.2  # there of vectors, some of a tile that is short
    assert (1 - sparsity_of(masks["b"])) >= least
    best = scores["b"] > np.quantile(scores["b"], 0.8)
    assert masks["b"][best].mean() > masks["b"][~best].mean()


def test_words_say_which_dims_are_a_matrix(seed):
    assert matrix_shape((3, 32, 4, 8), ("layers", "embed", "heads", None)) == (3, 32, 32)
    assert matrix_shape((3, 4, 8, 32), ("layers", "heads", None, "embed")) == (3, 32, 32)
    assert matrix_shape((2, 5, 32, 64), ("layers", "expert", "embed", "mlp")) == (10, 32, 64)
    assert matrix_shape((6, 32, 64)) == (6, 32, 64)
    query = draw(seed, {"q": (2, 32, 4, 8)})["q"]
    words = ("layers", "embed", "heads", None)
    by_words = prune({"q": query}, None, 0.5, tile=16, axes={"q": words})["q"]
    by_shape = prune(query.reshape(2, 32, 32), None, 0.5, tile=16)
    np.testing.assert_array_equal(by_words, by_shape.reshape(query.shape))


def test_bad_input_is_refused():
    w = np.ones((8, 8))
    for options, message in (
        ({"sparsity": 1.0}, r"sparsity=1.0 must be in \[0, 1\) \(--prune.sparsity\)"),
        ({"pattern": "tw3d"}, "pattern=tw3d must be one of .*Did you mean"),
        ({"unit_score": "mean"}, "unit_score=mean must be one of rms, paper .--prune.unit_score"),
        ({"tile": 0}, "tile=0 must be at least 1"),
        ({"scores": np.full((8, 8), np.nan)}, "scores must be finite"),
        ({"scores": np.ones((8, 4))}, r"score of shape \(8, 4\)"),
        ({"params": np.ones(8)}, "is no matrix"),
        ({"former": {"a": w}}, "former masks are a tree"),
    ):
        with pytest.raises(UserError, match=message):
            prune(**({"params": w, "scores": w, "sparsity": 0.5} | options))
