"""The times that decide between a ring and plain XLA, against another simulator and by hand."""

import itertools
import math

import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from experiments.reports.overlap_simulator import ExpertProduct, Load, Machine, gemm_s
from experiments.reports.overlap_simulator import expert_gemm_s as grouped_s
from megajax.core.hardware import CARDS
from megajax.parallel import expert_matmul, overlap

OPS = ("all_gather_matmul", "matmul_reduce_scatter")
CORES = {"H100": 132, "A100": 108}


def machine(card, dtype):
    """The reports' simulator of that card, at the rates that the choice assumes."""
    peak = CARDS[card].flops["tfloat32" if dtype == "float32" else dtype]
    return Machine(
        card,
        CORES[card],
        0.667 * peak,
        0.889 * CARDS[card].link_bytes_per_s,
        CARDS[card].memory_bytes_per_s,
    )


def product_by_hand(op, rows, width, parts, R, dtype, card):
    """Seconds of (plain XLA, the ring): gather, products, scatter, one after the other or in R."""
    gpu, size, chunk = machine(card, dtype), 4 if dtype == "float32" else 2, rows / R

    def ring_s(work, hop, add=0.0):
        return (R - 1) * (max(hop, work) + add + gpu.launch_s) + work

    def link(m, itemsize):
        return m * width * itemsize / gpu.link_bytes_per_s

    plain = link(rows - chunk, size) + gpu.call_s + sum(gemm_s(rows, n, width, gpu) for n in parts)
    ring = ring_s(sum(gemm_s(chunk, n, width, gpu) for n in parts), link(chunk, size))
    back, back32 = (link(rows - chunk, s) + gpu.call_s for s in (size, 4))
    if op == OPS[0]:
        dw = sum(gemm_s(width, n, rows, gpu) for n in parts)
        return plain + max(back - dw, 0), ring + max(back32 - dw, 0)
    add = 12 * chunk * width / gpu.memory_bytes_per_s
    out = sum(gemm_s(rows, width, k, gpu) for k in parts)
    piece = sum(gemm_s(chunk, width, k, gpu) for k in parts)
    return plain + out + back, ring + ring_s(piece, link(chunk, 4), add)


def experts_by_hand(op, layer, card):
    gpu, size = machine(card, layer.dtype), 4 if layer.dtype == "float32" else 2
    R, load = layer.ranks, layer.tokens * layer.width / gpu.link_bytes_per_s

    def work(part, sources):
        rows_E = np.full(layer.experts, -(-layer.rows * sources // layer.experts))
        rows_of_rank = Load(0, rows_E[None], np.array([layer.tokens]))
        return sum(
            grouped_s(ExpertProduct(part, layer.width, F, size), rows_of_rank, gpu)
            for F in layer.hidden
        )

    def ring_s(part, itemsize, written):
        moved = (layer.rows + written) * sum(layer.hidden) * size / gpu.memory_bytes_per_s
        each = work(part, 1) + moved
        return (R - 1) * (max(load * itemsize, each) + gpu.launch_s) + each

    plain = load * layer.reached * size + gpu.call_s + work("dispatch", R)
    ring = ring_s("dispatch", size, layer.rows)
    if op == expert_matmul.DISPATCH:
        dw = work("dispatch", R)
        sums, sums32 = load * layer.reached * size, load * (R - 1) * 4
        return plain + max(sums - dw, 0), ring + max(sums32 - dw, 0)
    plain += work("combine", R) + load * layer.reached * size + gpu.call_s
    return plain, ring + ring_s("combine", 4, layer.tokens * layer.top)


@pytest.mark.parametrize("card", CORES)
def test_rings_are_chosen_as_the_kernels_simulator_has_it(card):
    """The times to rounding, and so the choice, over rows, widths, columns, ranks and types."""
    device = AbstractDevice(f"NVIDIA {card}", CORES[card], platform="gpu")
    meshes = {R: AbstractMesh((R,), ("tensor",), abstract_device=device) for R in (2, 8)}
    words = set()
    for rows, width, parts, R, dtype, op in itertools.product(
        (1024, 8192, 32768),
        (1024, 12288),
        ((512,), (1792, 1792), (6144,), (256,) * 4),
        (2, 8),
        ("bfloat16", "float32"),
        OPS,
    ):
        plain, ring = product_by_hand(op, rows, width, parts, R, dtype, card)
        simulated = overlap.simulate(op, (rows, width, parts), R, dtype, CARDS[card], CORES[card])
        assert simulated == pytest.approx((plain, ring), rel=1e-12)
        gains = rows >= 512 * R and ring + R * 6e-6 <= 0.95 * plain
        word, why = overlap.best(op, (rows, width, parts), "tensor", dtype, meshes[R])
        assert word == ("ring" if gains else "xla") or why == overlap.MEASURED
        words.add(word)
    assert words == {"ring", "xla"}


def test_rings_of_experts_are_chosen_as_the_kernels_simulator_has_it():
    device = AbstractDevice("NVIDIA H100", 132, platform="gpu")
    words = set()
    for tokens, top, width, experts, hidden, ranks, dtype in itertools.product(
        (1024, 8192),
        (2, 8),
        (4096,),
        (1, 8),
        ((768, 768), (14336,)),
        ((8, 8), (8, 4), (2, 2)),
        ("bfloat16", "float32"),
    ):
        layer = expert_matmul.Layer(
            tokens, top, width, experts, hidden, *ranks, dtype, ranks[0] - 1
        )
        times = []
        for op in expert_matmul.HALVES:
            by_hand = experts_by_hand(op, layer, "H100")
            simulated = expert_matmul.simulate(op, layer, CARDS["H100"], 132)
            assert simulated == pytest.approx(by_hand, rel=1e-12)
            times.append(simulated)
        plain, ring = (math.fsum(side) for side in zip(*times, strict=True))
        gains = layer.rows >= 512 and ring + 3 * ranks[0] * 6e-6 <= 0.95 * plain
        both = dict.fromkeys(expert_matmul.HALVES, layer)
        sizes = ranks[1], ranks[0] // ranks[1]
        mesh = AbstractMesh(sizes, ("expert", "tensor"), abstract_device=device)
        word, why = expert_matmul.best(both, ("expert", "tensor"), mesh)
        assert word == ("ring" if gains else "xla") or why == overlap.MEASURED
        words.add(word)
    assert words >= {"ring", "xla"}
