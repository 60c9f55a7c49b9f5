"""The main job as a person runs it: real processes, real signals, real kills.

One straight run of 30 steps is the control; everything else must end where it ends.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.core import config
from megajax.data.corpus import open_corpora
from megajax.data.loader import Loader, training_rows
from megajax.training.config import Config
from megajax.training.task import TrainState
from tests import forks
from tests.tiny import step_of
from tests.tolerances import LOSSES, PARAMETERS

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS = 30
OTHER_MESH = {"mesh.data": 1, "mesh.tensor": 4}  # four devices instead of eight
ONLY_STEPS = ["--eval.batches=0", "--eval.sample_tokens=0"]  # the control does the rest
SMALL = [
    "--model.layers=2",
    "--model.width=64",
    "--model.heads=4",
    "--model.kv_heads=4",
    "--model.head_width=16",
    "--model.mlp=128",
    "--train.global_batch=32",
    "--train.seq_len=64",
    "--eval.batches=2",
    "--eval.every=0",
    "--eval.sample_tokens=8",
    "--log.every=5",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Text to learn, and a cache that all processes of this module share."""
    home = tmp_path_factory.mktemp("home")
    text = home / "text"
    text.mkdir()
    random = np.random.default_rng(0)
    words = [f"word{i}" for i in range(50)]
    for i in range(80):
        (text / f"{i}.txt").write_text(" ".join(random.choice(words, 300)))
    return home


def command(home, *flags):
    fixed = [f"--data.source={home}/text", f"--cache_dir={home}/cache"]
    script = str(ROOT / "experiments" / "pretrain.py")
    return [sys.executable, script, *SMALL, *fixed, *flags]


