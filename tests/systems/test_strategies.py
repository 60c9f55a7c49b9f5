"""The search against trying everything, on models small enough for that; and its report."""

import dataclasses
import itertools
import json
import os
import random
import signal
import threading
import time
import typing

import pytest

from experiments.reports import plan as plan_report
from megajax.core.errors import UserError
from megajax.core.hardware import parse_cluster
from megajax.core.mesh import MeshSpec
from megajax.cost import memory
from megajax.models.parts import Remat
from megajax.parallel.pipeline import PipelineConfig
from megajax.schedule.build import Schedule
from megajax.systems import aot, strategies
from tests.tiny import MOE, run_config

HOST = parse_cluster("h100:1x8")
TINY = run_config(train__global_batch=6, model__layers=4)


def everything(cfg, cluster):
    """Every value of every knob, kept if the check of a run lets it pass.

    Left out on purpose, as in the search: fewer micro-batches than stages, interleaving one chunk.
    """
    ways, pieces = (1, 2, 4, 8), range(1, cfg.train.global_batch + 1)
    for pipe, expert, context, tensor in itertools.product(ways, ways, ways, ways):
        if cluster.devices % (pipe * expert * context * tensor):
            continue
        mesh = MeshSpec(pipe=pipe, expert=expert, context=context, tensor=tensor)
        if pipe == 1:
            schedules = [(PipelineConfig(), n) for n in pieces]
        else:
            knobs = itertools.product(
                typing.get_args(Schedule),
                pieces,
                (1, 2, 3),
                ("input", "residuals"),
                ("local", "sharded"),
            )
            schedules = [
                (PipelineConfig(*k), 1)
                for k in knobs
                if k[1] >= pipe and (k[0], k[2]) != ("interleaved", 1)
            ]
        for (pipeline, accumulate), remat in itertools.product(schedules, typing.get_args(Remat)):
            train = dataclasses.replace(cfg.train, accumulate=accumulate, remat=remat)
            one = dataclasses.replace(cfg, mesh=mesh, pipeline=pipeline, train=train)
            try:
                aot.sizes(one, cluster)
            except UserError:
                continue
            yield one


@pytest.fixture(scope="module")
def legal():
    accepted = list(everything(TINY, HOST))
    assert len(accepted) > 500
    return accepted


@pytest.fixture(scope="module")
def outlines(legal):
    return [aot.outline(c, HOST) for c in legal if c.mesh.expert == 1]


@pytest.fixture(scope="module")
def ranking():
    return strategies.search(TINY, HOST, compiles=False)


def proposed(cfg, cluster):
    meshes = strategies.legal_meshes(cfg, cluster)
    return [c for mesh, sizes in meshes for c in strategies.proposals(cfg, mesh, sizes)]


def test_proposals_are_exactly_what_a_run_accepts(legal):
    """A dense model on `expert` runs as on `data`, so that axis is proposed for experts only."""
    candidates = proposed(TINY, HOST)
    assert len(candidates) == len(set(candidates))
    assert set(candidates) == {c for c in legal if c.mesh.expert == 1}


def test_the_winner_is_that_of_trying_everything(ranking, outlines):
    fastest = min(p.estimate.step_s for p in outlines if p.misfit is None)
    assert ranking.best.estimate.step_s == fastest and ranking.best.misfit is None
    times = [p.estimate.step_s for p in ranking.ranked]
    assert times == sorted(times) and len(times) == strategies.SHOWN
    assert ranking.proposals == len(outlines) and not ranking.dropped


