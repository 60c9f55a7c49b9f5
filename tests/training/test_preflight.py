"""What a machine lacks is said before a run reads any text."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.data.tokenizer import ByteTokenizer
from megajax.training import shape
from megajax.training.config import Config
from megajax.training.evaluate import Measure

CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")


def run(changes, device, folder):
    shape.check(config.override(Config(), changes), device, folder)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"train.attention": "cudnn"}, CPU, "train.attention=cudnn needs an NVIDIA GPU"),
        (
            {"train.attention": "hopper"},
            CPU,
            "train.attention=hopper needs a Hopper GPU, found a CPU",
        ),
        ({"train.attention": "cudnn"}, H100, "found train.dtype=float32"),
        ({"overlap": "fused"}, CPU, "overlap=fused: needs Hopper GPUs, found cpu"),
        ({"overlap": "fused"}, A100, "found NVIDIA A100"),
    ],
)
def test_kernels_that_the_device_lacks(tmp_path, changes, device, words):
    with pytest.raises(UserError, match=words):
        run(changes, device, tmp_path)


def test_fused_kernels_beside_other_axes_are_refused_before_anything_compiles():
    """Wherever the run starts: a plan asks `check` too."""
    sizes = dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
    cfg = config.override(Config(), {"overlap": "fused", "mesh.tensor": 4})
    cfg.check(sizes | {"tensor": 4})
    with pytest.raises(UserError, match="data 2 may hold SMs.*--mesh.tensor"):
        cfg.check(sizes | {"data": 2, "tensor": 4})


def test_what_is_there_passes(tmp_path):
    run({"train.attention": "cudnn", "train.dtype": "bfloat16", "overlap": "fused"}, H100, tmp_path)
    run({"checkpoint.dir": "s3://bucket/run"}, CPU, tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"uv sync --extra wandb, or none \(--log.wandb\)"):
        run({"log.wandb": "project"}, CPU, tmp_path)


def test_folders_that_cannot_be_written(tmp_path):
    """/proc refuses every user, root too; a file is no folder."""
    (tmp_path / "file").write_text("")
    for folder in (Path("/proc/run"), tmp_path / "file" / "run", tmp_path / ("long" * 99)):
        with pytest.raises(UserError, match=r"cannot write to .*\(--run_dir\)"):
            run({}, CPU, folder)
        with pytest.raises(UserError, match=r"(cannot write to |too long).*\(--checkpoint.dir\)"):
            run({"checkpoint.dir": str(folder)}, CPU, tmp_path)


@pytest.mark.parametrize("address", ["s3://", "gs://", "ftp://host/run"])
def test_addresses_of_no_store(tmp_path, address):
    with pytest.raises(UserError, match=rf"{address}.*\(--checkpoint.dir\)"):
        run({"checkpoint.dir": address}, CPU, tmp_path)
    run({"checkpoint.dir": "s3://bucket/run"}, CPU, tmp_path)  # it is not asked


class Bare(ByteTokenizer):
    begin = None


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "legal"),
    [
        (ByteTokenizer(), "", True),
        (Bare(), "", False),
        (Bare(), "x" * 8, False),
        (Bare(), "x", True),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_training(tokenizer, prompt, legal):
    cfg = Config()
    model = dataclasses.replace(cfg.model, max_positions=8)
    cfg = dataclasses.replace(cfg, model=model, eval=dataclasses.replace(cfg.eval, prompt=prompt))
    nothing = SimpleNamespace()

    def make(cfg):
        return Measure(cfg, nothing, [], tokenizer, nothing, nothing, nothing, lambda: [])

    if legal:
        make(cfg)
        return
    with pytest.raises(UserError, match="--eval.prompt"):
        make(cfg)
    make(dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, sample_tokens=0)))
