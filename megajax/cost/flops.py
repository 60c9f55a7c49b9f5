"""Model FLOPs of training a decoder, and MFU, in the two conventions that papers use.

Forward and backward cost 6 FLOPs a parameter and token (2 forward, 4 backward); attention adds
12 L H K s_eff, where s_eff is how many keys a query is credited with. 'megatron': all s keys, as if
attention were not causal (Megatron-LM, PaLM; MegaScale's tables follow it). 'causal': the keys a
query really sees, so a sliding window counts with its own size. Recomputation is never credited.
Source: MegaScale tables 2 and 3 reproduce to 0.1 % (tests/cost/test_flops.py).
"""

import math
from dataclasses import dataclass
from typing import Literal

Convention = Literal["megatron", "causal"]
Remat = Literal["none", "full", "outputs", "dots"]

# How often the backward pass makes a forward value again, by what is kept (models/parts.py). An
# attention whose result is kept makes its weights again: one of its two products. Experts are made
# again whole, because the gradient of a token's weights needs their answers.
_AGAIN = {"norm": 1.0, "attention": 1.0, "activation": 1.0, "experts": 1.0}
RECOMPUTED = {
    "none": {},
    "dots": _AGAIN,
    "outputs": _AGAIN | {"input": 1.0, "attention": 0.5, "router": 1.0},
    "full": _AGAIN | {"input": 1.0, "output": 1.0, "router": 1.0},
}


@dataclass(frozen=True)
class ExpertWork:
    """Routed experts of every layer (layers/moe.py).

    experts: of a layer. top_k: that a token uses. hidden: width of one. capacity: slots of an
    expert over a balanced load, given out row by row; None: dropless.
    """

    experts: int
    top_k: int
    hidden: int
    capacity: float | None = None

    def slots(self, seq_len: int) -> int | None:
        """Slots of an expert for one row (layers/moe.py:MoeConfig.slots); None: dropless."""
        if self.capacity is None:
            return None
        return min(math.ceil(self.capacity * seq_len * self.top_k / self.experts), seq_len)

    def pairs(self, seq_len: int) -> float:
        """Expert rows that are computed for each token: with capacity all slots, filled or not."""
        slots = self.slots(seq_len)
        return self.top_k if slots is None else self.experts * slots / seq_len


@dataclass(frozen=True)
class DecoderWork:
    """What the FLOPs of a decoder depend on.

    matmul_params: parameters that a token multiplies, without embedding lookups and head; of a
    mixture of experts only those of the experts that it uses, routed and shared, and the router's.
    attention_width: heads x head width. window: keys a query sees at most; None: all. kv_width:
    key-value heads x head width. hidden: feed-forward width, of a mixture of experts the shared
    experts' (0: none). gated: whether the feed-forward layer has two input matrices. parallel:
    attention and feed-forward side by side (one gather and one scatter a block). tied: the head is
    the embedding. positions: rows of a learned position table. routed: the experts; None: dense.
    """

    layers: int
    width: int
    attention_width: int
    matmul_params: int
    vocab: int
    window: int | None = None
    heads: int = 1
    kv_width: int = 0
    hidden: int = 0
    gated: bool = False
    parallel: bool = False
    tied: bool = False
    positions: int = 0
    routed: ExpertWork | None = None

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert in all layers."""
        hidden = self.routed.hidden if self.routed else 0
        return self.layers * self.width * (2 + self.gated) * hidden

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts, used by a token or not."""
        return self.expert_params * (self.routed.experts if self.routed else 0)

    @property
    def dense_params(self) -> int:
        """Parameters of the layers that every token multiplies, routers included."""
        return self.matmul_params - self.expert_params * (self.routed.top_k if self.routed else 0)

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return round(self.kv_width * self.heads / self.attention_width)

    @property
    def kv_params(self) -> int:
        """Parameters of all layers that make keys and values."""
        return 2 * self.layers * self.width * self.kv_width

    @property
    def sublayers(self) -> int:
        """Gathers of the residual stream into a block, its routed experts' left out."""
        return 1 if self.parallel or not self.hidden else 2

    @property
    def input_width(self) -> int:
        """Columns of all matrices that read a block's input: q, k, v, up and gate."""
        return self.attention_width + 2 * self.kv_width + (1 + self.gated) * self.hidden

    @property
    def output_width(self) -> int:
        """Rows of all matrices that write to the residual stream."""
        return self.attention_width + self.hidden

    @property
    def table_params(self) -> int:
        """Parameters of embeddings and head."""
        return ((1 if self.tied else 2) * self.vocab + self.positions) * self.width

    @property
    def params(self) -> int:
        """All parameters but norms and biases, of all experts."""
        return self.dense_params + self.routed_params + self.table_params

    @property
    def active_params(self) -> int:
        """Parameters that a token meets."""
        return self.matmul_params + self.table_params


def keys_per_query(seq_len: int, window: int | None, convention: Convention) -> float:
    """Returns the mean number of keys a query is credited with."""
    reach = seq_len if window is None else min(window, seq_len)
    if convention == "megatron":
        return reach
    # Query i (from 0) sees min(i + 1, reach) keys.
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def train_flops_per_token(work: DecoderWork, seq_len: int, convention: Convention) -> float:
    """Returns FLOPs of one token's forward and backward pass."""
    keys = keys_per_query(seq_len, work.window, convention)
    dense = 6 * work.matmul_params + 6 * work.vocab * work.width
    return dense + 12 * work.layers * work.attention_width * keys


def recomputed_flops_per_token(
    work: DecoderWork, seq_len: int, remat: Remat, loss_chunks: int, keys: float
) -> float:
    """Returns FLOPs that the backward pass spends on making forward values again.

    keys: keys per query that the attention kernel multiplies, visible or not. loss_chunks: above 1
    the logits are made twice. Source: models/parts.py:remat_policy, layers/losses.py.
    """
    again = RECOMPUTED[remat]
    layer = 2 * work.width * work.input_width * again.get("input", 0.0)
    layer += 2 * work.width * work.output_width * again.get("output", 0.0)
    layer += 4 * work.attention_width * keys * again.get("attention", 0.0)
    if (routed := work.routed) is not None:
        layer += 2 * work.width * routed.experts * again.get("router", 0.0)
        pairs = routed.pairs(seq_len) * again.get("experts", 0.0)
        layer += 2 * work.expert_params / work.layers * pairs
    return work.layers * layer + (2 * work.vocab * work.width if loss_chunks > 1 else 0)


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak_flops: float) -> float:
    """Returns model FLOPs utilisation: model FLOP/s over the devices' dense peak, 0..1."""
    return tokens_per_s * flops_per_token / (devices * peak_flops)
