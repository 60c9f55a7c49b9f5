"""Every experiment: its paper, one line about it, and the smallest commands that show it.

`megajax experiments` lists them and `megajax experiments --run` runs them
(scripts/run_experiments.py); `.ci/run` runs the same list. Not here: what a command shows; that is
in its own file. No jax.
"""

import base64
import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

LAST_LINES = 15  # (chosen) of an experiment's output on the page
MOST_BYTES = 2**21  # (chosen) of a picture, and of all output that is read
MOST_PICTURES = 8  # (chosen) of an experiment
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """An experiment.

    commands: what is behind `python`, with {out} for the folder of all results, {cache} for that of
    compiled programs. needs: entries whose results they read.
    """

    paper: str
    about: str
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()


# Their order is that in which they are run: what others read comes first.
ENTRIES = {
    "pretrain": Entry(
        "MegaScale, arXiv 2402.15627",
        "a small decoder learns Python's standard library on 8 emulated devices",
        ("experiments/pretrain.py --run_dir={out}/pretrain --cache_dir={cache}",),
    ),
    "finetune": Entry(
        "BERT, arXiv 1810.04805",
        "an encoder learns labels of text",
        ("experiments/finetune.py --run_dir={out}/finetune --cache_dir={cache}",),
    ),
    "hybridflow": Entry(
        "HybridFlow, arXiv 2409.19256",
        "reinforcement learning of a decoder",
        ("experiments/hybridflow.py --preset=tiny --run_dir={out}/hybridflow --cache_dir={cache}",),
    ),
    "butterfly": Entry(
        "Butterfly detector, arXiv 1803.06626",
        "a detector learns drawn butterflies, and is judged",
        (
            "experiments/butterfly.py train --preset=tiny --run_dir={out}/butterfly "
            "--cache_dir={cache}",
            "experiments/butterfly.py evaluate --run_dir={out}/butterfly --cache_dir={cache}",
        ),
    ),
    "optimus": Entry(
        "Optimus, arXiv 2408.03505",
        "a vision-language model, and its tower in a pipeline's idle slots",
        (
            "experiments/optimus.py --preset=tiny --run_dir={out}/optimus --cache_dir={cache}",
            "experiments/optimus.py --preset=tiny --mesh.pipe=4 --mesh.data=2 "
            "--encoder.schedule=bubbles --run_dir={out}/bubbles --cache_dir={cache}",
        ),
    ),
    "plan": Entry(
        "MegaScale, arXiv 2402.15627",
        "memory and time of a run on 8 H100s, compiled without one",
        ("experiments/plan.py --cluster=h100:1x8 --optim.name=adamw --out={out}/plan",),
    ),
    "megascale_ablation": Entry(
        "MegaScale, arXiv 2402.15627",
        "the ablation of table 3 by the cost model",
        ("experiments/megascale_ablation.py --out={out}/megascale_ablation",),
    ),
    "schedules": Entry(
        "GPipe to zero bubble",
        "pipeline schedules side by side",
        ("experiments/schedules.py --out={out}/schedules",),
    ),
    "cdmpp": Entry(
        "CDMPP, arXiv 2311.09690",
        "the time of a program, predicted and replayed",
        (
            "experiments/cdmpp.py predict --out={out}/cdmpp",
            "experiments/cdmpp.py replay --configurations=short --others=8 --passes=6 "
            "--out={out}/cdmpp",
        ),
    ),
    "bytetransformer": Entry(
        "ByteTransformer, arXiv 2210.03052",
        "BERT without padding beside BERT with it",
        ("experiments/bytetransformer.py --out={out}/bytetransformer",),
    ),
    "bytecheckpoint": Entry(
        "ByteCheckpoint, arXiv 2407.20143",
        "what a save and a load cost the loop",
        ("experiments/bytecheckpoint.py --out={out}/bytecheckpoint",),
    ),
    "flux": Entry(
        "Flux, arXiv 2406.06858",
        "products that hide their communication, simulated",
        ("experiments/flux.py --out={out}/flux",),
    ),
    "comet": Entry(
        "COMET, arXiv 2502.19811",
        "expert layers that hide their communication, simulated",
        ("experiments/comet.py --out={out}/comet",),
    ),
    "tilewise": Entry(
        "Tile-Wise sparsity, arXiv 2008.13006",
        "a model is pruned by three patterns",
        (
            "experiments/tilewise.py --state={out}/tilewise --cache_dir={cache} "
            "--out={out}/tilewise",
        ),
    ),
    "sdp4bit": Entry(
        "SDP4Bit, arXiv 2410.15526",
        "gradients and weights in 4 bits on the wire",
        ("experiments/sdp4bit.py --state={out}/sdp4bit --cache_dir={cache} --out={out}/sdp4bit",),
    ),
    "serving": Entry(
        "Orca, PagedAttention, Sarathi-Serve",
        "continuous beside static batching",
        ("experiments/serving.py --out={out}/serving",),
    ),
    "minder": Entry(
        "Minder, arXiv 2411.01791",
        "the machine that is about to stop a job is named",
        (
            "experiments/minder.py --out={out}/minder",
            "experiments/minder.py time --time.machines=16 --time.minutes=5 --time.calls=1 "
            "--out={out}/minder",
        ),
    ),
    "llm_pq": Entry(
        "LLM-PQ, arXiv 2403.01136",
        "unlike GPUs serve a model in unlike bits",
        ("experiments/llm_pq.py --run --run_dir={out}/pretrain --out={out}/llm_pq",),
        needs=("pretrain",),
    ),
    "qsync": Entry(
        "QSync, arXiv 2407.02327",
        "one job on unlike GPUs, the weak ones with fewer bits",
        (
            "experiments/qsync.py plan --out={out}/qsync",
            "experiments/qsync.py run --ways=qsync --held_out=0 --train.steps=6 "
            "--train.global_batch=4 --eval.every=6 --eval.batches=1 --warm_up=1 --batches=1 "
            "--rows=2 --cache_dir={cache} --out={out}/qsync",
        ),
    ),
    "chaos": Entry(
        "MegaScale, arXiv 2402.15627, section 4",
        "a run under faults ends with the parameters of an undisturbed one",
        ("experiments/chaos.py --faults=1 --steps=24 --stall_s=30 --out={out}/chaos",),
    ),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment did. state: 'ok', 'failed with exit code 2', or 'stopped'."""

    name: str
    state: str
    seconds: float
    log: Path
    folders: tuple[Path, ...] = ()


def page(outcomes: Sequence[Outcome], title: str) -> str:
    """Returns one HTML page that needs no other file: state, last lines and pictures of each."""
    parts = [HEAD.format(title=html.escape(title))]
    rows = "".join(
        f'<tr><td><a href="#{o.name}">{o.name}</a></td><td>{html.escape(ENTRIES[o.name].paper)}'
        f"</td><td>{html.escape(o.state)}</td><td>{o.seconds:.0f} s</td></tr>"
        for o in outcomes
    )
    parts.append(f"<table><tr><th>experiment<th>paper<th>state<th>time</tr>{rows}</table>")
    for outcome in outcomes:
        entry, name = ENTRIES[outcome.name], outcome.name
        parts.append(
            f'<h2 id="{name}">{name}</h2><p>{html.escape(f"{entry.paper}: {entry.about}.")} '
            f"<b>{html.escape(outcome.state)}</b></p>"
        )
        lines = tail(outcome.log)
        parts.append(f"<pre>{html.escape(chr(10).join(lines))}</pre>")
        parts += [picture(path) for path in pictures(outcome.folders)]
    return "\n".join([*parts, "</body></html>\n"])


def tail(log: Path) -> list[str]:
    """Returns the last lines of a log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(log.stat().st_size - MOST_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        return []


def pictures(folders: Sequence[Path]) -> list[Path]:
    """Returns the pictures of folders, of PNG and SVG of one name the PNG."""
    named = {
        path.with_suffix(""): path
        for suffix in TYPES
        for folder in folders
        for path in sorted(folder.glob(f"*{suffix}"))
        if path.stat().st_size < MOST_BYTES
    }
    return list(named.values())[:MOST_PICTURES]


def picture(path: Path) -> str:
    """Returns a picture as part of a page. It runs no script: an SVG is an image too."""
    data = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.name)
    return (
        f'<figure><img alt="{name}" src="data:{TYPES[path.suffix]};base64,{data}">'
        f"<figcaption>{name}</figcaption></figure>"
    )


HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse }} td, th {{ padding: .2rem .8rem; text-align: left }}
pre {{ background: #f4f4f4; padding: .8rem; overflow-x: auto; font-size: 12px }}
img {{ max-width: 100% }} figure {{ margin: 1rem 0 }} figcaption {{ color: #666 }}
</style></head><body>
<h1>{title}</h1>"""
