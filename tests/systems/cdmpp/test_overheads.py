"""What a call costs beside its operations: counted in programs, fitted on timed ones."""

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import parse_cluster
from megajax.cost.replay import contention
from megajax.systems.cdmpp.step import Counts, Overheads, counts, predict
from tests.systems.cdmpp.test_program_step import CLUSTER, TEXT

NESTED = """HloModule jit_g, is_scheduled=true

%inner_body (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %x = f32[8]{0} get-tuple-element(%a), index=1
  %y = f32[8]{0} add(%x, %x)
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %y)
}

%outer_body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]{0}) parameter(0)
  ROOT %in = (s32[], f32[8]{0}) while(%b), condition=%cond, body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
}

%cond (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: s32[], q: f32[8]) -> (s32[], f32[8]) {
  %p = s32[] parameter(0)
  %q = f32[8]{0} parameter(1)
  %first = (s32[], f32[8]{0}) tuple(%p, %q)
  ROOT %out = (s32[], f32[8]{0}) while(%first), condition=%cond, body=%outer_body, backend_config={"known_trip_count":{"n":"4"}}
}
"""  # noqa: E501


def test_counts_of_nested_loops():
    # Two arguments, two results; 4 turns of the outer loop, in each 3 of the inner one.
    assert counts(NESTED) == Counts(arrays=4, launches=12, turns=4 * (1 + 3))
    assert counts(TEXT).turns == 5


def test_a_fit_finds_the_overheads_that_made_the_calls():
    rng = np.random.default_rng(0)
    true = Overheads(4e-5, 1e-6, 2e-6, 5e-6)
    programs = [Counts(int(a), float(b), float(c)) for a, b, c in rng.integers(1, 90, (40, 3))]
    computed = rng.uniform(1e-5, 1e-3, 40)
    walls = [s + true.of(one) for s, one in zip(computed, programs, strict=True)]
    fitted = Overheads.fit(programs, computed, walls)
    for name in ("call_s", "array_s", "launch_s", "turn_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)
    # A call that is shorter than its parts gives no negative overhead.
    assert Overheads.fit(programs, [2 * w for w in walls], walls) == Overheads()
    with pytest.raises(UserError, match="none"):
        Overheads.fit([], [], [])


def test_overheads_lie_on_the_compute_stream():
    plain = predict(TEXT, CLUSTER)
    costs = Overheads(call_s=1e-3, array_s=1e-4, launch_s=1e-5, turn_s=1e-6)
    slow = predict(TEXT, CLUSTER, overheads=costs)
    assert slow.overhead_s == pytest.approx(costs.of(counts(TEXT)))
    # Nothing of it hides but what is launched beside a collective: the gather, and `beside`.
    assert slow.seconds - plain.seconds == pytest.approx(slow.overhead_s, abs=2.1e-5)
    assert (slow.compute_s, slow.communication_s) == (plain.compute_s, plain.communication_s)
    assert plain.overhead_s == 0


def test_a_slowdown_makes_a_step_longer_where_it_overlaps():
    cluster = parse_cluster("h100:2x8")
    plain, slow = (predict(TEXT, cluster, slowdown=s) for s in (None, contention(1.5, 1.5)))
    assert plain.seconds < slow.seconds < 1.5 * plain.seconds
