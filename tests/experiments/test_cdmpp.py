"""scripts/profile_programs.py and experiments/cdmpp.py as commands, from programs to a plan."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megajax.systems.cdmpp.labels import Labels
from tests.experiments.test_pretrain import ROOT, environment

pytestmark = [pytest.mark.process, pytest.mark.slow]
FAMILIES = "product,norm,elementwise,mlp"


def call(script, *words, code=0):
    command = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout if code == 0 else done.stderr


def profile(folder, *words, script="scripts/profile_programs.py"):
    return call(
        script,
        f"--out={folder}",
        f"--families={FAMILIES}",
        "--batch=4",
        *words,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    profile(folder, "--programs=4", "--threads=1")
    first = Labels.load(folder / "labels.npz")
    profile(folder, "--programs=16", "--threads=1")
    return folder, first


def test_a_profile_goes_on_where_it_was(measured):
    folder, first = measured
    joined = Labels.load(folder / "labels.npz")
    assert len(joined.dataset) > len(first.dataset) > 0
    np.testing.assert_array_equal(joined.halves[: len(first.halves)], first.halves)
    assert sorted(set(joined.programs.tolist())) == list(range(16))
    assert set(joined.families) == set(FAMILIES.split(","))
    assert joined.dataset.facts["noise_mean"] == pytest.approx(joined.disagreement.mean())
    (card,) = joined.dataset.cards.values()
    assert card.sms == 1
    floors = [record.floor_s(card) for record in joined.dataset.records]
    assert np.all(np.array(floors) <= joined.dataset.seconds * (1 + 1e-9))
    said = call(
        "scripts/profile_programs.py", f"--out={folder}", "--families=norm", "--threads=1", code=2
    )
    assert "--out" in said


def test_what_is_measured_is_learnt_and_plans(measured, tmp_path):
    data = f"--data={measured[0] / 'labels.npz'}"
    call("experiments/cdmpp.py", "train", data, "--fit_steps=20", f"--out={tmp_path}")
    call(
        "experiments/cdmpp.py",
        "evaluate",
        data,
        "--fit_steps=20",
        "--splits=random,families",
        f"--out={tmp_path}",
    )
    rows = json.loads((tmp_path / "evaluation.json").read_text())["rows"]
    assert {row["method"] for row in rows} >= {"ours", "roofline"}
    assert all(row["rows"] > 0 and np.isfinite(row["mean"]) for row in rows)
    fitted = tmp_path / "predictor.npz"
    said = call(
        "experiments/cdmpp.py",
        "calibrate",
        "--budget=2",
        f"--predictor={fitted}",
        f"--out={tmp_path / 'here'}",
    )
    assert "adapted" in said and (tmp_path / "here" / "predictor.npz").exists()
    plans = [
        call("experiments/plan.py", "--workload=prefill", *words)
        for words in ((), ("--cost=learned", f"--cost_file={fitted}"))
    ]
    assert plans[0] != plans[1]


# The script as on a machine with a GPU, where the first program fails. A turn is checked by a lock
# of its own: a file that must not exist yet.
AS_ON_A_GPU = """
import contextlib, os, sys
import jax
from megajax.core import mesh
from megajax.systems.cdmpp import families, labels

def fail(draw):
    raise RuntimeError("no memory")

mesh.count_gpus = lambda: 1
if any(word.startswith("--worker") for word in sys.argv):
    many = "--processes=2" in sys.argv
    flags = os.environ["XLA_FLAGS"]
    assert flags.endswith("--xla_gpu_enable_command_buffer=")
    assert many == ("--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" in flags)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == ("0.46" if many else None)
    mesh.start = lambda: None
    jax.config.update("jax_platforms", "cpu")
    jax.default_backend = lambda: "gpu"
    families.FAMILIES["product"] = fail
    turn = labels.Turns.turn

    @contextlib.contextmanager
    def checked(self):
        with turn(self) as waited:
            alone = str(self.path) + ".alone"
            os.close(os.open(alone, os.O_CREAT | os.O_EXCL))  # fails in another process's turn
            yield waited
            os.remove(alone)

    labels.Turns.turn = checked
exec(compile(open(SCRIPT).read(), SCRIPT, "exec"), {"__name__": "__main__", "__doc__": "-"})
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_gpu_s_profile_leaves_out_what_fails(tmp_path, processes):
    script = tmp_path / "as_on_a_gpu.py"
    path = str(ROOT / "scripts" / "profile_programs.py")
    script.write_text(AS_ON_A_GPU.replace("SCRIPT", repr(path)))
    several = f"--processes={processes}"
    said = profile(
        tmp_path / "out", f"--programs={6 * processes}", "--scale=2", several, script=script
    )
    assert "program 0 did not compile: RuntimeError: no memory" in said
    for process in range(processes):
        assert f"GPU, process {process}: 4 programs" in said
        assert f"GPU, process {process}: 6 programs" in said
    labels = Labels.load(tmp_path / "out" / "labels.npz")
    expected = {number for number in range(6 * processes) if number % 4}  # not the products
    assert set(labels.programs.tolist()) == expected
    assert labels.dataset.facts["below_floor"] == labels.below_floor
    assert ("cuBLAS's own" in labels.dataset.facts["products"]) == (processes > 1)
    parts = [
        {number for path in folder.glob("0*.npz") for number in Labels.load(path).programs.tolist()}
        for folder in sorted((tmp_path / "out").glob("gpu*"))
    ]
    assert len(parts) == processes and sum(map(len, parts)) == len(expected)
    words = (f"--out={tmp_path / 'out'}", "--threads=1")
    assert "--threads" in call(script, *words, code=2)
    more = (f"--families={FAMILIES}", "--scale=2", "--processes=3")
    assert "--processes" in call(script, f"--out={tmp_path / 'out'}", *more, code=2)


def test_steps_are_replayed_from_their_instructions(tmp_path):
    words = ("--configurations=short", "--others=8", "--passes=6", f"--out={tmp_path}")
    said = call("experiments/cdmpp.py", "replay", *words)
    result = json.loads((tmp_path / "cdmpp_replay.json").read_text())
    table, _ = result["rows"]
    assert table["method"] == "table" and "| short |" in said
    assert 0.2 < table["predicted_s"] / table["measured_s"] < 2  # other processes may run
    again = call("experiments/cdmpp.py", "replay", f"--measured={tmp_path}", f"--out={tmp_path}")
    assert "| short |" in again


def test_wrong_flags_are_named():
    assert "--data" in call("experiments/cdmpp.py", "train", code=2)
    several = call("experiments/cdmpp.py", "train", f"--data={ROOT},x.npz", code=2)
    assert "must stand alone" in several and "--data" in several
    rows = ROOT / "experiments/results/cdmpp_h200_labels.npz"
    for flags, message in (
        ("train --ops=bmm", "--ops chooses among NeuSight's rows"),
        ("evaluate --splits=devices", "splits=devices needs rows of two devices"),
        (f"evaluate --json={rows}", "is no evaluation; remove it"),
    ):
        said = call("experiments/cdmpp.py", *flags.split(), f"--data={rows}", code=2)
        assert message in said, said
    assert "Did you mean train?" in call("experiments/cdmpp.py", "trian", code=2)
    assert "--families" in call("scripts/profile_programs.py", "--families=nrom", code=2)
    assert "--configurations" in call(
        "experiments/cdmpp.py", "replay", "--configurations=n", code=2
    )
    assert "--measured" in call("experiments/cdmpp.py", "replay", "--measured=/tmp", code=2)
