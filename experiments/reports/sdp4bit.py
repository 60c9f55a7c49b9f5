"""SDP4Bit's throughput table beside this library's cost model: ESTIMATES, nothing is measured here.

The paper (arXiv 2410.15526, section 4; its table of throughput) trains five GPT models on 64 A100
and on 128 H800 GPUs, with Megatron-LM's distributed optimizer and with SDP4Bit on top: 1.53 to 4.08
times the throughput. `estimates` prices both with megajax/cost in two ways:

- `estimate`: from the cards of GPUs and links alone, with the assumed efficiencies of
  cost/roofline.py and links at their full speed.
- `calibrated`: two factors for each cluster, one of everything that a GPU computes and one of the
  network's speed, are set so that both times of the 1.3B model are the paper's. The other models of
  that cluster then are predictions.

What is assumed stands in ASSUMED. The models, --micro-batch-size=1 and the two levels' groups are
those of the paper's published scripts.
"""

import dataclasses
import functools
from typing import Any

from megajax.core.config import override
from megajax.core.hardware import CARDS, Cluster, shared
from megajax.cost import traffic
from megajax.cost.base import train_flops_per_token
from megajax.cost.estimate import Estimate, estimate
from megajax.cost.step import StepShape
from megajax.models.decoder_config import DecoderConfig
from megajax.training.config import Config
from megajax.training.shape import step_shape

ASSUMED = (
    "rows of 1,024 tokens, one a data-parallel rank, no accumulation (the paper's notes on its "
    "throughput runs; its scripts say 2,048)",
    "64 A100: hosts of 4 GPUs that share one Slingshot-10 adapter of 100 Gb/s; 128 H800: hosts of "
    "8 GPUs with one NDR InfiniBand adapter of 400 Gb/s each (neither stands in its scripts)",
    "the baseline gathers weights in bfloat16 and scatters gradients in float32, nothing of either "
    "runs beside a product (the scripts overlap neither)",
    "SDP4Bit's two levels run one after the other: the scripts of 1.3B to 6.7B pipeline them",
    "activations of attention are made again in the backward pass, attention is not fused",
    "efficiencies of cost/roofline.py, whatever the size of a product; no time between kernels",
)
CALIBRATED = "1.3B"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model on a cluster. baseline, sdp4bit: the paper's TFLOP/s a GPU."""

    cluster: str
    model: str
    tensor: int
    pipe: int
    baseline: float
    sdp4bit: float

    @property
    def speedup(self) -> float:
        """The paper's."""
        return self.sdp4bit / self.baseline


# Layers, width, heads (the scripts' --num-layers, --hidden-size, --num-attention-heads).
MODELS = {
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "18B": (40, 6144, 48),
}
CLUSTERS = {
    "64 A100": Cluster(shared(CARDS["A100"], "Slingshot-10", 1, 4), 16, 4),
    "128 H800": Cluster(shared(CARDS["H800"], "InfiniBand NDR", 8, 8), 16, 8),
}
PAIRS = (
    Pair("64 A100", "1.3B", 1, 1, 24.1, 57.6),
    Pair("64 A100", "2.7B", 1, 1, 24.0, 58.4),
    Pair("64 A100", "6.7B", 4, 1, 10.8, 37.1),
    Pair("64 A100", "13B", 4, 2, 9.7, 26.0),
    Pair("64 A100", "18B", 4, 2, 10.2, 29.8),
    Pair("128 H800", "1.3B", 1, 1, 69.1, 106.0),
    Pair("128 H800", "2.7B", 1, 1, 71.9, 116.9),
    Pair("128 H800", "6.7B", 4, 1, 26.2, 77.9),
    Pair("128 H800", "13B", 8, 1, 13.9, 53.5),
    Pair("128 H800", "18B", 8, 1, 14.5, 59.2),
)


