"""A network with words of its own, as docs/own_networks.md shows it: both files run here."""

import dataclasses
import functools
import inspect
import pathlib
import re
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx

from megajax.core import mesh
from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import is_words, named_leaves
from megajax.layers.ops import Ops
from megajax.models.parts import of_module
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.masking import chosen
from megajax.training.optim import OptimConfig, is_hidden_matrix
from megajax.training.shape import with_chunks
from megajax.training.step import make_train_step
from megajax.training.task import Task, mean_loss, token_rows
from tests.tiny import host_batch, on
from tests.tolerances import LOSSES

ROOT = pathlib.Path(__file__).parents[2]


def code(name):
    text = (ROOT / "docs" / "own_networks.md").read_text()
    (source,) = re.findall(rf"^<!-- {name} -->\n```python\n(.*?)^```", text, re.M | re.S)
    return source


@pytest.fixture(scope="module")
def mixer():
    module = types.ModuleType("mixer")
    sys.modules["mixer"] = module
    exec(compile(code("mixer.py"), "mixer.py", "exec"), module.__dict__)
    yield module
    del sys.modules["mixer"]


def test_the_files_are_short():
    assert len(code("train_mixer.py").splitlines()) <= 30
    assert len(code("mixer.py").splitlines()) <= 75


def test_stacks_are_known_by_their_words_wherever_they_lie(mixer):
    """The trunk is what a pipeline cuts, both stacks are pruned, and each layer is one matrix."""
    parts = mixer.parts(mixer.MixerConfig(), None, Ops())
    assert parts.stack == "trunk"
    words = dict(named_leaves(parts.axes, is_words))
    assert words["trunk.value"] == ("layers", "embed", "mlp")
    assert words["tower.value"] == ("tower", "embed", "mlp")
    assert words["tower.norm.scale"] == ("tower", None)
    assert parts.abstract["tower"]["value"].shape == (2, 64, 128)
    matrices = tuple(f"{s}.{m}" for s in ("tower", "trunk") for m in ("gate", "out", "value"))
    assert chosen(parts.axes) == chosen(parts.axes, "mlp") == matrices
    assert chosen(parts.axes, "attention") == ()
    assert not is_hidden_matrix(words["tower.norm.scale"])


def test_two_stacks_without_a_mark_are_refused(mixer, monkeypatch):
    monkeypatch.setattr(mixer, "as_tower", lambda stack: stack)
    with pytest.raises(UserError, match="found tower, trunk; mark further stacks by .*as_tower"):
        mixer.parts(mixer.MixerConfig(), None, Ops())


def test_all_members_that_a_shape_lacks_are_named_at_once():
    @dataclasses.dataclass(frozen=True)
    class Bare:
        layers: int = 2
        width: int = 8

    with pytest.raises(UserError) as caught:
        JobConfig(model=Bare())
    said = str(caught.value)
    assert said.startswith("model=") and "lacks 3 of the members that ModelShape has" in said
    listed = said.partition("): ")[2].split("; ")
    assert [line.partition(":")[0] for line in listed] == ["dropout", "max_positions", "sizes"]
    assert all(len(line.partition(": ")[2]) > 10 for line in listed)  # each says what it is
    module = dataclasses.make_dataclass(
        "Whole",
        [(name, object, value) for name, value in vars(Bare()).items()]
        + [("dropout", float, 0.0), ("max_positions", int, 8), ("sizes", object, None)],
    )
    assert JobConfig(model=module()).model.max_positions == 8


def test_a_shape_without_workload_says_what_needs_it(mixer):
    cfg = JobConfig(model=mixer.MixerConfig(), train=TrainConfig(loss_chunks=0, seq_len=16))
    with pytest.raises(UserError, match="MixerConfig has no workload.*--train.loss_chunks=1"):
        with_chunks(cfg, dict.fromkeys(MESH_AXES, 1), 10**9)


