"""Each wait of the attention kernels, deleted, is missed by the interpreter."""

import functools

import pytest

from pallas_kernels.attention import hopper_backward, hopper_forward
from tests.attention_oracle import Case
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.attention.test_hopper import run_backward, run_forward

# Twice as many tiles as buffers, of which each warpgroup lets some go before and after its own.
APART = Case((64, 190), width=64, heads=(1, 1), spare=2)
# Tiles that are masked in part, several heads in a ring.
RAGGED = Case((50, 0, 60), causal=True, heads=(4, 1), width=64, spare=18)
FUSED = hopper_backward.heuristic(64, deterministic=False)


def runs(run, *cases, **named):
    return [functools.partial(run, case, 0, **named) for case in cases]


FORWARD = [
    *runs(run_forward, APART, RAGGED),
    *runs(run_forward, APART, RAGGED, tile=hopper_forward.Tile(64, 2, overlap=False)),
]
BACKWARD = runs(run_backward, APART, RAGGED)
# The kernels in which a function waits.
RUNS = {
    (hopper_forward, "multiply_into"): FORWARD,
    (hopper_forward, "logits_beside_sum"): FORWARD,
    (hopper_forward, "_Warpgroup"): FORWARD,
    (hopper_forward, "_body"): FORWARD,
    (hopper_backward, "multiply"): BACKWARD,
    (hopper_backward, "_varlen_attention_dq"): BACKWARD,
    (hopper_backward, "_varlen_attention_dkv"): [
        *runs(run_backward, APART, RAGGED, tile=FUSED),
        *BACKWARD,
    ],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {
    "_varlen_attention_dq._compute.step.wgmma_wait(0)": (
        (0,),
        "the interpreter ends each product at once; test_products.py misses it",
    ),
    "_varlen_attention_dkv._compute.step.in_turn.wgmma_wait(0)": (
        (0,),
        "the product behind it waits for both before its result is read",
    ),
}


@pytest.mark.parametrize(
    "site",
    parameters([hopper_forward, hopper_backward]),
)
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
