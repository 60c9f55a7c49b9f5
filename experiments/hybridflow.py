"""HybridFlow: reinforcement learning of a language model as a dataflow.

With no flags a small decoder, new and untaught, learns by GRPO to copy three digits, on 8 emulated
CPU devices: it trains on data 2 x tensor 4, generates on data 4 x tensor 2, and its weights go
between the two layouts in every iteration. It can be stopped and continued as pretraining can:

    uv run experiments/hybridflow.py
    uv run experiments/hybridflow.py --algorithm=ppo --task=sort:3
    uv run experiments/hybridflow.py --algorithm=dapo --rl.overlong=2
    uv run experiments/hybridflow.py --task=PROMPTS.jsonl --reward=rewards.py:score

--algorithm is one of ppo, grpo, dr_grpo, rloo, remax, reinforce_plus_plus, gspo, cispo, dapo.
Source: HybridFlow (arXiv 2409.19256); docs/rl.md.
"""

import megajax.core.interrupted  # noqa: F401

import sys

from megajax.core import config
from megajax.systems import job
from megajax.systems.hybridflow import command
from megajax.systems.hybridflow.config import FIRST, PRESETS, take
from megajax.training.interrupts import ends_when_superseded

config.define_flags(PRESETS, "nano", FIRST)
KIND = job.Kind("hybridflow", PRESETS, take, command.Problems)


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code."""
    timers = job.start_timers()

    # Configuration, devices, and the run's folder: as in experiments/pretrain.py.
    cfg, preset = config.from_flags(PRESETS, take)
    cfg, mesh = job.start_devices(cfg, preset)
    run = job.Job(KIND, cfg, preset, mesh, timers)

    # Prompts, tokenizer and rewards. Row i of the prompts is a function of the seed and of i.
    problems = command.Problems(cfg, run.console, run.run_dir)
    run.done("data", "prompts ready")

    # The models on their pools of devices, and the dataflow of an iteration. It is compiled in the
    # first one, but for the way between the layouts, whose cost is read from its program here.
    flow = command.built(cfg, mesh, problems)
    command.show(run.console, cfg, flow, mesh)
    try:
        # An iteration is a step of the loop: state, checkpoints and records are those of any run.
        start = run.first_state(flow, problems)
        recorder = run.recorder(flow, start)
        measure = problems.measure(flow, recorder, run.console, run.run_dir)
        batches = command.PromptBatches(cfg, problems.prompts, start.rows)
        code = run.train(flow, start, batches, recorder, measure, problems)
    finally:
        flow.close()
    command.draw_rewards(run.run_dir, run.console)
    return code


if __name__ == "__main__":
    sys.exit(config.run(main))
