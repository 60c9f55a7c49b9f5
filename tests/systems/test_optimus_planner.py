"""The planner of Optimus against invariants and brute force that know nothing of its code."""

import collections
import dataclasses
import itertools
import random
import time

import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.kernels import Attention
from megajax.cost.roofline import Group, Roofline, collective_time
from megajax.models.vlm import PRESETS
from megajax.schedule import bubbles, build, simulator
from megajax.systems import optimus
from megajax.systems.optimus import Degrees
from megajax.systems.optimus.problem import even
from megajax.systems.optimus.scheduler import EncoderCut, backbone_of, into_gaps

CLUSTER = parse_cluster("h100:4x4")
CUT = Degrees(4, 2, 2, 2)


def model(layers=8, blocks=4):
    base = PRESETS["vit_3b_gpt_11b"]()
    return dataclasses.replace(
        base,
        decoder=dataclasses.replace(base.decoder, layers=layers),
        tower=dataclasses.replace(base.tower, layers=blocks),
    )


@pytest.fixture(scope="module")
def plans():
    return optimus.plan(model(), CLUSTER, CUT, batch=16, patches=1024)


@pytest.fixture(scope="module")
def timelines(plans):
    return [optimus.simulate(one) for one in plans]


def by_resource(timeline):
    spans = collections.defaultdict(list)
    for span in timeline.spans:
        spans[span.task.resource].append(span)
    return spans


def last_ends(timeline, kind):
    """{microbatch: when its last kernel of a kind has ended}."""
    ends = {}
    for span in timeline.spans:
        if span.task.kind == kind:
            m = span.task.microbatch
            ends[m] = max(ends.get(m, 0), span.end)
    return ends


# ---- timelines


