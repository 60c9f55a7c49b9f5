"""flux.py and comet.py as a user meets them: small runs, and what is refused."""

import json

import pytest

from tests import forks


def experiment(name, *flags):
    return forks.run(f"experiments/{name}", *flags)


@pytest.mark.slow  # two programs, each seconds of imports
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "flags", "part"),
    [("flux", ["--rows=512,2048"], "op"), ("comet", ["--tokens=1024"], "layer")],
)
def test_a_small_run_writes_its_rows_and_figure(name, flags, part, tmp_path):
    done = experiment(f"{name}.py", *flags, f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    stem = f"{name}_simulated"
    assert {p.name for p in tmp_path.iterdir()} == {f"{stem}.{s}" for s in ("json", "svg", "png")}
    result = json.loads((tmp_path / f"{stem}.json").read_text())
    assert result["layer"] == "simulated" and result["machine"]["name"] == "H800"
    assert any(row["part"] == part for row in result["rows"])
    shown = [line for line in done.stdout.splitlines() if " us" in line or " ms" in line]
    assert shown and all(line.startswith("simulated") for line in shown)


@pytest.mark.slow  # four compiled layers
@pytest.mark.process
def test_the_layer_is_exact_in_every_layout(tmp_path):
    done = experiment("comet.py", "--part=exact", "--tokens=16", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "comet_emulated.json").read_text())
    assert result["layer"] == "emulated"
    assert [(r["tensor"], r["expert"]) for r in result["rows"]] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert all(row["same_bits"] and row["y_error"] < 1e-5 for row in result["rows"])


@pytest.mark.slow  # six compiled layers
@pytest.mark.process
def test_products_are_exact_in_every_way(tmp_path):
    done = experiment("flux.py", "--part=exact", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "flux_emulated.json").read_text())
    assert result["layer"] == "emulated"
    ways = ["xla", "ring", "ring, both ways"]
    assert [(r["m"], r["way"]) for r in result["rows"]] == [(m, w) for m in (8, 200) for w in ways]
    assert all(row["same_bits"] and row["y_error"] < 1e-5 for row in result["rows"])


@pytest.mark.process
def test_a_wrong_flag_is_one_line():
    done = experiment("comet.py", "--models=mixtral")
    assert done.returncode == 2
    assert done.stderr.startswith("error: models=mixtral must be of mixtral_8x7b")
    assert "Traceback" not in done.stderr
    done = experiment("comet.py", "--tokens=4096,12")
    assert done.returncode == 2
    assert "tokens=12 must be a multiple of the 8 ranks; nearest: 8, 16" in done.stderr
