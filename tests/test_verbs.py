"""The command `megajax`: its verbs, what it prints, how programs are named, several processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import megajax
from megajax import commands
from megajax.core import mesh, script
from megajax.core.errors import UserError
from megajax.systems.elastic import local
from scripts.house import ROOT


@pytest.fixture
def console(monkeypatch, capsys):
    """Runs `megajax WORDS` up to the program. Returns (code, output, errors, what would be run)."""

    def run(*words):
        executed = []
        monkeypatch.setattr(commands, "execute", lambda *call: executed.append(call))
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/megajax", *words])
        code = commands.main()
        return code, *capsys.readouterr(), executed

    return run


def test_every_verb_has_its_file_in_a_checkout_and_in_the_wheel():
    packed = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel]")[2]
    for name, what in commands.VERBS.values():
        assert (ROOT / name).is_file() and what
        assert name.startswith("experiments/") or f'"{name}"' in packed, name


@pytest.mark.parametrize("words", [(), ("help",), ("--help",)])
def test_the_page_names_every_verb_in_one_screen(console, words):
    code, out, _, _ = console(*words)
    assert code == 0 and len(out.splitlines()) < 40 and max(map(len, out.splitlines())) <= 80
    assert all(f"  {verb} " in out for verb in commands.VERBS) and megajax.__version__ in out


def test_version(console):
    assert console("--version")[:2] == (0, f"megajax {megajax.__version__}\n")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["trian"], "there is no command 'trian'. Did you mean train?"),
        (["xyzzy"], "there is no command 'xyzzy'. megajax help lists them"),
        (["train", "--processes=0"], "processes=0 must be an integer, at least 1 (--processes)"),
        (["train", "--processes"], "processes= must be an integer, at least 1 (--processes)"),
        (["train", "--processes=2000"], "processes=2000 must be in [1, 1024] (--processes)"),
    ],
)
def test_what_is_no_command_is_refused(console, words, sentence):
    code, _, errors, executed = console(*words)
    assert (code, errors, executed) == (2, f"error: {sentence}\n", [])


def test_a_program_gets_its_flags_and_its_name(console, monkeypatch):
    monkeypatch.setattr(commands, "typed", lambda: ["megajax"])
    _, _, _, executed = console("hf", "import", "A B", "--step=1")
    assert executed == [(ROOT / "scripts/hf.py", "megajax hf", ["import", "A B", "--step=1"])]
    monkeypatch.setenv("MEGAJAX_ONE_HOST", "1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    _, _, _, executed = console("train", "--processes", "2", "--emulate=1")
    assert executed == [
        (ROOT / "experiments/pretrain.py", "megajax train --processes=2", ["--emulate=1"])
    ]
    _, _, _, executed = console("supervise", "--processes=2", "--", "true")
    assert executed[0][2] == ["--processes=2", "--", "true"]


def test_the_name_is_what_one_types(monkeypatch, tmp_path):
    place = tmp_path / "bin" / "megajax"
    place.parent.mkdir()
    place.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(place)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert commands.typed() in ([str(place)], ["uv", "run", "megajax"])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert commands.typed() == [str(place)]
    monkeypatch.setenv("PATH", str(place.parent))
    assert commands.typed() == ["megajax"]
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    monkeypatch.chdir(ROOT / "tests")
    assert commands.typed() == ["uv", "run", "megajax"]


def test_a_command_line_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megajax train", "--data.source=A B", "--train.steps=2"])
    assert script.command_line() == "megajax train '--data.source=A B' --train.steps=2"
    monkeypatch.setattr(sys, "argv", ["experiments/pretrain.py", "--data.source=A B"])
    assert script.command_line() == "uv run experiments/pretrain.py '--data.source=A B'"


def test_help_names_the_command():
    verb = "checkpoint"
    command = [sys.executable, "-m", "megajax", verb, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert f"megajax {verb}" in done.stdout and f"uv run scripts/{verb}.py" not in done.stdout


def test_the_devices_of_a_machine_are_divided():
    assert [mesh.share_of(8, process, 4) for process in (0, 3)] == [[0, 1], [6, 7]]
    with pytest.raises(UserError, match="processes=3 must divide the 8 GPUs .*nearest: 2, 4"):
        mesh.share_of(8, 0, 3)
    env = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    job = mesh.find_cluster(env)
    assert job is not None and not job.shares_devices
    job = mesh.find_cluster({**env, local.MARK: "1"})
    assert job is not None and job.shares_devices
    with pytest.raises(UserError, match="a launcher has started this process already"):
        local.is_started(2, env)
    assert local.is_started(2, {**env, local.MARK: "1"}) and not local.is_started(2, {})


# What a process prints, and how it ends: process 1 fails when process 0 has begun.
PROGRAM = """
import os, pathlib, signal, sys, time
rank = os.environ["JAX_PROCESS_ID"]
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("process", rank, "of", os.environ["JAX_NUM_PROCESSES"], flush=True)
pathlib.Path(f"began{rank}").touch()
while "fail" in sys.argv and rank == "1":
    if pathlib.Path("began0").exists():
        print("the reason", flush=True)
        sys.exit(7)