def test_all_cuts_are_ranked_and_keep_the_invariants(plans, timelines):
    cuts = {(p.encoder.pipe, p.encoder.tensor) for p in plans}
    assert cuts == {(1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (1, 1)}
    assert [p.step_s for p in plans] == sorted(p.step_s for p in plans)
    for one, timeline in zip(plans, timelines, strict=True):
        assert timeline.start == 0 and timeline.makespan == pytest.approx(one.step_s)
        ends = {}
        for resource, spans in by_resource(timeline).items():
            spans.sort(key=lambda span: span.start)
            for a, b in itertools.pairwise(spans):
                assert b.start >= a.end - 1e-9, (one.encoder, resource, a, b)
            for span in spans:
                assert span.end - span.start == pytest.approx(span.task.duration)
                assert ends.setdefault(span.task.name, span.end) is span.end
        for span in timeline.spans:
            assert all(ends[dep] <= span.start + 1e-9 for dep in span.task.deps)
        assert len(last_ends(timeline, "EF")) == len(last_ends(timeline, "EB")) == 8


def test_features_come_in_the_order_of_the_decoder(timelines):
    """EF[i] <= F[i] and EB[i] >= B[i], with times taken from the spans alone."""
    for timeline in timelines:
        enter, leave, begin = {}, {}, {}
        for span in timeline.spans:
            m, task = span.task.microbatch, span.task
            # (stage, chunk) (0, 0); collectives of the decoder name their pass.
            if task.name.startswith(("F stage 0 ", "F stage 0 part 0 ")) and task.chunk == 0:
                enter[m] = min(enter.get(m, 9e9), span.start)
            if task.name.startswith(("B stage 0 ", "B stage 0 part 0 ")) and task.chunk == 0:
                leave[m] = max(leave.get(m, 0), span.end)
            if task.name.startswith("EB "):
                begin[m] = min(begin.get(m, 9e9), span.start)
        done = last_ends(timeline, "EF")
        assert all(done[m] <= enter[m] for m in range(8))
        assert all(begin[m] >= leave[m] for m in range(8))


def test_no_task_of_the_decoder_moves(plans, timelines):
    alone = next(p for p in optimus.rivals(plans[0].job) if p.method == "decoder")
    assert alone.step_s == plans[0].decoder_s
    names = {s.task.name: s.start for s in optimus.simulate(alone).spans if s.task.microbatch >= 0}
    number = next(i for i, p in enumerate(plans) if p.encoder.tensor == CUT.tensor)
    starts = {s.task.name: s.start for s in timelines[number].spans}
    shifts = [starts[name] - start for name, start in names.items()]
    assert max(shifts) == pytest.approx(min(shifts), abs=1e-9)


def test_the_decoder_is_as_fast_as_the_simulator_of_schedules_says(plans):
    """The same order and makespan, backward passes at their earliest, forwards not before it."""
    job = plans[0].job
    backbone = backbone_of(job, "decoder")
    table = build.interleaved(4, 8, 2)
    spent = {(s.task.kind, s.task.stage, s.task.chunk): s.end - s.start for s in backbone.spans}
    timeline = simulator.simulate(
        table, lambda t: spent[t.kind, t.stage, t.chunk], transfer=backbone.hop
    )
    assert backbone.end == pytest.approx(timeline.end)
    earliest = {s.task.name: s.start for s in timeline.spans}
    for span in backbone.spans:
        early = earliest[span.task.name]
        assert span.start >= early - 1e-9
        assert span.task.kind == "F" or span.start == pytest.approx(early)


def test_idle_time_adds_up(timelines):
    timeline = timelines[0]
    idle = sum(bubble.seconds for bubble in bubbles.find(timeline))
    busy = sum(s.end - s.start for s in timeline.spans if s.task.resource in timeline.resources)
    assert idle + busy == pytest.approx(len(timeline.resources) * timeline.makespan)


# ---- the scheduler


def naive(chain, gaps, ready):
    """First fit on whole seconds, second by second."""
    free = [{t for a, b in zip(*room, strict=True) for t in range(a, b)} for room in gaps]
    starts = []
    for seconds, kind in chain:
        room = free[kind == "COMM"]
        options = (t for t in range(ready, 400) if {*range(t, t + seconds)} <= room)
        if (start := next(options, None)) is None:
            return None
        room -= {*range(start, start + seconds)}
        starts.append(start)
        ready = start + seconds
    return starts


def test_kernels_take_the_first_gaps_that_hold_them(seed):
    rng = random.Random(seed)
    fits = 0
    for _ in range(100):
        rooms = []
        for _ in range(2):
            edges = sorted(rng.sample(range(300), 40))
            rooms.append((edges[::2], edges[1::2]))
        chains = [
            [(rng.randrange(1, 7), rng.choice(["EF", "EF", "COMM"])) for _ in range(12)]
            for _ in range(2)
        ]
        first = naive(chains[0], rooms, 5)
        copies = [([*map(float, a)], [*map(float, b)]) for a, b in rooms]
        assert into_gaps(chains[0], copies, 5.0) == first
        if first is None:
            continue
        fits += 1
        # What is taken stays taken: the second chain sees the gaps without the first one.
        for (seconds, kind), start in zip(chains[0], first, strict=True):
            starts, ends = rooms[kind == "COMM"]
            left = {t for a, b in zip(starts, ends, strict=True) for t in range(a, b)}
            left -= {*range(start, start + seconds)}
            rooms[kind == "COMM"] = [*left], [t + 1 for t in left]
        assert into_gaps(chains[1], copies, 0.0) == naive(chains[1], rooms, 0)
    assert fits > 20


def compositions(number, parts):
    cuts = itertools.combinations(range(1, number), parts - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cut, number))] for cut in cuts]


