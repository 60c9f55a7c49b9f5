"""Rows of flux.py and comet.py: drawn routings counted by loops, and figures that follow."""

import itertools

import numpy as np
import pytest

from experiments.reports import overlap as report
from experiments.reports.overlap_simulator import H800, MACHINES
from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from pallas_kernels.expert.cases import MIXTURES


def test_machines_are_parts_of_their_cards():
    """Two thirds of the peak, 0.89 of the link, 0.9 of the memory, for every card."""
    for name, machine in MACHINES.items():
        card = CARDS[name]
        parts = (
            machine.flops / card.flops["bfloat16"],
            machine.link_bytes_per_s / card.link_bytes_per_s,
            machine.memory_bytes_per_s / card.memory_bytes_per_s,
        )
        assert parts == pytest.approx((0.667, 0.889, 0.9), abs=0.01)


@pytest.mark.parametrize("std", [0.0, 0.02, 0.05])
def test_routing_has_different_experts_and_the_std_asked_for(std):
    for case in MIXTURES.values():
        drawn, reached = report.draw_routing(2048, case.experts, case.active, std)
        assert drawn.shape == (2048, case.active)
        assert all(len(set(row)) == case.active for row in drawn.tolist())
        shares = [np.sum(drawn == e) / drawn.size for e in range(case.experts)]
        assert reached == pytest.approx(np.std(shares))
        assert reached == pytest.approx(std, abs=0.005)


def test_loads_against_a_loop(seed):
    drawn, _ = report.draw_routing(64, 8, 2, 0.03, seed % 1000)
    for expert_ranks in (1, 2, 8):
        local = 8 // expert_ranks
        for group, load in enumerate(report.loads_of(drawn, 8, expert_ranks)):
            assert load.rank == group * (8 // expert_ranks)
            counts, tokens = np.zeros((8, local), int), np.zeros(8, int)
            for t, row in enumerate(drawn.tolist()):
                local_experts = [e for e in row if e // local == group]
                for e in local_experts:
                    counts[t // 8, e % local] += 1
                tokens[t // 8] += bool(local_experts)
            assert (load.counts_RE == counts).all() and (load.tokens_R == tokens).all()


def test_rows_of_products_hang_together():
    rows = list(report.dense_rows(["llama_70b"], [256, 2048], H800))
    assert len(rows) == 6
    for row in rows:
        assert row["floor_s"] == max(row["gemm_s"], row["comm_s"]) <= row["fused_s"]
        assert row["serial_s"] == pytest.approx(row["gemm_s"] + row["comm_s"])
        hidden = 1 - (row["fused_s"] - row["gemm_s"]) / (row["serial_s"] - row["gemm_s"])
        assert row["fused_efficiency"] == pytest.approx(hidden)
        ways = {"xla": row["serial_s"], "ring": row["ring_s"], "fused": row["fused_s"]}
        assert ways[row["fastest"]] == min(ways.values())
    gather, narrow, wide = rows[3:]
    assert narrow["comm_s"] < wide["comm_s"] and narrow["gemm_s"] == wide["gemm_s"]
    assert gather["n"] == 2 * 28672 // 8 and wide["k"] == 28672 // 8


def test_rows_of_layers_hang_together():
    layouts = [(8, 1), (1, 8)]
    rows = list(report.expert_rows(["qwen2_moe_2p7b"], layouts, [1024], [0.02], H800))
    assert [(r["tensor"], r["expert"]) for r in rows] == layouts
    for row, part in itertools.product(rows, ("gemm", "comm", "serial", "fused")):
        both = row[f"dispatch_{part}_s"] + row[f"combine_{part}_s"]
        assert row[f"{part}_s"] == pytest.approx(both)
    for row in rows:
        assert row["speedup"] == pytest.approx(row["serial_s"] / row["fused_s"])
        assert row["hidden"] < 1


def test_lists_of_flags():
    assert report.names("models", "a, b", ["a", "b", "c"]) == ["a", "b"]
    assert report.numbers("rows", "1,16") == [1, 16]
    assert report.numbers("stds", "0,0.5", float) == [0, 0.5]
    with pytest.raises(UserError, match=r"models=mixtral must be of .* Did you mean mixtral_8x7b"):
        report.names("models", "mixtral", MIXTURES)
    for text in ("1;2", "0", "", "-1"):
        with pytest.raises(UserError, match="must be whole numbers above 0"):
            report.numbers("rows", text)
    for text in ("nan", "inf", "-1", "0,nan"):
        with pytest.raises(UserError, match="must be numbers of at least 0"):
            report.numbers("stds", text, float)
    assert report.shared("rows", "8,1024") == [8, 1024]
    with pytest.raises(UserError, match=r"12 must be a multiple of the 8 ranks; nearest: 8, 16 "):
        report.shared("rows", "8,12")


def test_the_title_of_a_figure_without_large_products_claims_nothing(monkeypatch, tmp_path):
    titles = []
    monkeypatch.setattr(report, "save", lambda figure, path, title: titles.append(title))
    row = {"part": "op", "model": "gpt3_175b", "wire_bytes": 2, "fused_efficiency": -9.0}
    row["ring_efficiency"] = 0.9
    for m in (1024, 4096):
        rows = [row | {"kind": kind, "m": m} for kind in ("gather", "scatter")]
        report.draw_ops(rows, "H800", tmp_path)
    assert titles[0].startswith("Overlap of GPT-3's products")
    assert titles[1].startswith("A fused kernel hides -900 to -900 % of the communication")