def shapes(pair: Pair) -> tuple[StepShape, StepShape]:
    """Returns the steps of a pair: the baseline's and SDP4Bit's."""
    cluster, (layers, width, heads) = CLUSTERS[pair.cluster], MODELS[pair.model]
    ranks = cluster.devices // (pair.tensor * pair.pipe)
    inside = max(cluster.gpus_per_host // pair.tensor, 1)
    rows = 128 * pair.tensor  # Megatron-LM pads GPT-2's vocabulary to whole pieces of these
    sizes = {
        "pipe": pair.pipe, "node": ranks // inside, "data": inside, "expert": 1, "context": 1,
        "tensor": pair.tensor,
    }  # fmt: skip
    model = DecoderConfig(
        layers=layers, width=width, heads=heads, kv_heads=heads, head_width=width // heads,
        mlp=4 * width, vocab=-(-50257 // rows) * rows, activation="gelu",
        position="learned", max_positions=2048, norm="layer", bias="all",
    )  # fmt: skip
    run = {
        "train.global_batch": ranks, "train.seq_len": 1024, "train.dtype": "bfloat16",
        "train.remat": "dots", "pipeline.microbatches": 1 if pair.pipe > 1 else None,
        "pipeline.stash": "residuals", "shard.zero": "optimizer",
    }  # fmt: skip
    cfg = override(dataclasses.replace(Config(), model=model), run)
    coded = override(cfg, {"wire": "sdp4bit"})
    return step_shape(cfg, sizes), step_shape(coded, sizes)


@dataclasses.dataclass(frozen=True)
class Factors:
    """What is calibrated. compute: of the time of all that is no exchange of data parallelism.
    network: of the speed between hosts."""

    compute: float = 1.0
    network: float = 1.0


def seconds(pair: Pair, step: StepShape, factors: Factors = Factors()) -> float:
    """Returns the estimate of one step."""
    guess = _guess(pair, step, factors.network)
    exchanged = _exchanged(guess)
    return factors.compute * (guess.step_s - exchanged) + exchanged


def paper_seconds(pair: Pair) -> tuple[float, float]:
    """Returns the paper's times of a step, baseline and SDP4Bit: the model's FLOPs (Megatron's
    convention) over its TFLOP/s."""
    load, devices = shapes(pair)[0].load, CLUSTERS[pair.cluster].devices
    flops = train_flops_per_token(load, "megatron") * load.tokens / devices
    return flops / (pair.baseline * 1e12), flops / (pair.sdp4bit * 1e12)


@functools.cache
def factors(pair: Pair) -> Factors:
    """Returns the two factors with which both times of a pair are the paper's.

    compute is the baseline's remainder for a given network, and the gap of the two times falls as
    the network gets faster, so a bisection finds it.
    """
    (slow, fast), (plain, coded) = paper_seconds(pair), shapes(pair)

    def at(network: float) -> Factors:
        guess = _guess(pair, plain, network)
        exchanged = _exchanged(guess)
        return Factors((slow - exchanged) / (guess.step_s - exchanged), network)

    low, high = 1e-2, 1e2
    for _ in range(40):
        middle = (low * high) ** 0.5
        gap = slow - seconds(pair, coded, at(middle))
        low, high = (middle, high) if gap > slow - fast else (low, middle)
    return at(low)


def estimates() -> list[dict[str, Any]]:
    """Returns one row a pair: the paper's figures and the two estimates beside them.

    *_s: seconds of a step. implied_bytes_per_s: the speed between hosts, a GPU, that the pair's own
    two times imply under this cost model; where it differs from that of its cluster's other pairs,
    the calibrated estimate cannot agree.
    """
    rows = []
    fits = {p.cluster: factors(p) for p in PAIRS if p.model == CALIBRATED}
    for pair in PAIRS:
        plain, coded = shapes(pair)
        fitted, card = fits[pair.cluster], CLUSTERS[pair.cluster].card
        base_s, coded_s = seconds(pair, plain), seconds(pair, coded)
        paper_base_s, paper_coded_s = paper_seconds(pair)
        calibrated = seconds(pair, plain, fitted) / seconds(pair, coded, fitted)
        rows.append(
            {
                "label": "estimate",
                "cluster": pair.cluster,
                "model": pair.model,
                "parameters": plain.load.params,
                "mesh": {axis: n for axis, n in plain.sizes.items() if n > 1},
                "paper_speedup": pair.speedup,
                "paper_baseline_s": paper_base_s,
                "paper_sdp4bit_s": paper_coded_s,
                "estimate_baseline_s": base_s,
                "estimate_sdp4bit_s": coded_s,
                "estimate_speedup": base_s / coded_s,
                "calibrated_speedup": calibrated,
                "is_calibrated_on": pair.model == CALIBRATED,
                "compute_factor": fitted.compute,
                "network_factor": fitted.network,
                "card_bytes_per_s": card.network_bytes_per_s,
                "implied_bytes_per_s": factors(pair).network * card.network_bytes_per_s,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown, every number of ours with the word 'estimate' in its column."""
    head = (
        "cluster", "model", "paper", "estimate from cards", "estimate calibrated on 1.3B",
        "calibrated / paper", "implied GB/s a GPU (estimate)",
    )  # fmt: skip
    lines = [
        (
            row["cluster"], row["model"], f"{row['paper_speedup']:.2f}x",
            f"{row['estimate_speedup']:.2f}x",
            "(set)" if row["is_calibrated_on"] else f"{row['calibrated_speedup']:.2f}x",
            "" if row["is_calibrated_on"]
            else f"{row['calibrated_speedup'] / row['paper_speedup']:.2f}",
            f"{row['implied_bytes_per_s'] / 1e9:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(text + ["| " + " | ".join(line) + " |" for line in lines])


def _exchanged(guess: Estimate) -> float:
    """Seconds of the exchange of data parallelism, quantizing included."""
    axes = ("node", "data", "node+data")
    return guess.quantize_s + sum(guess.communication_s.get(name, 0.0) for name in axes)


def _guess(pair: Pair, step: StepShape, network: float) -> Estimate:
    cluster = CLUSTERS[pair.cluster]
    speed = network * cluster.card.network_bytes_per_s
    card = dataclasses.replace(cluster.card, network_bytes_per_s=speed)
    sent = traffic.transfers(step)
    return estimate(step, dataclasses.replace(cluster, card=card), sent)
