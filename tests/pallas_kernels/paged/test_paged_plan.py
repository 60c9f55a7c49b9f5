"""The plan of the paged kernel against a loop over steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged import plan as paged_plan


def drawn(random):
    """A batch that decodes, one with long prompts, and few sequences of many blocks."""
    segments = int(random.integers(1, 9))
    counts = random.integers(0, random.choice([2, 2, 40]), segments)
    contexts = counts + random.integers(0, random.choice([3, 400, 3000]), segments)
    return counts.astype(np.int32), contexts.astype(np.int32)


def made(counts, contexts, rows, heads, keys, blocks, least, left):
    tokens = max(int(counts.sum()), 1) + 3
    starts = np.cumsum(counts) - counts
    window = None if left is None else (left, 0)

    def make(starts, counts, contexts):
        tiles = paged_plan.cut(tokens, starts, counts, contexts, rows, window)
        return tiles, paged_plan.plan(tiles, heads, keys, blocks, least)

    return jax.device_get(jax.jit(make)(*(jnp.int32(x) for x in (starts, counts, contexts))))


@pytest.mark.parametrize("number", range(12))
def test_every_step_has_one_block_and_masks_are_where_they_must_be(number, seed):
    random = np.random.default_rng(seed + number)
    counts, contexts = drawn(random)
    rows, heads = int(random.choice([1, 8, 32])), int(random.integers(1, 4))
    keys, blocks, least = 64, int(random.integers(1, 20)), int(random.integers(1, 4))
    left = random.choice([None, 30, 500])
    tiles, plan = made(counts, contexts, rows, heads, keys, blocks, least, left)
    live = tiles.lo_XQ < tiles.hi_XQ
    want = {}  # (item, step): whether it needs no mask
    for x in np.flatnonzero(live.any(1)):
        lo, hi = tiles.lo_XQ[x][live[x]], tiles.hi_XQ[x][live[x]]
        for step in range(lo.min() // keys, -(-hi.max() // keys)):
            full = lo.max() <= step * keys and (step + 1) * keys <= hi.min()
            want |= {(x * heads + g, step): full for g in range(heads)}
    unmasked_of, taken, slots = {}, [], {}
    for block in range(blocks):
        taken.append(0)
        for v in range(plan.first_D[block], plan.first_D[block + 1]):
            part = plan.parts_V[v]
            item, first, steps = (part[c] for c in (0, 2, 3))
            x, taken[-1] = item // heads, taken[-1] + steps
            assert part[paged_plan.SEGMENT] == tiles.segment_X[x]
            assert part[paged_plan.LIVE] == live[x].sum()
            assert part[paged_plan.POSITION] == tiles.hi_XQ[x, 0] - 1
            assert part[paged_plan.BEGINS] == (first == tiles.lo_XQ[x, 0] // keys)
            assert steps > 0
            slots.setdefault(item, []).append(part[paged_plan.SLOT])
            for step in range(first, first + steps):
                masked = step < first + part[4] or step >= first + steps - part[5]
                assert (item, step) not in unmasked_of
                unmasked_of[item, step] = not masked
    assert unmasked_of.keys() == want.keys()
    assert all(want[k] for k, unmasked in unmasked_of.items() if unmasked)
    # A step that needs no mask has one only at an end that a row's window or causal order reaches.
    assert sum(unmasked_of.values()) >= sum(want.values())
    share = max(-(-len(want) // blocks), least)
    assert max(taken) <= share and sum(n < share for n in taken if n) <= 1
    jobs = {int(job[0]): job[1:] for job in plan.jobs_D[: plan.count[0]]}
    slot_numbers = [s for each in slots.values() for s in each if len(each) > 1]
    assert slot_numbers == list(range(len(slot_numbers))) and len(
        slot_numbers
    ) <= paged_plan.most_slots(blocks)
    for item, each in slots.items():
        if len(each) == 1:
            assert each == [-1] and plan.job_I[item] == -1
        else:
            assert tuple(jobs[item]) == (each[0], len(each))
            assert plan.jobs_D[plan.job_I[item], 0] == item
    assert len(jobs) == sum(len(each) > 1 for each in slots.values())
