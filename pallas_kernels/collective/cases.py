"""Named shapes of the papers, for the simulator, tests and benchmarks; tensor parallel over 8.

Flux (arXiv 2406.06858) section 5: the feed-forward layers of GPT-3 175B and Llama-2 70B. COMET
(arXiv 2502.19811) section 5: Mixtral 8x7B, Qwen2-MoE 2.7B, Phi-3.5-MoE; shapes are those of the
models' configurations, Qwen2-MoE's experts rounded up from 60 to what 8 ranks divide.
"""

import dataclasses

from pallas_kernels.collective.expert_simulator import ExpertProduct, Part
from pallas_kernels.collective.simulator import Product

RANKS = 8


@dataclasses.dataclass(frozen=True)
class Dense:
    """A feed-forward layer: (m, width) x inputs matrices (width, hidden), then (hidden, width)."""

    width: int
    hidden: int
    inputs: int

    def up(self, m: int) -> Product:
        """Returns the all-gather + product, its matrices side by side after one gather."""
        return Product("gather", m, self.inputs * self.hidden // RANKS, self.width, RANKS)

    def down(self, m: int, wire_bytes: int) -> Product:
        """Returns the product + reduce-scatter; wire_bytes: of a partial sum."""
        return Product("scatter", m, self.width, self.hidden // RANKS, RANKS, wire_bytes)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture of experts, `active` of `experts` for a token; inputs: 2 where it is gated."""

    width: int
    hidden: int
    experts: int
    active: int
    inputs: int = 2

    def product(self, part: Part, tensor: int, sum_bytes: int = 4) -> ExpertProduct:
        """Returns a rank's product where `tensor` ranks share each expert.

        sum_bytes: of a partial sum that crosses ranks.
        """
        if part == "dispatch":
            return ExpertProduct(part, self.width, self.inputs * self.hidden // tensor, 2)
        return ExpertProduct(part, self.width, self.hidden // tensor, sum_bytes)


DENSE = {"gpt3_175b": Dense(12288, 49152, 1), "llama_70b": Dense(8192, 28672, 2)}
MIXTURES = {
    "mixtral_8x7b": Mixture(4096, 14336, 8, 2),
    "qwen2_moe_2p7b": Mixture(2048, 1408, 64, 4),
    "phi3p5_moe": Mixture(4096, 6400, 16, 2),
}
# 8192 tokens of what Flux's repository times on 8 GPUs (docs/performance.md).
REPOSITORY = {
    "32 experts": Mixture(8192, 8192, 32, 4, 1),
    "8 experts": Mixture(8192, 8192, 8, 2, 1),
}
LAYOUTS = ((8, 1), (4, 2), (2, 4), (1, 8))  # (tensor, expert)
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
