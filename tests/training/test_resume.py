"""How a run begins when its newest step is damaged."""

import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.trust import RECORD
from megajax.core import config
from megajax.core.errors import UserError
from megajax.data.tokenizer import ByteTokenizer
from megajax.foreign import hf
from megajax.training import resume
from megajax.training.config import Config
from megajax.training.run_dir import open_run
from megajax.training.step import joint, make_train_step
from megajax.training.task import TrainState
from tests.tiny import run_config


def state(step):
    return TrainState({"w": jnp.full((8, 300), step, jnp.float32)}, {}, jnp.int32(step))


def train_step():
    """What `begin` asks of one, without a model to compile."""
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )
    storage = types.SimpleNamespace(arranged=lambda s: s, exchange={})
    return types.SimpleNamespace(
        abstract_state=abstract, storage=storage, rows={}, init=lambda seed: state(0)
    )


@pytest.fixture
def folder(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (5, 10):
        manager.save(step, vars(state(step)), data_state={"rows": 16 * step, "seed": 0}).result()
    return tmp_path


def begin(folder, steps=100, **identity):
    cfg = run_config(train__steps=steps)
    return resume.begin(cfg, train_step(), CheckpointManager(folder), {"seed": 0} | identity)


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_step_gives_way_to_the_one_before(folder):
    assert begin(folder).how == "resumed after step 10"
    damage(max((folder / "10").rglob("*"), key=lambda p: p.stat().st_size * p.is_file()))
    start = begin(folder)
    assert (start.how, start.rows) == ("resumed after step 5", 80)
    np.testing.assert_array_equal(np.asarray(start.state.params["w"]), 5.0)


def test_a_run_without_a_whole_step_does_not_begin_anew(folder):
    for step in (5, 10):
        damage(folder / str(step) / RECORD)
    with pytest.raises(
        UserError, match=r"none of the steps \[5, 10\] .* is whole; move the folder"
    ):
        begin(folder)


def test_a_run_that_has_all_steps_or_more_says_so(folder):
    assert begin(folder, steps=11).how == "resumed after step 10"
    assert begin(folder, steps=10).how == (
        "resumed after step 10: all of train.steps=10 are done; a larger --train.steps, with "
        "--run_dir of this folder, trains on"
    )
    with pytest.raises(UserError, match=r"=9: .* already has 10 steps, .* \(--train.steps\)"):
        begin(folder, steps=9)


def test_other_data_is_refused(folder):
    with pytest.raises(UserError, match=r"trained on other data \(seed changed\)"):
        begin(folder, seed=1)


def test_an_empty_folder_begins_anew(tmp_path):
    start = begin(tmp_path)
    assert (start.how, start.rows) == ("initialised", 0)
    assert dataclasses.asdict(start.state)["step"] == 0


@pytest.mark.parametrize("rows", [None, -5, 1.5, "x"])
def test_a_position_that_is_none_is_refused(tmp_path, rows):
    manager = CheckpointManager(tmp_path)
    manager.save(5, vars(state(5)), data_state={"rows": rows, "seed": 0}).result()
    with pytest.raises(UserError, match="says that .* rows were read"):
        begin(tmp_path)


def test_what_differs_from_the_former_start_is_listed(tmp_path):
    """The learning rate's course first. Rates by hand: linear from 1e-3 to 0, no warm-up."""
    optim = {
        "optim__schedule": "linear",
        "optim__lr": 1e-3,
        "optim__final": 0.0,
        "optim__warmup": 0,
    }
    former = run_config(train__steps=100, run_dir="there", **optim)
    assert resume.changes(former, former, 40) == []
    assert resume.changes(former, None, 0) == []
    free = config.override(former, {"run_dir": "here", "eval.batches": 3})
    assert resume.changes(free, former, 40) == [
        "settings that differ from the former start:",
        "  eval.batches: 8 -> 3",
    ]
    longer = run_config(train__steps=200, run_dir="there", **optim)
    assert resume.changes(longer, former, 40) == [
        "the learning rate takes another course: step 41 learns with 0.0008 (it would have been "
        "0.0006), the last one, 200, with 5e-06 (step 100, 1e-05 before)",
        "settings that differ from the former start:",
        "  train.steps: 100 -> 200",
    ]
    assert (
        "step 101 learns with 0.0005 (the run had ended at 0)"
        in resume.changes(longer, former, 100)[0]
    )
    slower = dataclasses.replace(former, optim=dataclasses.replace(former.optim, lr=1e-4))
    assert resume.changes(slower, former, 0)[0].startswith("the learning rate takes another course")


def test_what_differs_from_the_folder_of_the_weights_is_listed(tmp_path):
    with np.load(Path(__file__).parents[1] / "golden" / "hf_llama.npz") as golden:
        (tmp_path / "config.json").write_text(str(golden["config"]))
    model = dataclasses.replace(hf.load_config(tmp_path), window=8, norm_eps=1e-5)
    cfg = dataclasses.replace(run_config(), model=model, init_from=str(tmp_path))
    assert resume.changes(cfg, None, 0) == [
        f"settings that differ from {tmp_path}:",
        "  model.norm_eps: 1e-06 -> 1e-05",
        "  model.window: None -> 8",
    ]
    assert resume.changes(cfg, None, 5) == []


def test_what_may_change_between_the_starts_of_a_run(tmp_path):
    cfg = run_config(run_dir=str(tmp_path))
    (tmp_path / "config.json").write_text(config.to_json(cfg))
    unlike = {"precisions": "other.json", "kind": "weak", "play": "int8:20"}
    for free in (
        {"overlap": "xla"},
        {"optim__lr": 0.5},
        {"mesh__tensor": 2},
        {"eval__batches": 3},
        {"train__precision": "int8"},
        unlike,
    ):
        open_run(run_config(run_dir=str(tmp_path), **free), "pretrain", "nano")
    for fixed in ({"optim__name": "lamb"}, {"model__activation": "gelu"}, {"train__seed": 1}):
        name = next(iter(fixed)).replace("__", ".")
        with pytest.raises(UserError, match=f"holds another run: {name} was .*, now "):
            open_run(run_config(run_dir=str(tmp_path), **fixed), "pretrain", "nano")


@pytest.mark.parametrize("text", ["", '{"train": {"ste', "\0" * 40])
def test_a_torn_configuration_is_written_anew_or_the_remedy_named(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    cfg = run_config()
    run = open_run(cfg, "pretrain", "nano")
    run.begin(cfg, ByteTokenizer())
    saved, json_text = run.path / "config.json", (run.path / "config.json").read_text()
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json"]
    saved.write_text(text)
    with pytest.raises(UserError, match=r"is torn: delete it and give the command that began"):
        open_run(run_config(run_dir=str(run.path)), "pretrain", "nano")
    assert saved.read_text() == text
    again = open_run(cfg, "pretrain", "nano")  # the folder is named by this configuration
    assert again.path == run.path and again.former is None
    again.begin(cfg, ByteTokenizer())
    assert saved.read_text() == json_text


@dataclasses.dataclass(frozen=True)
class TwoModels(Config):
    """A run of two decoders, of which the weights of init_from are for the second one."""

    def given_params(self, layout, fresh):
        specs = {word: layout.stored(word) for word in ("embed", "vocab")}
        assert all(isinstance(spec, P) for spec in specs.values())
        return fresh | {"second": jax.tree.map(jnp.ones_like, fresh["second"])}


def test_weights_start_a_run_of_two_models(tmp_path):
    plain = run_config(mesh__data=2)
    members = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    cfg = TwoModels(**members | {"init_from": "FOLDER"})
    one = make_train_step(plain, plain.mesh.build())
    both = joint({"first": one, "second": one}, lambda state, batch: (state, {}))
    start = resume.begin(cfg, both, CheckpointManager(tmp_path), {})
    assert start.how == "weights from FOLDER" and start.rows == 0
    fresh = both.init(cfg.train.seed).params
    jax.tree.map(np.testing.assert_array_equal, start.state.params["first"], fresh["first"])
    assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(start.state.params["second"]))