def test_every_parameter_without_words_is_named_with_the_remedy(mixer):
    class Foreign(nnx.Module):
        def __init__(self, rngs, **words):
            self.inner = nnx.Linear(64, 64, rngs=rngs, **words)

    def build(key, **words):
        network = mixer.Network(mixer.MixerConfig(), None, Ops(), nnx.Rngs(params=key))
        network.foreign = Foreign(nnx.Rngs(params=key), **words)
        return network

    with pytest.raises(UserError) as caught:
        of_module(build, 4)
    said = str(caught.value)
    assert "foreign.inner.bias (64,) has none; foreign.inner.kernel (64, 64) has none." in said
    assert "trunk" not in said and "tower" not in said
    for remedy in ("megajax.layers.param.normal(", "nnx.Param(value, axes=", "kernel_metadata="):
        assert remedy in said
    (keywords,) = re.findall(r"nnx.Linear\(\.\.\., (.*)\)$", said)  # the remedy, as it is written
    words = eval(f"dict({keywords})")
    axes = of_module(functools.partial(build, **words), 4).axes
    assert axes["foreign"]["inner"] == {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
    for wrong in (("embed", "mlp", "vocab"), ["embed", "mlp"], "embed"):
        bad = words | {"kernel_metadata": {"axes": wrong}}
        with pytest.raises(UserError, match=r"foreign.inner.kernel \(64, 64\) has [\['(]+embed"):
            of_module(functools.partial(build, **bad), 4)


def test_a_variable_that_is_no_parameter_is_named(mixer):
    def build(key):
        network = mixer.Network(mixer.MixerConfig(), None, Ops(), nnx.Rngs(params=key))
        network.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(dropout=key))
        return network

    with pytest.raises(UserError, match="drop.rngs.count is a RngCount and no nnx.Param"):
        of_module(build, 4)


def test_each_member_of_ops_is_documented():
    """In its docstring and in the table of the page on networks of one's own."""
    page = (ROOT / "docs" / "own_networks.md").read_text()
    about = inspect.getdoc(Ops) or ""
    for field in dataclasses.fields(Ops):
        assert re.search(rf"^{field.name}[(:]", about, re.M) or f" {field.name}(" in about
        assert f"\n| `{field.name}` | " in page, field.name


@pytest.mark.slow
def test_a_pipeline_and_tensor_ranks_train_it_as_one_device_does(mixer):
    model = mixer.MixerConfig(width=32, mlp=32, vocab=64)
    cfg = JobConfig(
        model=model,
        train=TrainConfig(steps=20, global_batch=16, seq_len=16),
        optim=OptimConfig(name="muon", lr=1e-2),
    )
    task = Task(functools.partial(mixer.parts, model), token_rows(16), mean_loss())
    losses, ends = [], []
    for sizes in ({"data": 1}, {"pipe": 2, "tensor": 2}):
        step = make_train_step(cfg, MeshSpec(**sizes).build(), task)
        state, values = step.init(0), []
        for i in range(4):
            state, metrics = step.step(state, on(step, host_batch(i)))
            values.append(float(metrics["loss"]))
        losses.append(values)
        ends.append(jax.tree.map(np.asarray, step.storage.natural(state.params)))
    np.testing.assert_allclose(*losses, atol=LOSSES)
    assert losses[0][-1] < losses[0][0]
    for name, x in named_leaves(ends[0]):
        other = dict(named_leaves(ends[1]))[name]
        np.testing.assert_allclose(x, other, atol=5e-3, err_msg=name)


@pytest.mark.slow
def test_the_program_trains_and_resumes(mixer, tmp_path, monkeypatch, capsys):
    """20 steps in one go, and the same in two starts: equal losses to all digits printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(mesh, "start", lambda emulate: None)  # this process has its 8 devices
    program = code("train_mixer.py").replace("~/.cache/megajax", str(tmp_path / "cache"))
    program = program.replace(":.3f}", ":.9f}").replace('"megajax/"', '"megajax/core/"')
    program = program.replace("lr=1e-2", 'lr=1e-2, schedule="constant"')

    def run(folder, steps):
        text = program.replace("runs/mixer", str(tmp_path / folder))
        exec(text.replace("steps=20", f"steps={steps}"), {"__name__": "__main__"})
        return [line for line in capsys.readouterr().out.splitlines() if "loss" in line]

    uninterrupted = run("whole", 20)
    assert len(uninterrupted) == 20 and float(uninterrupted[-1].split()[2]) < 0.8 * float(
        uninterrupted[0].split()[2]
    )
    assert run("parts", 10) + run("parts", 20) == uninterrupted
    assert run("whole", 20) == []  # all steps are done