end = time.time() + (0 if "end" in sys.argv else 20)
while time.time() < end:
    time.sleep(0.02)
"""


def start(folder: pathlib.Path, *words: str) -> subprocess.Popen:
    (folder / "program.py").write_text(PROGRAM)
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from megajax.systems.elastic import local
sys.exit(local.run(2, [sys.executable, "program.py", *{list(words)!r}], os.environ))
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.process
def test_the_first_failure_ends_all_and_is_shown(tmp_path):
    job = start(tmp_path, "fail")
    out, errors = job.communicate(timeout=20)
    assert job.returncode == 7
    assert "process 0 of 2" in out and "process 1 of 2" not in out
    assert "process 1 ended with exit code 7" in errors and "  the reason" in errors
    (log,) = (tmp_path / "runs/processes").glob("*/rank1.log")
    assert log.read_text() == "process 1 of 2\nthe reason\n" and str(log) in errors


@pytest.mark.process
def test_processes_that_end_well_end_well(tmp_path):
    job = start(tmp_path, "end")
    out, errors = job.communicate(timeout=20)
    assert (job.returncode, errors) == (0, "") and "process 0 of 2" in out


@pytest.mark.process
def test_ctrl_c_reaches_every_process(tmp_path):
    job = start(tmp_path)
    end = time.monotonic() + 20
    while not all((tmp_path / f"began{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=20)
    assert (job.returncode, errors) == (130, "")


def test_an_experiment_is_run_by_its_name(console, monkeypatch):
    monkeypatch.setattr(commands, "typed", lambda: ["megajax"])
    _, _, _, executed = console("experiments", "flux", "--part=exact")
    assert executed == [
        (ROOT / "experiments/flux.py", "megajax experiments flux", ["--part=exact"])
    ]
    _, _, _, executed = console("experiments", "--run")
    assert executed == [(ROOT / "scripts/run_experiments.py", "megajax experiments", ["--run"])]
    code, _, errors, _ = console("experiments", "flx")
    assert (code, errors) == (2, "error: there is no experiment 'flx'. Did you mean flux?\n")


def test_programs_and_extras_are_named_as_they_are_used_here(monkeypatch):
    text = "uv run --extra aot experiments/plan.py; scripts/hf.py export; experiments/flux.py x.py"
    monkeypatch.setattr(sys, "argv", ["scripts/hf.py"])
    assert script.as_started(text) == text
    monkeypatch.setattr(sys, "argv", ["/a/bin/megajax hf"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/b/scripts/hf.py", raising=False)
    named = "megajax plan; megajax hf export; megajax experiments flux x.py"
    assert script.as_started(text) == named.replace("megajax", "/a/bin/megajax")
    assert script.as_started("uv sync --extra serve") == "uv sync --extra serve"
    monkeypatch.setattr(script, "__file__", "/site/megajax/core/script.py")
    assert script.as_started("uv sync --extra serve") == "pip install 'megajax[serve]'"
