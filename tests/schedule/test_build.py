"""The builders against the formulas of papers, written out."""

import pytest

from megajax.core.errors import UserError
from megajax.schedule import build

INTERLEAVED = [(s, g * s, v) for s in (1, 2, 4, 8) for g in (1, 2, 3) for v in (1, 2, 3)]
PLAIN = [(s, m) for s in (1, 2, 4, 8) for m in (1, 2, s - 1, s, s + 1, 2 * s, 3 * s) if m]


def counts(table):
    return [(p.kinds, p.ticks) for p in table.phases if p.ticks]


@pytest.mark.parametrize(("s", "m", "v"), INTERLEAVED)
def test_interleaved(s, m, v):
    table = build.interleaved(s, m, v)
    assert table.check() == min(v * m, (v + 1) * s - 1) <= 2 * v * s - 1
    for stage in range(s):
        for k in range(v * m):
            g, r = divmod(k, v * s)
            mb = g * s + r % s
            assert (k + stage, stage, "F", r // s, mb) in table.slots
            b = k + (v * s - 1) + (s - 1 - stage), stage, "B", v - 1 - r // s, mb
            assert b in table.slots
    assert len(table.slots) == 2 * s * v * m
    phases = [
        (("F",), v * s - 1),
        (("F", "B"), v * m + s - v * s),
        (("B",), v * s - 1),
    ]
    assert counts(table) == [p for p in phases if p[1]]


@pytest.mark.parametrize(("s", "m"), PLAIN)
def test_one_f_one_b(s, m):
    table = build.one_f_one_b(s, m)
    assert table.check() == min(m, 2 * s - 1)
    assert table.live() == tuple(min(m, 2 * (s - stage) - 1) for stage in range(s))
    phases = [(("F",), s - 1), (("F", "B"), m), (("B",), s - 1)]
    assert counts(table) == [p for p in phases if p[1]]
    if m % s == 0:
        assert table.slots == build.interleaved(s, m).slots


@pytest.mark.parametrize(("s", "m", "v"), [(1, 1, 1), (4, 6, 1), (4, 8, 2), (3, 3, 3)])
def test_gpipe(s, m, v):
    table = build.gpipe(s, m, v)
    assert table.check() == v * m
    assert counts(table) == [(("F",), v * m + s - 1), (("B",), v * m + s - 1)]


@pytest.mark.parametrize(("s", "m"), PLAIN)
def test_zero_bubble(s, m):
    """F and B as 1F1B has them; W in one window of M ticks; inputs kept no longer than stage 0's"""
    table, base = build.zero_bubble(s, m), build.one_f_one_b(s, m)
    assert table.check() == base.check()
    assert tuple(x for x in table.slots if x.kind != "W") == base.slots
    assert sum(p.ticks for p in table.phases if "W" in p.kinds) == m
    assert table.ticks == base.ticks


def test_the_plan_of_175b():
    """S=8, v=6, M=32: the compiled program's loops have 47, 152 and 47 ticks."""
    assert [p.ticks for p in build.interleaved(8, 32, 6).phases] == [47, 152, 47]


@pytest.mark.parametrize(
    ("builder", "sizes", "message"),
    [
        ("interleaved", (4, 6, 2), r"microbatches=6 .* nearest: 4, 8 \(--pipeline.microbatches\)"),
        ("interleaved", (4, 2), r"microbatches=2 .* nearest: 4 \("),
        ("gpipe", (4, 6, 2), r"nearest: 4, 8 \(--pipeline.microbatches\)"),
        ("1f1b", (4, 8, 2), r"chunks=2.*use 1.*interleaved.*\(--pipeline.chunks\)"),
        ("zero_bubble", (4, 8, 2), r"chunks=2.*use 1.*\(--pipeline.chunks\)"),
        ("1f1b", (0, 8), r"pipe=0 must be at least 1 \(--mesh.pipe\)"),
        ("gpipe", (2, 0), r"at least 1 \(--pipeline.microbatches\)"),
        ("interleaved", (2, 2, 0), r"at least 1 \(--pipeline.chunks\)"),
        ("zero_bubble", (2, 2, 0), r"at least 1 \(--pipeline.chunks\)"),
    ],
)
def test_bad_sizes_are_refused(builder, sizes, message):
    with pytest.raises(UserError, match=message):
        build.BUILDERS[builder](*sizes)