def test_the_search_finds_the_best_composition_or_nearly(plans):
    job = plans[0].job
    backbone = backbone_of(job, "decoder")
    for cut in (Degrees(2, 2, 4), Degrees(2, 1, 8)):
        encoder = EncoderCut(job, backbone, cut)
        options = compositions(8, len(encoder.devices))
        steps = [encoder.schedule(counts).step_s(backbone) for counts in options]
        counts, placed = encoder.search(len(options))
        assert placed.step_s(backbone) == min(steps)
        counts, placed = encoder.search(6)
        assert sum(counts) == 8 and min(counts) > 0
        assert min(steps) <= placed.step_s(backbone) <= 1.02 * min(steps)


def test_moving_kernels_into_gaps_never_lengthens_a_step(plans):
    for one in plans:
        assert one.decoder_s <= one.step_s <= one.coarse_s + 1e-12
        assert 0 <= one.coarse_share <= one.fine_share <= 1
    assert any(one.step_s < one.coarse_s for one in plans)


def test_the_share_in_bubbles_falls_with_the_microbatches(plans):
    coarse, fine = [], []
    for batch in (16, 32, 48):
        job = dataclasses.replace(plans[0].job, model=model(8, 12), batch=batch)
        encoder = EncoderCut(job, backbone_of(job, "decoder"), Degrees(1, 2, 8))
        counts, placed = encoder.search(1)
        coarse.append(encoder.schedule(counts, fine=False).share)
        fine.append(placed.share)
    assert coarse == sorted(coarse, reverse=True) and coarse[0] > 1.5 * coarse[-1]
    assert all(a >= b for a, b in zip(fine, coarse, strict=True))


def test_planning_many_stages_takes_seconds():
    began = time.process_time()
    cluster, cut = parse_cluster("h100:8x8"), Degrees(8, 8, 1, 12)
    optimus.plan(model(96, 8), cluster, cut, batch=16, patches=1024)
    assert time.process_time() - began < 15


# ---- kernels


