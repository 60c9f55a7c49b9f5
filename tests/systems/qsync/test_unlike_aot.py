"""Programs of unlike kinds, compiled for H100s: the same collectives, and few bits in products."""

import re
from collections import Counter

import pytest

from megajax.core.mesh import MeshSpec
from megajax.models.decoder_config import DecoderConfig
from megajax.quant import Precisions
from megajax.systems.aot import QUICK
from megajax.systems.qsync import check_programs, sequence
from megajax.training.config import Config, TrainConfig
from megajax.training.step import make_train_step
from pallas_kernels import aot

pytestmark = pytest.mark.aot
PRODUCTS = "attention.query attention.key attention.value attention.out mlp.gate mlp.up mlp.down"
LAYERS = 4


def compiled(**changes):
    model = DecoderConfig(
        layers=LAYERS, width=512, heads=4, kv_heads=4, head_width=128, mlp=1024, vocab=1000
    )
    train = dict(global_batch=32, seq_len=512, attention="xla", remat="none")
    train |= changes.pop("train", {})
    cfg = Config(model=model, train=TrainConfig(**train), **changes)
    step = make_train_step(cfg, cfg.mesh.build(aot.devices(2, 4)))
    lowered = step.step.lower(step.abstract_state, step.abstract_batch)
    return aot.compile(lowered, QUICK)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two kinds, three runs of layers."""
    path = tmp_path_factory.mktemp("precisions") / "file.json"
    rows = {
        "strong": ("float32",) * LAYERS,
        "weak": ("int8", "float16", "float16", "float32"),
    }
    Precisions(
        {
            kind: {f"blocks.{i}.{n}": of[i] for i in range(LAYERS) for n in PRODUCTS.split()}
            for kind, of in rows.items()
        }
    ).save(path)
    return str(path)


def dots(text):
    """{types of a product's operands}, of XLA's and of the libraries' products."""
    return set(re.findall(r"\b(s8|f8e4m3fn|f8e5m2|bf16|f16|f32)\[[\d,]*\]", text))


def test_kinds_run_the_same_collectives(file):
    mesh = MeshSpec(node=2, tensor=2)
    programs = {k: compiled(mesh=mesh, precisions=file, kind=k) for k in ("strong", "weak")}
    check_programs(programs)
    assert {"s8", "f16"} <= dots(programs["weak"].as_text())
    assert not {"s8", "f16"} & dots(programs["strong"].as_text())
    # The gradients of a matrix are scattered, each device's part to it.
    assert any(row.startswith("reduce-scatter") for row in flat(sequence(programs["weak"])))


def test_few_bits_bring_no_collective():
    # How often arrays of which type and shape travel, in whatever messages.
    travel = {}
    for name in ("none", "fp8"):
        program = compiled(mesh=MeshSpec(tensor=2), train=dict(dtype="bfloat16", precision=name))
        travel[name] = Counter(
            (row.split(" of ")[0].split(" along")[0], array)
            for row in flat(sequence(program))
            for array in re.findall(r"\w+\[[\d,]*\]", row)
        )
        assert {"f8e4m3fn", "f8e5m2"} <= dots(program.as_text()) or name == "none"
    assert travel["fp8"] == travel["none"]


def flat(rows):
    for row in rows:
        yield from (
            (row,) if isinstance(row, str) else (one for _ in range(row[0]) for one in flat(row[1]))
        )
