"""What hidden communication is worth to whole models: ESTIMATES from simulated times of one block.

Papers report whole systems over others: Flux 1.24 times in training and 1.66 in prefill, COMET 1.71
times. Here a model is equal blocks, and a block its products with their collectives, one after the
other or fused (overlap.py), attention itself at a product's rate, and in training the
weights' gradients. Nothing else costs time (norms, vocabulary, optimizer, other parallelism), and
what is compared with hides nothing: a real run gains less.

Legend: m tokens of all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.reports import overlap_simulator as sim
from experiments.reports.overlap import COMET_MODEL, COMM_BLOCKS, Row
from experiments.reports.overlap_simulator import Machine
from pallas_kernels.collective.cases import DENSE, RANKS, Product
from pallas_kernels.expert.cases import MIXTURES

SEQUENCE = 2048  # positions that attention sees half of (chosen: GPT-3's)
# Columns of queries, keys and values together (the models' configurations).
QKV = {
    "gpt3_175b": 3 * 12288, "llama_70b": 80 * 128,
    "mixtral_8x7b": 48 * 128, "qwen2_moe_2p7b": 48 * 128, "phi3p5_moe": 48 * 128,
}  # fmt: skip
# m (chosen: one sequence a microbatch; eight that come in together), and Flux's figure (abstract).
TOKENS = {"training": SEQUENCE, "prefill": 8 * SEQUENCE}
FLUX_MODEL = {"training": 1.24, "prefill": 1.66}
# Products of attention, forward and backward, over those of forward alone (FlashAttention: 2, 5).
BOTH_WAYS = 3.5


def dense_rows(models: Sequence[str], machine: Machine) -> Iterator[Row]:
    """Yields a row for each model in training and in prefill: seconds of a block."""
    for model in models:
        for passes, m in TOKENS.items():
            case = DENSE[model]
            forward = (*attention(model, case.width, m, RANKS), case.up(m), case.down(m, 2))
            products, beside = forward, attention_s(case.width, m, RANKS, machine)
            if passes == "training":
                products += tuple(map(backward, forward))
                beside *= BOTH_WAYS
                beside += sum(sim.gemm_s(p.k, p.n, p.m, machine) for p in forward)
            times = [sim.simulate(p, machine, sim.candidates(p, COMM_BLOCKS))[0] for p in products]
            yield {"part": "model", "model": model, "passes": passes, "m": m} | speedup(
                beside + sum(t.serial_s for t in times),
                # Where a fused kernel loses, none is taken.
                beside + sum(min(t.serial_s, t.fused_s) for t in times),
                FLUX_MODEL[passes],
            )


def mixture_row(layer: Mapping[str, Any], machine: Machine) -> Row:
    """Returns the row of a block forward, from that of its experts' layer; attention hides nothing.

    The expert axis cuts attention's tokens, tensor its heads.
    """
    model, tensor = layer["model"], layer["tensor"]
    width, m = MIXTURES[model].width, layer["tokens"] // layer["expert"]
    beside = attention_s(width, m, tensor, machine)
    for product in attention(model, width, m, tensor):
        beside += sim.gemm_s(product.m, product.n, product.k, machine)
        beside += sim.comm_s(product, machine) if tensor > 1 else 0.0
    row = {"part": "model", "passes": "forward"}
    row |= {name: layer[name] for name in ("model", "tensor", "expert", "tokens", "std")}
    return row | speedup(beside + layer["serial_s"], beside + layer["fused_s"], COMET_MODEL)


def speedup(serial_s: float, fused_s: float, reported: float) -> Row:
    """Returns both times of a block, their ratio, and what the paper reports of its systems."""
    return {"serial_s": serial_s, "fused_s": fused_s, "speedup": serial_s / fused_s,
            "reported": reported}  # fmt: skip


def attention(model: str, width: int, m: int, ranks: int) -> tuple[Product, Product]:
    """Returns the products into attention and out of it."""
    return (
        Product("gather", m, QKV[model] // ranks, width, ranks),
        Product("scatter", m, width, width // ranks, ranks, 2),
    )


def attention_s(width: int, m: int, ranks: int, machine: Machine) -> float:
    """Returns seconds of scores and their sums, half of them masked."""
    return 2 * m * SEQUENCE * width / ranks / machine.flops


def backward(product: Product) -> Product:
    """Returns what brings the gradient of x: each kind is the other's."""
    kind = "scatter" if product.kind == "gather" else "gather"
    return Product(kind, product.m, product.k, product.n, product.ranks, 2)
