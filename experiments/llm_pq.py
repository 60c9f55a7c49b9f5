"""LLM-PQ (arXiv 2403.01136): plans how a few unlike GPUs serve a model that none of them holds.

    uv run experiments/llm_pq.py --preset=case3             # OPT-30B on 3 T4 and a V100
    uv run experiments/llm_pq.py --preset=paper             # all eleven clusters of the paper
    uv run experiments/llm_pq.py --preset=case3 --cluster=l4:2,l40s:1 --quality=0.5
    uv run experiments/llm_pq.py --preset=case3 --run       # also serves a small trained model

The plan says which device holds which layers in how many bits, and how large the micro-batches of
prefill and decoding are, so that all requests end as soon as possible. The command prints this
placement, the tokens a second, the loss of quality (the sum of omega, the loss of each layer at its
bits) and the gap: by what fraction the run could be shorter at most. It compares the placement with
rivals on the same cluster: one width with an even split, PipeEdge's partition, the least loss of
quality ("adabits"), and offloading like FlexGen's. Against each rival we plan again, with a sum of
omega of at most the rival's.

Every time is an ESTIMATE of the cost model (assumed efficiencies), pipelines are SIMULATED event by
event, and how much a layer counts in quality is ASSUMED (--seed draws it). The command writes
llm_pq.json, .svg and .png into --out, and placement_CASE.json for each case.

--run also plans for a small trained model (--run_dir; none: the newest nano run) on the same
cluster with its memory scaled down, measures the held-out loss before and after quantization, and
answers prompts through the pipeline on emulated devices. That plan heeds --bits, --requests,
--solver and --time_limit_s. Its prompts and answers have 32 tokens, and its quality is `equal`,
because the loss of quality of this model is in another unit.

At the end of --time_limit_s a search returns the best placement found so far with its gap. Ctrl-C
ends the whole command: it prints the best placement and the rivals found so far, and its exit code
is 130. A second Ctrl-C ends it at once. Exit code 2: the devices cannot hold the model; the message
names the missing bytes and the largest term.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.reports import llm_pq as report
from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, equal, option
from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import parse_mixed
from megajax.monitor import results
from megajax.systems import llm_pq
from megajax.systems.llm_pq.planning import assumed_omega


@dataclass(frozen=True)
class Config(Checked):
    """What is planned."""

    cases: str = option("case1", "the paper's models with their clusters, joined by commas")
    cluster: str = option("", "another cluster, kind:GPUS,kind:GPUS; empty: the case's own")
    requests: int = option(32, "number of requests that are answered together", at_least=1)
    prompt: int = option(512, "tokens of each request's prompt", at_least=1)
    new_tokens: int = option(100, "tokens of each answer", at_least=1)
    bits: str = option("3,4,8,16", "widths that a layer may have, joined by commas")
    quality: str = option(
        "equal",
        "bound on the sum of omega (loss of quality): a number; any: no bound; equal: the sum at "
        "the highest width that fits if all layers have it and are split evenly",
    )
    solver: Literal["exact", "counts", "transfer"] = option(
        "exact", "search; counts: without the program over single layers; transfer: the heuristic"
    )
    time_limit_s: float = option(60.0, "longest time of one search", unit="s", above=0)
    rivals: bool = option(True, "whether to compare with rivals, each at its own quality")
    seed: int = option(0, "random seed of the assumed weight of each layer", at_least=0)
    run: bool = option(
        False, "also serve a small trained model by such a plan, on emulated devices"
    )
    run_dir: str | None = option(
        None, "folder of the run to serve; none: the newest nano run", needs=equal("run", True)
    )
    out: str = results.out_option("llm_pq")

    def __post_init__(self):
        """Refuses cases, widths, clusters and qualities that do not exist."""
        super().__post_init__()
        for case in self.cases.split(","):
            if case not in llm_pq.PRESETS:
                near = did_you_mean(case, llm_pq.PRESETS)
                raise UserError(f"cases={case} must be of case1 to case11.{near} (--cases)")
        self.widths()
        self.budget()
        if self.cluster:
            parse_mixed(self.cluster)

    def widths(self) -> tuple[int, ...]:
        """Returns the widths."""
        try:
            return tuple(int(b) for b in self.bits.split(","))
        except ValueError:
            raise UserError(f"bits={self.bits} must be numbers with commas (--bits)") from None

    def budget(self) -> Any:
        """Returns the quality as `plan` takes it."""
        if self.quality in ("equal", "any"):
            return None if self.quality == "any" else "equal"
        try:
            return float(self.quality)
        except ValueError:
            raise UserError(
                f"quality={self.quality} must be equal, any or a number (--quality)"
            ) from None


def paper() -> Config:
    """All eleven clusters."""
    return Config(cases=",".join(llm_pq.PRESETS))


def _case(name: str):
    def preset() -> Config:
        return Config(cases=name)

    preset.__doc__ = f"{llm_pq.PRESETS[name].workload.name} on {llm_pq.PRESETS[name].cluster.name}."
    return preset


def main() -> int:
    """Plans every case, and writes after each.

    After Ctrl-C HiGHS still computes in a thread. Python, where it ends as usual, would end that
    thread inside C++ code, which aborts the process (exit code 134); so it ends at once.
    """
    signal.signal(signal.SIGINT, interrupt)
    try:
        if not run_cases():
            return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


def interrupt(*_: Any) -> None:
    """Handles the first Ctrl-C. The second one ends the process at once, also inside C++ code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def run_cases() -> bool:
    """Does what the flags say. Returns whether Ctrl-C ended a search, and so the command."""
    cfg, base = config.from_flags(PRESETS)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    opened = small_model(cfg.run_dir) if cfg.run else None  # before the work, not behind it
    folder = results.writable_folder(cfg.out)
    about = results.facts("roofline with assumed efficiencies", "simulated estimate")
    about |= {"preset": config.start_name(), "omega": f"assumed, seed {cfg.seed}"}
    rows: list[dict[str, Any]] = []
    is_interrupted = False
    for case in cfg.cases.split(","):
        workload, cluster = llm_pq.PRESETS[case]
        if cfg.cluster:
            cluster = parse_mixed(cfg.cluster)
        bits = cfg.widths()
        workload = dataclasses.replace(
            workload,
            requests=cfg.requests,
            prompt=cfg.prompt,
            new_tokens=cfg.new_tokens,
            bits=bits,
            omega=assumed_omega(workload.stack.layers, bits, cfg.seed),
        )
        search = report.Options(cfg.budget(), cfg.solver, cfg.time_limit_s, cfg.rivals)
        row, placement, is_interrupted = report.one(case, workload, cluster, search)
        placement.save(folder / f"placement_{case}.json")
        rows.append(row)
        results.write(folder / "llm_pq.json", about | report.summary(rows), rows)
        print(report.text(row, placement), flush=True)
        if is_interrupted:
            print(f"stopped in {case}; what was found is in {folder}", file=sys.stderr)
            break
    if any(row["rivals"] for row in rows):
        report.draw(rows, folder / "llm_pq")
        print(report.told(report.summary(rows)))
    print(folder / "llm_pq.json")
    if opened is not None and not is_interrupted:
        serve(cfg, opened, folder)
    print(closing(config.start_name()))
    return is_interrupted


def small_model(run_dir: str | None) -> Any:
    """Opens the model of --run. Raises: UserError where there is none."""
    from megajax.systems.open_model import open_model
    from megajax.systems.server.launch import newest_run

    return open_model(run_dir=run_dir or newest_run())


def serve(cfg: Config, opened: Any, folder: Path) -> None:
    """Serves a small model by a plan for the first case, and writes run.json."""
    workload, cluster = llm_pq.PRESETS[cfg.cases.split(",")[0]]
    cluster = parse_mixed(cfg.cluster) if cfg.cluster else cluster
    mesh_.start(cluster.devices)
    from experiments.reports.llm_pq_run import served

    workload = dataclasses.replace(workload, requests=cfg.requests, bits=cfg.widths())
    row = served(opened, workload, cluster, cfg.solver, cfg.time_limit_s)
    results.write(folder / "run.json", results.facts("emulated", "emulated"), [row])
    print(folder / "run.json")


PRESETS = {name: _case(name) for name in llm_pq.PRESETS} | {"paper": paper}
config.define_flags(PRESETS, "case1")

if __name__ == "__main__":
    sys.exit(config.run(main))
