"""The fused kernels with one call changed: every wait, signal and page is missed when it is wrong.

The calls are read from the source (tests/kernel_calls.py), so that a new one is changed as well.
"""

import functools
import importlib
import pathlib

import pytest

import pallas_kernels
from tests.kernel_calls import calls, mutants
from tests.kernel_cases import CASES, NOTHING, fault, reached

# Of each kernel, its modules; then those that all have.
MODULES = {
    "all_gather_gemm": ["collective.all_gather_gemm", "hopper.relay"],
    "gemm_reduce_scatter": ["collective.gemm_reduce_scatter", "hopper.relay"],
    "gemm_all_reduce": ["collective.gemm_all_reduce"],
    "dispatch_gemm": ["expert.dispatch_gemm", "expert.rows"],
    "gemm_combine": ["expert.gemm_combine", "expert.rows"],
}
COMMON = ["hopper.fused", "hopper.peers", "hopper.engine", "hopper.epilogue"]
# Changes that do no harm, and why; of one kernel.
HARMLESS: dict[tuple[str, str], str] = {
    **{
        (kernel, "Product.produce._.barrier_wait(self.free.at[self._buffer(r, i)]): next"): (
            "at the end all of them are waited for, in another order"
        )
        for kernel in MODULES
    },
    **{
        (kernel, "Product.compute.wait_smem_to_gmem(0): dropped"): (
            "the epilogue has waited, before its signal"
        )
        for kernel in ("gemm_reduce_scatter", "gemm_all_reduce", "gemm_combine")
    },
    ("dispatch_gemm", "Product.compute.wait_smem_to_gmem(0): dropped"): (
        "rows that stay empty are cleared after it, with a wait of their own"
    ),
    ("gemm_all_reduce", "Peers.wait.fence(): dropped"): (
        "what the flag announces is read by loads of a thread, not by TMA"
    ),
    ("gemm_all_reduce", "_body.send.copy.peer(gmem['inbox'], to, rank): rank"): (
        "the piece goes to all ranks, in another order"
    ),
    ("gemm_all_reduce", "_body.send.signal(flags, lax.rem(rank + d, R), i): rank"): (
        "the flag is raised at all ranks, in another order"
    ),
    ("gemm_combine", "relay._.wait_smem_to_gmem(0, wait_read_only=True): dropped"): (
        "the next job is loaded after a wait for complete stores"
    ),
}
# Calls that no case makes, and why.
UNREACHED: dict[str, str] = {
    "collective.all_gather_gemm: _body.load.peer(gmem['x'], place.peer)": (
        "for ReadyPeer, whose rows are there: test_collective_interpreted.py"
    ),
    "hopper.engine: Product._product._.barrier_wait(self.ready.at[self._buffer(ring, i)])": (
        "fused kernels multiply every tile; grouped products do not"
    ),
}


def module(name):
    return importlib.import_module(f"pallas_kernels.{name}")


def changed(kernel, names):
    return [
        pytest.param(kernel, mutant, id=f"{kernel}-{mutant}")
        for name in names
        for mutant in mutants(module(name))
    ]


@functools.cache
def made(kernel):
    return reached(kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "mutant"),
    [p for kernel, names in MODULES.items() for p in changed(kernel, [*names, *COMMON])],
)
def test_a_changed_call_is_missed(kernel, mutant):
    if mutant.place not in made(kernel):
        pytest.skip("this kernel does not make the call")
    said = fault(kernel, mutant)
    if said == NOTHING:
        pytest.skip("there is one page, or one barrier of the name")
    assert (said is None) == ((kernel, str(mutant)) in HARMLESS), said


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("all_gather_gemm", "pull.wait(flags, chunks, (R - 1) * comm): dropped"),
        ("gemm_reduce_scatter", "_body.finish.wait_smem_to_gmem(0): late"),
    ],
)
def test_of_one_call(kernel, change):
    (mutant,) = (m for m in mutants(module(f"collective.{kernel}")) if str(m) == change)
    assert "race" in str(said := fault(kernel, mutant)) or "end" in str(said)


@pytest.mark.slow
def test_every_call_is_made():
    everywhere = set().union(*map(made, MODULES))
    names = {name for names in MODULES.values() for name in names} | set(COMMON)
    left = {
        f"{name}: {call}"
        for name in names
        for call in calls(module(name))
        if call.place not in everywhere
    }
    assert left == set(UNREACHED)


def test_every_kernel_that_communicates_has_cases():
    root = pathlib.Path(pallas_kernels.__file__).parent
    names = {name for names in MODULES.values() for name in names} | set(COMMON)
    assert set(MODULES) == set(CASES)
    for path in root.rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if "peers.signal(" in path.read_text() or "peers.wait(" in path.read_text():
            assert name in names


def test_what_is_harmless_exists():
    every = {
        str(m) for names in MODULES.values() for n in (*names, *COMMON) for m in mutants(module(n))
    }
    assert {change for _, change in HARMLESS} <= every
