"""A run of reinforcement learning that is killed, stopped or has bad rewards, by its command."""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from megajax.checkpoint import offline
from megajax.checkpoint.manager import CheckpointManager
from megajax.systems.elastic.reaper import MARK, marked
from tests import forks
from tests.experiments.test_pretrain import optimized, rows, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.process]
ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = "experiments/hybridflow.py"
STRUCK = 4  # the iteration in which things happen; its rows are 12 to 15
REWARDS = """
import os, re, signal, subprocess, time

def score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] == 13 and os.environ.get("STRIKE") == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    if extra_info["index"] == 13 and os.environ.get("STRIKE") == "wait":
        subprocess.Popen(["sleep", "1000"])
        print("amid a reward")
        time.sleep(2)
    return sum(a == b for a, b in zip(solution_str, ground_truth))

def hang(text):
    re.match(r"(a+)+$", "a" * 60 + "b")

def fail(text):
    raise RuntimeError("two\\nlines")

def loud(text):
    subprocess.Popen(["sleep", "1000"])
    print("x" * 100_000_000)
    return 1.0

BAD = {
    "hang": hang,
    "fail": fail,
    "nan": lambda text: float("nan"),
    "text": lambda text: "1",
    "exit": lambda text: os._exit(3),
    "loud": loud,
}

def bad(data_source, solution_str, ground_truth, extra_info=None):
    kinds = dict(word.split("=") for word in os.environ["BAD"].split(","))
    kind = kinds.get(str(extra_info["index"]))
    return BAD[kind](solution_str) if kind else len(solution_str)
"""


@dataclasses.dataclass
class Home:
    """A folder of runs of one command, which differ in `algorithm`, flags and environment."""

    path: pathlib.Path

    def words(self, name, *flags, algorithm="grpo", reward="score"):
        """The command's words, of a run in the folder `name`."""
        return [
            *("--preset=tiny", "--emulate=2", "--mesh.data=1", "--mesh.tensor=2"),
            *("--generate.tensor=1", "--rl.prompts=4", "--rl.eval_prompts=8", "--train.steps=5"),
            *("--rl.check_every=0", "--checkpoint.every=1", "--eval.every=2"),
            *(f"--reward={self.path}/rewards.py:{reward}", f"--algorithm={algorithm}"),
            *(f"--run_dir={self.path}/{name}", f"--cache_dir={self.path}/cache", *flags),
        ]

    def env(self, name, **env):
        """Its environment, with a mark by which its processes are known."""
        return optimized() | {MARK: f"{self.path}/{name}"} | env

    def run(self, name, *flags, env=(), **options):
        """Runs it to its end."""
        words = self.words(name, *flags, **options)
        return forks.run(SCRIPT, *words, env=self.env(name, **dict(env)))

    def start(self, name, *flags, env=(), **options):
        """Starts it."""
        words = self.words(name, *flags, **options)
        return forks.start(SCRIPT, *words, env=self.env(name, **dict(env)))

    def has_ended(self, name):
        """Waits until no process of a run is left."""
        end = time.monotonic() + 20
        while marked(f"{self.path}/{name}"):
            assert time.monotonic() < end, marked(f"{self.path}/{name}")
            time.sleep(0.05)

    def are_equal(self, one, other):
        """Compares two runs: parameters and optimizers, losses, scores, evaluations."""
        ends = [offline.open_folder(self.path / name / "checkpoints")[0] for name in (one, other)]
        records = [offline.verify(steps, 5) for steps in ends]
        assert offline.differences(*records) == []
        for key, steps in (("loss", {1, 2, 3, 4, 5}), ("eval_reward", {2, 4, 5})):
            a, b = (rows(self.path / name, key) for name in (one, other))
            assert set(a) == set(b) == steps
            names = [name for name in a[2] if name == "loss" or name.startswith(LEARNT)]
            for step, name in itertools.product(steps, names):
                assert a[step][name] == b[step][name], (step, name)


LEARNT = ("grad_norm", "actor/", "critic/", "reward/", "response_length/", "eval_", "val-core/")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    (path / "rewards.py").write_text(REWARDS)
    return Home(path)


@pytest.fixture(scope="module")
def straight(home):
    """Returns a function: the name of a run of an algorithm that nothing happened to."""
    done = {}

    def run(algorithm):
        if algorithm not in done:
            done[algorithm] = f"{algorithm}-straight"
            ended = home.run(done[algorithm], algorithm=algorithm)
            assert ended.returncode == 0, ended.stderr
        return done[algorithm]

    return run


STAGES = ("step", "generate", "reward", "update_actor", "save", "evaluate")


