"""Named shapes of COMET (arXiv 2502.19811, section 5), for tests and benchmarks.

Mixtral 8x7B, Qwen2-MoE 2.7B and Phi-3.5-MoE, from the models' configurations; Qwen2-MoE's experts
are rounded up from 60 to what 8 ranks divide.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture of experts, `active` of `experts` for a token; inputs: 2 where it is gated."""

    width: int
    hidden: int
    experts: int
    active: int
    inputs: int = 2


MIXTURES = {
    "mixtral_8x7b": Mixture(4096, 14336, 8, 2),
    "qwen2_moe_2p7b": Mixture(2048, 1408, 64, 4),
    "phi3p5_moe": Mixture(4096, 6400, 16, 2),
}
