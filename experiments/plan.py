"""Plan a training run for a cluster that you do not have: the real step, compiled on this machine.

    uv run --extra aot experiments/plan.py --cluster=h100:1x8
    uv run --extra aot experiments/plan.py --preset=megascale_175b --cluster=h100:1536x8 \\
        --mesh.tensor=8 --out=plans/175b
    uv run --extra aot experiments/plan.py --preset=llama3_8b --cluster=h100:8x8 --search

Flags are those of pretraining, so the commands of a plan and of its run differ only in the script's
name. The command prints memory by term beside XLA's own figure, the largest collectives of the
scheduled program, warnings about what the compiler inserted, and step time and MFU as ESTIMATES
(MegaScale, arXiv 2402.15627, sections 3 and 6).

--search chooses the mesh, the pipeline's schedule, the micro-batches and the rematerialisation
itself, whatever the flags say of them. It prints a ranking, with the flags to paste behind
pretrain.py. After Ctrl-C it ranks the candidates so far, says that the ranking is partial, and
exits with code 130.

--workload=prefill or decode plans generation, by the cost model alone: --train.global_batch rows of
--train.seq_len tokens, or one more token for each of them. --workload=serve estimates, for several
batch sizes, the tokens a second that the cluster serves with engines on --mesh.tensor GPUs each and
sequences of --train.seq_len tokens.

--cost chooses the source of times: assumed efficiencies (roofline), a predictor that
experiments/cdmpp.py fitted (learned), or a JSON table of measured kernels (table); --cost_file
names the file. Exit code 2: the step does not fit; the message names the largest term.
"""

import megajax.core.interrupted  # noqa: F401

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from experiments.reports import plan as plan_report
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.errors import UserError
from megajax.core.hardware import Cluster, parse_cluster
from megajax.cost.base import CostModel
from megajax.monitor import results
from megajax.systems import aot, strategies
from megajax.systems.cdmpp import backend
from megajax.training.config import Config
from megajax.training.presets import FIRST, PRESETS, take_model

config.define_flags(PRESETS, "nano", FIRST)
CLUSTER = flags.DEFINE_string("cluster", "h100:1x8", "cluster to plan for, kind:HOSTSxGPUS")
OUT = flags.DEFINE_string(
    "out", None, "folder for plan.md, plan.json, plan.png and pipeline.svg; none: print"
)
SEARCH = flags.DEFINE_boolean(
    "search", False, "search meshes and schedules, rank them and compile the best few"
)
WORKLOAD = flags.DEFINE_enum(
    "workload", "train", ["train", "prefill", "decode", "serve"], "what is planned (see above)"
)
COST = flags.DEFINE_enum(
    "cost", "roofline", ["roofline", "learned", "table"], "source of the times of operations"
)
COST_FILE = flags.DEFINE_string(
    "cost_file", None, "file of the predictor (--cost=learned) or of the table (--cost=table)"
)
BEST = flags.DEFINE_integer(
    "best", 3, "number of fitting plans that --search compiles", lower_bound=1
)


def main() -> int:
    """Plans. Returns 0, or 2 when it does not fit."""
    cfg, base = config.from_flags(PRESETS, take_model, warn=not SEARCH.value)  # 1 configuration
    cluster = parse_cluster(CLUSTER.value)
    mesh_.start(1)  # no device is used
    folder = None if OUT.value is None else results.writable_folder(OUT.value)
    section, figures = "", None
    if SEARCH.value and WORKLOAD.value != "train":
        raise UserError(f"--search ranks training only; leave out --workload={WORKLOAD.value}")
    model = backend.load(COST.value, COST_FILE.value)
    times = backend.source(model, COST.value, COST_FILE.value, cluster.card, plan_report.ASSUMED)
    if said := backend.unknown(model, cluster.card):
        print(said)
    if WORKLOAD.value == "serve":
        return serve(cfg, cluster, folder, model)
    is_stopped = False
    if SEARCH.value:  # 2 either rank what could run
        ranking = search(cfg, cluster, model)
        plan, is_stopped = ranking.best, bool(ranking.stopped)
        rows = plan_report.ranking_rows(ranking, base, config.start_flags())
        section, figures = (
            plan_report.search_markdown(ranking, rows),
            plan_report.search_figures(ranking, rows),
        )
    elif WORKLOAD.value != "train":
        plan = aot.outline(cfg, cluster, phase=WORKLOAD.value, model=model)
    else:  # or plan what was asked for
        plan = aot.plan(cfg, cluster, model)
    print(plan_report.markdown(plan, section, times))  # 3 what it will do
    if folder is not None:
        plan_report.write(plan, folder, section, figures, times)
        if figures:
            about = results.facts(cluster.name, f"estimate, best compiled for {cluster.card.name}")
            results.write(folder / "search.json", about | figures, figures["rows"])
        print(f"see {folder}/plan.md, plan.json, plan.png")
    print(plan_report.verdict(plan))
    if is_stopped:
        print("stopped: the ranking is partial", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # at once: the compiler may still run in a thread
    return 2 if plan.misfit else 0


def search(cfg: Config, cluster: Cluster, model: CostModel) -> strategies.Ranking:
    """Ranks what could run, and says on standard error how far it is.

    The first Ctrl-C ends the search, the second one the process. The handler only notes it: an
    exception that it raised would be lost where Python ignores exceptions, as in jax's callback of
    the garbage collector.
    """
    shown, on_terminal, is_stopped = -60.0, sys.stderr.isatty(), False

    def tell(line: str) -> None:
        nonlocal shown
        if is_stopped:
            raise KeyboardInterrupt
        if time.monotonic() - shown > (0.2 if on_terminal else 10):
            shown = time.monotonic()
            wide = shutil.get_terminal_size().columns - 1
            text = f"\r{line[:wide]:<{wide}}" if on_terminal else f"{line}\n"
            print(text, end="", file=sys.stderr, flush=True)

    def interrupt(*_: Any) -> None:
        nonlocal is_stopped
        is_stopped = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, interrupt)
    try:
        return strategies.search(cfg, cluster, BEST.value, model=model, tell=tell)
    finally:
        if on_terminal:
            print(file=sys.stderr)


def serve(cfg: Config, cluster: Cluster, folder: Path | None, model: CostModel) -> int:
    """Prints what the cluster serves. Returns 0, or 2 when not one sequence fits."""
    plan = plan_report.plan(cfg, cluster, model)
    print(plan_report.serving_markdown(plan, cluster))
    if folder is not None:
        about = results.facts(cluster.name, "estimate") | plan_report.serving_figures(plan)
        results.write(folder / "serve.json", about, plan_report.serving_rows(plan, cluster))
        print(f"see {folder}/serve.json")
    return 0 if plan.rates else 2


if __name__ == "__main__":
    sys.exit(config.run(main))
