"""Plan a training run for a cluster that you do not have: the real step, compiled on this machine.

    uv run --extra aot experiments/plan.py --cluster=h100:1x8
    uv run --extra aot experiments/plan.py --preset=megascale_175b --cluster=h100:1536x8 \\
        --mesh.tensor=8 --out=plans/175b
    uv run --extra aot experiments/plan.py --preset=llama3_8b --cluster=h100:8x8 --search

Flags are those of pretraining, so the plan and the run differ in the script's name only. It prints
memory by term beside XLA's own figure, the largest collectives of the scheduled program, what the
compiler did that nobody wanted, and step time and MFU as ESTIMATES (MegaScale, arXiv 2402.15627,
sections 3 and 6). Exit code 2: it does not fit, and which term is to blame.
"""

import sys
from pathlib import Path

from absl import flags

from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.hardware import parse_cluster
from megajax.systems import aot, plan_report
from megajax.training.presets import PRESETS

config.define_flags(PRESETS, "nano")
CLUSTER = flags.DEFINE_string("cluster", "h100:1x8", "what to plan for, kind:HOSTSxGPUS")
OUT = flags.DEFINE_string("out", None, "folder for plan.md, plan.json and plan.png; none: print")
SEARCH = flags.DEFINE_boolean("search", False, "rank all legal meshes, compile the best few")
BEST = flags.DEFINE_integer("best", 3, "how many meshes --search compiles", lower_bound=1)


def main() -> int:
    """Plans. Returns 0, or 2 when it does not fit."""
    cfg, _ = config.from_flags(PRESETS)  # 1 configuration
    cluster = parse_cluster(CLUSTER.value)
    mesh_.start(1)  # no device is used
    if SEARCH.value:  # 2 either rank all meshes
        plans, outlines = aot.search(cfg, cluster, BEST.value)
        text = f"{plan_report.ranking(plans)}\n\n{plan_report.ranking(outlines)}\n"
        plan = [*plans, *outlines][0]
        print(text)
    else:  # or plan the one that was asked for
        plan = aot.plan(cfg, cluster)
    print(plan_report.markdown(plan))  # 3 what it will do
    if OUT.value is not None:
        folder = Path(OUT.value).expanduser()
        plan_report.write(plan, folder)
        if SEARCH.value:
            (folder / "search.md").write_text(text)
        print(f"see {folder}/plan.md, plan.json, plan.png")
    print(plan_report.verdict(plan))
    return 2 if plan.misfit else 0


if __name__ == "__main__":
    sys.exit(config.run(main))
