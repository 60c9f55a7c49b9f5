"""Bytes of the exchange: counted from given collectives, and from the program for H100s."""

import pytest

from experiments.reports import sdp4bit
from megajax.core.errors import UserError
from megajax.cost.hlo import Collective
from pallas_kernels import aot

N = 2**22


def collectives(weights, inside, between):
    """Collectives as a program of 2 x 4 has them."""
    places = [
        ("all-gather", ("node", "data"), weights),
        ("all-to-all", ("data",), inside),
        ("all-to-all", ("node",), between),
        ("all-reduce", ("node", "data"), 4),
    ]
    return [Collective(*place[:2], 1, place[2], (), True, "", 0, (), ()) for place in places]


def test_counts_by_hand():
    rows = {r["level"]: r for r in sdp4bit.count("bf16", collectives(2 * N, 2 * N, 2 * N // 4), N)}
    assert all(r["of_bf16"] == 1 for r in rows.values())
    assert rows["crossing"]["bytes"] == 2 * N // 4 // 2 + 2 * N // 2
    halves = {r["level"]: r for r in sdp4bit.count("x", collectives(N, N, N // 4), N)}
    assert [r["bits"] for r in halves.values()] == [8, 8, 8, 5]
    assert all(r["of_bf16"] == 0.5 for r in halves.values())


def test_a_program_of_other_collectives_is_refused():
    program = collectives(N, N, N // 4)
    for bad in (program[:2] + program[3:], [*program, program[1]]):
        with pytest.raises(UserError, match="collectives all-to-all over"):
            list(sdp4bit.count("x", bad, N))


def test_without_the_extra_it_is_said_how_to_get_it(monkeypatch):
    def devices(*_):
        raise NotImplementedError("deviceless compilation needs ...: uv sync --extra aot")

    monkeypatch.setattr(aot, "devices", devices)
    with pytest.raises(UserError, match=r"--bytes: .*--extra aot.* or leave --bytes out"):
        sdp4bit.compiled("sdp4bit")


@pytest.mark.aot
def test_the_program_for_h100s_sends_the_papers_bits():
    rows = {r["level"]: r for r in sdp4bit.count("sdp4bit", sdp4bit.compiled("sdp4bit"))}
    assert rows["weights"]["bits"] == 4 + 32 / 2048
    assert rows["inside"]["bits"] == 8 + 32 / 128
    assert rows["between"]["bits"] == 4 + 32 / 128
    assert rows["between"]["of_bf16"] == 4.25 / 16
