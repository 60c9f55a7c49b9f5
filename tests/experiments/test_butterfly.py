"""The detector's command as a person meets it: a folder of photographs, one command, the end."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from megajax.checkpoint import offline
from tests import forks
from tests.experiments.test_pretrain import ROOT, environment, optimized, rows, wait_for
from tests.foreign.test_torchvision import state_dict, write

pytestmark = pytest.mark.process

SCRIPT = "experiments/butterfly.py"
SMALL = [
    "--preset=tiny",
    "--model.width=0.25",
    "--model.hidden=32",
    "--model.candidates=32",
    "--model.proposals=8",
    "--model.region_samples=8",
    "--data.canvases=64x64,64x96",
    "--data.augment=hflip,noise",
    "--train.steps=6",
    "--train.global_batch=4",
    "--eval.every=3",
    "--checkpoint.every=2",
    "--checkpoint.keep=0",
    "--optim.ema=0.5",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A COCO folder with a space in its name, ids that are not dense, and a missing image."""
    home = tmp_path_factory.mktemp("home")
    folder, rng = home / "my photographs", np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    images, annotations = [], []
    for i in range(24):
        pixels = rng.integers(0, 40, (60, 80, 3), dtype=np.uint8)
        x, y = rng.integers(0, 50, 2)
        label = i % 2
        if i != 7:  # an image without an object
            pixels[y : y + 20, x : x + 24, label] = 220
            box = {"bbox": [int(x), int(y), 24, min(20, 60 - int(y))], "image_id": 100 - 3 * i}
            annotations.append(box | {"id": 5 * i, "category_id": 7 + 20 * label})
        images.append({"id": 100 - 3 * i, "file_name": f"a {i}.png", "height": 60, "width": 80})
        Image.fromarray(pixels).save(folder / "images" / f"a {i}.png")
    images.append({"id": 999, "file_name": "lost.jpg", "height": 60, "width": 80})
    classes = [{"id": 7, "name": "Inachis io"}, {"id": 27, "name": "Vanessa atalanta"}]
    said = {"images": images, "annotations": annotations, "categories": classes}
    (folder / "annotations" / "all.json").write_text(json.dumps(said))
    return home


def words(home, folder, *flags, verb="train", small=True):
    return [
        verb,
        *(SMALL if small else ()),
        f"--data.source=coco:{home}/my photographs",
        f"--cache_dir={home}/cache",
        f"--run_dir={home}/{folder}",
        *flags,
    ]


def butterfly(*args):
    return forks.run(SCRIPT, *args, env=optimized())


@pytest.fixture(scope="module")
def straight(home):
    done = butterfly(*words(home, "straight"))
    assert done.returncode == 0, done.stderr
    return home / "straight", done.stdout


def same_end(*folders):
    """Tells whether the last checkpoints have the same bits."""
    ends = [offline.open_folder(folder / "checkpoints")[0] for folder in folders]
    return offline.differences(*(offline.verify(steps, 6) for steps in ends)) == []


@pytest.mark.slow
def test_a_folder_of_photographs_is_one_command(straight):
    folder, said = straight
    assert "1 x missing image" in said and "lost.jpg" in said
    assert "step 6: mean average precision" in said and "images/s" in said
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "labels.json", "curve.png", "map.png", "summary.md"} <= names
    assert json.loads((folder / "labels.json").read_text()) == ["Inachis io", "Vanessa atalanta"]
    assert {p.name for p in (folder / "samples").iterdir()} == {"00000003.png", "00000006.png"}
    steps = rows(folder)
    assert len(steps) == 6 and all(np.isfinite(r["loss"]) for r in steps.values())
    assert {"loss_objectness", "loss_rpn_box", "loss_classification", "loss_box"} <= {*steps[1]}
    last = rows(folder, "eval_voc10")[6]
    assert {"eval_voc07", "eval_coco_ap50", "eval_ap/Inachis io", "eval_images"} <= {*last}
    assert "| Inachis io |" in (folder / "summary.md").read_text()


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(home, straight):
    killed = butterfly(*words(home, "killed", "--fault=kill@5:rank0"))
    assert killed.returncode in (-signal.SIGKILL, 137), killed.stdout
    copy = home / "other"
    shutil.copytree(home / "killed", copy)
    resumed = butterfly(*words(home, "killed"))
    assert resumed.returncode == 0 and "resumed after step" in resumed.stdout, resumed.stderr
    assert same_end(straight[0], home / "killed")
    other = butterfly(*words(home, "other", "--emulate=4", "--mesh.tensor=2"))
    assert other.returncode == 0 and "resumed after step" in other.stdout, other.stderr
    losses = [[rows(f)[step]["loss"] for step in (5, 6)] for f in (straight[0], copy)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_goes_on(home, straight):
    with forks.start(SCRIPT, *words(home, "parts"), env=optimized()) as run:
        wait_for(run, lambda: len(rows(home / "parts")) >= 3)
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.written()
    assert len(rows(home / "parts")) < 6
    done = butterfly(*words(home, "parts"))
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stderr
    assert same_end(straight[0], home / "parts")


@pytest.mark.slow
def test_a_supervised_run_survives_a_kill(home, straight):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "supervise.py"),
        f"--out={home}/supervised/out",
        "--backoff_s=0.1",
        "--start_s=300",
        "--",
        sys.executable,
        str(ROOT / SCRIPT),
        *words(home, "supervised", "--fault=kill@5:rank0"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=optimized())
    assert done.returncode == 0, done.stdout + done.stderr
    assert same_end(straight[0], home / "supervised")


