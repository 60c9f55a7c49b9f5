"""Model FLOPs of training a decoder, and MFU, in the two conventions that papers use.

Forward and backward cost 6 FLOPs a parameter and token (2 forward, 4 backward); attention adds
12 L H K s_eff, where s_eff is how many keys a query is credited with. 'megatron': all s keys, as if
attention were not causal (Megatron-LM, PaLM; MegaScale's tables follow it). 'causal': the keys a
query really sees, so a sliding window counts with its own size. Recomputation is never credited.
Source: MegaScale tables 2 and 3 reproduce to 0.1 % (tests/cost/test_flops.py).
"""

from dataclasses import dataclass
from typing import Literal

Convention = Literal["megatron", "causal"]


@dataclass(frozen=True)
class DecoderWork:
    """What the FLOPs of a decoder depend on.

    matmul_params: parameters that a token multiplies, without embedding lookups and head; of a
    mixture of experts only those of the experts that it uses, routed and shared, and the router's.
    attention_width: heads x head width. window: keys a query sees at most; None: all.
    """

    layers: int
    width: int
    attention_width: int
    matmul_params: int
    vocab: int
    window: int | None = None


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


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak_flops: float) -> float:
    """Returns model FLOPs utilisation: model FLOP/s over the devices' dense peak, 0..1."""
    return tokens_per_s * flops_per_token / (devices * peak_flops)
