"""Scripts refuse bad settings at once, and by their own flags."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from megajax.core.errors import UserError
from tests import forks

SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture(scope="module")
def supervise():
    spec = importlib.util.spec_from_file_location("supervise", SCRIPTS / "supervise.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--processes=0", "processes=0 must be at least 1; nearest: 1 (--processes)"),
        ("--spares=-1", "spares=-1 must be at least 0"),
        ("--step_s=nan", "step_s=nan must be a finite number, above 0"),
        ("--period_s=0", "period_s=0.0 must be above 0; the default is 1.0 (--period_s)"),
        ("--backoff_s=-1", "nearest: 0"),
        ("--hots=2", "there is no flag --hots. Did you mean --hosts?"),
        ("--hlep", "there is no flag --hlep. Did you mean --help?"),
        ("--hosts=two", "argument --hosts: invalid int value: 'two'; --help lists the flags"),
        ("train.py", "unexpected argument 'train.py': the command stands behind --"),
        ("--out=~nobody-of-this-name/x", "home directory. (--out)"),
    ],
)
def test_supervise_refuses(supervise, flag, words):
    with pytest.raises(UserError) as error:
        supervise.parse([flag, "--", "true"])
    assert words in str(error.value)
    supervise.parse(["--join_s=0", "--max_restarts=0", "--", "true"])


def test_supervise_describes_every_flag_by_what_it_is_about(supervise, monkeypatch):
    monkeypatch.setenv("HOME", "/root/of/nobody")
    shown = supervise.flags_of().format_help()
    settings, _ = supervise.parse(["--out=~/x", "--", "true"])
    assert settings.out == "/root/of/nobody/x"
    for flag in vars(settings):
        assert f"  --{flag}" in shown
    assert shown.index("the job:") < shown.index("how long is too long") < shown.index("meet:")


@pytest.mark.parametrize("name", ["check.sh", "isa.sh", "launch_slurm.sh"])
def test_shell_scripts_describe_themselves(name):
    done = subprocess.run([SCRIPTS / name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and f"scripts/{name}" in done.stdout and not done.stderr
    assert not any(line.startswith("#") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("name", "word", "said"),
    [("check.sh", "--lnit", "--lint"), ("isa.sh", "AVX3", "AVX2"), ("isa.sh", "", "AVX2")],
)
def test_shell_scripts_refuse_a_wrong_word_before_they_begin(name, word, said):
    done = subprocess.run([SCRIPTS / name, word], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_slow_tests_of_every_folder_are_scheduled():
    tests = SCRIPTS.parent / "tests"
    jobs = (tests.parent / ".github/workflows/slow.yml").read_text()
    matrix = jobs[jobs.index("folders:") : jobs.index("runs-on:")]
    named = {word for line in matrix.splitlines()[1:] for word in line.split()} - {"-"}
    assert named == {p.parent.relative_to(tests).parts[0] for p in tests.glob("*/**/test_*.py")}


def test_slow_tests_have_the_packages_that_they_need():
    """No test is skipped there for want of an extra or a group of pyproject.toml."""
    tests = SCRIPTS.parent / "tests"
    jobs = (tests.parent / ".github/workflows/slow.yml").read_text()
    (installed,) = [line for line in jobs.splitlines() if "--extra" in line]
    skips = r"(?:reason=|skip\()\"[^\"]*uv sync (--(?:extra|group) [a-z0-9-]+)"
    needed = {words for p in tests.rglob("test_*.py") for words in re.findall(skips, p.read_text())}
    assert {"--extra ray", "--group models", "--group rivals"} <= needed
    assert [words for words in needed if words not in installed] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen=127.0.0.1:99999"], r"a port from 0 to 65535.*\(--listen\)"),
        (["--detectors=end,stal"], r"no detector 'stal'.*Did you mean stall\?.*\(--detectors\)"),
        (["--respond=disk=evikt"], r"Did you mean evict\?.*\(--respond\)"),
        (["--out=/proc/nowhere"], r"cannot write into /proc/nowhere: No such file.*\(--out\)"),
    ],
)
def test_supervise_cannot_begin(supervise, flags, words):
    with pytest.raises(UserError, match=words):
        supervise.drive(*supervise.parse([*flags, "--", "true"]))


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nosymmetric"], "write with --symmetric"),
        (["--form=awq", "--bits=8"], "bits=8 must be 4 in AWQ's form; --form=gptq takes others"),
        (["--bits=5"], "bits=5 must be one of 2, 3, 4, 8 (--bits)"),
    ],
)
def test_quantize_refuses_before_the_work_what_no_folder_holds(flags, words, tmp_path):
    done = forks.run("scripts/quantize.py", f"--hf={tmp_path}", f"--out={tmp_path / 'm'}", *flags)
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.process
def test_generate_names_its_own_flags(tmp_path):
    done = forks.run("scripts/generate.py", f"--hf={tmp_path}", "--step=3")
    assert done.returncode == 2 and done.stderr.rstrip().endswith(
        "No such file or directory (--hf)"
    )
    assert "step=3 has no effect: it needs run_dir to be set, found none (--run_dir)" in done.stderr


@pytest.mark.process
def test_pretraining_refuses_a_kernel_before_it_reads_text(tmp_path):
    done = forks.run(
        "experiments/pretrain.py",
        "--train.attention=cudnn",
        "--emulate=8",
        "--moe.top_k=3",
        f"--run_dir={tmp_path}/run",
        f"--cache_dir={tmp_path}/cache",
    )
    assert done.returncode == 2 and "train.attention=cudnn needs an NVIDIA GPU" in done.stderr
    assert "moe.top_k=3 has no effect: it needs moe.experts above 0, found 0" in done.stderr
    assert "tokens" not in done.stdout and not list(tmp_path.glob("cache/*.bin"))


def test_every_script_answers_help_and_refuses_unknown_flags():
    """By the one way in, which tests/core/test_script.py and test_config.py run."""
    folders = SCRIPTS, SCRIPTS.parent / "experiments"
    sources = {p.name: p.read_text() for f in folders for p in f.glob("*.py")}
    mains = {name: text for name, text in sources.items() if 'if __name__ == "__main__"' in text}
    ways = "config.run(main", "script.start(main", "argparse.ArgumentParser"
    assert len(mains) > 20
    assert not [name for name, text in mains.items() if not any(call in text for call in ways)]


# Answers --help for each script in a fork of one process, as the script itself does, but without
# the second attempt with the real packages.
HELP = """if True:
    import os, runpy, sys
    sys.argv[1:] = ["--help"]
    import megajax.core.interrupted
    sys.excepthook = sys.__excepthook__
    import megajax.systems.aot, megajax.systems.cdmpp.predictor, megajax.systems.job
    for path in sys.stdin.read().split():
        sys.stdout.flush()
        if not os.fork():
            sys.argv[0], sys.path[0] = path, os.path.dirname(path)
            os.dup2(os.open(f"{sys.argv[0].rpartition('/')[2]}.txt", os.O_WRONLY | os.O_CREAT), 1)
            try:
                runpy.run_path(path, run_name="__main__")
            finally:
                real = [m for m in HEAVY if getattr(sys.modules.get(m), "__file__", None)]
                print("imported:", *real)
        assert os.wait()[1] == 0, path
    """
HEAVY = [
    "chex",
    "flax",
    "grain",
    "jax",
    "jaxlib",
    "matplotlib",
    "optax",
    "orbax",
    "scipy",
    "tensorstore",
]


def commands() -> list[pathlib.Path]:
    folders = SCRIPTS, SCRIPTS.parent / "experiments"
    paths = sorted(p for f in folders for p in f.glob("*.py"))
    return [p for p in paths if '"__main__"' in p.read_text()]


SOME = "bytetransformer cdmpp flux hf minder pretrain serve tables".split()


@pytest.mark.process
@pytest.mark.parametrize("names", [SOME, pytest.param(None, marks=pytest.mark.slow)])
def test_help_imports_nothing_that_takes_seconds(tmp_path, names):
    paths = [path for path in commands() if names is None or path.stem in names]
    assert len(paths) >= len(SOME)
    code = HELP.replace("HEAVY", repr(HEAVY))
    env = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=" ".join(map(str, paths)),
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for path in paths:
        shown = (tmp_path / f"{path.name}.txt").read_text()
        assert len(shown) > 100 and shown.endswith("\nimported:\n"), (path, shown)


@pytest.mark.process
def test_help_that_needs_a_real_package_is_right_too(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import megajax.core.interrupted\n"
        "import scipy.constants\n"
        "print(f'--length: in m; {scipy.constants.inch}')\n"
    )
    for flag in ("--help", "--helpfull"):
        done = subprocess.run([sys.executable, path, flag], capture_output=True, text=True)
        assert done.stdout == "--length: in m; 0.0254\n" and not done.stderr, done


@pytest.mark.slow
@pytest.mark.parametrize("path", commands(), ids=lambda path: path.name)
def test_help_says_what_the_real_packages_would(path):
    said = [
        subprocess.run([sys.executable, *option, path, "--help"], capture_output=True, text=True)
        for option in ((), ("-X", "real_imports"))
    ]
    assert said[0].returncode == said[1].returncode == 0 and said[0].stdout == said[1].stdout