def environment():
    return {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {
        "PYTHONWARNINGS": "default",
        "CUDA_VISIBLE_DEVICES": "",
    }


def optimized():
    """As `environment`: of programs that are compiled once, found by all, and run many steps."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_backend_optimization_level=0", "")
    return environment() | {"XLA_FLAGS": flags}


def run(home, *flags):
    """As `start`, and waits for the end."""
    return forks.run("experiments/pretrain.py", *command(home, *flags)[2:], env=optimized())


def refused(home, *flags):
    """As `run`, for a run that ends before it begins: a fork that has its dependencies."""
    done = forks.run("experiments/pretrain.py", *command(home, *flags)[2:])
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    return done


def start(home, *flags):
    """A run as a process of its own, which need not import what megajax depends on."""
    return forks.start("experiments/pretrain.py", *command(home, *flags)[2:], env=optimized())


def rows(folder, key="loss"):
    """{step: row}, the last of each step."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    complete = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: r for r in complete if key in r}


def wait_for(process, condition, seconds=300):
    """Waits until condition() holds while the process runs."""
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None, process.written()
        assert time.time() < end
        time.sleep(0.01)


def last_step(folder):
    return max(rows(folder), default=0)


def load_config(folder):
    return config.load_json(Config, folder / "config.json")


def restore(folder, step, cfg=None):
    """Returns (train step, state, data state) of a checkpoint on the mesh of `cfg`."""
    cfg = cfg or load_config(folder)
    other = Config()  # what changes no state: one train step for all folders of a mesh
    same = ("run_dir", "eval", "checkpoint", "emulate", "play")
    train_step = step_of(dataclasses.replace(cfg, **{k: getattr(other, k) for k in same}))
    manager = CheckpointManager(folder / "checkpoints", keep=0)
    restored = manager.restore(step, like=vars(train_step.abstract_state))
    return train_step, TrainState(**restored), manager.data_state(step)


def loader_of(cfg, train_step, position):
    corpora, _ = open_corpora(cfg.data, cfg.cache_dir, lambda _: None)
    data = training_rows(corpora, cfg.train.seq_len, cfg.train.seed)
    return Loader(data, train_step.abstract_batch, position)


@pytest.fixture(scope="module")
def straight(home):
    """30 steps without interruption, in a process that a person's command would start."""
    folder = home / "straight"
    flags = (f"--train.steps={STEPS}", "--checkpoint.every=13", f"--run_dir={folder}")
    words = command(home, *flags)
    done = subprocess.run(words, capture_output=True, text=True, env=optimized())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def test_a_run_says_what_it_does_and_leaves_everything(straight):
    folder, done = straight
    out = done.stdout
    assert "data 4 x tensor 2 on 8 emulated cpu" in out
    assert "train.steps: 160 -> 30" in out and "model.width: 128 -> 64" in out
    assert "parameters" in out and "FLOPs a token" in out and "attention: xla" in out
    assert f"step {STEPS}/{STEPS} | loss" in out and "MFU N/A" in out and "ETA 0:00" in out
    assert "bits per byte" in out and "--- sample\ndef " in out
    assert "Traceback" not in done.stderr
    for name in ("config.json", "metrics.jsonl", "summary.md", "curve.png"):
        assert (folder / name).stat().st_size > 0
    assert list(folder.glob("events.out.tfevents*"))
    assert (folder / "samples" / f"{STEPS:08d}.txt").read_text().startswith("def ")
    assert CheckpointManager(folder / "checkpoints").steps() == [13, 26, 30]


def test_metrics_have_the_promised_members(straight):
    metrics = rows(straight[0])
    assert sorted(metrics) == list(range(1, STEPS + 1))
    for row in metrics.values():
        assert row["tokens"] == 32 * 64 and row["mfu"] is None and row["loss"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_time_s"])
        assert row["grad_norm"] > 0
    assert metrics[30]["loss"] < metrics[1]["loss"] - 0.5
    evaluations = rows(straight[0], "eval_loss")
    assert list(evaluations) == [STEPS] and "loss" not in evaluations[STEPS]
    ratio = evaluations[STEPS]["eval_bits_per_byte"] / evaluations[STEPS]["eval_loss"]
    assert ratio == pytest.approx(1 / np.log(2), rel=0.01)  # bytes: one token is one byte


def test_a_killed_run_comes_back_bit_for_bit(home, straight):
    folder = home / "killed"
    flags = [f"--train.steps={STEPS}", "--checkpoint.every=13", f"--run_dir={folder}", *ONLY_STEPS]
    process = start(home, *flags)
    saved = folder / "checkpoints" / "13" / "_CHECKPOINT_METADATA"
    wait_for(process, lambda: saved.exists() and last_step(folder) > 13)
    holder = json.loads((folder / "lock").read_text())
    assert holder["pid"] == process.pid and f"--run_dir={folder}" in holder["command"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert last_step(folder) < STEPS and (folder / "lock").exists()
    assert CheckpointManager(folder / "checkpoints").latest() == 13
    done = run(home, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed after step 13" in done.stdout
    assert "is in use" not in done.stderr and not (folder / "lock").exists()

    want, got = rows(straight[0]), rows(folder)
    assert sorted(got) == list(range(1, STEPS + 1))
    assert [got[s]["loss"] for s in got] == [want[s]["loss"] for s in got]
    train_step, a, data_a = restore(straight[0], STEPS)
    _, b, data_b = restore(folder, STEPS)
    assert data_a == data_b and data_a["rows"] == 32 * STEPS
    chex.assert_trees_all_equal(a, b)
    cfg = load_config(folder)
    batches = [next(loader_of(cfg, train_step, d["rows"])) for d in (data_a, data_b)]
    for key in batches[0]:
        np.testing.assert_array_equal(np.asarray(batches[0][key]), np.asarray(batches[1][key]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(
            ("--mesh.pipe=2", "--mesh.node=2", "--mesh.tensor=2", "--pipeline.microbatches=8"),
            id="pipeline",
        ),
        pytest.param(
            ("--mesh.node=2", "--mesh.data=2", "--mesh.tensor=2", "--train.accumulate=2"),
            id="without stages",
        ),
    ],
)
def test_a_killed_run_with_four_bits_on_the_wire_comes_back_bit_for_bit(home, tmp_path, mesh):
    """LAMB and micro-batches: masters, moments, copies of the weights and losses are those of an
    undisturbed run. Stages have micro-batches of their own in the place of --train.accumulate."""
    fixed = [
        *mesh,
        "--wire=sdp4bit",
        "--optim.name=lamb",
        "--train.steps=20",
        "--checkpoint.every=6",
        *ONLY_STEPS,
    ]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    done = run(home, *fixed, f"--run_dir={undisturbed}")
    assert done.returncode == 0, done.stdout + done.stderr
    process = start(home, *fixed, f"--run_dir={killed}")
    manager = CheckpointManager(killed / "checkpoints")
    wait_for(process, lambda: last_step(killed) > 6 and manager.latest())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert last_step(killed) < 20 and (killed / "lock").exists()
    saved = manager.latest()
    done = run(home, *fixed, f"--run_dir={killed}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed after step {saved}" in done.stdout and "made again" not in done.stdout

    want, got = rows(undisturbed), rows(killed)
    assert [got[s]["loss"] for s in range(1, 21)] == [want[s]["loss"] for s in range(1, 21)]
    assert all(got[s]["wire_drift"] > 0 for s in range(2, 21))
    _, a, data_a = restore(undisturbed, 20)
    _, b, data_b = restore(killed, 20)
    assert data_a == data_b and jax.tree.leaves(a.copies)
    chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mesh.data": 2, "mesh.tensor": 4}, marks=pytest.mark.slow),
        OTHER_MESH,
        pytest.param(  # stages instead of one program for all
            {"mesh.pipe": 2, "mesh.data": 2, "mesh.tensor": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_another_mesh_continues_to_the_same_place(straight, changes):
    """From step 13 of the control's own checkpoint, 17 more steps."""
    params = go_on(straight[0], straight[0], 13, STEPS, changes)
    _, control, _ = restore(straight[0], STEPS)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(control.params), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x - y) <= PARAMETERS * np.linalg.norm(y)


def go_on(folder, control, first, last, changes):
    """Steps from a checkpoint on another mesh, with the control's losses; the parameters."""
    cfg = config.override(load_config(folder), changes)
    train_step, state, data = restore(folder, first, cfg)
    loader = loader_of(cfg, train_step, data["rows"])
    want = rows(control)
    for step in range(first + 1, last + 1):
        state, metrics = train_step.step(state, next(loader))
        assert float(metrics["loss"]) == pytest.approx(want[step]["loss"], abs=LOSSES)
    return state.params


def start_job(home, *flags):
    """Starts two processes of four devices each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = []
    for i in range(2):
        env = environment() | {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(i),
        }
        words = command(home, "--emulate=4", *flags)[2:]
        job.append(forks.start("experiments/pretrain.py", *words, env=env))
    return job


def test_two_processes_are_one_run(home, straight):
    """Over loopback: the control's losses, one decision to stop, a state for any mesh."""
    folder = home / "job"
    flags = [f"--train.steps={STEPS}", "--checkpoint.every=0", f"--run_dir={folder}"]
    job = start_job(home, *flags, "--eval.batches=0", "--eval.every=4")
    try:
        wait_for(job[0], lambda: last_step(folder) >= 5)
        job[1].send_signal(signal.SIGTERM)  # to the one that does not write
        outputs = ["".join(p.communicate(timeout=300)) for p in job]
    finally:
        for p in job:
            p.kill()
    assert [p.returncode for p in job] == [0, 0], outputs
    assert "Continue with:" in outputs[0]
    assert "step 1/" not in outputs[1]  # one process speaks
    metrics = rows(folder)
    assert all(0 <= row["launch_skew_s"] < 60 for row in metrics.values())
    assert set(rows(folder, "start_devices_s")) == {0}
    assert (folder / "samples" / "00000004.txt").read_text().startswith("def ")
    stopped = CheckpointManager(folder / "checkpoints").latest()
    assert 5 <= stopped < STEPS and f"stopped after step {stopped}" in outputs[0]

    assert sorted(metrics) == list(range(1, stopped + 1))
    want = rows(straight[0])
    for step, row in metrics.items():
        assert row["loss"] == pytest.approx(want[step]["loss"], abs=LOSSES), step
    go_on(folder, straight[0], stopped, min(stopped + 3, STEPS), OTHER_MESH)


def test_ctrl_c_saves_and_the_same_command_goes_on(home, straight):
    folder = home / "interrupted"
    flags = [f"--train.steps={STEPS}", "--checkpoint.every=0", f"--run_dir={folder}", *ONLY_STEPS]
    process = start(home, *flags)
    wait_for(process, lambda: last_step(folder) >= 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Continue with:" in out and f"--run_dir={folder}" in out and "Traceback" not in err
    stopped = CheckpointManager(folder / "checkpoints").latest()
    assert 4 <= stopped < STEPS and f"stopped after step {stopped}" in out
    done = run(home, *flags)
    assert f"resumed after step {stopped}" in done.stdout, done.stdout + done.stderr
    want, got = rows(straight[0]), rows(folder)
    assert [got[s]["loss"] for s in sorted(got)] == [want[s]["loss"] for s in sorted(want)]
    again = run(home, *flags)  # a finished run: nothing to do, nothing lost
    assert again.returncode == 0 and rows(folder) == got, again.stdout + again.stderr


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused_while_the_first_goes_on(home):
    folder = home / "shared"
    first = start(home, "--train.steps=5000", f"--run_dir={folder}")
    wait_for(first, lambda: last_step(folder) >= 3)
    done = refused(home, "--train.steps=5000", f"--run_dir={folder}")
    assert f"error: {folder} is in use by process {first.pid} on " in done.stderr
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, out + err
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_sigterm_saves(home):
    folder = home / "terminated"
    process = start(home, "--train.steps=5000", f"--run_dir={folder}")
    wait_for(process, lambda: last_step(folder) >= 3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Continue with:" in out
    assert CheckpointManager(folder / "checkpoints").latest() >= 3


def test_numbers_that_are_not_finite_stop_the_run(home, straight):
    """A learning rate of 1e30 blows the weights up; what was good stays."""
    folder = home / "diverged"
    shutil.copytree(straight[0], folder)
    words = command(
        home,
        "--train.steps=60",
        "--optim.lr=1e30",
        "--optim.schedule=constant",
        "--checkpoint.every=1000",
        f"--run_dir={folder}",
        *ONLY_STEPS,
    )[2:]
    # A program of its own for a few steps: not optimised.
    done = forks.run("experiments/pretrain.py", *words, env=environment())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "first non-finite gradient: blocks." in done.stderr
    assert "last good checkpoint: step 30" in done.stderr
    assert CheckpointManager(folder / "checkpoints").steps() == [13, 26, 30]


@pytest.mark.slow
def test_a_full_disk_is_said_once_and_training_goes_on(home):
    """The file system takes the metrics but not the checkpoints."""
    disk = home / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        done = run(
            home,
            "--train.steps=12",
            "--checkpoint.every=5",
            "--log.tensorboard=false",
            f"--run_dir={disk}/run",
        )
        assert sorted(rows(disk / "run")) == list(range(1, 13))
        assert done.returncode == 2, done.stdout + done.stderr
        assert (
            "step 5 was not saved" in done.stderr and "error: step 12 was not saved" in done.stderr
        )
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a reader may be late


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset=nanoo"], "Did you mean nano?"),
        (["--modle.layers=3"], "Did you mean --model.layers?"),
        (["--mesh.tensor=3"], "tensor 3 = 3 does not divide the 8 devices"),
        (["--mesh.tensor=8"], "model.heads=4 must be divisible by"),
        (["--data.tokenizer=nowhere.json"], "--data.tokenizer"),
        (["--data.source=nowhere"], "--data.source"),
        (["--data.tokenizer=bpe:400", "--model.vocab=300"], "model.vocab=300; nearest:"),
        (["--init_from=nowhere"], "init_from=nowhere does not exist: give a folder"),
        (["--profile.steps=5..2"], "profile.steps=5..2 must be a..b"),
        (["--run_dir=/proc/nowhere"], "cannot write to /proc/nowhere"),
    ],
)
def test_mistakes_get_one_clear_message(home, flags, words):
    done = refused(home, "--train.steps=2", f"--run_dir={home}/never", *flags)
    assert words in done.stderr, done.stderr


@pytest.mark.parametrize("preset", [(), ("--preset=nano",)])
def test_given_weights_are_tuned_by_a_recipe_of_their_own(home, tmp_path, preset):
    """Said at the start, before the text is missed; flags and a typed preset win."""
    golden = np.load(ROOT / "tests" / "golden" / "hf_llama.npz")
    (tmp_path / "config.json").write_text(str(golden["config"]))
    flags = ("--data.tokenizer=bytes", "--data.source=nowhere", "--optim.warmup=7")
    done = refused(home, f"--init_from={tmp_path}", *flags, *preset)
    first, *diff = done.stdout.splitlines()
    recipe = {"  optim.name: muon -> adamw", "  optim.lr: 0.02 -> 2e-05", "  mesh.tensor: 2 -> 1"}
    if preset:
        assert first.startswith("nano: ") and not recipe & set(diff)
    else:
        assert first.startswith("finetune: ") and "/finetune-" in first
        assert recipe <= set(diff), done.stdout
    assert "  optim.warmup: 10 -> 7" in diff


def test_another_run_in_the_folder_is_not_harmed(home, straight):
    before = sorted(rows(straight[0]))
    done = refused(home, "--train.steps=40", "--model.mlp=96", f"--run_dir={straight[0]}")
    assert done.returncode == 2 and "model.mlp was 128, now 96" in done.stderr
    assert sorted(rows(straight[0])) == before
    assert load_config(straight[0]).model.mlp == 128


def test_changed_text_is_noticed(home, straight):
    folder = home / "moved"
    shutil.copytree(straight[0], folder)
    other = home / "other"
    shutil.copytree(home / "text", other)
    (other / "0.txt").write_text("something else " * 100)
    cfg = config.override(load_config(folder), {"data.source": str(other)})
    (folder / "config.json").write_text(config.to_json(cfg))
    done = refused(home, "--train.steps=40", f"--data.source={other}", f"--run_dir={folder}")
    assert done.returncode == 2 and "was trained on other data (corpora changed)" in done.stderr


@pytest.mark.slow
def test_a_run_on_bpe_goes_round(home, tmp_path):
    """Trained on its own BPE, sampled from a moved folder, exported, fine-tuned from the export."""

    def call(script, *args):
        words = [sys.executable, str(ROOT / script), *map(str, args)]
        return subprocess.run(words, capture_output=True, text=True, env=environment())

    short = ("--train.steps=2", "--eval.sample_tokens=0", f"--cache_dir={home}/cache")
    text = f"--data.source={home}/text"
    made = tmp_path / "made"
    done = run(home, "--data.tokenizer=bpe:300", f"--run_dir={made}", *short)
    assert done.returncode == 0, done.stderr
    run_dir = made.rename(tmp_path / "moved")
    done = call("scripts/generate.py", f"--run_dir={run_dir}", "--prompt=word1", "--new_tokens=3")
    assert done.returncode == 0 and "---\nword1" in done.stdout, done.stderr
    done = call("scripts/hf.py", "export", run_dir, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    tune = (f"--init_from={tmp_path}/hf", text, f"--run_dir={tmp_path}/tuned", *short)
    small = ("--train.global_batch=8", "--train.seq_len=64", "--eval.batches=1", "--eval.every=0")
    done = call("experiments/pretrain.py", *tune, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    cfg = load_config(tmp_path / "tuned")
    assert cfg.model.width == 64 and cfg.data.tokenizer == f"{tmp_path}/hf/tokenizer.json"
    ended = rows(run_dir, "eval_loss")[2]["eval_loss"]
    assert abs(rows(tmp_path / "tuned")[1]["loss"] - ended) < 0.3  # not at ln(300) = 5.7 again

    (tmp_path / "hf" / "tokenizer.json").unlink()
    done = call("experiments/pretrain.py", f"--init_from={tmp_path}/hf", text)
    assert done.returncode == 2 and "say what its tokens are" in done.stderr
