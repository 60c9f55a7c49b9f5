"""Model FLOPs of a workload, and MFU, in the two conventions that papers use.

Forward and backward cost 6 FLOPs a parameter and token (2 forward, 4 backward); attention adds
12 L H K s_eff, where s_eff is how many keys a query is credited with. 'megatron': all s keys, as if
attention were not causal (Megatron-LM, PaLM; MegaScale's tables follow it). 'causal': the keys a
query really sees, so a sliding window counts with its own size. Recomputation is never credited.
Source: MegaScale tables 2 and 3 reproduce to 0.1 % (tests/cost/test_flops.py).
"""

import dataclasses
from typing import Literal

from megajax.cost.base import Op, Workload
from megajax.cost.kernels import Attention, Experts, Kernel

Convention = Literal["megatron", "causal"]
Remat = Literal["none", "full", "outputs", "dots"]

# Rematerialisation: how much of each part's forward work the backward pass computes again, by what
# is kept (models/parts.py). Attention without a fused kernel whose result is kept computes only its
# weights again, which is one of its two products. A fused kernel whose log-sum-exp is kept, too,
# computes nothing again. Experts are computed again in full, because the gradient of a token's
# routing weights needs their results.
_AGAIN = {"norm": 1.0, "attention": 0.5, "activation": 1.0, "experts": 1.0}
RECOMPUTED = {
    "none": {},
    "dots": _AGAIN,
    "outputs": _AGAIN | {"input": 1.0, "router": 1.0},
    "full": _AGAIN | {"attention": 1.0, "input": 1.0, "output": 1.0, "router": 1.0},
}


def recomputed(remat: Remat, part: str, keeps_attention: bool) -> float:
    """Returns how often the backward pass computes the forward values of a part again.

    keeps_attention: whether attention's weights exist as an array; False: its kernel is fused.
    """
    if part == "attention" and not keeps_attention and remat != "full":
        return 0.0
    return RECOMPUTED[remat].get(part, 0.0)


def keys_per_query(seq_len: int, window: int | None, convention: Convention) -> float:
    """Returns the mean number of keys a query is credited with."""
    reach = seq_len if window is None else min(window, seq_len)
    if convention == "megatron":
        return reach
    # Query i (from 0) sees min(i + 1, reach) keys.
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def model_flops_per_token(load: Workload, convention: Convention) -> float:
    """Returns FLOPs of one token's forward pass: of experts, those that it uses. Those of towers
    are shared out over the tokens of the blocks."""
    return sum(op.count * _credited(op, convention) for op in load.all_ops) / load.tokens


def block_flops_per_token(load: Workload) -> float:
    """Returns FLOPs of one token's forward pass through all blocks, as the kernels execute it but
    for experts' empty slots."""
    ops = (op for op in load.ops if op.part not in ("embedding", "head"))
    return sum(op.count * _used(op).flops for op in ops) / load.tokens


def train_flops_per_token(load: Workload, convention: Convention) -> float:
    """Returns FLOPs of one token's forward and backward pass."""
    return 3 * model_flops_per_token(load, convention)


def _credited(op: Op, convention: Convention) -> float:
    kernel = op.kernel
    if not isinstance(kernel, Attention):
        return _used(op).flops
    if kernel.causal and kernel.queries == kernel.keys:
        keys = keys_per_query(int(kernel.keys), kernel.window, convention)
    else:  # all keys, or those of a cache: each query sees as many
        keys = min(kernel.window or kernel.keys, kernel.keys)
    return dataclasses.replace(kernel, keys=keys, window=None).flops


def _used(op: Op) -> Kernel:
    """The kernel without the slots of experts that no token fills."""
    kernel = op.kernel
    if isinstance(kernel, Experts):
        return dataclasses.replace(kernel, pairs=kernel.top_k)
    return kernel


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak_flops: float) -> float:
    """Returns model FLOPs utilisation: model FLOP/s over the devices' dense peak, 0..1."""
    return tokens_per_s * flops_per_token / (devices * peak_flops)
