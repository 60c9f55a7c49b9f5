"""HybridFlow: reinforcement learning of a language model as a dataflow.

With no flags a small decoder, new and untaught, learns by GRPO to copy three digits, on 8 emulated
CPU devices: it trains on data 2 x tensor 4, generates on data 4 x tensor 2, and its weights go
between the two layouts in every iteration. It can be stopped and continued as pretraining can:

    uv run experiments/hybridflow.py
    uv run experiments/hybridflow.py --task=sort:3 --train.steps=200
    uv run experiments/hybridflow.py --algorithm=ppo
    uv run experiments/hybridflow.py --algorithm=dapo --rl.overlong=2
    uv run experiments/hybridflow.py --task=PROMPTS.jsonl --reward=rewards.py:score

--map plans the placement of section 6 for a cluster that is not here, without devices: which models
share GPUs, and the layout of each, beside three fixed placements. Its times are ESTIMATES. The
flags rl.* say how many prompts and tokens; those of the paper are the defaults there:

    uv run experiments/hybridflow.py --map --models=actor:llama3_70b,critic:llama3_8b \\
        --cluster=a100:16x8

--algorithm is one of ppo, grpo, dr_grpo, rloo, remax, reinforce_plus_plus, gspo, cispo, dapo.
Source: HybridFlow (arXiv 2409.19256); docs/rl.md.
"""

import megajax.core.interrupted  # noqa: F401

import sys

from absl import flags

from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.errors import UserError
from megajax.core.hardware import parse_cluster
from megajax.monitor import results
from megajax.systems import job
from megajax.systems.hybridflow import command
from megajax.systems.hybridflow.config import FIRST, PRESETS, take
from megajax.training.interrupts import ends_when_superseded

config.define_flags(PRESETS, "nano", FIRST)
MAP = flags.DEFINE_boolean(
    "map", False, "plan which models share the GPUs of --cluster, and train nothing"
)
MODELS = flags.DEFINE_string(
    "models",
    "actor:llama3_8b,critic:llama3_8b",
    "of --map: role:preset, ...; reference as actor and reward as critic unless named (or none)",
)
CLUSTER = flags.DEFINE_string("cluster", "a100:16x8", "of --map: kind:HOSTSxGPUS")
OUT = flags.DEFINE_string("out", None, "of --map: folder for mapping.json; none: print")
KIND = job.Kind("hybridflow", PRESETS, take, command.Problems)


@ends_when_superseded()
def main() -> int:
    """Runs the training job. Returns the exit code."""
    if MAP.value:
        return plan_mapping()
    for flag in (MODELS, CLUSTER, OUT):
        if flag.present:
            raise UserError(f"{flag.name}={flag.value} needs --map (--{flag.name})")
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
    if code == 0:
        run.console.say(closing(config.start_name()))
    return code


def plan_mapping() -> int:
    """Prints the best placement of the models and the fixed ones. Returns 0."""
    from experiments.reports import hybridflow_mapping as report

    cfg, _ = config.from_flags(PRESETS, report.paper_work, warn=False)
    cluster = parse_cluster(CLUSTER.value)
    mesh_.start(1)  # no device is used
    folder = None if OUT.value is None else results.writable_folder(OUT.value)
    estimates = report.estimates_of(MODELS.value, cfg.rl, cluster)
    rows, layouts = report.placements(estimates), report.layouts(estimates)
    print(report.markdown(estimates, MODELS.value, rows, layouts))
    if folder is not None:
        about = results.facts(cluster.name, "estimated") | {"models": MODELS.value}
        results.write(folder / "mapping.json", about | {"layouts": layouts}, rows)
        print(f"see {folder}/mapping.json")
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main))
