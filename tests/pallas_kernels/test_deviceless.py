"""Deviceless compilation: what it compiles, and what it must leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot


@pytest.fixture
def cache(tmp_path):
    """A compile cache of this test that keeps every program."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.aot
def test_a_program_compiles_twice_beside_a_cache_on_disk(cache):
    """jax stores such a program and then fails to read it, so it must never be stored."""
    sharding = NamedSharding(Mesh(np.array(aot.devices()), "x"), P("x"))
    values = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)
    for _ in range(2):
        lowered = jax.jit(lambda x: jnp.sin(x).sum()).lower(values)
        assert "all-reduce" in aot.compile(lowered).as_text()
    assert not list(cache.iterdir())
    jax.jit(lambda x: jnp.cos(x).sum())(jnp.ones(8))
    assert list(cache.iterdir()), "the cache must go on for programs with devices"
