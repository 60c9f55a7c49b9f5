"""Ten thousand requests against an independent model of the pages (scheduler_model.py)."""

import random
from collections import Counter

import pytest

from megajax.core.errors import UserError
from megajax.serving.scheduler import PagePool, Scheduler
from tests.scheduler_model import Device

GROUPS, RUNS, REQUESTS = 10, 5, 200  # requests that a run serves; it refuses others
CONTEXT = 64
SYSTEM_PROMPTS = [[i % 3 for i in range(k * 7)] for k in range(4)]


def limits_of(rng: random.Random) -> dict[str, int]:
    max_batch = rng.randint(1, 12)
    budget, chunk = max_batch + rng.randint(0, 40), rng.randint(1, 40)
    return {"max_batch": max_batch, "budget": budget, "chunk": chunk, "context": CONTEXT}


def submit(rng: random.Random, device: Device, number: int) -> bool:
    """Adds a request; one that is too large must be refused, and only such a one."""
    prompt = rng.choice(SYSTEM_PROMPTS) + rng.choices(range(3), k=rng.randint(1, 30))
    most, n = rng.randint(1, rng.choice((10, 30))), rng.choice((1, 1, 1, 1, 2, 4))
    room = (device.pool.pages - 1) * device.pool.page_size
    fits = len(prompt) + most <= CONTEXT and len(prompt) + most - 1 <= room
    priority = rng.choice((0, 0, 0, -2, 3))
    try:
        made = device.scheduler.add(number, prompt, max_tokens=most, n=n, priority=priority)
    except UserError:
        assert not fits
        return False
    assert fits and [s.index for s in made] == list(range(n))
    device.follow(made, rng.randint(1, most))
    return True


def simulate(run: int) -> Counter:
    """Serves requests that come at random; returns how often what happened."""
    rng = random.Random(run)
    page_size = (1, 3, 4, 5, 8)[run % 5]
    pages = rng.choice((50, 64, 128, 400)) // page_size  # a request has up to 64 tokens
    pool = PagePool(pages + 1, page_size, prefix_cache=run % 4 != 3)
    limits = limits_of(rng)
    device = Device(rng, pool, Scheduler(pool, **limits), **limits)
    added = served = 0
    while served < REQUESTS or device.live:
        while served < REQUESTS and rng.random() < 0.5:
            served += submit(rng, device, added)
            added += 1
        if rng.random() < 0.02 and device.live:
            request = rng.choice(list(device.live)).request
            device.forget(device.scheduler.cancel(request))
        if not device.step(rng.choice((1, 1, 4))):
            assert not device.live
        assert device.plans < 20 * REQUESTS, "no end in sight"
    assert device.scheduler.plan() is None
    assert not device.scheduler.running and not device.scheduler.waiting
    assert pool.in_use == 0
    pages = pool.take(pool.capacity)  # every page is there, once, and none is page 0
    assert sorted(pages) == list(range(1, pool.pages))
    return Counter(
        served=served,
        preempted=device.scheduler.preemptions,
        reused=device.scheduler.prefix_hits,
        forked=device.scheduler.forked,
        copied=device.copied,
        evicted=pool.evictions,
        multiple=device.multiple,
        ahead=device.ahead,
        vain=device.vain,
        loaded=device.weights,
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_ten_thousand_requests(group):
    """Every request ends, no page leaks, and every page that is read holds what it should."""
    events = Counter()
    for run in range(group * RUNS, (group + 1) * RUNS):
        events += simulate(run)
    assert len(events) == 10, events  # each of them happened
    assert events["served"] == RUNS * REQUESTS