def test_what_fits_no_device_is_dropped_and_counted(outlines):
    """Half of the candidates fit a card of this size: the same half, and the same winner."""
    bounds = sorted(memory.bound(p.terms) for p in outlines)
    room = bounds[len(bounds) // 2]
    card = dataclasses.replace(HOST.card, memory_bytes=aot.RESERVE_BYTES + room)
    small = dataclasses.replace(HOST, card=card)
    ranking = strategies.search(TINY, small, compiles=False)
    fits = [p for p in outlines if memory.bound(p.terms) <= room]
    assert sum(ranking.dropped.values()) == len(outlines) - len(fits) > 0
    assert ranking.best.estimate.step_s == min(p.estimate.step_s for p in fits)
    assert "fit no GPU by their bound (largest term: " in plan_report.summary(ranking)


def test_a_model_that_fits_nowhere_names_the_term(outlines):
    card = dataclasses.replace(HOST.card, memory_bytes=aot.RESERVE_BYTES + 1)
    nowhere = dataclasses.replace(HOST, card=card)
    ranking = strategies.search(TINY, nowhere)
    least = min(memory.bound(p.terms) for p in outlines)
    terms = ranking.best.terms
    assert memory.bound(terms) == least and ranking.compiled == ()
    assert ranking.best.misfit == max(terms, key=terms.get)
    assert plan_report.verdict(ranking.best).startswith("DOES NOT FIT")


def test_experts_and_nodes_are_proposed_where_they_change_something():
    experts = {
        m.expert
        for m, _ in strategies.legal_meshes(
            run_config(model__moe__experts=8, model__moe__width=32), HOST
        )
    }
    assert experts == {1, 2, 4, 8}
    two = parse_cluster("h100:4x2")
    assert {m.node for m, _ in strategies.legal_meshes(run_config(), two)} == {1}
    hybrid = run_config(shard__zero="hybrid")
    assert {m.node for m, _ in strategies.legal_meshes(hybrid, two)} == {1, 2, 4}


def test_a_mixture_of_experts_is_searched():
    cfg = dataclasses.replace(run_config(), model=MOE)
    ranking = strategies.search(cfg, HOST, compiles=False)
    for plan in ranking.ranked:
        plan.cfg.check(plan.step.sizes)
    assert ranking.best.misfit is None and ranking.best.step.load.routed.experts == 8


def test_nothing_legal_says_what_to_change():
    with pytest.raises(UserError, match="--train.global_batch=7"):
        strategies.search(
            run_config(train__global_batch=7, model__heads=1, model__kv_heads=1, train__seq_len=15),
            HOST,
        )


def pretend(monkeypatch, peaks):
    """Compiles in which a program's peak is so many times its bound."""
    tried = []

    def plan(cfg, cluster, model):
        outlined = aot.outline(cfg, cluster)
        peak = peaks[len(tried)] * memory.bound(outlined.terms)
        tried.append(cfg)
        compiled = aot.Compiled("", {"peak": peak}, {}, (), 0, 0.0, "xla")
        made = dataclasses.replace(outlined, compiled=compiled)
        fits = made.needed <= cluster.card.memory_bytes
        return made if fits else dataclasses.replace(made, misfit="stash")

    monkeypatch.setattr(aot, "plan", plan)
    return tried


def test_the_best_few_that_fit_are_compiled(monkeypatch):
    tried = pretend(monkeypatch, [1e9, 1.5, 1.5, 1.5])
    ranking = strategies.search(TINY, HOST, best=2)
    # The first needs too much, so what keeps as much is left out, and a third is tried.
    first = strategies.search(TINY, HOST, compiles=False).ranked[0].cfg
    assert tried[0] == first and len(tried) == 3
    assert all(
        (c.mesh.pipe > 1, c.train.remat) != (first.mesh.pipe > 1, first.train.remat)
        for c in tried[1:]
    )
    assert [p.misfit for p in ranking.compiled] == [None, None, "stash"]
    assert ranking.compiled[0].estimate.step_s <= ranking.compiled[1].estimate.step_s
    assert ranking.plans[:2] == ranking.compiled[:2] and ranking.best.misfit is None
    assert ranking.plans[-1] == ranking.compiled[-1] and not ranking.ended


def test_what_needs_more_than_its_bound_is_not_tried(monkeypatch):
    """All programs need 1.5 bounds: one whose bound has no such room is not compiled."""
    priced = strategies.price(TINY, HOST, strategies.legal_meshes(TINY, HOST)).fits
    priced = [p for p in priced if p.cfg.mesh.pipe == 1 and p.cfg.train.remat == "full"]
    room = 1.5 * sorted(p.bound for p in priced)[len(priced) // 2]
    card = dataclasses.replace(HOST.card, memory_bytes=aot.RESERVE_BYTES + room)
    tried = pretend(monkeypatch, [1.5] * 99)
    strategies.compile_best(priced, dataclasses.replace(HOST, card=card), 99)
    first, *others = [p.cfg for p in priced]
    small = {p.cfg for p in priced if 1.5 * p.bound <= room}
    assert tried[0] == first and tried[1:] == [c for c in others if c in small]
    assert 0 < len(small) < len(priced)


def test_ctrl_c_while_pricing_ranks_what_was_priced():
    meshes, told = strategies.legal_meshes(TINY, HOST), []

    def stop(line):
        told.append(line)
        if line.startswith("pricing mesh 4 of"):
            raise KeyboardInterrupt

    ranking = strategies.search(TINY, HOST, compiles=False, tell=stop)
    assert ranking.stopped.startswith(f"3 of {len(meshes)} legal meshes are priced, nothing is")
    seen = {mesh for mesh, _ in meshes[:3]}
    assert ranking.ranked and {p.cfg.mesh for p in ranking.ranked} <= seen
    priced = strategies.price(TINY, HOST, meshes[:3]).fits
    assert ranking.best.estimate.step_s == priced[0].step_s and ranking.proposals == len(priced)
    assert told[-1].split(": ")[1].startswith(f"{len(priced)} candidates so far")
    text = plan_report.search_markdown(ranking, plan_report.ranking_rows(ranking, TINY, []))
    assert f"PARTIAL: Ctrl-C ended the search: {ranking.stopped}" in text
    assert plan_report.search_figures(ranking, [])["stopped"] == ranking.stopped

    def at_once(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # nothing to rank
        strategies.search(TINY, HOST, compiles=False, tell=at_once)


@pytest.mark.parametrize("signalled", [True, False])
def test_ctrl_c_while_compiling_keeps_what_is_compiled(monkeypatch, signalled):
    """The signal reaches the main thread, while the compiler goes on in another one."""
    pretend(monkeypatch, [1.5, 1.5])
    quick, free, stopped = aot.plan, threading.Event(), threading.Event()

    def plan(cfg, cluster, model):
        made = quick(cfg, cluster, model)
        if len(tried) > 1:
            if signalled:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                stopped.set()
            assert free.wait(60)
        return made

    def tell(line):
        if stopped.is_set():  # what a script does whose handler only notes the signal
            raise KeyboardInterrupt

    tried = []
    monkeypatch.setattr(aot, "plan", lambda *args: (tried.append(args[0]), plan(*args))[1])
    # A shell starts what it puts into the background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        ranking = strategies.search(TINY, HOST, best=3, tell=tell)
    finally:
        signal.signal(signal.SIGINT, before)
        free.set()
    assert time.monotonic() - began < 50
    assert len(ranking.compiled) == 1 and ranking.best.cfg == tried[0]
    assert ranking.stopped == "all legal meshes are priced, 1 of 3 that fit are compiled"
    assert len(ranking.ranked) == strategies.SHOWN and tried[0] not in [
        p.cfg for p in ranking.ranked
    ]


def test_a_row_that_does_not_fit_says_so_first_within_80_columns(monkeypatch):
    pretend(monkeypatch, [1e9, 1.5])
    ranking = strategies.search(TINY, HOST, best=1)
    text = plan_report.search_markdown(
        ranking, plan_report.ranking_rows(ranking, run_config(), ["--preset=nano"])
    )
    lines = text.split("```")[1].strip("\n").splitlines()
    assert max(map(len, text.split("```")[1].splitlines())) < 80
    (bad,) = [line for line in lines if "DOES NOT FIT" in line]
    assert bad.startswith(f"{len(ranking.plans):2}  DOES NOT FIT (stash)")
    assert lines[1].startswith(" 1  fits ")
    told = plan_report.markdown(dataclasses.replace(ranking.best, misfit="stash")).splitlines()
    assert told[2].startswith("DOES NOT FIT: needs ")  # before everything else


def test_the_report_has_the_table_and_flags_to_paste(ranking, tmp_path):
    rows = plan_report.ranking_rows(ranking, run_config(), ["--preset=nano"])
    text = plan_report.search_markdown(ranking, rows)
    plan_report.write(ranking.best, tmp_path, text, plan_report.search_figures(ranking, rows))
    assert f"{ranking.proposals:,} candidates on" in (tmp_path / "plan.md").read_text()
    figures = json.loads((tmp_path / "plan.json").read_text())["search"]
    assert figures["label"] == "estimate" and len(figures["rows"]) == strategies.SHOWN
    for row, plan in zip(figures["rows"], ranking.plans, strict=True):
        words = row["flags"].split()
        assert words[0] == "--preset=nano" and "--train.global_batch=6" in words
        pipe = plan.step.sizes["pipe"]
        assert (f"--mesh.pipe={pipe}" in words) == (pipe > 1)
        assert (
            row["estimate"].count("estimate") == 2
            and f"1: {row['flags']}" in text
            or row["rank"] > 1
        )


@pytest.mark.aot
@pytest.mark.slow
def test_a_whole_search_of_nano():
    from megajax.training.presets import PRESETS

    ranking = strategies.search(PRESETS["nano"](), HOST, best=1)
    assert ranking.best.compiled is not None and ranking.best.misfit is None
    fastest = strategies.search(PRESETS["nano"](), HOST, compiles=False).ranked
    assert ranking.best.cfg in [p.cfg for p in fastest]


def test_a_wire_is_searched_beside_runs_without_one():
    """On two slow hosts: with it on every cut into nodes, without it where nodes change nothing."""
    slow = dataclasses.replace(HOST.card, network_bytes_per_s=1e9)
    cluster = dataclasses.replace(HOST, card=slow, hosts=2, gpus_per_host=2)
    cfg = run_config(wire="sdp4bit", exchange__start_step=3, train__global_batch=4)
    candidates = proposed(cfg, cluster)
    kinds = {(c.wire, c.zero, c.mesh.node) for c in candidates}
    assert kinds == {
        ("sdp4bit", "optimizer", 1),
        ("sdp4bit", "optimizer", 2),
        ("none", "full", 1),
        ("none", "optimizer", 1),
    }
    for one in candidates:
        aot.sizes(one, cluster)
        assert one.exchange.start_step == (3 if one.wire == "sdp4bit" else 0)
        once = one.wire != "none" or one.zero == "optimizer"
        assert not (once and one.mesh.pipe > 1 and one.pipeline.gradients == "sharded")
    assert {c.zero for c in proposed(run_config(shard__zero="optimizer"), HOST)} == {"optimizer"}


def test_a_search_with_a_wire_shows_what_each_row_sends():
    cfg = run_config(wire="zeropp", train__global_batch=8, model__layers=1, train__remat="full")
    ranking = strategies.search(cfg, parse_cluster("h100:1x2"), compiles=False)
    rows = plan_report.ranking_rows(ranking, run_config(), ["--preset=nano"])
    text = " ".join(plan_report.search_markdown(ranking, rows).split())
    assert all(f"; {row['exchange']}" in text for row in rows)
    for row, plan in zip(rows, ranking.plans, strict=True):
        assert row["exchange"] == f"wire {plan.cfg.wire}, ZeRO {plan.cfg.zero}"
        assert ("--wire=zeropp" in row["flags"]) == (plan.cfg.wire == "zeropp")


def grown(monkeypatch, factor):
    """Compiles in which a program needs factor(cfg, bound) times its bound."""
    tried = []

    def plan(cfg, cluster, model):
        outlined = aot.outline(cfg, cluster)
        tried.append(cfg)
        bound = memory.bound(outlined.terms)
        peak = factor(cfg, bound) * bound
        compiled = aot.Compiled("", {"peak": peak}, {}, (), 0, 0.0, "xla")
        made = dataclasses.replace(outlined, compiled=compiled)
        fits = made.needed <= cluster.card.memory_bytes
        return made if fits else dataclasses.replace(made, misfit="stash")

    monkeypatch.setattr(aot, "plan", plan)
    return tried


def card_with(room):
    """The cluster with so many bytes beside the reserve on each device."""
    card = dataclasses.replace(HOST.card, memory_bytes=aot.RESERVE_BYTES + room)
    return dataclasses.replace(HOST, card=card)


@pytest.fixture(scope="module")
def priced():
    return strategies.price(TINY, HOST, strategies.legal_meshes(TINY, HOST)).fits


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
)
def test_searches_of_random_memories_against_trying_everything(monkeypatch, priced, first):
    """Programs grow by 1 to 3 times their bounds, by kind and by chance, on cards of any size.

    What is said to fit does; where a tenth of the memory is to spare for some candidate, one is
    ranking, within the tries that are allowed; it is the fastest of all in at least half of the
    searches.
    """
    bounds, slower = sorted(p.bound for p in priced), []
    for seed in range(50 * first, 50 * first + 50):
        rng = random.Random(f"memories {seed}")
        room = rng.choice(bounds) * rng.uniform(1, 3)
        kinds, chance = {}, rng.choice([0, 0.05, 0.3])

        def factor(cfg, bound, rng=rng, kinds=kinds, chance=chance, seed=seed):
            staged = cfg.mesh.pipe > 1
            kind = staged, staged and cfg.pipeline.stash, cfg.train.remat
            if kind not in kinds:
                kinds[kind] = random.Random(f"{seed} {kind}").uniform(1, 3)
            return kinds[kind] * (1 + chance * random.Random(bound).random())

        candidates = [p for p in priced if p.bound <= room]
        needs = [factor(p.cfg, p.bound) * p.bound for p in candidates]
        with monkeypatch.context() as patch:
            tried = grown(patch, factor)
            tries = strategies.compile_best(candidates, card_with(room), 1)
        assert len(tried) == len(set(tried)) <= strategies.MOST_MISFITS + 1
        fits = [p for p in tries.plans if p.fits]
        assert len(fits) <= 1 and all(p.compiled.xla["peak"] <= room for p in fits)
        assert bool(fits) != bool(tries.ended)
        assert fits or min(needs) > 0.9 * room
        if fits:
            fastest = min(
                p.step_s for p, need in zip(candidates, needs, strict=True) if need <= room
            )
            slower.append(fits[0].estimate.step_s / fastest)
    assert len(slower) > 25 and min(slower) >= 1 and sorted(slower)[len(slower) // 2] == 1


def test_only_a_compiled_row_says_that_it_fits(monkeypatch, priced):
    """All programs need 1.8 bounds, as where 68 GiB became 125: half of the candidates, which fit
    by their bounds, do not. None of these is ranked, and no other row says 'fits'."""
    room = 1.8 * sorted(p.bound for p in priced)[len(priced) // 2]
    tried = grown(monkeypatch, lambda cfg, bound: 1.8)
    ranking = strategies.search(TINY, card_with(room), best=2)
    rows = plan_report.ranking_rows(ranking, TINY, [])
    for plan, row in zip(ranking.plans, rows, strict=True):
        assert plan.fits == (row["fits"] == "fits")
        assert (row["fits"] == "not compiled") == (row["needed_is"] != "compiled")
        if plan.misfit:
            continue
        said = plan_report.verdict(plan)
        assert said.startswith("fits: " if plan.fits else "not compiled: ")
        if not plan.compiled and plan.expected:
            assert plan.expected == pytest.approx(1.8 * memory.bound(plan.terms))
            assert plan.needed <= aot.RESERVE_BYTES + room and "expected to need" in said
        elif not plan.compiled:
            assert "needs at least" in said
    assert {row["needed_is"] for row in rows} >= {"compiled", "expected"}
    too_large = sum(p.bound <= room < 1.8 * p.bound for p in priced)
    assert 0 < too_large == ranking.unlikely
    text = plan_report.summary(ranking)
    assert f"{len(tried)} were compiled, of which 2 fit. {ranking.unlikely:,} that fit by" in text


def test_loss_chunks_that_are_left_open_are_chosen_before_the_bound_drops_a_candidate():
    """A large vocabulary and few layers: what one piece of logits does not fit, more pieces do.

    The oracle is the outline of each proposal, which chooses as a run does.
    """
    cfg = run_config(
        model__vocab=128_000,
        model__layers=1,
        train__seq_len=4096,
        train__global_batch=8,
        train__loss_chunks=0,
        train__attention="xla",
    )
    cluster = dataclasses.replace(HOST, gpus_per_host=2)
    cluster = dataclasses.replace(
        cluster, card=dataclasses.replace(HOST.card, memory_bytes=round(aot.RESERVE_BYTES + 8e9))
    )
    priced = strategies.price(cfg, cluster, strategies.legal_meshes(cfg, cluster))
    outlines = [aot.outline(c, cluster) for c in proposed(cfg, cluster)]
    assert {p.cfg for p in priced.fits} == {p.cfg for p in outlines if p.misfit is None}
    times = {p.cfg: (p.estimate.step_s, memory.bound(p.terms)) for p in outlines}
    assert all((p.step_s, p.bound) == times[p.cfg] for p in priced.fits)
    one_piece = strategies.price(
        dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, loss_chunks=1)),
        cluster,
        strategies.legal_meshes(cfg, cluster),
    )
    assert len(one_piece.fits) < len(priced.fits) and one_piece.dropped["logits"] > 0


def test_a_search_in_vain_says_how_many_it_compiled(monkeypatch):
    """Every program needs more than the card has, and the tries are bounded."""
    tried = grown(monkeypatch, lambda cfg, bound: HOST.card.memory_bytes / bound * (1 + len(tried)))
    ranking = strategies.search(TINY, HOST, best=1)
    assert not ranking.best.fits and 0 < len(tried) <= strategies.MOST_MISFITS
    text = plan_report.summary(ranking)
    assert f"{len(tried)} were compiled, of which 0 fit" in text
    assert f"The search ended early: {ranking.ended}." in text


def test_gpus_that_the_compiler_does_not_know_are_ranked_without_it():
    ranking = strategies.search(TINY, parse_cluster("l4:1x8"), best=1)
    assert ranking.ended == "programs cannot be compiled for L4" and not ranking.compiled
    rows = plan_report.ranking_rows(ranking, TINY, [])
    assert {(row["fits"], row["needed_is"]) for row in rows} == {("not compiled", "bound")}
    assert "The search ended early: programs cannot be" in plan_report.summary(ranking)


def test_attention_of_other_gpus_is_compiled_for_an_h100():
    """Where a run has a fused kernel; XLA's own is compiled for the GPUs themselves."""
    cfg = run_config(train__dtype="bfloat16", train__attention="auto")
    for kind, place in (("h200", "H200"), ("a100", "H100"), ("b200", "H100"), ("l4", "H100")):
        cluster = parse_cluster(f"{kind}:2x4")
        chosen = aot.compiled_in_place(cfg, cluster)
        assert (chosen.card.name, chosen.devices) == (place, 8)
        plain = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, attention="xla"))
        assert aot.compiled_in_place(plain, cluster) == cluster