@pytest.mark.parametrize(
    ("algorithm", "stage"),
    [*itertools.product(("grpo", "ppo"), STAGES), ("ppo", "update_critic")],
)
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_was_not(
    home, straight, algorithm, stage
):
    name, want = f"{algorithm}-{stage}", straight(algorithm)
    steps = home.path / name / "checkpoints"
    flags = {"step": [f"--fault=kill@{STRUCK}"], "save": [], "reward": []}
    flags = flags.get(stage, [f"--fault={stage}=600@{STRUCK}"])
    env = {"STRIKE": "kill"} if stage == "reward" else {}

    def is_there():
        if stage == "save":  # something of it is on the disk
            return any(str(STRUCK) in path.name for path in steps.glob("*"))
        is_struck = f"injected fault: {stage} in step {STRUCK}" in process.written()[0]
        return is_struck and (stage != "evaluate" or (steps / str(STRUCK)).exists())

    with home.start(name, *flags, env=env, algorithm=algorithm) as process:
        if stage not in ("step", "reward"):
            wait_for(process, is_there)
            process.kill()
        assert process.wait() == -signal.SIGKILL, process.written()
    home.has_ended(name)
    done = home.run(name, algorithm=algorithm)
    assert done.returncode == 0 and "resumed after step" in done.stdout, done.stdout + done.stderr
    home.are_equal(want, name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["generate", "reward", "update_actor"])
def test_a_run_that_is_stopped_saves_and_goes_on(home, straight, stage, number):
    """Ctrl-C in a terminal reaches all processes of the foreground."""
    name, want = f"{stage}-{number.name}", straight("grpo")
    flags = [] if stage == "reward" else [f"--fault={stage}=2@{STRUCK}"]
    word = "amid a reward" if stage == "reward" else f"injected fault: {stage}"
    command, log = [sys.executable, ROOT / SCRIPT, *home.words(name, *flags)], home.path / "log"
    env = home.env(name, STRIKE="wait", PYTHONUNBUFFERED="1")
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True) as run,
    ):
        try:
            run.written = log.read_text
            wait_for(run, lambda: word in log.read_text())
            os.killpg(run.pid, number)
            code = run.wait(300)
        finally:
            run.kill()
    text = log.read_text()
    assert code == (130 if number == signal.SIGINT else 0), text
    assert f"stopped after step {STRUCK}; saved. Continue with:" in text
    assert "Traceback" not in text
    home.has_ended(name)
    assert CheckpointManager(home.path / name / "checkpoints").latest() == STRUCK
    done = home.run(name)
    assert f"resumed after step {STRUCK}" in done.stdout, done.stdout + done.stderr
    home.are_equal(want, name)


def test_a_bad_reward_stops_the_run_and_what_was_saved_is_good(home):
    """Each time the run goes on from the iteration before the one that failed."""
    causes = {
        "fail": "RuntimeError: two lines (rewards.py, line 18)",  # at once, amid a save
        "hang": "no answer within 1 s",
        "nan": "a finite number is needed, not nan",
        "text": "a number is needed, not str '1'",
        "exit": "its process ended (exit code 3)",
    }
    for start, (kind, cause) in enumerate(causes.items()):
        flags = ("--rl.reward_seconds=1", "--eval.every=0")
        done = home.run("bad", *flags, reward="bad", env={"BAD": f"9={kind}"})
        assert done.returncode == 2, done.stdout + done.stderr
        assert ("resumed after step 2" in done.stdout) == (start > 0)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert errors == [
            f"error: iteration 3: reward bad on row 4 (uid copy:3-train-9): {cause}. With "
            "--rl.on_error=skip such prompts are left out (--reward, --rl.on_error, "
            "--rl.reward_seconds)"
        ]
        assert "Traceback" not in done.stderr
        home.has_ended("bad")
    done = home.run("bad", *flags, "--rl.on_error=skip", reward="bad", env={"BAD": "9=fail"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_prompts_of_bad_rewards_are_left_out_and_counted(home):
    bad = "4=fail,5=nan,6=text,8=exit,9=hang,10=loud,12=fail,13=fail,14=fail,15=nan"
    flags = ("--rl.on_error=skip", "--train.steps=4", "--rl.reward_seconds=10", "--eval.every=0")
    done = home.run("skip", *flags, reward="bad", env={"BAD": bad})
    metrics = rows(home.path / "skip", "reward/failed_prompts")
    assert [row["reward/failed_prompts"] for row in metrics.values()] == [0, 3, 2], done.stderr
    assert "prompts are left out, 3 since a reward failed" in done.stderr
    assert len(done.stdout) < 2**20 and "is left out]" in done.stdout
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: iteration 4: no prompt has responses to learn from: 4 whose")
    assert "First: reward bad on row 0 (uid copy:3-train-12): RuntimeError: two lines" in last
    home.has_ended("skip")


def test_a_lost_transition_stops_the_run_and_names_both_versions(home):
    done = home.run("unsynced", "--fault=unsynced@3")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "weights of version 1, and the policy has version 2" in done.stderr


def test_a_policy_that_is_not_finite_stops_the_run(home):
    done = home.run("nan", "--fault=nan@3")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "iteration 3: no prompt has responses to learn from: 4 of which the engine" in done.stderr
    )
    assert "the policy's logits are no numbers" in done.stderr
    assert CheckpointManager(home.path / "nan" / "checkpoints").latest() == 2
