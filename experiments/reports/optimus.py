"""Simulates Optimus' experiments (arXiv 2408.03505, section 5): rows, tables and the figure.

Times are SIMULATED (megajax/systems/optimus). The paper gives no efficiency of its kernels, no
sequence length and no bandwidth; what stands for them:

- 2,048 tokens and 2,048 patches a row (chosen: with them the paper's step times have its MFU of
  34 % in Megatron-LM's formula, 2104.04473 section 5.1, which counts recomputation).
- LINK: a collective of GPT-175B's tensor parallelism takes the paper's 300 us.
- MATMUL, 'one': products and attention of both networks reach this share of the peak. With it the
  simulated step of 1,536 GPUs takes the paper's 9.80 s. Nothing else is fitted.
- 'two': the encoder has a share of its own, with which the forward pass of a block of ViT-22B takes
  the paper's 1.4 ms; that of the decoder is fitted as above.

The paper's search counts no time for the encoder's own data parallelism. Rows have the steps
without it, which stand beside the paper's, and with it (`exchanged_s`).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.reports.reporting import Row, markdown_table, read, rows_of, source, written
from megajax.core.hardware import CARDS, Cluster
from megajax.cost.base import mfu, train_flops_per_token
from megajax.cost.roofline import Roofline
from megajax.models.vit import VitConfig
from megajax.models.vlm import PRESETS, VITS
from megajax.monitor import results
from megajax.schedule import trace
from megajax.schedule.ir import Span, Task, Timeline
from megajax.systems.optimus.planner import Plan, plan, rivals, simulate
from megajax.systems.optimus.problem import Degrees, encoder_networks, network

TOKENS = PATCHES = 2048
LINK = 329e9  # bytes a second; see above
MATMUL = {"one": (0.31, 0.31), "two": (0.284, 0.71)}  # (decoder, encoder)
FRACTION = 800  # of a step: gaps that a figure leaves out


class Case(NamedTuple):
    """A line of one of the paper's tables; times in seconds, shares of 1; None: not in it."""

    part: str
    name: str
    model: str
    cluster: Cluster
    cut: Degrees
    batch: int
    microbatch: int
    towers: tuple[str, ...] = ()
    optimus_s: float | None = None
    megatron_s: float | None = None
    balanced_s: float | None = None
    coarse: float | None = None
    fine: float | None = None
    speedup: float | None = None  # over Megatron-LM


