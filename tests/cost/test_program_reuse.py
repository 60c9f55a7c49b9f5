"""How long ago operands were touched, by hand from the lines of a schedule."""

import math

import pytest

from megajax.cost.program import records

STRAIGHT = """HloModule straight, is_scheduled=true

ENTRY %main (p0: f32[100], p1: f32[1000]) -> (f32[100], f32[1000]) {
  %p0 = f32[100]{0} parameter(0)
  %p1 = f32[1000]{0} parameter(1)
  %a = f32[100]{0} negate(%p0)
  %same = f32[100]{0} bitcast(%a)
  %b = f32[100]{0} add(%same, %p0)
  %c = f32[1000]{0} negate(%p1)
  %d = f32[100]{0} add(%b, %a)
  ROOT %out = (f32[100]{0}, f32[1000]{0}) tuple(%d, %c)
}
"""

LOOP = """HloModule loop, is_scheduled=true

%cond (s: (s32[], f32[100], f32[10,100])) -> pred[] {
  %s = (s32[], f32[100]{0}, f32[10,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (t: (s32[], f32[100], f32[10,100])) -> (s32[], f32[100], f32[10,100]) {
  %t = (s32[], f32[100]{0}, f32[10,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[100]{0} get-tuple-element(%t), index=1
  %w = f32[10,100]{1,0} get-tuple-element(%t), index=2
  %zero = s32[] constant(0)
  %row = f32[1,100]{1,0} dynamic-slice(%w, %i, %zero), dynamic_slice_sizes={1,100}
  %flat = f32[100]{0} bitcast(%row)
  %sum = f32[100]{0} add(%x, %flat)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %r = (s32[], f32[100]{0}, f32[10,100]{1,0}) tuple(%j, %sum, %w)
}

ENTRY %main (p0: f32[100], p1: f32[10,100]) -> f32[100] {
  %p0 = f32[100]{0} parameter(0)
  %p1 = f32[10,100]{1,0} parameter(1)
  %start = s32[] constant(0)
  %state = (s32[], f32[100]{0}, f32[10,100]{1,0}) tuple(%start, %p0, %p1)
  %done = (s32[], f32[100]{0}, f32[10,100]{1,0}) while(%state), condition=%cond, body=%body, TRIPS
  %y = f32[100]{0} get-tuple-element(%done), index=1
  ROOT %z = f32[100]{0} add(%y, %p0)
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"10"}}'


def places(text: str) -> dict:
    return {one.name: one for one in records(text)}


def test_the_clock_counts_what_is_read_and_written():
    placed = places(STRAIGHT)
    # Clock before: a 0, b 800, c 2000, d 10000; at the end 11200.
    for name, distance, cold in (
        ("a", 11200, 400),
        ("b", 0, 0),
        ("c", 11200, 4000),
        ("d", 8000, 0),
    ):
        assert placed[name]["distance"] == pytest.approx(1 + distance), name
        assert placed[name]["cold"] == cold
        assert placed[name]["around"] == 11200 and placed[name]["turns"] == 1


def test_what_is_older_is_further_by_its_share_of_the_bytes():
    text = STRAIGHT.replace("add(%b, %a)", "add(%b, %p0)").replace("add(%same, %p0)", "negate(%a)")
    placed = places(text)
    # p0 was touched at 800 and b at 1600; c ends at 9600, where d reads 400 bytes of each.
    want = math.exp((math.log1p(9600 - 800) + math.log1p(9600 - 1600)) / 2)
    assert placed["d"]["distance"] == pytest.approx(want)


def test_a_turn_knows_the_one_before():
    placed = places(LOOP.replace("TRIPS", TRIPS))
    row, added, z = placed["row"], placed["sum"], placed["z"]
    # A turn touches 400 + 400 + 8 (two indices of the slice) and 1200, and 12 bytes of counting.
    iteration = row["around"]
    assert iteration == pytest.approx(row.nbytes + added.nbytes + placed["j"].nbytes)
    assert row["turns"] == added["turns"] == 10 and z["turns"] == 1
    # The slice is another part of 4000 bytes each turn; what was summed is as old as a turn's rest.
    assert row["cold"] == 0 and row["distance"] > 3000
    old = iteration - added.nbytes
    assert added["distance"] == pytest.approx(math.sqrt((1 + old) * 1))
    # Behind the loop the sum is near and p0, which nothing of ten turns but the first read, is not.
    assert z["around"] == pytest.approx(10 * iteration + z.nbytes)
    near = 1 + placed["j"].nbytes
    assert z["distance"] / math.sqrt(near * 9.5 * iteration) == pytest.approx(1, rel=0.05)


def test_a_structure_is_the_same_wherever_it_stands():
    one = places(STRAIGHT)["b"]
    other = places(
        STRAIGHT.replace("add(%b, %a)", "add(%c, %c)")
        .replace("%d = f32[100]", "%d = f32[1000]")
        .replace("(f32[100]{0}, f32[1000]{0}) tuple", "(f32[1000]{0}, f32[1000]{0}) tuple")
    )["b"]
    moved = one.within(distance=1e6, cold=1.0, around=1e7, turns=3.0)
    assert one.hash == other.hash == moved.hash
    assert moved["distance"] == 1e6 and one["distance"] == 1
