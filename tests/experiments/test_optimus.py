"""The command of vision-language models as a person meets it: stopped, killed, continued."""

import json
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from megajax.checkpoint import offline
from tests import forks
from tests.experiments.test_pretrain import optimized, rows, wait_for

pytestmark = [pytest.mark.process, pytest.mark.slow]

SCRIPT = "experiments/optimus.py"
SMALL = [
    "--preset=tiny",
    "--model.layers=1",
    "--model.width=32",
    "--model.mlp=48",
    "--tower.layers=1",
    "--tower.width=32",
    "--tower.mlp=32",
    "--checkpoint.every=2",
    "--checkpoint.keep=0",
    "--mesh.data=4",
    "--emulate=4",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of captioned images, one of which no row can hold, and lines of conversations."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    for i in range(12):
        pixels = rng.integers(0, 256, (56, 84 if i else 560, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(home / f"{i}.png")
        (home / f"{i}.txt").write_text(f"caption {i}")
    lines = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": f"{i}.png"}]},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(1, 9)
    ]
    (home / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def words(home, folder, *flags):
    return [*SMALL, f"--cache_dir={home}/cache", f"--run_dir={home}/runs/{folder}", *flags]


def optimus(*args):
    return forks.run(SCRIPT, *args, env=optimized())


def same_end(*folders):
    """Tells whether the last checkpoints have the same bits."""
    ends = [offline.open_folder(folder / "checkpoints")[0] for folder in folders]
    return offline.differences(*(offline.verify(steps, 6) for steps in ends)) == []


@pytest.fixture(scope="module")
def straight(home):
    done = optimus(*words(home, "straight"))
    assert done.returncode == 0, done.stderr
    return home / "runs" / "straight", done.stdout


def test_drawings_are_one_command(straight):
    folder, said = straight
    assert "step 6: exact match" in said and "the most frequent answers would get" in said
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "curve.png", "exact.png", "summary.md"} <= names
    assert {p.name for p in (folder / "samples").iterdir()} == {"00000003.png", "00000006.png"}
    last = rows(folder, "eval_exact")[6]
    assert {"eval_exact/word", "eval_exact/count", "eval_exact_blank", "eval_loss"} <= {*last}
    assert last["eval_images"] == 32


def test_a_killed_run_ends_with_the_same_bits(home, straight):
    killed = optimus(*words(home, "killed", "--fault=kill@5:rank0"))
    assert killed.returncode in (-signal.SIGKILL, 137), killed.stdout
    copy = home / "runs" / "other"
    shutil.copytree(home / "runs" / "killed", copy)
    resumed = optimus(*words(home, "killed"))
    assert resumed.returncode == 0 and "resumed after step" in resumed.stdout, resumed.stderr
    assert same_end(straight[0], home / "runs" / "killed")
    other = optimus(*words(home, "other", "--mesh.data=2", "--mesh.tensor=2"))
    assert other.returncode == 0 and "resumed after step" in other.stdout, other.stderr
    losses = [[rows(f)[step]["loss"] for step in (5, 6)] for f in (straight[0], copy)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_an_interrupted_run_is_saved_and_goes_on(home, straight):
    folder = home / "runs" / "parts"
    with forks.start(SCRIPT, *words(home, "parts"), env=optimized()) as run:
        wait_for(run, lambda: len(rows(folder)) >= 3)
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.written()
    assert len(rows(folder)) < 6
    done = optimus(*words(home, "parts"))
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stderr
    assert same_end(straight[0], folder)


def test_files_are_one_flag_and_what_does_not_fit_is_said(home):
    flags = ("--data.holdout=0.3", "--train.freeze=tower,projector")
    done = optimus(*words(home, "captions", f"--data.source={home}", *flags))
    assert done.returncode == 0, done.stderr
    assert "1 x sample that does not fit a row" in done.stdout and "0.png has" in done.stdout
    assert "of them trained" in done.stdout and "rows an epoch" in done.stdout
    chats = f"--data.source={home}/chats.jsonl"
    done = optimus(*words(home, "chats", chats, "--data.holdout=0.3", "--train.steps=2"))
    assert done.returncode == 0 and "samples to learn" in done.stdout, done.stderr


def test_wrong_data_is_one_message(home):
    broken = home / "broken.jsonl"
    line = {"messages": [{"role": "user", "content": "<image>"}], "images": []}
    broken.write_text(json.dumps(line) + "\n")
    done = optimus(*words(home, "broken", f"--data.source={broken}"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "broken.jsonl line 1: message 0 has a placeholder without an image" in done.stderr
    done = optimus(*words(home, "context", "--mesh.context=2", "--mesh.data=2"))
    assert done.returncode == 2 and "--mesh.context" in done.stderr
