"""The step time of a compiled program: its schedule, its streams, and what is exposed."""

import numpy as np
import pytest

from megajax.core.hardware import parse_cluster
from megajax.cost.replay import replay
from megajax.cost.roofline import Group, collective_time
from megajax.systems.cdmpp.step import assumed, by_kind, predict, schedule, tasks

CLUSTER = parse_cluster("h100:2x8")
MIB = 2**20
# A gather beside one product of two, a loop whose turns each reduce at once, a gather that XLA
# says is synchronous, and a permute from every device to itself.
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=16

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %p = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%p), index=1
  %inner = f32[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduced = f32[512,512]{1,0} all-reduce(%inner), replica_groups=[2,8]<=[16], to_apply=%add
  ROOT %t = (s32[], f32[512,512]{1,0}) tuple(%i, %reduced)
}

%cond (p.1: (s32[], f32[512,512])) -> pred[] {
  %p.1 = (s32[], f32[512,512]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (w: f32[512,512], x.1: f32[512,512]) -> f32[512,512] {
  %w = f32[512,512]{1,0} parameter(0)
  %x.1 = f32[512,512]{1,0} parameter(1)
  %first = f32[512,512]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gather-start = (f32[512,512]{1,0}, f32[8192,512]{1,0}) all-gather-start(%w), replica_groups=[1,16]<=[16], dimensions={0}
  %beside = f32[512,512]{1,0} dot(%first, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gather-done = f32[8192,512]{1,0} all-gather-done(%gather-start)
  %after = f32[8192,512]{1,0} dot(%gather-done, %beside), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %zero = s32[] constant(0)
  %init = (s32[], f32[512,512]{1,0}) tuple(%zero, %beside)
  %loop = (s32[], f32[512,512]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %sync-start = (f32[512,512]{1,0}, f32[8192,512]{1,0}) all-gather-start(%w), replica_groups=[1,16]<=[16], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}
  %late = f32[512,512]{1,0} dot(%x.1, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sync-done = f32[8192,512]{1,0} all-gather-done(%sync-start)
  %still = f32[512,512]{1,0} collective-permute(%late), source_target_pairs={{0,0},{1,1}}
  ROOT %out = f32[512,512]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def of(launches, **named):
    """Seconds of all executions, 1 of what is not named."""
    return [named.get(one.record.name.replace("-", "_"), 1.0) for one in launches]


def test_the_schedule_has_all_launches_in_their_order():
    launches = list(schedule(TEXT))
    assert [one.record.name for one in launches] == [
        "first",
        "gather-start",
        "beside",
        "after",
        "inner",
        "reduced",
        "sync-start",
        "late",
        "still",
    ]
    by_name = {one.record.name: one for one in launches}
    assert by_name["inner"].record.executions == by_name["reduced"].record.executions == 5
    assert by_name["gather-start"].starts == "gather-start"
    assert by_name["after"].after == ("gather-start",)
    assert by_name["sync-start"].starts == by_name["reduced"].starts == ""


def test_an_async_collective_hides_beside_what_stands_before_its_done():
    launches = list(schedule(TEXT))
    # first 1, then beside 3 next to the gather of 4: 1 s waits. after 1, inner 1, reduced 2 waits,
    # sync-start 2 waits though late stands before its done, late 1, still 0.
    seconds = of(launches, beside=3.0, gather_start=4.0, reduced=2.0, sync_start=2.0, still=0.0)
    replayed = replay(tasks(launches, seconds))
    assert replayed.seconds == 1 + 4 + 1 + 1 + 2 + 2 + 1
    assert replayed.exposed_s == 1 + 2 + 2
    hidden = of(launches, beside=5.0, gather_start=4.0, reduced=0.0, sync_start=0.0, still=0.0)
    assert replay(tasks(launches, hidden)).exposed_s == 0


def test_times_of_collectives_are_those_of_their_groups():
    step_time = predict(TEXT, CLUSTER)
    rows = {record.name: seconds for record, seconds, _ in step_time.rows}
    gathered = collective_time("all-gather", 16.0 * MIB, Group(8, 2), CLUSTER)
    assert rows["gather-start"] == pytest.approx(gathered)
    inside = collective_time("all-reduce", 1.0 * MIB, Group(8, 1), CLUSTER)
    assert rows["reduced"] == pytest.approx(5 * inside)
    assert rows["still"] == 0
    assert step_time.communication_s == pytest.approx(2 * gathered + 5 * inside)
    assert step_time.seconds <= step_time.compute_s + step_time.communication_s + 1e-12
    assert step_time.exposed_s == pytest.approx(step_time.seconds - step_time.compute_s)
    assert sum(by_kind(step_time).values()) == pytest.approx(
        step_time.compute_s + step_time.communication_s
    )
    assert list(by_kind(step_time))[0] == "collective"


def test_a_predictor_is_asked_once_for_all_that_computes():
    asked = []

    def times(records, card):
        asked.append([record.name for record in records])
        seconds, sigma = assumed(records, card)
        return 3 * seconds, 0.5 * seconds

    plain, slow = predict(TEXT, CLUSTER), predict(TEXT, CLUSTER, times)
    assert asked == [["first", "beside", "after", "inner", "late"]]
    assert slow.compute_s == pytest.approx(3 * plain.compute_s)
    assert slow.communication_s == plain.communication_s
    assert 0 < slow.sigma < slow.seconds
    for record, seconds, _ in slow.rows:
        assert seconds >= record.floor_s(CLUSTER.card) * record.executions or (
            record.kind == "collective"
        )


def test_a_program_without_a_launch_takes_no_time():
    nothing = predict("ENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n", CLUSTER)
    assert (nothing.seconds, nothing.sigma, nothing.rows) == (0, 0, ())
    assert np.isfinite(nothing.exposed_s)
