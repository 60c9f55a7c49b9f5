"""Packing against a NumPy loop, its gradients, garbage in what pads, and the buckets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PackedTokens, PackInfo, bucket, pack, unpack

LENGTHS = {
    "mixed": (3, 0, 7, 1, 0),
    "full": (7, 7, 7, 7, 7),
    "empty": (0, 0, 0, 0, 0),
    "last": (0, 0, 0, 0, 6),
}


def loop(x, lengths, capacity):
    """Returns (packed, unpacked again, segment ids, positions), token by token."""
    packed = np.zeros((capacity, *x.shape[2:]), x.dtype)
    back, ids, places, t = np.zeros_like(x), np.full(capacity, -1), np.zeros(capacity, int), 0
    for b, length in enumerate(lengths):
        for s in range(length):
            packed[t], ids[t], places[t], back[b, s] = x[b, s], b, s, x[b, s]
            t += 1
    return packed, back, ids, places


def poison(x, lengths):
    """NaN in everything that pads."""
    pads = np.arange(x.shape[1]) >= np.asarray(lengths)[:, None]
    return np.where(pads.reshape(*pads.shape, *(1,) * (x.ndim - 2)), np.nan, x)


@functools.partial(jax.jit, static_argnums=2)
def there_and_back(x, lengths, capacity):
    """Returns what `loop` returns, unpacked from a tail of NaN, and the prefix sums."""
    packed, info = pack(x, lengths, capacity)
    tail = (info.segment_ids < 0).reshape(-1, *(1,) * (packed.ndim - 1))
    back = unpack(jnp.where(tail, jnp.nan, packed), info)
    return packed, back, info.segment_ids, info.positions, info.cu_seqlens


@pytest.mark.parametrize("features", [(), (2, 3)], ids=str)
def test_is_the_loop(features, seed):
    x = np.random.default_rng(seed).standard_normal((5, 7, *features)).astype(np.float32)
    for lengths in LENGTHS.values():
        results = there_and_back(poison(x, lengths), np.array(lengths), 38)
        want = (*loop(x, lengths, 38), np.cumsum([0, *lengths]))
        for a, b in zip(results, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_integers_keep_their_type():
    ids = np.arange(35, dtype=np.int32).reshape(5, 7)
    packed, info = pack(jnp.asarray(ids), jnp.asarray(LENGTHS["mixed"]), 11)
    assert packed.dtype == jnp.int32
    np.testing.assert_array_equal(packed, loop(ids, LENGTHS["mixed"], 11)[0])
    tokens = PackedTokens(packed, info.cu_seqlens)
    assert tokens.capacity == 11
    np.testing.assert_array_equal(tokens.segment_ids, info.segment_ids)
    np.testing.assert_array_equal(tokens.positions, info.positions)


def test_each_is_the_others_transpose(seed):
    """Gradients against the loop's, with NaN in the padding, the tail and their gradients."""
    random, lengths, capacity = np.random.default_rng(seed), LENGTHS["mixed"], 16
    x = random.standard_normal((5, 7, 2)).astype(np.float32)
    dx = random.standard_normal((capacity, 2)).astype(np.float32)
    tail = np.arange(capacity)[:, None] >= sum(lengths)

    @jax.jit
    def both(x, lengths, dx, dpacked, dback):
        packed, pull = jax.vjp(lambda x: pack(x, lengths, capacity)[0], x)
        info = pack(x, lengths, capacity)[1]
        _, pull_back = jax.vjp(lambda x: unpack(x, info), packed)
        return pull(dpacked)[0], pull_back(dback)[0], unpack(dx, info)

    dpacked = np.where(tail, np.nan, dx)
    results = both(poison(x, lengths), np.array(lengths), dx, dpacked, poison(x, lengths))
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(results[1], loop(x, lengths, capacity)[0])


def test_one_compile_for_all_lengths():
    compiled = jax.jit(lambda x, lengths: pack(x, lengths, 20))
    x = jnp.ones((5, 7))
    for lengths in LENGTHS.values():
        packed, info = compiled(x, jnp.asarray(lengths))
        # traced: what does not fit is left out, and cu_seqlens stays legal
        assert int(info.cu_seqlens[-1]) == int(packed.sum()) == min(sum(lengths), 20)
    assert compiled._cache_size() == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x, n: pack(x, n, 10),
            "capacity=10 is too small for 11 tokens; it must be",
        ),
        (lambda x, n: pack(x, n, 10), "at least 11, and bucket(11) = 128"),
        (lambda x, n: pack(x, n + 5, 99), "must be from 0 to 7, the padded length; got 5 to 12"),
        (lambda x, n: pack(x, n[:3], 99), "lengths (3,) (B,)"),
        (lambda x, n: pack(x, n.astype(float), 99), "integers"),
        (lambda x, n: pack(x, n, 0), "capacity=0 must be at least 1"),
        (lambda x, n: unpack(x, PackInfo(n, 12, 7)), "T = capacity = 12"),
        (lambda x, n: bucket(12, most=11), "tokens=12, steps=4, multiple=128, most=11"),
        (lambda x, n: bucket(-1), "tokens=-1 must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError) as error:
        call(jnp.ones((5, 7)), jnp.asarray(LENGTHS["mixed"]))
    assert words in str(error.value)


@pytest.mark.parametrize(("steps", "multiple"), [(4, 128), (8, 64), (2, 96), (1, 1)])
def test_buckets_are_few_and_waste_is_bounded(steps, multiple):
    sizes = {}
    for tokens in range(6001):
        capacity = bucket(tokens, steps=steps, multiple=multiple)
        assert capacity >= max(tokens, 1) and capacity % multiple == 0
        assert capacity - tokens < max(tokens / steps, multiple) or tokens == 0
        sizes.setdefault(capacity, tokens)
    assert list(sizes) == sorted(sizes)  # never smaller for more tokens
    for n in (600, 1000, 2048, 3000):
        among = {bucket(t, steps=steps, multiple=multiple) for t in range(n, 2 * n + 1)}
        assert len(among) <= steps + 2


def test_the_paper_needs_a_handful_of_compiles(seed):
    """Batches of 16, lengths drawn from [0.2 L, L] (alpha 0.6) as ByteTransformer draws them."""
    random = np.random.default_rng(seed)
    for longest in (128, 512, 1024):
        most = 16 * longest
        totals = random.integers(longest // 5, longest + 1, (2000, 16)).sum(1)
        capacities = np.array([bucket(int(t), most=most) for t in totals])
        assert len(set(capacities)) <= 6 and capacities.max() <= most
        assert capacities.mean() / totals.mean() < 1.15  # against 1.67 with padding
    assert bucket(16 * 1024, most=16 * 1024) == 16 * 1024


def test_200_batches_compile_a_handful_of_programs(seed):
    """Real compiles, over the paper's draws: one for each bucket that came, and no more."""
    random = np.random.default_rng(seed)
    compiled = jax.jit(lambda x, lengths, capacity: pack(x, lengths, capacity)[0], static_argnums=2)
    x, seen = np.ones((16, 64), np.float32), set()
    for _ in range(200):
        lengths = random.integers(12, 65, 16)
        capacity = bucket(int(lengths.sum()), most=16 * 64)
        seen.add(capacity)
        assert float(compiled(x, lengths, capacity).sum()) == lengths.sum()
    assert compiled._cache_size() == len(seen) <= 5
