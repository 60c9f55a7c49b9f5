"""Puts the figures of experiments/results/*.json into the documents.

    uv run scripts/tables.py            # rewrite
    uv run scripts/tables.py --check    # exit with 1 when a document is not up to date

A document marks a place by `<!-- NAME -->` and `<!-- end -->`; what stands between is generated.
The documents are README.md, PAPERS.md, the pages of docs/ and docs/papers/, and the README.md of
each kernel folder.
"""

import megajax.core.interrupted  # noqa: F401

import functools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
from absl import flags

from experiments.faults import storm
from experiments.reports import (
    butterfly,
    bytecheckpoint,
    cdmpp,
    cdmpp_replay,
    gpu,
    hybridflow_mapping,
    llm_pq,
    minder,
    optimus,
    overlap,
    qsync,
    qsync_run,
    sdp4bit,
    serving,
    tilewise,
    vision,
)
from experiments.reports.reporting import markdown_table, read, rows_of, table
from megajax.core import config
from megajax.core.hardware import CARDS
from megajax.cost.base import mfu, train_flops_per_token
from megajax.models.decoder_config import PRESETS
from megajax.monitor.console import training_line

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
PATTERNS = ("docs/*.md", "docs/papers/*.md", "pallas_kernels/*/README.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
CHECK = flags.DEFINE_boolean("check", False, "rewrite nothing; exit code 1: a document is stale")
DOCUMENTS = ("README.md", "PAPERS.md", *(str(path.relative_to(ROOT)) for path in PAGES))


def known(row: dict) -> dict:
    """Returns a row without the members that were infinite, but with its unknown MFU."""
    return {k: v for k, v in row.items() if v is not None or k == "mfu"}


def nano_output() -> str:
    """What the first command printed, from its records."""
    run = read(RESULTS / "pretrain_nano.json")
    train = {r["step"]: r for r in run["rows"] if "loss" in r}
    last = max(train)
    lines = ["$ uv run experiments/pretrain.py", f"nano: {run['mesh']}"]
    lines += [
        training_line(s, last, {"eta_s": math.inf} | known(train[s]))
        for s in (1, 40, 80, 120, last)
    ]
    lines.append(
        f"step {last}: held-out loss {run['eval_loss']:.4f} nats, "
        f"{run['eval_bits_per_byte']:.3f} bits per byte"
    )
    return "\n".join(["```", *lines, "```"])


def nano_figures() -> str:
    """The sentence under the first command."""
    run = read(RESULTS / "pretrain_nano.json")
    return (
        f"{run['parameters'] / 1e6:.2f} M parameters, {run['steps']} steps of "
        f"{run['tokens_per_step']:,} tokens in {run['wall_s']:.0f} s on two CPU cores: "
        f"{run['last_10_loss']:.2f} nats a byte (mean of the last 10 steps), "
        f"{run['eval_bits_per_byte']:.2f} bits a byte on held-out files "
        f"({run['layer']}, {run['date']}, commit {run['commit']})."
    )


def bench_train() -> str:
    """The trainer beside a hand-written loop."""
    columns = {
        "loop": "loop",
        "median s": "median_s",
        "p10": "p10_s",
        "p90": "p90_s",
        "n": "n",
        "ratio": "ratio",
    }
    return table(RESULTS / "bench_train.json", columns)


def bench_serve() -> str:
    """The server beside llama.cpp."""
    columns = {
        "program": "who",
        "first token, s": "first_token_s",
        "first token, CPU-s": "first_token_cpu_s",
        "one stream, CPU-s a token": "cpu_s_a_token_1",
        "over llama.cpp": "cpu_s_a_token_1_over_rival",
        "eight streams, CPU-s a token": "cpu_s_a_token_8",
        "over llama.cpp's": "cpu_s_a_token_8_over_rival",
        "peak memory, MiB": "peak_mib",
    }
    return table(RESULTS / "bench_serve.json", columns)


def megascale_mfu() -> str:
    """MegaScale's table 2 from its own tokens a second, by our formula."""
    load = replace(PRESETS["megascale_175b"](), window=None).workload(1, 2048)
    flops = train_flops_per_token(load, "megatron")
    rows = (
        (256, 39.3, 53.0),
        (512, 74.1, 49.9),
        (768, 103.8, 46.7),
        (1024, 132.7, 44.7),
        (3072, 433.6, 48.7),
        (6144, 851.6, 47.8),
        (8192, 1027.9, 43.3),
        (12288, 1466.8, 41.2),
    )
    lines, differ = [], []
    for gpus, rate, paper in rows:
        ours = 100 * mfu(1e3 * rate, flops, gpus, CARDS["A100"].flops["bfloat16"])
        lines.append((f"{gpus:,}", rate, f"{paper} %", f"{ours:.1f} %"))
        if f"{ours:.1f}" != f"{paper:.1f}":
            differ.append(f"{ours:.2f} % for the paper's {paper} % at {gpus:,} GPUs")
    text = f"{len(rows) - len(differ)} of {len(rows)} rows agree to the last digit"
    text += f"; not: {', '.join(differ)}." if differ else "."
    heads = ("GPUs (A100)", "thousand tokens/s", "MFU, paper", "MFU, ours")
    return f"{markdown_table(heads, lines)}\n\n{text}"


def megascale_ablation() -> str:
    """MegaScale's table 3 beside the cost model's simulation of it."""
    columns = {
        "added": "added",
        "MFU, paper": "paper",
        "gain, paper": "paper_gain",
        "MFU, simulated": "ours",
        "gain, simulated": "gain",
    }
    return table(RESULTS / "megascale_ablation.json", columns)


def schedules() -> str:
    """Pipeline schedules, ideal and as executed."""
    columns = {
        "schedule": "schedule",
        "ideal makespan": "ideal",
        "ideal bubble": "bubble",
        "lockstep, residuals stashed": "residuals",
        "lockstep, inputs stashed": "inputs",
        "inputs kept a stage": "places",
    }
    return table(RESULTS / "schedules.json", columns)


def plans() -> str:
    """The two plans of the 175B model on 12,288 GPUs."""
    both = [read(RESULTS / f"plan_175b_{kind}.json") for kind in ("fsdp", "pipeline")]

    def gib(x: float) -> str:
        return f"{x / 2**30:.1f} GiB"

    def sent(plan: dict) -> str:
        total: dict[str, int] = {}
        for c in plan["collectives"]:
            total[c["axes"]] = total.get(c["axes"], 0) + c["nbytes"]
        largest = sorted(total.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{gib(n)} over {axes}" for axes, n in largest)

    def mesh(plan: dict) -> str:
        return " x ".join(f"{a} {n}" for a, n in plan["mesh"].items() if n > 1)

    def step(plan: dict) -> str:
        e = plan["estimate"]
        return f"estimate: {e['step_s']:.1f} s, estimate: MFU {100 * e['mfu_megatron']:.0f} %"

    lines: dict[str, Callable[[dict], str]] = {
        "memory a GPU, lower bound by terms": lambda p: gib(p["memory_bound_bytes"]),
        "memory a GPU, XLA's peak": lambda p: gib(p["memory_xla_bytes"]["peak"]),
        "bytes sent a step and GPU": sent,
        "share of these bytes with known mesh axes and operation": lambda p: (
            f"{100 * p['collective_bytes_attributed']:.3f} %"
        ),
        "pipeline bubble": lambda p: f"{100 * p['estimate']['bubble']:.1f} % of the work",
        "a step": step,
        "CPU seconds of the compiler": lambda p: f"{p['compile_cpu_s']:.0f}",
    }
    rows = ((name, *map(value, both)) for name, value in lines.items())
    made = " and ".join(f"{p['date']}, {p['commit']}" for p in both)
    return f"{markdown_table(('', *map(mesh, both)), rows)}\n\n*{both[0]['layer']}, {made}*"


def plan_search() -> str:
    """The search for the 175B model on 12,288 GPUs: how many, and the best few with their flags."""
    path = RESULTS / "plan_175b_search.json"
    search = read(path)
    columns = {
        "mesh": "mesh",
        "schedule": "schedule",
        "remat": "remat",
        "source": "source",
        "a step": "estimate",
        "GiB a GPU": "needed_gib",
    }
    dropped = ", ".join(f"{term} {count:,}" for term, count in search["dropped"].items())
    text = (
        f"{search['candidates']:,} candidates on {search['legal_meshes']} legal meshes in "
        f"{search['search_cpu_s']:.0f} CPU seconds before anything is compiled; "
        f"{sum(search['dropped'].values()):,} fit no GPU by their bound (largest term: {dropped})."
    )
    flags = f"The first row: `pretrain.py {search['rows'][0]['flags']}`."
    return "\n\n".join([text, table(path, columns), flags])


def bytetransformer_counts() -> str:
    """What padding costs on the paper's workload, counted."""
    columns = {
        "maximum length": "longest",
        "tokens, padded": "padded_tokens",
        "in the bucket": "capacity",
        "GFLOP, padded": "gflop_padded",
        "GFLOP, ours": "gflop_ours",
        "GB, padded": "gbyte_padded",
        "GB, ours": "gbyte_ours",
        "attention, pairs saved": "attention_saving_visited",
        "at most": "attention_saving_useful",
    }
    return table(RESULTS / "bytetransformer_cpu.json", columns, part="count")


def bytetransformer_steps() -> str:
    """The steps of figure 13, counted: an H200's floor, which no kernel reaches."""
    columns = {
        "maximum length": "longest",
        "step": "step",
        "GFLOP": "gflop",
        "GB": "gbyte",
        "floor, ms (estimate)": "floor_ms_estimate",
        "gain, % (estimate)": "gain_percent_estimate",
        "gain, %, paper (from memory)": "gain_percent_paper",
    }
    return table(RESULTS / "bytetransformer_cpu.json", columns, part="step")


def bytetransformer_times() -> str:
    """The paper's milliseconds beside ours: empty until a GPU was there."""
    path = RESULTS / "bytetransformer_gpu.json"
    ours = read(path) if path.exists() else {"rows": []}

    def took(step: str, longest: int) -> str:
        rows = rows_of(ours, part="time", step=step, longest=longest, batch=16)
        median = rows[0].get("median_ms") if rows else None
        return f"{median:.2f}" if median else ""

    paper = read(RESULTS / "bytetransformer_cpu.json")["paper"]
    lengths = paper["lengths"]
    lines = [
        (f"{name}, A100 (paper)", *(f"{t:.2f}" for t in times))
        for name, times in paper["ms"].items()
    ]
    for name in ("padded, XLA", "padded, cuDNN", "+ fused attention"):
        shown = name.replace("+ fused attention", "packed")
        lines.append((f"ours: {shown}", *(took(name, n) for n in lengths)))
    heads = ("ms at maximum length", *map(str, lengths))
    source = ours.get("layer", "ours: not reproduced, not timed yet")
    return f"{markdown_table(heads, lines)}\n\n*{source}*"


# A row of PAPERS.md each: its page in docs/papers, and all of the row but our number.
PAPERS = (
    (
        "megascale", "MegaScale", "NSDI 2024",
        "parallel block, window attention, LAMB, all parallelisms, supervised runs, plans",
        "experiments/megascale_ablation.py",
        "47.7 to 65.3 % MFU in the ablation, 175B on 256 A100s",
    ),
    (
        "bytetransformer", "ByteTransformer", "IPDPS 2023",
        "encoders without padding, fused Hopper kernels", "experiments/bytetransformer.py",
        "BERT at length 1024 in 24.7 ms, PyTorch in 53.2 ms",
    ),
    (
        "bytecheckpoint", "ByteCheckpoint", "NSDI 2025",
        "saves in two stages, resharding, imports, a planner, integrity, a memory tier",
        "experiments/bytecheckpoint.py", "a save stalls training for a 12th to a 162nd of the time",
    ),
    (
        "flux", "Flux", "arXiv 2024",
        "rings, fused products with their communication, a simulator", "experiments/flux.py",
        "1.24 times as fast in training",
    ),
    (
        "comet", "COMET", "MLSys 2025",
        "expert layers in rings and as fused kernels, a simulator", "experiments/comet.py",
        "whole models 1.71 times as fast",
    ),
    (
        "tilewise", "Tile-Wise sparsity", "SC 2020",
        "pruning during training, tile-sparse kernels", "experiments/tilewise.py",
        "1.95 times as fast as dense at 75 %, V100",
    ),
    (
        "sdp4bit", "SDP4Bit", "NeurIPS 2024",
        "4-bit differences of weights, gradients in two levels", "experiments/sdp4bit.py",
        "loss +0.09 to +0.24 %, 125M to 1.3B",
    ),
    (
        "minder", "Minder", "NSDI 2025",
        "the detector, a daemon, eviction in supervised runs", "experiments/minder.py",
        "F1 0.893 on 150 faults in production",
    ),
    (
        "serving", "Orca, PagedAttention, Sarathi-Serve", "OSDI 2022, SOSP 2023, OSDI 2024",
        "continuous batching, pages, prompts in chunks", "experiments/serving.py",
        "up to 36.9 times FasterTransformer's throughput, GPT-3 175B",
    ),
    (
        "cdmpp", "CDMPP", "EuroSys 2024",
        "a predictor of the times of compiled programs, a replay", "experiments/cdmpp.py",
        "14.03 % error across models",
    ),
    (
        "llm_pq", "LLM-PQ", "PPoPP 2024",
        "an exact planner for unlike GPUs, a runtime, GPTQ and AWQ", "experiments/llm_pq.py",
        "2.26 times its baselines' throughput in the mean, quality not held equal",
    ),
    (
        "hybridflow", "HybridFlow", "EuroSys 2025",
        "nine algorithms, layouts of training and generation, pools, placements, a sandbox",
        "experiments/hybridflow.py",
        "the fastest of three placements on 16 to 128 GPUs changes at 96 (figures 12, 13)",
    ),
    (
        "optimus", "Optimus", "ATC 2025",
        "an encoder in a pipeline's idle slots, executed in one program; a planner of its kernels",
        "experiments/optimus.py", "1.06 to 1.21 times as fast as balanced stages",
    ),
    (
        "qsync", "QSync", "IPDPS 2024",
        "one job on unlike GPUs, each kind with its own precisions; replay, indicator, allocation",
        "experiments/qsync.py",
        "replay below 5 % off the measured step; 0.27 to 1.03 points more accuracy than one "
        "precision",
    ),
    (
        "butterfly", "Butterfly detector", "arXiv 2018",
        "Faster R-CNN for folders of photographs, by backbone and training set",
        "experiments/butterfly.py", "mAP of about 0.60 in the worst run, on photographs",
    ),
)  # fmt: skip


def headlines() -> dict[str, str]:
    """Returns {page: our headline number}, from the results."""

    def result(name: str) -> dict:
        return read(RESULTS / f"{name}.json")

    def rows(name: str, **members: object) -> list[dict]:
        return rows_of(result(name), **members)

    def speedups(name: str, **members: object) -> str:
        times = [row["speedup"] for row in rows(name, part="model", **members)]
        return f"{min(times):.2f} to {max(times):.2f} times as fast, ESTIMATED"

    ablation = rows("megascale_ablation")
    longest = max(rows("bytetransformer_cpu", part="count"), key=lambda row: row["longest"])
    packed = longest["gflop_padded"] / longest["gflop_ours"]
    stall = {row["how"]: row["median_s"] for row in rows("bytecheckpoint", what="stall")}
    (gap,) = rows("sdp4bit", part="gap", variant="SDP4Bit")
    price = max(r["speedup_estimate"] for r in rows("tilewise", part="price", goal=0.75))
    (detector,) = rows("minder", part="overall", detector="ours")
    (batching,) = rows("serving", part="offline", mode="continuous")
    (replay,) = (row for row in result("cdmpp_replay")["summary"] if row["method"] == "learned")
    plans = result("llm_pq")["pipeedge"]
    strong = rows("optimus_simulated", part="strong", efficiency="one")
    faster = [row["balanced_s"] / row["optimus_s"] for row in strong]
    precision = butterfly.best(rows("butterfly_table"))
    plans_tried, off, _ = qsync_run.replayed(result("qsync_run"))
    placed = [row["reproduced"] for row in result("hybridflow_mapping")["rows"]]
    return {
        "megascale": f"{ablation[0]['ours'].rstrip(' %')} to {ablation[-1]['ours']} MFU, SIMULATED",
        "bytetransformer": f"{packed:.1f} times fewer FLOPs at length 1024, counted; not timed",
        "bytecheckpoint": f"stall of {stall['ours']:.2f} s; of Orbax's asynchronous save "
        f"{stall['orbax']:.2f} s, of a save that waits {stall['orbax, waits']:.2f} s (0.5 GB, "
        "one disk)",
        "flux": speedups("flux_simulated", passes="training"),
        "comet": speedups("comet_simulated", std=0.032),
        "tilewise": f"{price:.2f} times as fast, ESTIMATED for an H200",
        "sdp4bit": f"loss {gap['gap_percent']:+.2f} ± {gap['gap_error']:.2f} %, a small GPT on "
        "emulated devices",
        "minder": f"F1 {detector['f1']:.3f} on {detector['faults']} faults, SIMULATED",
        "serving": f"{batching['ratio']:.1f} times static batching with padding, nano on a CPU",
        "cdmpp": f"{replay['median_percent']:.1f} % median error of {replay['steps']} train steps, "
        "one CPU thread",
        "llm_pq": f"{plans['mean']:.2f} times PipeEdge's at equal quality in the mean of "
        f"{plans['cases']} clusters, ESTIMATED",
        "butterfly": f"mAP {precision:.2f} of the best backbone on drawn butterflies",
        "optimus": f"{min(faster):.2f} to {max(faster):.2f} times as fast, SIMULATED",
        "qsync": f"replay {off:.1f} % off in the mean of {plans_tried} plans, PLAYED by two "
        "processes; the accuracy is not reproduced",
        "hybridflow": f"the same placement in {sum(placed)} of {len(placed)} cases, ESTIMATED; the "
        "change is not reproduced",
    }


def papers() -> str:
    """The table of PAPERS.md."""
    heads = ("paper", "venue", "what of it is built", "command", "the paper's number", "ours")
    ours = headlines()
    lines = (
        (f"[{name}](docs/papers/{page}.md)", venue, built, f"`{command}`", theirs, ours[page])
        for page, name, venue, built, command, theirs in PAPERS
    )
    return markdown_table(heads, lines)


TABLES: dict[str, Callable[[], str]] = {
    "butterfly_sets": lambda: butterfly.sets(read(RESULTS / "butterfly_sets.json")),
    "butterfly_table": lambda: butterfly.markdown(read(RESULTS / "butterfly_table.json")),
    "cdmpp_calls": functools.partial(cdmpp.calls, RESULTS / "cdmpp.json"),
    "cdmpp_kinds": functools.partial(cdmpp.kinds, RESULTS / "cdmpp_one_thread.json"),
    "cdmpp_devices": functools.partial(cdmpp.programs, RESULTS / "cdmpp_two_threads.json"),
    **llm_pq.tables(RESULTS),
    "cdmpp_kernels": functools.partial(cdmpp.kernels, RESULTS / "cdmpp_neusight.json"),
    "cdmpp_gpu": functools.partial(cdmpp.programs, RESULTS / "cdmpp_gpu.json"),
    "cdmpp_one_thread": functools.partial(cdmpp.programs, RESULTS / "cdmpp_one_thread.json"),
    "cdmpp_families": functools.partial(cdmpp.families_table, RESULTS / "cdmpp_one_thread.json"),
    "cdmpp_h200": functools.partial(cdmpp.h200, RESULTS / "cdmpp_h200.json"),
    "chaos": functools.partial(storm.drills, RESULTS / "chaos.json"),
    "storm": functools.partial(storm.table, RESULTS / "storm.json"),
    "storm_outside": functools.partial(storm.table, RESULTS / "storm_outside.json"),
    "optimus_executed": functools.partial(optimus.executed, RESULTS / "optimus_executed.json"),
    "optimus_kernels": functools.partial(optimus.kernel_times, RESULTS / "optimus_simulated.json"),
    "optimus_strong": functools.partial(optimus.strong, RESULTS / "optimus_simulated.json"),
    "optimus_strong_two": functools.partial(
        optimus.strong, RESULTS / "optimus_simulated.json", "two"
    ),
    **{
        f"optimus_{part}": functools.partial(
            optimus.others, RESULTS / "optimus_simulated.json", part
        )
        for part in ("weak", "dual", "small")
    },
    "overlap_gather": overlap.gather,
    "overlap_ops": functools.partial(overlap.ops, RESULTS / "flux_simulated.json"),
    "overlap_layers": functools.partial(overlap.layers, RESULTS / "comet_simulated.json"),
    "overlap_models": functools.partial(
        overlap.models, RESULTS / "flux_simulated.json", RESULTS / "comet_simulated.json"
    ),
    "overlap_repository": functools.partial(overlap.repository, RESULTS / "comet_simulated.json"),
    **{
        f"gpu_{table.__name__}": functools.partial(table, RESULTS)
        for table in (
            gpu.summary,
            gpu.machines,
            gpu.peaks,
            gpu.checks,
            gpu.verdicts,
            gpu.training,
            gpu.serving,
            gpu.decoding,
            gpu.bert,
        )
    },
    **{
        f"{folder}_overlap": functools.partial(gpu.overlap, RESULTS, folder)
        for folder in ("collective", "expert")
    },
    "gpu_tuned": functools.partial(gpu.tuned, ROOT / "pallas_kernels" / "tuned"),
    "hybridflow_mapping": functools.partial(
        hybridflow_mapping.figures, RESULTS / "hybridflow_mapping.json"
    ),
    "papers": papers,
    "nano_output": nano_output,
    "nano_figures": nano_figures,
    "bench_train": bench_train,
    "bench_serve": bench_serve,
    "step_budget": functools.partial(gpu.configurations, RESULTS / "step_budget.json"),
    "step_memory": functools.partial(gpu.memory, RESULTS / "step_memory.json"),
    "step_causes": functools.partial(gpu.causes, RESULTS / "step_budget.json", 4),
    "megascale_mfu": megascale_mfu,
    "megascale_ablation": megascale_ablation,
    "schedules": schedules,
    "plans": plans,
    "plan_search": plan_search,
    **{f"{folder}_floors": functools.partial(gpu.floors, RESULTS, folder) for folder in gpu.SIDES},
    **{
        f"kernel_report_{folder}": functools.partial(gpu.compiled, RESULTS, folder)
        for folder in gpu.REPORTED
    },
    "bytecheckpoint": functools.partial(
        bytecheckpoint.seconds_table, RESULTS / "bytecheckpoint.json"
    ),
    "bytetransformer_counts": bytetransformer_counts,
    "bytetransformer_steps": bytetransformer_steps,
    "bytetransformer_times": bytetransformer_times,
    "tilewise_quality": functools.partial(tilewise.quality_table, RESULTS / "tilewise.json"),
    "tilewise_claims": functools.partial(tilewise.claims_table, RESULTS / "tilewise.json"),
    "tilewise_prices": functools.partial(tilewise.prices_table, RESULTS / "tilewise.json"),
    "tilewise_speeds": functools.partial(tilewise.speeds_table, RESULTS / "tilewise.json"),
    **{
        f"sdp4bit_{name}": functools.partial(table, RESULTS / "sdp4bit.json")
        for name, table in {
            "losses": sdp4bit.losses,
            "claims": sdp4bit.claims_table,
            "sent": sdp4bit.sent,
            "estimates": sdp4bit.estimates_table,
        }.items()
    },
    **minder.tables(RESULTS),
    **qsync.tables(RESULTS),
    **qsync_run.tables(RESULTS),
    **{
        f"serving_{table.__name__}": functools.partial(table, RESULTS / "serving.json")
        for table in (serving.offline, serving.online, serving.numerics)
    },
    "cdmpp_replay": functools.partial(cdmpp_replay.steps_table, RESULTS / "cdmpp_replay.json"),
    "vision_nano": functools.partial(vision.table, RESULTS / "vision_nano.json"),
    "visited": gpu.visited,
}


def fill(text: str) -> str:
    """Returns a document with every marked place generated anew."""

    def replace_one(match: re.Match) -> str:
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", replace_one, text, flags=re.DOTALL)


def main() -> int:
    """Returns 1 when --check finds a stale document."""
    stale = []
    for name in DOCUMENTS:
        before = (path := ROOT / name).read_text()
        if (after := fill(before)) != before:
            stale.append(name)
            if not CHECK.value:
                path.write_text(after)
    print(f"{'stale' if CHECK.value else 'rewritten'}: {', '.join(stale) or 'none'}")
    return int(CHECK.value and bool(stale))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # counting tiles needs no GPU
    sys.exit(config.run(main))
