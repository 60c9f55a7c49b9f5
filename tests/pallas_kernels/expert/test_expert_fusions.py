"""Fusions where nothing was measured: legal for every shape, and what they are read back from."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.reports import overlap_simulator
from experiments.reports.overlap_simulator import H100, Fused
from pallas_kernels.expert import fusions
from pallas_kernels.expert.cases import MIXTURES
from pallas_kernels.expert.fusions import COMBINE, DISPATCH
from pallas_kernels.hopper import fused
from pallas_kernels.hopper.peers import RemotePeer

# Choices of a rank, experts of a rank, contracted, columns.
SHAPES = [
    (4096, 1, 4096, [14336, 14336]),
    (2048, 8, 1408, [2048]),
    (1, 64, 64, [128]),
    (24, 2, 64, [64, 192]),
]


@pytest.mark.parametrize(("choices", "experts", "K", "widths"), SHAPES)
@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_a_fusion_is_legal(op, choices, experts, K, widths):
    if op == COMBINE and len(widths) > 1:
        widths = [384]
    fusion = fusions.heuristic(op, 8, choices, experts, K, widths, "float32")
    clusters = fused.clusters_of(op, fusion, RemotePeer(8, "x"), 132)
    assert clusters * fusion.tile.cluster <= 132
    assert fusion.tile.block_n <= min(widths) and 0 < fusion.chunk <= max(choices + 7, 64)
    assert fusions.load(json.loads(json.dumps(dataclasses.asdict(fusion)))) == fusion


@pytest.mark.parametrize("op", [DISPATCH, COMBINE])
def test_what_is_picked_is_nearly_the_best_of_a_simulation(op):
    """Event by event on a simulated GPU, for the papers' models: at most 6 % slower."""
    for mixture in MIXTURES.values():
        for choices in (512 * mixture.active, 2048 * mixture.active):
            experts, part = mixture.experts // 8, "dispatch" if op == DISPATCH else "combine"
            product = overlap_simulator.product_of(mixture, part, 1)
            fusion = fusions.heuristic(op, 8, choices, experts, product.k, [product.n], "float32")
            counts_RE = np.full((8, experts), choices // (8 * experts), np.int32)
            load = overlap_simulator.Load(0, counts_RE, counts_RE.sum(1))
            block = fusion.tile.block_m, fusion.tile.block_n
            seconds = {
                (comm, width): overlap_simulator.expert_fused_s(
                    product, load, H100, Fused(block, fusions.CHUNK, comm, width=width)
                )
                for comm in fusions.COMM
                for width in (fusions.WIDTHS if op == COMBINE else fusions.WIDTHS[:1])
            }
            assert seconds[fusion.comm, fusion.width] <= 1.06 * min(seconds.values())


def test_more_of_the_link_takes_more_blocks():
    """Short rows of few columns: what is sent outweighs what is computed."""
    wide, narrow = (
        fusions.heuristic(DISPATCH, 8, 4096, 1, 4096, [N], "bfloat16").comm for N in (28672, 512)
    )
    assert narrow > wide
