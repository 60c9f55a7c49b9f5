"""A command with a step and batches of its own: two networks in one state, killed and resumed."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from megajax.checkpoint import offline

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = '''
import sys
sys.path.insert(0, sys.argv.pop(1))
import dataclasses
import jax, numpy as np
from megajax.core import config
from megajax.core.config import Checked, group, option
from megajax.systems import job
from megajax.training import JobConfig, OptimConfig, TrainConfig, joint, make_train_step
from shapes import task

@dataclasses.dataclass(frozen=True)
class ResNetConfig(Checked, section="model"):
    width: int = option(8, "channels")
    classes: int = option(4, "classes")
    @property
    def sizes(self): return {}
    layers = property(lambda self: 0)
    max_positions = property(lambda self: 0)
    dropout = property(lambda self: 0.0)

@dataclasses.dataclass(frozen=True)
class LearnConfig(JobConfig):
    model: ResNetConfig = group(ResNetConfig)

def tiny():
    return LearnConfig(train=TrainConfig(steps=6, global_batch=8), optim=OptimConfig(lr=1e-2))

class Reading:
    tokenizer, labels, rows, identity, last_sample = None, (), None, {"drawn": 0}, None
    def __init__(self, cfg, console, run_dir): pass
    def measure(self, *args): return self
    def due(self, finished, last): return False
    def start(self, state, finished): return state

class Batches:
    """Every second batch is on a larger canvas."""
    def __init__(self, step, position):
        self.position, self.rows_per_batch = position, 8
    def __next__(self):
        number = self.position // 8
        random = np.random.default_rng(number)
        size = (8, 12)[number % 2]
        self.position += 8
        x = random.integers(0, 256, (8, size, size, 3), dtype=np.uint8)
        return {"image": x, "label": (x[:, 0, 0, 0] % 4).astype(np.int32)}

def build(cfg, mesh):
    first = make_train_step(cfg, mesh, task)
    second = make_train_step(cfg, mesh, task)
    def step(state, batch):
        after, states, found = state.step + 1, {}, {}
        for name in whole.steps:
            like = {k: x.sharding for k, x in whole.steps[name].abstract_batch.items()}
            states[name], metrics = whole.steps[name].step(
                whole.part(state, name), jax.device_put(batch, like))
            found |= {f"{name}_{k}": v for k, v in metrics.items()}
        found |= {"loss": found["first_loss"], "grad_norm": found["first_grad_norm"],
                  "leaf_norms": np.concatenate([found[f"{n}_leaf_norms"] for n in whole.steps])}
        return whole.join(states, after), found
    whole = joint({"first": first, "second": second}, step)
    return whole

config.define_flags({"tiny": tiny}, "tiny")
KIND = job.Kind("learn", {"tiny": tiny}, lambda base, given, read: base, Reading, build,
                lambda cfg, reading, step, position: Batches(step, position),
                lambda console, *args: console.say("two residual networks"))
sys.exit(config.run(lambda: job.run(KIND)))
'''


def run(folder, out, *flags):
    (folder / "learn.py").write_text(COMMAND)
    text = (ROOT / "docs" / "own_networks.md").read_text()
    code = text.split("<!-- shapes.py -->\n```python\n")[1].split("```")[0]
    (folder / "shapes.py").write_text(code)
    command = [sys.executable, folder / "learn.py", folder, f"--run_dir={out}", "--emulate=2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    return subprocess.run([*command, *flags], env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.process
def test_two_models_in_one_state_are_killed_and_resumed(tmp_path):
    whole = run(tmp_path, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "two residual networks" in whole.stdout and "images/s" in whole.stdout
    killed = run(tmp_path, tmp_path / "killed", "--fault=kill@5:rank0", "--checkpoint.every=2")
    assert killed.returncode < 0 or killed.returncode == 137, killed.stdout
    resumed = run(tmp_path, tmp_path / "killed", "--checkpoint.every=2")
    assert resumed.returncode == 0 and "resumed after step" in resumed.stdout, resumed.stdout
    ends = [offline.open_folder(tmp_path / name / "checkpoints")[0] for name in ("whole", "killed")]
    records = [offline.verify(steps, 6) for steps in ends]
    assert offline.differences(*records) == []
    leaves = offline.StoredLeaves(ends[0].step(6), records[0])
    first, second = (leaves[f"params.{name}.stem.kernel"] for name in ("first", "second"))
    assert (np.asarray(first) != np.asarray(second)).any()
    rows = [json.loads(x) for x in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "loss" in r]
    assert len(steps) == 6 and all(r["images"] == 8 for r in steps)
    assert {"first_accuracy", "second_accuracy", "images_per_s"} <= {*steps[0]}
