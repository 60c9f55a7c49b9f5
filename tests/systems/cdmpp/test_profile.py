"""Labels of real programs: what the profiler says, joined to records, and what is kept of it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, DeviceCard
from megajax.cost.program import records
from megajax.cost.record import product
from megajax.systems.cdmpp import families
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.labels import Labels, prepared, runnable
from megajax.systems.cdmpp.profile import (
    Timed,
    by_pass,
    halves_of,
    measure,
    measure_ready,
    ready,
)

CPU = DeviceCard("a CPU", {"float32": 1e11}, 2**30, 1e10, 0.0, 0.0, sms=2)


def looped(x, w):
    return jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ w), x)


def labels(seconds=((1e-5, 1.05e-5), (2e-5, 3e-5)), family="mlp"):
    rows = [product(1, 8, 8, 8 + i, "float32") for i in range(len(seconds))]
    program = Program(3, family, looped, ())
    timed = Timed(program, rows, np.array(seconds), np.array([1e-4, 2e-4]), 0)
    return Labels.of([timed], CPU, {"date": "today"})


@pytest.fixture(scope="module")
def measured():
    small = jnp.ones((16, 16), jnp.float32)
    large = jnp.ones((384, 384), jnp.float32)
    programs = [
        Program(0, "small", lambda x, w: x @ w, (small, small)),
        Program(1, "large", lambda x, w: x @ w, (large, large)),
        Program(2, "loop", looped, (large, large)),
        Program(3, "small loop", looped, (small[:2, :2], small[:2, :2])),
    ]
    return measure(programs)


def test_the_profiler_times_every_launched_instruction(measured):
    assert [one.untimed for one in measured] == [0, 0, 0, 0]
    small, large = (max(one.halves.min(1)) for one in measured[:2])
    assert large > 3 * small  # 13,824 times the work
    for one in measured[:3]:
        total = sum(r.executions * s for r, s in zip(one.records, one.halves.min(1), strict=True))
        # An inner time is a part of the outer one; in a loop the median turn may exceed the mean.
        assert 0 < total <= 1.5 * one.wall.max()


def test_a_loop_is_timed_by_execution(measured):
    large, loop = measured[1:3]
    dear = max(range(len(loop.records)), key=lambda i: loop.records[i].flops)
    assert loop.records[dear].executions == 5
    # One turn is one product of the same size; five would be five times that.
    assert loop.halves.min(1)[dear] < 3.5 * max(large.halves.min(1))


def test_a_small_loop_has_no_times_of_its_parts(measured):
    """XLA compiles it into one function: the profiler has no event for what is inside."""
    compiled = ready(measured[3].program)
    assert "xla_cpu_small_call" in compiled.text
    every_record, outside = records(compiled.compiled), compiled.records
    assert [r.executions for r in every_record if r not in outside] and len(outside) < len(
        every_record
    )
    assert {r.executions for r in outside} <= {1.0}


def test_programs_that_fail_cost_no_other(capsys):
    def make(number):
        if number == 1:
            raise ValueError("cannot be drawn")
        x = jnp.ones((8, 8), jnp.float32)
        function = jnp.tanh if number != 2 else lambda x: x @ jnp.ones((3, 3))
        return Program(number, f"family{number}", function, (x,))

    def no_memory():
        raise RuntimeError("no memory")

    compiled, tried = prepared(make, range(5), threads=3)
    assert tried == 5 and [program.number for program, _ in compiled] == [0, 3, 4]
    program, broken = compiled[1]
    compiled[1] = program, dataclasses.replace(broken, call=no_memory)
    ready = runnable(compiled)
    assert [program.number for program, _ in ready] == [0, 4]
    said = capsys.readouterr().out
    assert "program 1 did not compile: ValueError: cannot be drawn" in said
    assert "program 2 (family2) did not compile" in said
    assert "program 3 (family3) did not run" in said
    assert [one.untimed for one in measure_ready(ready)] == [0, 0]


def test_a_batch_is_cut_short_when_the_time_is_over():
    compiled, tried = prepared(lambda number: (_ for _ in ()).throw(OSError), range(5), end=0.0)
    assert compiled == [] and tried <= 2  # the one that had begun, and one that began meanwhile


def test_passes_take_turns_between_the_halves():
    assert halves_of(np.array([5.0, 1.0, 4.0, 2.0, 6.0, 3.0])).tolist() == [4.0, 1.0]
    once = product(1, 8, 8, 8, "float32")
    three, sort = (dataclasses.replace(once, **c) for c in ({"executions": 3}, {"kind": "sort"}))
    assert by_pass(three, [1.0, 3.0, 2.0, 8.0, 8.0, 9.0], 2).tolist() == [2.0, 8.0]
    assert by_pass(once, [1.0, 2.0, 3.0], 2) is None  # events that do not add up
    assert by_pass(once, [], 2) is None
    # Of a loop that values stop, two events are two turns, or two kernels of one.
    assert by_pass(once, [1.0, 2.0, 3.0, 4.0], 2, is_open=True) is None
    assert by_pass(once, [1.0, 2.0], 2, is_open=True).tolist() == [1.0, 2.0]
    assert by_pass(sort, [1.0, 2.0, 3.0, 5.0], 2).tolist() == [3.0, 8.0]
    for passes in (2, 7):
        with pytest.raises(UserError, match="passes"):
            measure([], passes)


def test_a_loop_that_values_stop_is_timed_by_the_turns_that_were_seen():
    def run(x, w):
        return jax.lax.while_loop(lambda c: c[0, 0] < 4.5, lambda c: c @ w, x)

    # 1, 2, 4, 8: three turns of a product with twice the identity.
    args = jnp.ones((64, 64), jnp.float32), 2 * jnp.eye(64, dtype=jnp.float32)
    with pytest.warns(UserWarning, match="how often the loop"):
        (timed,) = measure([Program(7, "open", run, args)])
    assert [r.executions for r in timed.records if r.kind == "product"] == [3]


def test_labels_keep_both_halves_and_mark_rows_that_disagree(tmp_path):
    labelled = labels()
    assert labelled.dataset.seconds.tolist() == [1e-5, 2e-5]
    np.testing.assert_allclose(labelled.disagreement, [0.05, 0.5])
    assert labelled.is_marked.tolist() == [False, True]
    assert labelled.noise == pytest.approx(
        {"noise_mean": 0.275, "noise_median": 0.275, "marked": 0.5}
    )
    both = Labels.joined([labelled, labels(family="norm")])
    second = both.of_rows(np.arange(len(labelled.halves), len(both.halves)))
    assert set(second.families) == {"norm"} and len(second.dataset) == len(second.halves)
    np.testing.assert_array_equal(second.dataset.seconds, second.halves.min(1))
    both.save(tmp_path / "labels.npz")
    again = Labels.load(tmp_path / "labels.npz")
    assert again.families.tolist() == ["mlp", "mlp", "norm", "norm"]
    assert again.programs.tolist() == [3] * 4
    np.testing.assert_array_equal(again.halves, both.halves)
    np.testing.assert_array_equal(again.walls, both.walls)
    assert Dataset.load(tmp_path / "labels.npz").records[1].hash == labelled.dataset.records[1].hash


def test_files_that_hold_no_labels_are_refused(tmp_path):
    labelled = labels()
    labelled.dataset.save(tmp_path / "plain.npz")
    with pytest.raises(UserError, match="no family"):
        Labels.load(tmp_path / "plain.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "plain.npz").read_bytes()[:200])
    with pytest.raises(UserError, match="damaged"):
        Labels.load(tmp_path / "cut.npz")
    with pytest.raises(UserError, match="--budget"):
        Labels.joined([])


def test_no_row_beats_a_raised_card():
    # The second row takes longer than the card's floor, the first less: 1,024 FLOPs in 1 ns.
    raised = labels(((1e-9, 1e-9), (2e-5, 2e-5))).with_raised_cards()
    card = raised.dataset.cards["a CPU"]
    rows = zip(raised.dataset.records, raised.dataset.seconds, strict=True)
    assert all(record.floor_s(card) <= seconds * (1 + 1e-12) for record, seconds in rows)
    assert card.flops["float32"] == pytest.approx(1.024e12)
    assert labels().with_raised_cards().dataset.cards["a CPU"] == CPU
    assert CARDS["H100"].name not in raised.dataset.cards
    assert (labels(((1e-9, 1e-9), (2e-5, 2e-5))).below_floor, raised.below_floor) == (0.5, 0.0)


def test_programs_are_drawn_by_number():
    names = ("product", "elementwise", "layout")
    first = list(itertools.islice(families.programs(names, seed=1), 6))
    later = next(families.programs(names, seed=1, start=4))
    assert [p.family for p in first] == [*names, *names]
    assert (later.number, later.family) == (4, "elementwise")
    shapes = [jax.tree.map(jnp.shape, p.args) for p in (first[4], later)]
    assert shapes[0] == shapes[1]
    np.testing.assert_array_equal(first[4].args[0], later.args[0])
    other = next(families.programs(names, seed=2, start=4))
    assert jax.tree.map(jnp.shape, other.args) != shapes[0]


def test_a_larger_scale_draws_larger_programs_within_memory(monkeypatch):
    def sizes(scale):
        names = ("mlp", "attention")  # their shapes are drawn before their arrays
        drawn = itertools.islice(families.programs(names, seed=3, scale=scale), 12)
        return np.array([max(x.size for x in jax.tree.leaves(program.args)) for program in drawn])

    first = next(families.programs(("elementwise",), seed=3, start=4, scale=16.0))
    monkeypatch.setattr(families, "BFLOAT16", 1.0)
    half = next(families.programs(("elementwise",), seed=3, start=4, scale=16.0))
    assert jax.tree.map(jnp.shape, half.args) == jax.tree.map(jnp.shape, first.args)
    assert {x.dtype.name for x in jax.tree.leaves(half.args)} == {"bfloat16"}
    small, large = sizes(1.0), sizes(16.0)
    assert (large >= small).all() and 2 < (large / small).max() <= 17
    monkeypatch.setattr(families, "LARGEST", int(large.max()) - 1)
    again = sizes(16.0)
    assert again.max() < large.max() and (again <= large).all()
    assert (again == large).sum() > 6  # only programs that were too large are drawn again
    monkeypatch.setattr(families, "DRAWN", 100)  # then values repeat
    x = jax.tree.leaves(next(families.programs(("layout",), seed=3, scale=4.0)).args)[0]
    assert x.ravel()[:100].tolist() == x.ravel()[100:200].tolist()


def test_pieces_that_are_too_large_together_are_refused_before_all_take_memory(monkeypatch):
    monkeypatch.setattr(families, "LARGEST", 1000)
    drawn = []

    def piece(draw):
        drawn.append(draw.floats(100))
        return jnp.abs, (drawn[-1],)

    rng = np.random.default_rng(0)  # picks the largest number of pieces
    with pytest.raises(families.TooLarge):
        families.several(piece, 10**6)(families.Draw(rng, 1.0))
    assert len(drawn) == 11
    function, args = families.several(piece, 2)(families.Draw(rng, 1.0))
    assert [y.shape for y in function(*args)] == [(100,)] * len(args)


def test_a_third_of_the_sizes_are_powers_of_two():
    draw = families.Draw(np.random.default_rng(0), 1.0)
    sizes = np.array([draw.size(100, 1000) for _ in range(1000)])
    multiples = np.array([draw.size(100, 1000, 16) for _ in range(1000)])
    assert 64 <= sizes.min() and sizes.max() <= 1024 and (multiples % 16 == 0).all()
    share = np.mean(sizes & (sizes - 1) == 0)
    assert families.POWERS - 0.05 < share < families.POWERS + 0.05


def test_a_mixture_is_the_same_each_time_and_has_many_kinds_of_operations():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        mixtures = [families.program(0, ("mixture",), seed=5) for _ in range(2)]
        texts = [jax.jit(one.function).lower(*one.args).as_text() for one in mixtures]
    assert texts[0] == texts[1]
    for word in ("transpose", "slice", "reduce", "while", "concatenate", "dot_general", "pad"):
        assert f"stablehlo.{word}" in texts[0], word


def test_files_of_one_device_are_read_together(tmp_path):
    records = [product(1, 8 * i, 8, 8, "float32") for i in (1, 2, 3)]
    card = DeviceCard("here", {"float32": 1e11}, 10**10, 1e9, 0, 0)
    faster = dataclasses.replace(card, flops={"float32": 9e10}, memory_bytes_per_s=2e10)
    for name, measured_card, family in (("a", card, "mlp"), ("b", faster, "mixture")):
        data = Dataset(
            records, np.full(3, 1e-3), ["here"] * 3, {"here": measured_card}, {"date": name}
        )
        pairs = np.full((3, 2), 1e-3)
        Labels(data, np.array([family] * 3), np.array([0, 0, 4]), pairs, pairs).save(
            tmp_path / f"{name}.npz"
        )
    both = Labels.together([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert both.programs.tolist() == [0, 0, 4, 5, 5, 9]
    assert both.families.tolist() == ["mlp"] * 3 + ["mixture"] * 3
    [joined_card] = both.dataset.cards.values()
    assert joined_card == card  # of the first file
    facts = both.dataset.facts
    assert facts["date"] == "a" and [part["date"] for part in facts["parts"]] == ["a", "b"]
    alone = Labels.together([tmp_path / "b.npz"])
    assert alone.dataset.cards["here"] == faster and "parts" not in alone.dataset.facts


@pytest.mark.slow
@pytest.mark.parametrize("name", [*families.FAMILIES, *families.SYNTHETIC])
def test_every_family_runs(name):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for one in measure(list(itertools.islice(families.programs([name], seed=3), 2))):
            assert len(one.records) > 0
            assert one.untimed <= len(one.records) // 10
