"""Placements and shares of devices against brute force."""

import itertools
import math
import time

import numpy as np
import pytest

from megajax.systems.hybridflow import mapping

MODELS = ("actor", "critic", "reference", "reward")


def test_placements_are_all_partitions():
    for count, bell in ((1, 1), (2, 2), (3, 5), (4, 15), (5, 52)):
        partitions = mapping.placements([f"m{i}" for i in range(count)])
        assert len(partitions) == len(set(partitions)) == bell
        for sets in partitions:
            assert sorted(m for group in sets for m in group) == [f"m{i}" for i in range(count)]
    assert mapping.placements(MODELS)[0] == (MODELS,)
    with pytest.raises(ValueError, match="distinct"):
        mapping.placements(["a", "a"])


def brute_force(models, devices, seconds, least):
    best = math.inf
    for labels in itertools.product(range(len(models)), repeat=len(models)):
        groups = [[m for m, x in zip(models, labels, strict=True) if x == g] for g in set(labels)]
        for shares in itertools.product(range(1, devices + 1), repeat=len(groups)):
            if sum(shares) != devices:
                continue
            if any(n < least(tuple(g)) for g, n in zip(groups, shares, strict=True)):
                continue
            total = sum(
                max(
                    sum(seconds(stage, m, n) for m in g)
                    for g, n in zip(groups, shares, strict=True)
                )
                for stage in ("generate", "prepare", "train")
            )
            best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_best_mapping_is_found(seed):
    random = np.random.default_rng(seed)
    work = {(s, m): random.random() for s in mapping.STAGES for m in MODELS}
    power = random.uniform(0.2, 1.2)
    need = {m: int(random.integers(1, 3)) for m in MODELS}

    def seconds(stage, model, n):
        if seed == 3 and n % 2:
            return math.inf
        return work[stage, model] / n**power

    def least(models):
        return sum(need[m] for m in models)

    best = mapping.auto_map(MODELS, 8, seconds, least)
    assert best.seconds == pytest.approx(brute_force(MODELS, 8, seconds, least), rel=1e-12)
    assert sum(best.devices) == 8 and len(best.devices) == len(best.sets)
    again = sum(
        max(sum(seconds(s, m, n) for m in g) for g, n in zip(best.sets, best.devices, strict=True))
        for s in mapping.STAGES
    )
    assert best.seconds == pytest.approx(again)


def test_large_clusters_are_quick_and_what_does_not_fit_is_said():
    began = time.process_time()
    best = mapping.auto_map(
        MODELS, 128, lambda s, m, n: len(m) / n + 0.01 * math.log(n), lambda models: len(models)
    )
    assert time.process_time() - began < 30 and sum(best.devices) == 128
    with pytest.raises(ValueError, match="do not fit on 4 devices: they need 8 for actor"):
        mapping.auto_map(MODELS, 4, lambda *_: 1.0, lambda models: 2 * len(models))
    with pytest.raises(ValueError, match="no placement can run"):
        mapping.auto_map(MODELS, 4, lambda *_: math.inf, len)


def test_room_is_rounded_up_and_seconds_are_numbers():
    def shared(models):  # models that never fit together, and need more than one device each
        return 1.5 if len(models) == 1 else math.inf

    best = mapping.auto_map(("a", "b"), 4, lambda s, m, n: 1 / n, shared)
    assert best.sets == (("a",), ("b",)) and best.devices == (2, 2)
    for call, words in (
        (lambda: mapping.auto_map("ab", 3, lambda *_: 1.0, shared), r"need 3 for a \| b"),
        (lambda: mapping.auto_map("ab", 4, lambda s, m, n: math.nan if n == 1 else 1, len), "of a"),
        (lambda: mapping.auto_map("abcdefg", 4096, lambda *_: 1.0, len), "at most 1,073,741,824"),
        (lambda: mapping.placements("abcdefghijk"), "from 1 to 10"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
