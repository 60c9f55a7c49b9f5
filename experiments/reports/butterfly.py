"""The butterfly paper's table: backbones and training sets, over seeds, as intervals.

"The automatic identification of butterfly species" (Xie et al., arXiv 1803.06626) trains Faster
R-CNN with three backbones on two training sets: A has half of the images in the habitat and all
images of specimens, B the same half and the specimens of the species in the habitat. It judges the
other half. Its photographs are not public here, so the runs learn from drawn ones
(megajax/data/butterflies.py, `hard`), on backbones at a quarter of their width.

Each run is a process of experiments/butterfly.py in the folder OUT/PROTOCOL-BACKBONE-SEED.
A run that was cut off goes on from its newest checkpoint, one that ended has a row.json there.
"""

import itertools
import math
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.reports.reporting import Row, markdown_table, read, rows_of, source
from megajax.core.errors import UserError
from megajax.core.files import json_text, write_whole
from megajax.monitor.records import rows_by_step

PROTOCOLS, BACKBONES = ("A", "B"), ("zf", "vgg_m", "vgg16")
TITLES = {"zf": "ZF", "vgg_m": "VGG-M", "vgg16": "VGG16"}
# Steps of a run with each backbone: what twelve minutes of a CPU core allow, so runs are alike in
# time, not in steps. ZF's are measured (2 CPU cores beside other work, 2026-11-30: 655 CPU-s);
# the others follow from the gradients of 16 images of 128 pixels, 0.44, 0.78 and 1.32 CPU-s.
STEPS = {"zf": 1100, "vgg_m": 650, "vgg16": 380}
PAPER_WORST = 0.60  # (arXiv 1803.06626, abstract: the mean average precision of its worst run)
LATER = 0.797  # (IJMLC 2021, abstract: RetinaNet of the same group on the same benchmark)
CONFIDENCE = 0.95


def runs(
    script: Path,
    flags: Sequence[str],
    folder: Path,
    seeds: int,
    protocols: Sequence[str],
    backbones: Sequence[str],
) -> Iterator[Row]:
    """Yields a row of each run, trained now or before. flags: of all of them."""
    for seed, backbone, protocol in itertools.product(range(seeds), backbones, protocols):
        yield run(script, flags, folder, protocol, backbone, seed)


def run(
    script: Path, flags: Sequence[str], folder: Path, protocol: str, backbone: str, seed: int
) -> Row:
    """Returns the row of a run, after it has ended. Raises: UserError when it fails."""
    home = folder / f"{protocol}-{backbone}-{seed}"
    file = home / "row.json"
    if file.exists():
        return read(file)
    decided = [f"--protocol={protocol}", f"--backbone={backbone}", f"--train.seed={seed}"]
    if not any(flag.startswith("--train.steps=") for flag in flags):
        decided.append(f"--train.steps={STEPS[backbone]}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(script), "train", *flags, *decided, f"--run_dir={home}"]
    with subprocess.Popen(command) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait()  # it saves
            raise
    if code:
        raise UserError(f"the run in {home} ended with exit code {code}; the same command goes on")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    evaluations = rows_by_step(home / "metrics.jsonl", "eval_voc10")
    if not evaluations:
        raise UserError(f"{home} has no evaluation; give --eval.batches of 1 or more")
    step = max(evaluations)
    row = {
        "protocol": protocol,
        "backbone": backbone,
        "seed": seed,
        "steps": step,
        **{name: evaluations[step].get(f"eval_{name}") for name in MEASURES},
        "images": evaluations[step]["eval_images"],
        # Of this start alone, where the run was cut off before.
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }
    write_whole(file, json_text(row))
    return row


MEASURES = ("voc10", "voc07", "coco_ap50", "coco_ap")


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns (the mean, half of its 95 % interval by Student's t); None of a single value."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), None
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return float(np.mean(values)), t * float(np.std(values, ddof=1)) / math.sqrt(n)


def shown(values: Sequence[float]) -> str:
    """Returns '0.612 ± 0.034', or the mean alone."""
    mean, half = interval(values)
    return f"{mean:.3f}" if half is None else f"{mean:.3f} ± {half:.3f}"


def verdict(rows: Sequence[Row]) -> str:
    """Returns which protocol is better, by pairs of runs of equal backbone and seed."""
    of = {(r["backbone"], r["seed"], r["protocol"]): r["voc10"] for r in rows}
    pairs = [
        of[backbone, seed, "A"] - x
        for (backbone, seed, protocol), x in of.items()
        if protocol == "B" and (backbone, seed, "A") in of
    ]
    if not pairs:
        return "No backbone and seed was trained by both protocols."
    mean, half = interval(pairs)
    said = f"A minus B: {shown(pairs)} in {len(pairs)} pairs of equal backbone and seed"
    if half is None:
        return f"{said}; one pair says nothing of which is better."
    if abs(mean) <= half:
        return f"{said}: the interval contains 0, so neither protocol is better as measured."
    return f"{said}: protocol {'A' if mean > 0 else 'B'} is better."


def best(rows: Sequence[Row]) -> float:
    """Returns the best mean over seeds of a backbone and protocol."""
    of: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        of.setdefault((row["backbone"], row["protocol"]), []).append(row["voc10"])
    return max(float(np.mean(values)) for values in of.values())


def markdown(result: dict[str, Any]) -> str:
    """Returns the table of a result file with what it says."""
    heads = ("backbone", "protocol", "mAP (VOC 2010)", "mAP (VOC 2007)", "seeds", "steps", "CPU-s")
    lines = []
    for backbone, protocol in itertools.product(BACKBONES, PROTOCOLS):
        same = rows_of(result, backbone=backbone, protocol=protocol)
        if same:
            area, points = ([r[n] for r in same] for n in ("voc10", "voc07"))
            seconds = max(r["cpu_s"] for r in same)
            steps = max(r["steps"] for r in same)
            line = (TITLES[backbone], protocol, shown(area), shown(points), len(same), steps)
            lines.append((*line, f"{seconds:.0f}"))
    note = (
        f"{verdict(result['rows'])} Best mean of a backbone and protocol: "
        f"{best(result['rows']):.3f}; the paper's worst run "
        f"has {PAPER_WORST:.2f}, and its group's later detector {LATER:.3f}, on photographs. "
        "Intervals of 95 % over seeds, which draw the halves, the parameters and the order of the "
        "images; CPU-s: of the longest run, imports and evaluations included."
    )
    return f"{markdown_table(heads, lines)}\n\n{note}\n\n{source(result)}"


def sets(result: dict[str, Any]) -> str:
    """Returns the table of runs of the presets easy and hard, from a result file.

    rows: preset, seed, steps, images (held out), classes (that these show), voc10, and cpu_s of the
    run with its imports and evaluations, null where it was not recorded.
    """
    heads = ("preset", "seed", "steps", "held-out images", "classes", "mAP (VOC 2010)", "CPU-s")
    lines = [
        (
            f"`{row['preset']}`",
            row["seed"],
            row["steps"],
            row["images"],
            row["classes"],
            f"{row['voc10']:.3f}",
            "not recorded" if row["cpu_s"] is None else f"{row['cpu_s']:.0f}",
        )
        for row in result["rows"]
    ]
    return f"{markdown_table(heads, lines)}\n\n{source(result)}"