def hopper(gpus: int) -> Cluster:
    """Returns a cluster of H100s whose tensor collectives take the paper's time."""
    return Cluster(dataclasses.replace(CARDS["H100"], link_bytes_per_s=LINK), gpus // 8, 8)


def cases() -> list[Case]:
    """Returns what is simulated: the configurations of the paper's experiments."""
    strong = (
        (1536, 9.80, 10.65, 10.43, 0.343, 0.575),
        (2048, 7.29, 8.26, 8.06, 0.458, 0.693),
        (3072, 4.87, 5.91, 5.87, 0.687, 0.85),
    )
    weak = (
        ("ViT-11B + LLAMA-70B", "vit_11b_llama_70b", 64, 4, 6, 32),
        ("ViT-22B + LLAMA-70B", "vit_22b_llama_70b", 128, 4, 6, 64),
        ("ViT-11B + GPT-175B", "vit_11b_gpt_175b", 256, 8, 12, 128),
        ("ViT-22B + GPT-175B", "vit_22b_gpt_175b", 512, 8, 12, 256),
    )
    pairs = (("vit_11b", "vit_5b", 1.25), ("vit_22b", "vit_5b", 1.26), ("vit_22b", "vit_11b", 1.27))
    large = "vit_22b_gpt_175b"
    out = [
        Case(
            "strong",
            f"{n:,} GPUs",
            large,
            hopper(n),
            Degrees(8, 8, n // 64, 12),
            1536,
            2,
            (),
            *times,
        )
        for n, *times in strong
    ]
    out += [
        Case("weak", name, model, hopper(n), Degrees(p, 8, n // (8 * p), v), batch, 2)
        for name, model, n, p, v, batch in weak
    ]
    out += [
        Case(
            "dual",
            f"{a[4:].upper()} + {b[4:].upper()}",
            large,
            hopper(512),
            Degrees(8, 8, 8, 12),
            256,
            2,
            (a, b),
            speedup=ratio,
        )
        for a, b, ratio in pairs
    ]
    small = Cluster(CARDS["A100"], 1, 8)
    times = {"optimus_s": 2.78, "megatron_s": 3.42, "balanced_s": 3.04}
    cut = Degrees(2, 4, 1, 4)
    out.append(Case("small", "ViT-3B + GPT-11B", "vit_3b_gpt_11b", small, cut, 16, 1, **times))
    return out


def options(case: Case, efficiency: str, exchanges: bool) -> dict[str, Any]:
    """Returns the keyword arguments of `plan` for a case."""
    decoder, encoder = (Roofline(matmul=m, attention=m) for m in MATMUL[efficiency])
    towers: tuple[VitConfig, ...] = tuple(VITS[name]() for name in case.towers)
    return {
        "batch": case.batch,
        "microbatch": case.microbatch,
        "seq_len": TOKENS,
        "patches": PATCHES,
        "towers": towers or None,
        "cost": decoder,
        "tower_cost": encoder,
        "exchanges": exchanges,
    }


def planned(case: Case, efficiency: str, exchanges: bool) -> Plan:
    """Returns the best plan of a case."""
    model = PRESETS[case.model]()
    return plan(model, case.cluster, case.cut, **options(case, efficiency, exchanges))[0]


def simulated(case: Case, efficiency: str) -> Row:
    """Returns the row of a case: its best plan, the rivals, and the paper's figures."""
    best, other = (planned(case, efficiency, exchanges) for exchanges in (False, True))
    job, encoder = best.job, best.encoder or case.cut
    tokens = job.batch * TOKENS
    load = job.decoder_load
    flops = train_flops_per_token(load, "megatron") * tokens
    flops += sum(train_flops_per_token(t, "megatron") * t.tokens for t in job.tower_loads)
    peak = case.cluster.card.peak("bfloat16")
    row: Row = {
        "part": case.part,
        "name": case.name,
        "efficiency": efficiency,
        "gpus": case.cluster.devices,
        "batch": case.batch,
        "microbatches": job.microbatches,
        "decoder": dataclasses.asdict(case.cut),
        "encoder": dataclasses.asdict(encoder),
        "parts": list(best.parts),
        "executable": best.executable,
        "optimus_s": best.step_s,
        "exchanged_s": other.step_s,
        "exchanged_encoder": dataclasses.asdict(other.encoder or case.cut),
        "decoder_s": best.decoder_s,
        "coarse_s": best.coarse_s,
        "coarse": best.coarse_share,
        "fine": best.fine_share,
        "memory_bytes": best.memory_bytes,
        "mfu": mfu(1 / best.step_s, flops, case.cluster.devices, peak),
        "reported": {
            name: value
            for name in ("optimus_s", "megatron_s", "balanced_s", "coarse", "fine", "speedup")
            if (value := getattr(case, name)) is not None
        },
    }
    return row | {f"{p.method}_s": p.step_s for p in rivals(job)}


def kernels(efficiency: str) -> Row:
    """Returns the times of a block of ViT-22B and of a collective, beside the paper's."""
    job = planned(cases()[0], efficiency, False).job
    tower = encoder_networks(job, 8)[0].layer
    decoder = network(job, job.decoder_load, 8, ("F", "B")).layer
    sent = next(k.seconds for k in decoder.forward if k.kind == "COMM")
    forward, backward = (sum(k.seconds for k in one) for one in tower)
    return {
        "part": "kernels",
        "efficiency": efficiency,
        "forward_s": forward,
        "backward_s": backward,
        "collective_s": sent,
        "reported": {"forward_s": 1.4e-3, "backward_s": 2.0e-3, "collective_s": 300e-6},
    }


def all_rows() -> Iterator[Row]:
    """Yields all rows, the paper's strong scaling with both sets of efficiencies."""
    for efficiency in MATMUL:
        yield kernels(efficiency)
    for case in cases():
        for efficiency in MATMUL if case.part == "strong" else ("one",):
            yield simulated(case, efficiency)


def paper(out: str) -> int:
    """Simulates the paper's tables and draws a figure; the rows go to optimus_simulated.json.

    out: the folder for results.
    """
    path = results.writable_folder(out) / "optimus_simulated.json"
    about: dict[str, Any] = results.facts("H100 and A100 figures", "simulated")
    about |= {"tokens": TOKENS, "patches": PATCHES, "matmul": MATMUL, "link_bytes_per_s": LINK}
    rows: list[Row] = []
    for row in written(all_rows(), path, about, rows):
        if row["part"] == "kernels":
            continue
        print(
            f"simulated | {row['part']} {row['name']}, efficiencies {row['efficiency']!r} | "
            f"Optimus {row['optimus_s']:.2f} s, balanced {row['balanced_s']:.2f}, Megatron "
            f"{row['megatron_s']:.2f} s | in bubbles {100 * row['coarse']:.0f} % coarse, "
            f"{100 * row['fine']:.0f} % fine",
            flush=True,
        )
    shown = draw(path.with_suffix(""))
    print(f"{shown}; nothing was timed.")
    print(path)
    return 0


# ---- the figure


def outlined(timeline: Timeline) -> Timeline:
    """Returns a timeline in which the pieces of one task are one bar, without links and with the
    network of one stage, which is that of all.

    The encoder's pieces stay apart where other work lies between them, and have the darkest shade.
    """
    last = max(span.task.chunk for span in timeline.spans)
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.spans:
        resource = span.task.resource
        if resource.startswith("stage") or resource == "network 0":
            name = span.task.name.rpartition(" kernel ")[0] or span.task.name
            groups.setdefault((resource, name), []).append(span)
    bars = []
    shortest = timeline.makespan / FRACTION
    for (resource, name), spans in groups.items():
        spans.sort(key=lambda span: span.start)
        kinds = {span.task.kind for span in spans}
        runs: list[list[float]] = []
        for span in spans:
            near = span.start - runs[-1][1] <= shortest if runs else False
            if near or (runs and not kinds & {"EF", "EB"}):
                runs[-1][1] = span.end
            else:
                runs.append([span.start, span.end])
        first = spans[0].task
        for number, (start, end) in enumerate(runs):
            kind = max(kinds - {"COMM"}, default="COMM", key=lambda k: (len(k), k))
            shown = first.microbatch if end - start > 8 * shortest else -1
            chunk = last if kind in ("EF", "EB") else first.chunk
            label, seconds = f"{name} {number}", end - start
            task = Task(label, resource, (), seconds, kind, shown, chunk=chunk)
            bars.append(Span(task, start, end))
    bars.sort(key=lambda span: len(span.task.kind) == 2)  # the encoder's work above the decoder's
    return Timeline(tuple(bars), timeline.resources)


def draw(path: Path) -> str:
    """Draws a step of the smallest pair before and after. Returns the claim."""
    case = next(one for one in cases() if one.part == "weak")
    best = planned(case, "one", True)
    before = {p.method: p for p in rivals(best.job)}
    claim = (
        f"{case.name}, {case.cluster.devices} GPUs, simulated: a step takes {best.step_s:.2f} s "
        f"with the encoder in the decoder's bubbles, {before['balanced'].step_s:.2f} s if all "
        f"layers are balanced, {before['megatron'].step_s:.2f} s with the encoder in one stage"
    )
    first, balanced = before["megatron"], before["balanced"]
    timelines = {
        f"{case.name}, {case.cluster.devices} GPUs, simulated. The encoder in the first stage: "
        f"{first.step_s:.2f} s": outlined(simulate(first)),
        f"all layers balanced: {balanced.step_s:.2f} s": outlined(simulate(balanced)),
    }
    timelines[f"the encoder in bubbles: {best.step_s:.2f} s"] = outlined(simulate(best))
    for suffix in (".svg", ".png"):
        trace.gantt(timelines, path.with_suffix(suffix))
    return claim


# ---- tables


def _pair(ours: float, theirs: float | None, digits: int = 2) -> str:
    return f"{ours:.{digits}f}" + ("" if theirs is None else f" ({theirs:.{digits}f})")


def _percent(ours: float, theirs: float | None) -> str:
    return f"{100 * ours:.0f}" + ("" if theirs is None else f" ({100 * theirs:.1f})")


def strong(path: Path, efficiency: str = "one") -> str:
    """Returns the table of strong scaling; the paper's figures are in brackets."""
    result = read(path)
    lines = []
    for row in rows_of(result, part="strong", efficiency=efficiency):
        theirs = row["reported"]
        lines.append(
            (
                f"{row['gpus']:,}",
                row["microbatches"],
                _pair(row["balanced_s"], theirs["balanced_s"]),
                _pair(row["optimus_s"], theirs["optimus_s"]),
                _pair(
                    row["balanced_s"] / row["optimus_s"],
                    theirs["balanced_s"] / theirs["optimus_s"],
                ),
                _percent(row["coarse"], theirs["coarse"]),
                _percent(row["fine"], theirs["fine"]),
                f"{row['decoder_s']:.2f}",
                f"{row['exchanged_s']:.2f}",
                _cut(row["encoder"]),
            )
        )
    heads = (
        "GPUs",
        "microbatches",
        "balanced, s",
        "Optimus, s",
        "times faster",
        "in bubbles, coarse, %",
        "in bubbles, fine, %",
        "decoder alone, s",
        "with the encoder's exchange, s",
        "encoder: stages x tensor",
    )
    return f"{markdown_table(heads, lines)}\n\n{source(result)}"


def _cut(cut: dict[str, int]) -> str:
    return f"{cut['pipe']} x {cut['tensor']}"


def others(path: Path, part: str) -> str:
    """Returns the table of weak scaling, of two encoders, or of the small pair."""
    result = read(path)
    lines = []
    for row in rows_of(result, part=part):
        theirs = row["reported"]
        step, before = theirs.get("optimus_s"), theirs.get("balanced_s")
        megatron = theirs.get("megatron_s")
        reported = theirs.get("speedup", megatron and step and megatron / step)
        lines.append(
            (
                row["name"],
                row["gpus"],
                row["microbatches"],
                _pair(row["optimus_s"], step),
                _pair(row["balanced_s"] / row["optimus_s"], before and step and before / step),
                _pair(row["uniform_s"] / row["optimus_s"], None),
                _pair(row["megatron_s"] / row["optimus_s"], reported),
                _percent(row["coarse"], None),
                _percent(row["fine"], None),
                f"{row['exchanged_s']:.2f}",
                _cut(row["encoder"]),
            )
        )
    heads = (
        "networks",
        "GPUs",
        "microbatches",
        "Optimus, s",
        "times balanced",
        "times uniform",
        "times Megatron",
        "coarse, %",
        "fine, %",
        "with the encoder's exchange, s",
        "encoder: stages x tensor",
    )
    return f"{markdown_table(heads, lines)}\n\n{source(result)}"


def executed(path: Path) -> str:
    """Returns the table of a run of each schedule.

    rows: schedule, ticks, idle and passes (forward passes of a chunk, by FLOPs; as the run says
    them), steps, the held-out loss, the share of exact answers, cpu_s of the whole run.
    """
    result = read(path)
    heads = (
        "tower",
        "ticks of a step",
        "stages idle, by FLOPs",
        "forward passes of a chunk, by FLOPs",
        "held-out loss, nats",
        "exact match",
        "CPU-s of the run",
    )
    lines = [
        (
            row["schedule"],
            row["ticks"],
            f"{row['idle']:.0%}",
            f"{row['passes']:.1f}",
            f"{row['loss']:.3f}",
            f"{row['exact']:.1%} of {row['images']}",
            f"{row['cpu_s']:.0f}",
        )
        for row in result["rows"]
    ]
    return f"{markdown_table(heads, lines)}\n\n{source(result)}"


def kernel_times(path: Path) -> str:
    """Returns the table of what the simulated kernels take."""
    result = read(path)
    lines = [
        (
            ", ".join(str(share) for share in result["matmul"][row["efficiency"]]),
            *(
                _pair(scale * row[name], scale * row["reported"][name], digits)
                for name, scale, digits in (
                    ("forward_s", 1e3, 1),
                    ("backward_s", 1e3, 1),
                    ("collective_s", 1e6, 0),
                )
            ),
        )
        for row in rows_of(result, part="kernels")
    ]
    heads = (
        "share of the peak: decoder, encoder",
        "block of ViT-22B forward, ms",
        "backward, ms",
        "collective of GPT-175B, us",
    )
    return f"{markdown_table(heads, lines)}\n\n{source(result)}"
