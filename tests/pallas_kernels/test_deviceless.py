"""Deviceless compilation: what it compiles, and what it must leave alone."""

import os
import subprocess
import sys

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


@pytest.mark.aot
@pytest.mark.process
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_the_plugin_without_a_gpu_leaves_other_programs_of_the_environment_alone(tmp_path):
    """A program that imports jax and nothing of ours prints no traceback of the CUDA plugin."""
    jaxes = ("JAX_", "XLA_", "CUDA_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(jaxes)}
    code = "import jax; print(jax.devices(), jax.numpy.ones(3).sum())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["[CpuDevice(id=0)]", "3.0"]
