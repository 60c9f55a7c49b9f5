"""Plans where nothing was measured: legal for every shape, and what they are read back from."""

import dataclasses
import json

import pytest

from pallas_kernels.collective import core
from pallas_kernels.collective.peers import RemotePeer
from pallas_kernels.expert import plans
from pallas_kernels.expert.plans import COMBINE, DISPATCH

# Choices of a rank, experts of a rank, contracted, columns.
SHAPES = [(4096, 1, 4096, [14336, 14336]), (2048, 8, 1408, [2048]), (1, 64, 64, [128]),
          (24, 2, 64, [64, 192])]  # fmt: skip


@pytest.mark.parametrize(("choices", "experts", "K", "widths"), SHAPES)
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_a_plan_is_legal(op, choices, experts, K, widths):
    if op == COMBINE and len(widths) > 1:
        widths = [384]
    plan = plans.heuristic(op, 8, choices, experts, K, widths, "float32")
    clusters = core.clusters_of(op, plan, RemotePeer(8, "x"), 132)
    assert clusters * plan.tile.cluster <= 132
    assert plan.tile.block_n <= min(widths) and 0 < plan.chunk <= max(choices + 7, 64)
    assert plans.load(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_more_of_the_link_takes_more_blocks():
    """Short rows of few columns: what is sent outweighs what is computed."""
    wide, _ = plans.simulated(DISPATCH, 8, 4096, 1, 4096, 28672, _tile())
    narrow, _ = plans.simulated(DISPATCH, 8, 4096, 1, 4096, 512, _tile())
    assert narrow > wide


def _tile():
    return plans.heuristic(DISPATCH, 8, 4096, 1, 4096, [28672], "bfloat16").tile
