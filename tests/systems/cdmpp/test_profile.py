"""Labels of real programs: what the profiler says, joined to records, and what is kept of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, DeviceCard
from megajax.cost.record import product
from megajax.systems.cdmpp import families
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.profile import Timed, _by_pass, _halves, measure

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
    ]
    return measure(programs)


def test_the_profiler_times_every_launched_instruction(measured):
    assert [one.untimed for one in measured] == [0, 0, 0]
    small, large, _ = (max(one.halves.min(1)) for one in measured)
    assert large > 3 * small  # 13,824 times the work
    for one in measured:
        total = sum(r.executions * s for r, s in zip(one.records, one.halves.min(1), strict=True))
        assert 0 < total <= 1.2 * one.wall.max()  # an inner time is a part of the outer one


def test_a_loop_is_timed_by_execution(measured):
    _, large, loop = measured
    dear = max(range(len(loop.records)), key=lambda i: loop.records[i].flops)
    assert loop.records[dear].executions == 5
    # One turn is one product of the same size; five would be five times that.
    assert loop.halves.min(1)[dear] < 3.5 * max(large.halves.min(1))


def test_passes_take_turns_between_the_halves():
    assert _halves(np.array([5.0, 1.0, 4.0, 2.0, 6.0, 3.0])).tolist() == [4.0, 1.0]
    assert _by_pass([1.0, 3.0, 2.0, 8.0, 8.0, 9.0], 2, 3).tolist() == [2.0, 8.0]
    assert _by_pass([1.0, 2.0, 3.0], 2, 1) is None  # events that do not add up
    assert _by_pass([], 2, 1) is None
    for passes in (2, 7):
        with pytest.raises(UserError, match="passes"):
            measure([], passes)


def test_a_loop_that_values_stop_is_timed_by_the_turns_that_were_seen():
    def run(x, w):
        return jax.lax.while_loop(lambda c: c[0, 0] < 4.5, lambda c: c @ w, x)

    # 1, 2, 4, 8: three turns of a product with twice the identity.
    args = jnp.ones((64, 64), jnp.float32), 2 * jnp.eye(64, dtype=jnp.float32)
    with pytest.warns(UserWarning, match="how often the loop"):
        (found,) = measure([Program(7, "open", run, args)])
    assert [r.executions for r in found.records if r.kind == "product"] == [3]


def test_labels_keep_both_halves_and_mark_rows_that_disagree(tmp_path):
    found = labels()
    assert found.dataset.seconds.tolist() == [1e-5, 2e-5]
    np.testing.assert_allclose(found.disagreement, [0.05, 0.5])
    assert found.is_marked.tolist() == [False, True]
    assert found.noise == pytest.approx({"noise_mean": 0.275, "noise_median": 0.275, "marked": 0.5})
    both = Labels.joined([found, labels(family="norm")])
    both.save(tmp_path / "labels.npz")
    again = Labels.load(tmp_path / "labels.npz")
    assert again.families.tolist() == ["mlp", "mlp", "norm", "norm"]
    assert again.programs.tolist() == [3] * 4
    np.testing.assert_array_equal(again.halves, both.halves)
    np.testing.assert_array_equal(again.walls, both.walls)
    assert Dataset.load(tmp_path / "labels.npz").records[1].hash == found.dataset.records[1].hash


def test_files_that_hold_no_labels_are_refused(tmp_path):
    found = labels()
    found.dataset.save(tmp_path / "plain.npz")
    with pytest.raises(UserError, match="no family"):
        Labels.load(tmp_path / "plain.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "plain.npz").read_bytes()[:200])
    with pytest.raises(UserError, match="damaged"):
        Labels.load(tmp_path / "cut.npz")
    with pytest.raises(UserError, match="--budget"):
        Labels.joined([])


def test_no_row_beats_a_raised_card():
    # The second row takes longer than the card's floor, the first less: 1,024 FLOPs in 1 ns.
    found = labels(((1e-9, 1e-9), (2e-5, 2e-5))).with_raised_cards()
    card = found.dataset.cards["a CPU"]
    rows = zip(found.dataset.records, found.dataset.seconds, strict=True)
    assert all(record.floor_s(card) <= seconds * (1 + 1e-12) for record, seconds in rows)
    assert card.flops["float32"] == pytest.approx(1.024e12)
    assert labels().with_raised_cards().dataset.cards["a CPU"] == CPU
    assert CARDS["H100"].name not in found.dataset.cards


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


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_runs(name):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for one in measure(list(itertools.islice(families.programs([name], seed=3), 2))):
            assert len(one.records) > 0
            assert one.untimed <= len(one.records) // 10
