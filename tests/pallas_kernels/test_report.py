"""The deviceless gate: nothing spills, and no wgmma waits for another."""

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import aot, report
from pallas_kernels.hopper import cards

PATH = Path(__file__).parents[2] / "experiments" / "results" / "kernel_report.json"
STALE = 4  # (chosen: what a check of the whole project has the minutes to compile)


def committed() -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {}
    for row in json.loads(PATH.read_text())["rows"]:
        rows.setdefault(row["config"], []).append(row)
    return rows


def test_every_configuration_is_in_the_report_and_clean():
    assert committed().keys() == set(report.names()), "run scripts/kernel_report.py"
    for row in (row for rows in committed().values() for row in rows):
        assert not report.faults(row)
        assert row["registers"] <= cards.REGISTERS, row
        assert row["shared_bytes"] <= cards.SHARED_BYTES, row


def test_faults_are_found():
    row = {"config": "c", "name": "k", "spilled_bytes": 0, "serialized": False}
    assert not report.faults(row)
    assert report.faults(row | {"spilled_bytes": 8}) == ["c (k): spills 8 bytes"]
    assert "makes wgmma instructions wait" in report.faults(row | {"serialized": True})[0]


# Of ptxas 13.5, but the third, which is how CUDA 12 says the second.
REMARKS = {
    "C7511": "Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function 'k' in line 5",
    "C7517": "wgmma.wait_group is injected in around line 418 by compiler to allow use of "
    "registers defined by GMMA in function 'k'",
    "C7599": "warpgroup.wait is injected in around line 418 by compiler to allow use of registers "
    "defined by GMMA in function 'k'",
    "C7519": "warpgroup.arrive is injected in around line 285 by compiler to allow use of "
    "registers in GMMA in function 'serializer_mosaic_gpu_kernel'",
    "C7508": "Potential Performance Loss: 'setmaxnreg' ignored to allow debugging.",
}


@pytest.mark.parametrize("code", ["", *REMARKS])
def test_a_wait_that_ptxas_adds_counts_as_serialised(code, tmp_path):
    path = tmp_path / "k.ptxas"
    remark = f"ptxas info    : ({code}) {REMARKS[code]}\n" if code else ""
    path.write_text(
        f"{remark}ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'serializer_mosaic_gpu_kernel' for 'sm_90a'\n"
        "    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 58 registers, used 16 barriers, 1 bytes smem\n"
    )
    (tmp_path / "k.resources.txt").write_text("smem_scratch_bytes=1024\n")
    expected = aot.KernelReport("serializer", 58, 12, 1024, code in ("C7511", "C7517", "C7599"))
    assert aot._parse(path) == expected


def test_a_hash_sees_code_and_not_comments(tmp_path):
    file = tmp_path / "kernel.py"

    def hashed(text: str) -> str:
        file.write_text(text)
        return report.hash_of([file])

    first = hashed('"""Doc."""\ndef f():\n    """Says."""\n    return 1\n')
    assert first == hashed("def f():\n    # why\n    return 1\n")
    assert first != hashed("def f():\n    return 2\n")


def test_a_program_is_known_by_its_hash():
    """Places in memory, which differ from trace to trace, are no part of it."""
    names = [f"gemm forward {block} plain" for block in ("64x64", "64x128")]
    first, other = map(report.program_hash, names)
    assert first == report.program_hash(names[0]) and first != other
    for name, program in zip(names, (first, other), strict=True):
        assert program == committed()[name][0]["program"]


def test_few_configurations_differ_from_the_report():
    """The rest of the gate compiles those; more of them would take too long there."""
    rows = committed()
    stale = [n for n in report.names() if rows[n][0]["source"] != report.source_hash(n)]
    assert len(stale) <= STALE, f"run scripts/kernel_report.py: {stale}"


def chosen() -> list[str]:
    """What changed since the report, and a sample that changes with the sources.

    Of the rest one that is quick to compile: the backward kernels take a minute each.
    """
    hashes, rows = {name: report.source_hash(name) for name in report.names()}, committed()
    stale = [n for n, value in hashes.items() if rows.get(n, [{}])[0].get("source") != value]
    quick = [n for n in report.names() if n not in stale and "backward" not in n]
    return stale + random.Random("".join(hashes.values())).sample(quick, 1)


@pytest.mark.aot
@pytest.mark.parametrize("name", chosen())
def test_what_changed_and_a_sample_compile_as_reported(name):
    rows = report.compile_config(name)
    assert not [fault for row in rows for fault in report.faults(row)]
    if committed()[name][0]["source"] == report.source_hash(name):
        assert rows == committed()[name]


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(("cut", "fixed"), [("heads", True), ("rows", True), ("heads", False)])
def test_the_default_is_the_kernel_on_an_h100_and_needs_no_collective(cut, fixed):
    """Gradient of the public functions in a shard_map over two GPUs, over heads or batch rows."""
    mesh = Mesh(np.array(aot.devices(1, 2)), "x")
    spec, other = (P(None, None, "x"), P()) if cut == "heads" else (P("x"), P("x"))

    def array(*shape, dtype=jnp.bfloat16, spec=spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def grads(q, k, v, ids):
        def loss(q, k, v):
            out = pallas_kernels.packed_attention(
                q,
                k,
                v,
                segment_ids=ids,
                causal=True,
                deterministic=fixed,
                implementation="hopper",
            )
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    q, k = array(2, 256, 4, 64), array(2, 256, 2, 64)
    ids = array(2, 256, dtype=jnp.int32, spec=other)
    step = jax.shard_map(grads, mesh=mesh, in_specs=(spec,) * 3 + (other,), out_specs=spec)
    text = aot.compile(jax.jit(step).lower(q, k, k, ids)).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == (3 if fixed else 2)
    assert not any(word in text for word in ("all-reduce", "all-gather", "collective-permute"))