def test_kernels_of_a_block_by_hand(plans):
    job = plans[0].job
    groups = backbone_of(job, "decoder").passes["F", 1], backbone_of(job, "decoder").passes["B", 1]
    sent = [sum(k.kind == "COMM" for k in kernels) for kernels in groups]
    assert sent == [4, 6]  # of 1 block: two gathers and scatters; in B two gathers more
    card, T, D = CLUSTER.card, 2048, 3072
    gather = collective_time("all-gather", 2 * T * D, Group(2, 1), card)
    assert next(k for k in groups[0] if k.kind == "COMM").seconds == pytest.approx(gather)
    products = [(T, D, 3 * D // 2), (T, D // 2, D), (T, D, 2 * D), (T, 2 * D, D)]
    seconds = [2 * m * k * n / (0.7 * card.flops["bfloat16"]) for m, k, n in products]
    attention = Attention(1, T, T, 12, 12, 128).flops / (0.5 * card.flops["bfloat16"])
    computed = [k.seconds for k in groups[0] if k.kind == "F"]
    for one in (*seconds, attention):
        assert any(one == pytest.approx(other) for other in computed)
    # Every product is two kernels of the backward pass, every other kernel one of twice the time.
    again = sorted(k.seconds for k in groups[1] if k.kind == "B")
    rows = [c for c in computed if not any(c == pytest.approx(s) for s in seconds)]
    assert again == pytest.approx(sorted([*seconds, *seconds, *(2 * r for r in rows)]))


def test_collectives_and_frozen_towers(plans, timelines):
    assert {s.task.kind for s in timelines[0].spans} == {"F", "B", "EF", "EB", "COMM"}
    frozen = optimus.plan(model(), CLUSTER, CUT, batch=16, patches=1024, frozen=True)[0]
    assert frozen.step_s < plans[0].step_s
    ours = sum(s.task.kind == "EB" for s in optimus.simulate(frozen).spans)
    assert 0 < ours < sum(s.task.kind == "EB" for s in timelines[0].spans) / 4


def test_rivals_run_the_encoder_in_the_decoders_stages():
    deep = optimus.plan(model(8, 24), CLUSTER, CUT, batch=16, patches=1024)
    rivals = {p.method: p for p in optimus.rivals(deep[0].job)}
    assert rivals["balanced"].step_s < rivals["megatron"].step_s
    for method in ("megatron", "uniform", "balanced"):
        timeline = optimus.simulate(rivals[method])
        stages = {s.task.resource for s in timeline.spans if s.task.kind == "EF"}
        assert (stages == {"stage 0"}) == (method == "megatron")
        assert timeline.makespan == pytest.approx(rivals[method].step_s)
    assert even(80, 24).count(4) == 8 and sum(even(80, 24)) == 80


# ---- memory and errors


def test_memory_is_the_papers_formula(plans):
    job = plans[0].job
    ours, theirs = job.decoder_load.params, job.tower_loads[0].params
    needed = {(p.encoder.pipe, p.encoder.tensor): p for p in plans}
    for (pipe, tensor), one in needed.items():
        extra = 6 * theirs * (16 / (pipe * tensor) - 2) / 16
        assert one.extra_bytes == pytest.approx(extra)
        smallest = needed[4, 2].memory_bytes
        assert one.memory_bytes - smallest == pytest.approx(extra)
        assert smallest > 6 * (ours + theirs) / 8
    assert [p.executable for p in plans] == [
        (p.encoder.pipe, p.encoder.tensor) == (1, 2) for p in plans
    ]
    assert all(p.reason for p in plans)


def test_cuts_that_do_not_fit_are_dropped(plans):
    least = sorted(p.memory_bytes for p in plans)

    def at(nbytes):
        card = dataclasses.replace(CARDS["H100"], memory_bytes=int(nbytes))
        cluster = dataclasses.replace(CLUSTER, card=card)
        return optimus.plan(model(), cluster, CUT, batch=16, patches=1024)

    fits = at(least[2] + 1)
    assert len(fits) == sum(n <= least[2] for n in least) < len(plans)
    with pytest.raises(UserError, match=r"does not fit H100: with 4 stages x 2 tensor ranks"):
        at(least[0] - 2**20)


@pytest.mark.parametrize(
    ("cut", "batch", "message"),
    [
        (Degrees(4, 2, 4, 2), 16, r"4 x 2 x 4 = 32 devices, and h100:4x4 has 16"),
        (Degrees(4, 2, 2, 3), 16, r"strategy.pipe=4 x strategy.chunks=3 must be at most .* 8"),
        (CUT, 15, r"batch=15 must be a multiple of 2 replicas x 1 rows .*nearest: 14, 16"),
        (Degrees(2, 8, 1), 8, r"strategy.tensor=8 must divide the 4 GPUs of a host; nearest: 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(cut, batch, message):
    with pytest.raises(UserError, match=message):
        optimus.plan(model(), CLUSTER, cut, batch=batch, patches=1024)


def test_a_strategy_is_chosen_as_megatron_does():
    small = optimus.plan(model(), CLUSTER)[0]
    assert small.job.decoder == Degrees(1, 4, 4)  # all fits one stage
    card = dataclasses.replace(CARDS["H100"], memory_bytes=int(1.5e9))
    tight = dataclasses.replace(CLUSTER, card=card)
    chosen = optimus.plan(model(), tight, batch=16)[0].job.decoder
    assert chosen.tensor == 4 and chosen.pipe > 1 and chosen.chunks == 8 // chosen.pipe


def test_times_are_the_cost_models():
    slow = Roofline(matmul=0.35)

    def best(**options):
        cut, deep = Degrees(1, 2, 8), model(8, 24)
        return optimus.plan(deep, CLUSTER, cut, batch=16, patches=1024, **options)[0]

    fast, free = best(), best(exchanges=False)
    assert best(cost=slow).step_s > 1.1 * fast.step_s
    assert free.step_s < fast.step_s
    tower = best(exchanges=False, tower_cost=slow)
    assert tower.decoder_s == fast.decoder_s and tower.step_s > free.step_s
