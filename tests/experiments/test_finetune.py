"""An encoder's runs as a person meets them: labels and hidden tokens, stopped and continued."""

import dataclasses
import json
import pathlib
import signal
import types

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.checkpoint.manager import CheckpointManager
from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.tokenizer import ByteTokenizer
from megajax.foreign import hf
from megajax.models import encoder
from megajax.models.encoder_config import EncoderConfig
from megajax.parallel import sharding
from megajax.training.finetune import Examples, FinetuneConfig, nano, take_encoder
from megajax.training.run_dir import RunDir, saved_labels
from tests import forks
from tests.experiments.test_pretrain import optimized, rows, wait_for
from tests.foreign.test_hf import unpack

SCRIPT = "experiments/finetune.py"
SMALL = [
    "--model.layers=1",
    "--model.width=32",
    "--model.heads=2",
    "--model.mlp=64",
    "--model.vocab=300",
    "--train.steps=12",
    "--train.global_batch=16",
    "--train.seq_len=16",
    "--eval.every=4",
    "--eval.batches=2",
    "--checkpoint.every=5",
    "--optim.warmup=2",
    "--log.every=1",
    "--data.tokenizer=bytes",
    "--mesh.data=4",
    "--mesh.tensor=2",
    "--emulate=8",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A labelled set: the letters of a text say which label it has."""
    home = tmp_path_factory.mktemp("home")
    lines = [
        {"text": f"{letter * (i % 7 + 3)} {i}", "label": letter}
        for i in range(100)
        for letter in "xy"
    ]
    (home / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def words(home, folder, preset, *flags):
    return [
        *SMALL,
        f"--preset={preset}",
        f"--data.source={home}/set.jsonl",
        f"--cache_dir={home}/cache",
        f"--run_dir={home}/{folder}",
        *flags,
    ]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("preset", ["nano", "nano_mlm"])
def test_a_stopped_run_goes_on_bit_for_bit(home, preset):
    """On data 4 x tensor 2; with dropout, so that random keys go on too."""
    straight, parts = home / f"{preset}-whole", home / f"{preset}-parts"
    flags = ["--model.labels=2"] if preset == "nano" else []
    done = forks.run(SCRIPT, *words(home, straight.name, preset, *flags), env=optimized())
    assert done.returncode == 0, done.stderr
    with forks.start(SCRIPT, *words(home, parts.name, preset, *flags), env=optimized()) as run:
        wait_for(run, lambda: len(rows(parts)) >= 6)
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.written()
    assert 6 <= len(rows(parts)) < 12
    done = forks.run(SCRIPT, *words(home, parts.name, preset, *flags), env=optimized())
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stderr
    for key in ("loss", "accuracy", "grad_norm"):
        curves = [{step: row[key] for step, row in rows(f).items()} for f in (straight, parts)]
        assert curves[0] == curves[1] and len(curves[0]) == 12
    ends = [rows(f, "eval_loss")[12] for f in (straight, parts)]
    assert ends[0]["eval_accuracy"] == ends[1]["eval_accuracy"]
    assert ("eval_majority" in ends[0]) == (preset == "nano")
    assert (straight / "curve.png").exists() and "eval_accuracy" in (
        straight / "summary.md"
    ).read_text()
    other = forks.run(SCRIPT, *words(home, straight.name, preset, *flags, "--train.seed=1"))
    assert other.returncode == 2 and "train.seed was 0, now 1" in other.stderr


@pytest.mark.parametrize(
    "values, message",
    [
        ({"mesh.pipe": 2}, "mesh.pipe=2: encoders are cut over node, data and tensor only; use 1"),
        ({"mesh.context": 2}, "mesh.context=2: encoders are cut"),
        ({"train.seq_len": 128, "model.position_offset": 2}, "table that are left; at most 126"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(values, message):
    cfg = config.override(nano(), values)
    with pytest.raises(UserError, match=message):
        cfg.check(cfg.mesh.sizes(8))


@pytest.fixture
def untyped(monkeypatch):
    """Neither --preset nor --config was typed."""
    monkeypatch.setattr(config, "start_given", lambda: False)


def folder_of(tmp_path, names=None, **changes):
    """A folder with a tiny encoder, and its parameters."""
    model = EncoderConfig(layers=1, width=16, heads=2, mlp=32, vocab=384, max_positions=128)
    model = dataclasses.replace(model, **changes)
    params = encoder.parts(model).init(jax.random.key(1))
    hf.save(params, model, tmp_path / "hf", labels=names)
    return str(tmp_path / "hf"), params


def started(folder, **flags):
    """The configuration of a run of these flags."""
    flags = {"init_from": folder, "data.tokenizer": "bytes"} | flags
    base = config.override(nano(), {k: v for k, v in flags.items() if k == "init_from"})
    return config.override(take_encoder(base, flags, {}), flags)


@pytest.mark.parametrize("preset", [False, True])
def test_a_folder_with_another_head_starts_a_classifier(tmp_path, preset, monkeypatch):
    """Of a model with a masked-token head the trunk is taken; the head begins anew, if told."""
    monkeypatch.setattr(config, "start_given", lambda: preset)
    folder, stored = folder_of(tmp_path)
    with pytest.raises(UserError, match="has no tokenizer .*--data.tokenizer=bytes"):
        take_encoder(nano(), {"init_from": folder}, {})
    with pytest.raises(UserError, match="has the head mlm, and the run has the head classify.*new"):
        started(folder)
    cfg = started(folder, new_head=True)
    assert (cfg.model.head, cfg.model.labels, cfg.model.width) == (
        "classify",
        8 if preset else 2,
        16,
    )
    fresh = encoder.parts(cfg.model).init(jax.random.key(2))
    layout = sharding.layout(MeshSpec(data=1).build(), model=cfg.model)
    params = cfg.given_params(layout, fresh)
    named, theirs, new = (dict(named_leaves(tree)) for tree in (params, stored, fresh))
    assert named.keys() == new.keys()
    for name, x in named.items():
        want = new if name.split(".")[0] in encoder.HEAD else theirs
        rows = slice(2 if name == "types" else None)  # what pads a table is 0
        np.testing.assert_array_equal(x[rows], want[name][rows], err_msg=name)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.labels": 2}, "has the head classify with 3 labels, .* classify with 2 labels"),
        ({"model.head": "mlm"}, "has the head classify with 3 labels, and the run has the head ml"),
    ],
)
def test_a_head_is_left_out_only_if_told(tmp_path, untyped, changes, message):
    folder, _ = folder_of(tmp_path, head="classify", labels=3)
    assert started(folder).model.labels == 3
    with pytest.raises(UserError, match=message):
        started(folder, **changes)
    cfg = started(folder, new_head=True, **changes)
    assert config.diff(cfg.model, started(folder).model)[0][1] in ("classify", 3)
    with pytest.raises(UserError, match="begin from random weights"):
        dataclasses.replace(cfg, new_head=False).given_params(None, {})


def reading(home, cfg, run_dir):
    lines: list[str] = []
    console = types.SimpleNamespace(say=lines.append)
    return Examples(cfg, console, RunDir(run_dir)), lines


def test_the_classes_of_a_run_are_the_folders_then_its_own(home, tmp_path, untyped):
    """x is class 1 of the folder, y class 0, as in its id2label, whatever the alphabet says."""
    folder, _ = folder_of(tmp_path, ["y", "x"], head="classify", labels=2)
    data = {"data.source": f"{home}/set.jsonl", "cache_dir": f"{home}/cache"}
    cfg = started(folder, **data)
    run = tmp_path / "run"
    dataset, said = reading(home, cfg, run)
    assert dataset.labels == ("y", "x") and f"classes of {folder}: 0 y, 1 x" in said
    for i in range(20):
        row = dataset.rows[i]
        assert row["targets"][0] == (row["tokens"][1] == ord("x"))
    # The run goes on with its numbers: without the folder, with other data, with a new order.
    RunDir(run).begin(cfg, dataset.tokenizer, dataset.labels)
    assert saved_labels(run) == ("y", "x")
    alone = dataclasses.replace(cfg, init_from=None)
    assert reading(home, alone, run)[0].labels == ("y", "x")
    assert reading(home, alone, tmp_path / "other")[0].labels == ("x", "y")
    more = {"text": "z", "label": "z"}
    (tmp_path / "more.jsonl").write_text((home / "set.jsonl").read_text() + json.dumps(more))
    other = config.override(alone, {"data.source": f"{tmp_path}/more.jsonl"})
    with pytest.raises(UserError, match="labels that the run in .* does not know: z; its .* y, x"):
        reading(home, other, run)
    with pytest.raises(UserError, match=r"labels=2 must be the 3 of .*x, y, z \(--model.labels=3"):
        reading(home, other, tmp_path / "other")
    with pytest.raises(UserError, match="does not know: z.*--new_head=true"):
        reading(home, dataclasses.replace(other, init_from=folder), tmp_path / "other")


@pytest.mark.parametrize("name", ["roberta_classify", "bert"])
def test_a_run_is_exported_as_what_transformers_computes(name, tmp_path):
    """Of a run with the weights of a model of transformers whose logits are frozen: the folder has
    its tensors bit for bit, and a config.json of the same arithmetic (tests/checkpoint/
    test_hf_encoder.py compares the logits; tests/golden/check_encoder_export.py runs both)."""
    golden, tensors = unpack(name, tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs")
    run, out = tmp_path / "run", tmp_path / "out"
    manager = CheckpointManager(run / "checkpoints")
    manager.save(3, {"params": params}, data_state={"rows": 0}).result()
    manager.close()
    rows = json.loads((pathlib.Path(forks.ROOT) / "tests/golden/rows.json").read_text())
    for file, text in rows["bert"]["files"].items():
        (run / file).write_text(text)
    labels = ["2", "10", "other"] if cfg.head == "classify" else []
    RunDir(run).begin(FinetuneConfig(model=cfg), ByteTokenizer(), labels)
    done = forks.run("scripts/hf.py", "export", run, out, "--emulate=1")
    assert done.returncode == 0, done.stderr
    assert not labels or "classes 2, 10, other" in done.stdout
    exported = safetensors.numpy.load_file(out / "model.safetensors")
    assert exported.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
    written = json.loads((out / "config.json").read_text())
    shape = json.loads((tmp_path / "theirs" / "config.json").read_text())
    freed = {"id2label", "label2id", "torch_dtype", "dtype"}
    assert {k: written[k] for k in written.keys() - freed} == {
        k: shape[k] for k in written.keys() - freed
    }
    names = labels or ["LABEL_0", "LABEL_1"]
    assert written["id2label"] == {str(i): label for i, label in enumerate(names)}
    assert (out / "tokenizer.json").is_file()
