"""No wait of a kernel is forgotten: each is deleted in some test, and survivors are listed."""

import importlib
import pathlib

import pytest

import pallas_kernels
from tests.kernel_mutants import sites
from tests.pallas_kernels.attention import test_hopper_mutants as attention
from tests.pallas_kernels.collective import test_collective_mutants as collective
from tests.pallas_kernels.expert import test_expert_mutants as expert
from tests.pallas_kernels.gemm import test_gemm_mutants as gemm
from tests.pallas_kernels.grouped import test_grouped_mutants as grouped
from tests.pallas_kernels.norm import test_norm_mutants as norm
from tests.pallas_kernels.tile_sparse import test_tile_sparse_mutants as tile_sparse

TESTS = [attention, collective, expert, gemm, grouped, norm, tile_sparse]
# Kernels that only run with flags and peers, which the interpreter of Mosaic GPU lacks, or that
# only call what is in `collective.core`; what they wait for is in the protocols.
FLAGS = {
    "collective.all_gather_gemm": "the end of a block",
    "collective.gemm_all_reduce": "its tiles leave from the epilogue, before a flag",
    "collective.gemm_reduce_scatter": "the end of a block",
    "expert.dispatch_gemm": "the end of a block; a ring that is given to the product",
    "expert.gemm_combine": "its tiles are there, before a flag",
}


def modules():
    root = pathlib.Path(pallas_kernels.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if "plgpu." in path.read_text():
            yield name, importlib.import_module(f"pallas_kernels.{name}")


def test_every_kernel_that_waits_has_runs():
    kernels = {key for test in TESTS for key in test.RUNS}
    waiting = {(site.module, site.kernel) for _, module in modules() for site in sites(module)}
    left = {(module.__name__.removeprefix("pallas_kernels."), name) for module, name in
            waiting - kernels}  # fmt: skip
    assert {module for module, _ in left} == set(FLAGS), left
    assert kernels <= waiting


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__.split(".")[-1])
def test_what_is_not_seen_exists(test):
    """Each wait that may survive is there, and says why."""
    names = {site.name for module in {m for m, _ in test.RUNS} for site in sites(module)}
    assert set(test.UNSEEN) <= names
    assert all(numbers and reason for numbers, reason in test.UNSEEN.values())