@pytest.mark.slow
def test_a_trained_detector_judges_and_predicts(home, straight, tmp_path):
    folder = straight[0]
    flags = [f"--run_dir={folder}", f"--cache_dir={home}/cache"]
    done = butterfly("evaluate", *flags)
    assert done.returncode == 0, done.stderr
    judged = json.loads((folder / "evaluation.json").read_text())
    last = rows(folder, "eval_voc10")[6]
    for name in ("voc10", "voc07", "coco_ap50"):
        assert judged[name] == last[f"eval_{name}"]  # of the mean of the weights, too
    assert {"boxes", "images", "voc10", "voc07"} <= {*judged["per_class"]["Inachis io"]}
    assert "did not learn from" in done.stdout
    photographs = sorted((home / "my photographs" / "images").iterdir())[:5]
    (tmp_path / "bad.jpg").write_text("no image")
    names = [*map(str, photographs), str(tmp_path / "bad.jpg"), str(tmp_path / "lost.png")]
    done = butterfly("predict", *names, *flags, f"--out={tmp_path}/out", "--model.score=0.01")
    assert done.returncode == 0, done.stderr
    assert "bad.jpg is not a JPEG" in done.stdout and "lost.png" in done.stdout
    predicted = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [row["image"] for row in predicted] == names[:5]
    listed = [row["detections"] for row in predicted]
    assert sum(map(len, listed)) > 0
    for detections in listed:
        scores = [d["score"] for d in detections]
        assert scores == sorted(scores, reverse=True)
        for detection in detections:
            x0, y0, x1, y1 = detection["box"]
            assert 0 <= x0 < x1 <= 80.001 and 0 <= y0 < y1 <= 60.001
            assert detection["label"] in ("Inachis io", "Vanessa atalanta")
    assert len([*(tmp_path / "out").glob("*.jpg")]) == 5
    done = butterfly("predict", names[5], *flags, f"--out={tmp_path}/none")
    assert done.returncode == 2
    assert json.loads((tmp_path / "none" / "predictions.json").read_text()) == []


@pytest.mark.slow
def test_weights_of_torchvision_begin_a_run(home, tmp_path):
    """The backbone is the file's after a step that does not train it."""
    state = state_dict("resnet18")
    weights = write(tmp_path, state)
    flags = [
        "--model.maps=stride8",
        "--model.width=1",
        "--train.freeze=backbone",
        "--train.steps=1",
    ]
    done = butterfly(*words(home, "tuned", f"--init_from={weights}", *flags))
    assert done.returncode == 0, done.stderr
    assert f"weights from {weights}" in done.stdout and "of them trained" in done.stdout
    steps = offline.open_folder(home / "tuned" / "checkpoints")[0]
    leaves = offline.StoredLeaves(steps.step(1), offline.verify(steps, 1))
    kernel = leaves["params.backbone.stages.0.0.units.0.conv.kernel"]
    expected = state["layer1.0.conv1.weight"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(np.asarray(kernel), expected)


@pytest.mark.slow
def test_data_of_other_classes_is_judged_by_name_or_refused(home, straight, tmp_path):
    said = json.loads((home / "my photographs" / "annotations" / "all.json").read_text())
    for name, classes in {
        "turned": ["Vanessa atalanta", "Inachis io"],
        "strange": ["Inachis io", "Danaus plexippus"],
    }.items():
        shutil.copytree(home / "my photographs", tmp_path / name)
        named = [c | {"name": n} for c, n in zip(said["categories"], classes, strict=True)]
        (tmp_path / name / "annotations" / "all.json").write_text(
            json.dumps(said | {"categories": named})
        )
    flags = [f"--run_dir={straight[0]}", f"--cache_dir={home}/cache"]
    done = butterfly("evaluate", *flags, f"--data.source=coco:{tmp_path}/turned")
    assert done.returncode == 0, done.stderr
    judged = json.loads((straight[0] / "evaluation.json").read_text())
    assert judged["images"] == 24 and judged["source"] == f"coco:{tmp_path}/turned"
    assert judged["per_class"]["Inachis io"]["boxes"] == 11  # of the image without an object
    done = butterfly("evaluate", *flags, f"--data.source=coco:{tmp_path}/strange")
    assert done.returncode == 2, done.stdout
    assert "has boxes of Danaus plexippus, and the classes of the run in" in done.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data.source=coco:/nowhere"], "data.source=coco:/nowhere: /nowhere is missing"),
        (["--data.source=/nowhere"], "data.source=/nowhere must be KIND:FOLDER"),
        (["--data.max_boxes=0"], "data.max_boxes=0 must be at least 1"),
        (["--train.seq_len=8"], "train.seq_len"),
        (["--mesh.pipe=2", "--emulate=2"], "a detector has no layers"),
        (["--protocol=A"], "needs pictures of specimens"),
    ],
)
def test_what_cannot_run_ends_in_one_line(home, tmp_path, flags, message):
    done = forks.run(SCRIPT, *words(home, tmp_path / "run", *flags), env=environment())
    assert done.returncode in (1, 2), done.stdout
    assert "Traceback" not in done.stderr and message in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


def test_what_a_verb_needs_is_said(home, tmp_path):
    for words_, message in {
        ("evaluate",): "name the folder of a trained detector (--run_dir)",
        ("predict", "a.png"): "name the folder of a trained detector (--run_dir)",
        ("predict", f"--run_dir={tmp_path}"): "name the images",
        ("judge",): "'judge' must be train, evaluate, predict",
        ("train", "a.png"): "unexpected argument 'a.png'",
        ("evaluate", f"--run_dir={tmp_path}"): "config.json",
    }.items():
        done = forks.run(SCRIPT, *words_, f"--out={tmp_path}/out", env=environment())
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert message in done.stderr
