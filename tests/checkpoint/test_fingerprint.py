"""Fingerprints against the formula in plain Python, over cuts, types and damage."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import sealing
from megajax.checkpoint.sealing import Fingerprints
from megajax.core import hashes

M = 2**32


def scramble(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B % M
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % M
    return x ^ (x >> 16)


def oracle(x):
    """The sums, element by element, with Python's integers; elements of 1, 2, 4 or 8 bytes."""
    one = two = 0
    for place in np.ndindex(*x.shape):
        raw = x[place].tobytes()
        words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
        for w, bits in enumerate(words):
            where = sum(i * k for i, k in zip(place, hashes.STRIDES, strict=False))
            key = scramble((where + w * hashes.WORD_STRIDE) % M)
            one += scramble(bits ^ key)
            two += scramble((bits * 0x2545F491 + (key ^ 0x5BD1E995)) % M)
    return one % M, two % M


def of(*leaves):
    return Fingerprints(leaves).local()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint32", "bool", "float64", "int64"]
)
def test_the_formula(dtype, seed):
    random = np.random.default_rng(seed)
    for shape in ((), (3, 1, 4)):
        x = (random.integers(0, 2, shape) if dtype == "bool" else random.normal(0, 9, shape)) + 0
        x = np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
        assert of(x) == [oracle(x)]
        if x.dtype.itemsize < 8:
            assert of(jnp.asarray(x)) == [oracle(x)]


def test_every_cut_has_the_same(seed):
    x = np.random.default_rng(seed).standard_normal((8, 6, 4), np.float32)
    devices = np.array(jax.devices())
    sums = set()
    for sizes in ((8, 1), (4, 2), (2, 4), (2, 1), (1, 1)):
        mesh = jax.sharding.Mesh(devices[: math.prod(sizes)].reshape(sizes), ("a", "b"))
        for spec in (P(), P("a"), P(None, "b" if sizes[1] < 4 else None, None), P("b", None, "a")):
            if spec == P("b", None, "a") and sizes[0] == 8:
                continue
            y = jax.device_put(x, NamedSharding(mesh, spec))
            prints = Fingerprints([y])
            sums.add(prints.local()[0])
            assert prints.wrong(prints.local()) == []
            with jax.set_mesh(mesh):
                assert of(y) == prints.local()
    assert sums == {oracle(x)}


def test_every_bit_and_every_exchange_is_seen(seed):
    x = np.random.default_rng(seed).integers(0, 4, (6, 5), np.uint32)
    good = Fingerprints([x, x]).local()
    for place in np.ndindex(*x.shape):
        bad = x.copy()
        bad[place] ^= np.uint32(1 << (place[0] * 5 + place[1]))
        assert Fingerprints([x, bad]).wrong(good) == [1]
    swapped = x[:, ::-1].copy()
    assert Fingerprints([swapped, x.T.copy().reshape(6, 5)]).wrong(good) == [0, 1]
    assert of(x[:, :4]) != of(x)  # a missing column


def test_a_bad_replica_is_seen_though_another_is_good():
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    good = np.arange(8, dtype=np.float32)
    pieces = [jax.device_put(good[:4] if d.id < 4 else good[4:], d) for d in mesh.devices.ravel()]
    pieces[6] = jax.device_put(np.array([4, 5, 6, 8], np.float32), mesh.devices.ravel()[6])
    x = jax.make_array_from_single_device_arrays((8,), NamedSharding(mesh, P("a")), pieces)
    prints = Fingerprints([x])
    assert prints.local() == of(good) and prints.wrong(of(good)) == [0]


def test_an_array_without_elements_has_zeros(seed):
    """Beside another leaf, on two devices; to compute it there would crash XLA's compiler."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",))
    full = np.random.default_rng(seed).standard_normal((4, 2), np.float32)
    leaves = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in (
            (np.zeros((0, 4), np.float32), P()),
            (full, P("a")),
            (np.zeros((4, 0), jnp.bfloat16), P("a")),
            (np.zeros((2, 0, 3), np.int8), P(None, "a")),
        )
    ]
    prints = Fingerprints([*leaves, np.zeros((0, 2))])
    zeros = (0, 0)
    assert prints.local() == [zeros, oracle(full), zeros, zeros, zeros]
    assert prints.wrong([zeros] * 5) == [1]


def test_parts_add_up():
    assert sealing.add([(1, M - 1), (M - 1, 3)]) == (0, 2)
    assert sealing.add([]) == (0, 0)


def test_donated_arrays_are_read_before_they_go():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.arange(1 << 16, dtype=jnp.float32)
    expected = of(np.arange(1 << 16, dtype=np.float32))
    prints = Fingerprints([x])
    for _ in range(3):
        x = step(x)
    assert prints.local() == expected
