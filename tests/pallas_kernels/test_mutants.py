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
from tests.pallas_kernels.hopper import test_engine_mutants as engine
from tests.pallas_kernels.norm import test_norm_mutants as norm
from tests.pallas_kernels.paged import test_paged_mutants as paged
from tests.pallas_kernels.quant_gemm import test_quant_gemm_mutants as quant_gemm
from tests.pallas_kernels.quantize import test_quantize_mutants as quantize

TESTS = [
    attention,
    collective,
    engine,
    expert,
    gemm,
    grouped,
    norm,
    paged,
    quant_gemm,
    quantize,
]
# What the interpreter of Mosaic GPU cannot run, because it has no flags and no peers:
# test_communication_mutants.py.
UNREACHED = {
    "collective.gemm_all_reduce": ["_body.send.wait_smem_to_gmem(0)"],
    "expert.dispatch_gemm": [
        "_body.compute.barrier_wait(begun)",
        "_body.produce.barrier_wait(begun)",
    ],
}


def modules():
    root = pathlib.Path(pallas_kernels.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if "plgpu." in path.read_text():
            yield name, importlib.import_module(f"pallas_kernels.{name}")


def test_every_kernel_that_waits_has_runs():
    kernels = {key for test in TESTS for key in test.RUNS}
    left, waiting = {}, set()
    for name, module in modules():
        for site in sites(module):
            waiting.add((module, site.kernel))
            if (module, site.kernel) not in kernels:
                left.setdefault(name, []).append(site.name)
    assert left == UNREACHED
    assert kernels <= waiting


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__.split(".")[-1])
def test_what_is_not_seen_exists(test):
    """Each wait that may survive is there, and says why."""
    names = {site.name for module in {m for m, _ in test.RUNS} for site in sites(module)}
    assert set(test.UNSEEN) <= names
    assert all(numbers and reason for numbers, reason in test.UNSEEN.values())
