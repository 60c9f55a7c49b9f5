"""Every test runs on 8 emulated CPU devices, with strict promotion and warnings as errors."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# Compiling is most of the suite's time, and its programs run a few times each.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that depends on the test's name only."""
    import zlib

    return zlib.crc32(request.node.name.encode())
