"""LLM-PQ's cost of a layer, its presets and rivals."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, Cluster, MixedCluster
from megajax.cost.base import Stack
from megajax.systems.llm_pq import PRESETS, Workload, plan, solve
from megajax.systems.llm_pq.planning import (
    assumed_omega,
    equal_quality,
    layer_s,
    micro_batches,
    problem_of,
    uniform_bits,
)
from megajax.systems.llm_pq.problem import (
    even_split,
    omega_of,
    partition,
    pipeline_s,
    simulate,
    timed,
    violations,
)
from megajax.systems.llm_pq.rivals import rivals

SMALL = Workload(
    "small", Stack(8, 2048, 16, 16, 128, 8192), 50272, prompt=64, new_tokens=8, requests=8
)
PAIR = MixedCluster((CARDS["T4"], CARDS["V100"]), PRESETS["case3"].cluster.link)


def test_presets_are_the_papers_models_on_the_papers_clusters():
    sizes = {"OPT-13B": 13e9, "OPT-30B": 30e9, "OPT-66B": 66e9, "BLOOM-176B": 176e9}
    for preset in PRESETS.values():
        w, stack = preset.workload, preset.workload.stack
        params = 12 * stack.width**2 * stack.layers + (w.vocab + w.positions) * stack.width
        assert params == pytest.approx(sizes[w.name], rel=0.02)
    assert [p.cluster.devices for p in PRESETS.values()] == [1, 1, 4, 4, 6, 4, 8, 6, 4, 4, 4]
    assert PRESETS["case4"].cluster.name == "p100-12:3,v100:1"


def test_the_bytes_of_a_problem_by_hand():
    p = problem_of(SMALL, PAIR)
    matrices = 12 * 2048**2  # 3 + 1 of attention, 4 + 4 of the feed-forward layer
    scales = 2 / 128
    expected = [matrices * (b / 8 + (scales if b < 16 else 0)) for b in (3, 4, 8, 16)]
    assert p.layer_bytes == pytest.approx(expected)
    assert p.cache_bytes == 8 * 72 * 2 * 2048 * 2
    assert p.first_bytes == p.last_bytes == 50272 * 2048 * 2
    assert p.memory == pytest.approx([0.95 * 16e9 - 1.93e9, 0.95 * 32e9 - 1.93e9])
    assert p.prefill_hop_s[2] == pytest.approx(14e-6 + 2 * 64 * 2048 * 2 / 12.5e9)
    assert list(p.decode_s) == [1, 2, 4, 8] == micro_batches(8, 2)
    assert micro_batches(32, 6) == [1, 2, 4, 6, 8, 16, 32]
    assert micro_batches(5, 2) == [1, 2, 3, 4, 5]


def test_decoding_a_layer_by_hand():
    """One row on a T4: bound by memory, so weights and cache over 85 % of 320 GB/s."""
    stack = Stack(1, 8192, 64, 64, 128, 4 * 8192)
    rate = 0.85 * 320e9
    weights = 12 * 8192**2
    cache = 2 * 1024 * 8192 * 2
    for bits, each in [(16, 2), (8, 1 + 2 / 128), (4, 0.5 + 2 / 128), (3, 0.375 + 2 / 128)]:
        got = layer_s(stack, CARDS["T4"], bits, 1, 1, 1024)
        assert got == pytest.approx((weights * each + cache) / rate, rel=0.01)


def test_prefilling_a_layer_by_hand():
    """Many rows: arithmetic at 0.7 and 0.5 of the peak; quantized weights are expanded before."""
    stack = Stack(1, 8192, 64, 64, 128, 4 * 8192)
    plain = layer_s(stack, CARDS["V100"], 16, 8, 512, 512)
    products = 2 * 12 * 8192**2 * 8 * 512 / (0.7 * 125e12)
    attention = 4 * 8 * 512 * 512 * 8192 / (0.5 * 125e12)
    assert plain == pytest.approx(products + attention, rel=0.05)  # norms and activations beside
    four = layer_s(stack, CARDS["V100"], 4, 8, 512, 512)
    expanded = 12 * 8192**2 * (0.5 + 2 / 128 + 2) / (0.85 * 900e9)
    assert four - plain == pytest.approx(expanded)


def test_the_assumed_loss_of_quality():
    omega = assumed_omega(48, (3, 4, 8, 16))
    assert omega.shape == (48, 4) and (omega[:, 3] == 0).all()
    assert omega[:, 1].sum() == pytest.approx(1)
    assert omega[:, 0].sum() == pytest.approx(49 / 9)
    assert (np.diff(omega, axis=1) < 0).all() and np.ptp(omega[:, 0]) > 0


def test_equal_quality_is_that_of_the_highest_uniform_width_that_fits():
    p = problem_of(*PRESETS["case3"])
    # 12 layers of 4 bits: 12 * (616.6e6 * 0.516 + 561e6) = 10.6 GB of the T4's 13.3; 8 bits: 14.2.
    assert uniform_bits(p) == 4 and equal_quality(p) == pytest.approx(1)
    assert even_split(p) == [(0, 0, 12), (1, 12, 24), (2, 24, 36), (3, 36, 48)]
    p = problem_of(*PRESETS["case4"])
    assert uniform_bits(p) is None and equal_quality(p) == pytest.approx(49 / 9)


def test_plan_keeps_the_quality_and_the_simulator_agrees():
    p = problem_of(SMALL, PAIR)
    got = plan(SMALL, PAIR, quality=0.05)
    assert got.gap == 0 and got.omega <= 0.05 * (1 + 1e-9)
    assert violations(p, got.stages, got.bits, 0.05) == []
    assert simulate(p, got).tokens_per_s == pytest.approx(got.tokens_per_s)
    assert plan(SMALL, PAIR, quality=None).tokens_per_s >= got.tokens_per_s
    with pytest.raises(UserError, match="--quality"):
        plan(SMALL, PAIR, quality="best")


def test_a_growing_context_changes_the_times_by_less_than_two_percent():
    """The planner times decoding at the mean context; here every token has its own."""
    workload, cluster = PRESETS["case3"]
    p = problem_of(workload, cluster)
    stages, bits, size = even_split(p), [4] * 48, 8

    def seconds(_batch, lap):
        keys = workload.prompt + 1 + lap
        each = [
            (stop - start) * layer_s(workload.stack, cluster.cards[d], 4, size, 1, keys)
            for d, start, stop in stages
        ]
        return [*itertools.chain(*([s, p.decode_hop_s[size]] for s in each))][:-1]

    known = [seconds(0, lap) for lap in range(99)]
    got = pipeline_s(lambda _batch, lap: known[lap], 4, 99)
    assert got == pytest.approx(timed(p, stages, bits, size, size).decode_s, rel=0.02)


def test_a_homogeneous_cluster():
    got = plan(SMALL, Cluster(CARDS["L4"], 1, 2), quality="equal")
    assert set(got.bits) == {16} and got.omega == 0  # it fits as it is


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((PAIR, SMALL), "workload must be an llm_pq.Workload, got a MixedCluster$"),
        (("case3", PAIR), r"workload must be .*, got 'case3' \(str\)$"),
        ((None, PAIR), "workload must be .*, got None$"),
        ((SMALL, SMALL), "cluster must be a MixedCluster or a Cluster of .*, got a Workload; "),
        ((SMALL, "t4:1,v100:1"), r"cluster must be .* got 't4:1,v100:1' \(str\); parse_mixed"),
        ((SMALL, None), "cluster must be .* got None; "),
    ],
)
def test_arguments_of_another_type(arguments, words):
    with pytest.raises(UserError, match=f"^plan: {words}"):
        plan(*arguments)


def test_a_cluster_that_is_too_small():
    with pytest.raises(UserError, match=r"memory.*bytes are missing"):
        plan(PRESETS["case5"].workload, PRESETS["case1"].cluster)


def test_widths_without_a_kernel():
    with pytest.raises(UserError, match="--bits"):
        dataclasses.replace(SMALL, bits=(2, 4))


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("prompt", 0),
        ("prompt", -512),
        ("new_tokens", 0),
        ("requests", 2.5),
        ("requests", "8"),
        ("vocab", -1),
        ("positions", -2050),
    ],
)
def test_counts_that_are_none(member, value):
    """A prompt of -512 tokens took less than no time."""
    with pytest.raises(UserError, match=f"^{member}.* must be a whole number, at least 1"):
        dataclasses.replace(SMALL, **{member: value})
    assert dataclasses.replace(SMALL, requests=np.float64(8)).requests.bit_length() == 4


@pytest.mark.parametrize("case", ["case3", "case11"])
def test_rivals_are_legal(case):
    p = problem_of(*PRESETS[case])
    by_name = {rival.name: rival for rival in rivals(p)}
    assert {"pipeedge", "pipeedge_tuned", "adabits"} <= set(by_name)
    for rival in by_name.values():
        assert rival.omega == pytest.approx(omega_of(p, rival.bits))
        broken = violations(p, rival.stages, rival.bits, None)
        assert bool(broken) == bool(rival.offloaded), (rival.name, broken)
        if not rival.offloaded:
            assert rival.times == timed(
                p, rival.stages, rival.bits, rival.prefill_batch, rival.decode_batch
            )
    tuned, plain = by_name["pipeedge_tuned"].times, by_name["pipeedge"].times
    assert tuned.tokens_per_s >= plain.tokens_per_s
    assert by_name["offload_16"].times.tokens_per_s < plain.tokens_per_s


def test_pipeedges_partition_has_the_fastest_slowest_stage():
    """Against every composition of 9 layers on 3 devices, in every order."""
    cluster = MixedCluster((CARDS["T4"], CARDS["V100"], CARDS["P100"]), PAIR.link)
    workload = dataclasses.replace(SMALL, stack=Stack(9, 2048, 16, 16, 128, 8192))
    p = problem_of(workload, cluster)
    p = dataclasses.replace(p, memory=p.layer_bytes[2] * np.array([3.0, 7.0, 3.4]) + 4e8)
    seconds = p.decode_s[4][:, 2]
    stages = partition(p, 2, seconds)
    assert stages is not None and violations(p, stages, [8] * 9, None) == []
    got = max(seconds[d] * (stop - start) for d, start, stop in stages)
    least = np.inf
    for count in (1, 2, 3):
        for order in itertools.permutations(range(3), count):
            for inner in itertools.combinations(range(1, 9), count - 1):
                spans = itertools.pairwise((0, *inner, 9))
                tried = [(d, a, b) for d, (a, b) in zip(order, spans, strict=True)]
                if not violations(p, tried, [8] * 9, None):
                    least = min(least, max(seconds[d] * (b - a) for d, a, b in tried))
    assert got == pytest.approx(least)


def test_rivals_are_beaten_or_equalled_at_their_quality():
    p = problem_of(SMALL, PAIR)
    p = dataclasses.replace(p, memory=p.layer_bytes[2] * np.array([4.0, 6.5]) + 4.5e8)
    for rival in rivals(p):
        if not rival.offloaded:
            begin = (rival.stages, rival.bits, (rival.prefill_batch, rival.decode_batch))
            got = solve(p, quality=rival.omega, time_limit_s=5, start=[begin])
            assert got.tokens_per_s >= rival.times.tokens_per_s * (1 - 1e-9)
            assert got.omega <= rival.omega * (1 + 1e-9)


@pytest.mark.slow  # up to a minute each
@pytest.mark.parametrize("case", list(PRESETS))
def test_every_preset_is_planned_to_one_percent(case):
    p = problem_of(*PRESETS[case])
    began = time.monotonic()
    got = plan(*PRESETS[case], time_limit_s=60)
    assert time.monotonic() - began < 63  # a program that is being solved ends at its own limit
    assert got.gap <= 0.01
    assert violations(p, got.stages, got.bits, equal_quality(p)) == []
    assert simulate(p, got).tokens_per_s == pytest.approx(got.tokens_per_s, rel=0.02)
