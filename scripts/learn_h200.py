"""Adapts the shipped predictor to rows of one H200, and measures its errors there.

    uv run --extra aot scripts/learn_h200.py           # measures errors
    uv run --extra aot scripts/learn_h200.py --save    # also replaces the shipped predictor

The rows are instructions of this library's programs, timed by scripts/profile_programs.py
(labels.npz); bf16 products that scripts/gpu_check.py timed and that XLA runs as one launch; and the
forward pass of cuDNN's attention. A step that is compiled without a GPU contains our attention
kernel in the place of cuDNN's, so a row of attention has the record of our kernel and the time of
cuDNN's.
Errors are measured on four kinds of rows: on instructions of other families, of which each half is
predicted after adapting to the other half; on each attention, after adapting to all other rows; on
products that run as two launches, by the sum of both; and on the train step of the 1.2B decoder. No
fit uses rows of the last two kinds. The errors are written to experiments/results/cdmpp_h200.json.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.reports.cdmpp import unique_rows
from megajax.core import script
from megajax.core.hardware import parse_cluster
from megajax.cost.program import records
from megajax.cost.record import OpRecord
from megajax.monitor import results
from megajax.systems import aot as steps
from megajax.systems.cdmpp import Dataset, FarFromTraining, Predictor, step
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.predictor import DEFAULT
from pallas_kernels import aot
from pallas_kernels.attention import bench as attention
from pallas_kernels.gemm import bench as gemm
from pallas_kernels.quant_gemm import bench as quant_gemm
from scripts.gpu_session import training

FOLDER = Path(__file__).parents[1] / "experiments" / "results"
DEVICE, FAMILIES = "H200", ("encoder", "vit")
SAVE = flags.DEFINE_boolean("save", False, "replace the shipped predictor by what was learnt")
Product = tuple[str, list[OpRecord], float]  # a case, its launches, seconds


def products(file: dict[str, Any]) -> list[Product]:
    """Returns the library's bf16 products of a file of gpu_check.py, compiled for the same chip.

    Cases that are the same product (with a weight in other formats) are one, the first.
    """
    sides = {("gemm", c.name, "xla"): gemm.sides(c, "reference")["xla"] for c in gemm.CASES}
    sides |= {
        ("quant_gemm", c.name, "dense"): quant_gemm.sides(c, "reference")["dense"]
        for c in quant_gemm.CASES
    }
    unique: dict[tuple[str, ...], Product] = {}
    for row in file["rows"]:
        key = row.get("folder"), row.get("case"), row.get("implementation")
        if key in sides and row["direction"] == "forward" and "median_s" in row:
            launches = records(compiled(*sides[key]()))
            each = f"{key[0]} {key[1]}", launches, row["median_s"]
            unique.setdefault(tuple(one.hash for one in launches), each)
    return list(unique.values())


def compiled(function: Any, like: Any) -> jax.stages.Compiled:
    """Returns a program for one GPU of this kind."""
    place = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in like]
    return aot.compile(jax.jit(function).lower(*args))


def attentions(file: dict[str, Any]) -> list[tuple[OpRecord, float]]:
    """Returns (our kernel's record, cuDNN's seconds) of the cases that gpu_check.py timed
    forward."""
    times = {
        (row["case"], row["implementation"]): row["median_s"]
        for row in file["rows"]
        if row.get("folder") == "attention" and row["direction"] == "forward" and "median_s" in row
    }
    kernels = []
    for case in attention.CASES:
        is_packed = len(set(case.lengths)) > 1
        seconds = times.get((case.name, "cudnn packed" if is_packed else "cudnn padded"))
        if seconds is not None:
            text = compiled(*attention.ours(case, "hopper")).as_text()
            [told] = [one.flops for one in records(text, platform="gpu") if is_attention(one)]
            exact = records(text, platform="gpu", live_pairs=case.flops() / told)
            kernels += [(one, seconds) for one in exact if is_attention(one)]
    return kernels


def is_attention(one: OpRecord) -> bool:
    """Returns whether an operation is attention itself."""
    return one.kind == "attention"


def unknowing(predictor: Predictor) -> Predictor:
    """Returns the predictor without what it learnt from this device."""
    return dataclasses.replace(
        predictor,
        devices={k: v for k, v in predictor.devices.items() if k != DEVICE},
        cards={k: v for k, v in predictor.cards.items() if k != DEVICE},
        errors={k: v for k, v in predictor.errors.items() if k != f"adapted {DEVICE}"},
        learnt={k: v for k, v in predictor.learnt.items() if k != DEVICE},
    )


def judged(name: str, ratio: np.ndarray, inside: np.ndarray | None = None) -> dict[str, Any]:
    """Returns a row of the result. ratio: predicted divided by measured seconds."""
    wrong = np.abs(ratio - 1)
    return {
        "what": name,
        "rows": len(ratio),
        "mean": float(wrong.mean()),
        "median": float(np.median(wrong)),
        "ratio": float(np.median(ratio)),
        "coverage": None if inside is None else float(inside.mean()),
    }


def of_rows(name: str, predictor: Predictor, data: Dataset) -> dict[str, Any]:
    """Returns the errors of single launches."""
    seconds, sigma = predictor.predict(data.records, data.cards[DEVICE])
    inside = np.abs(seconds - data.seconds) <= 1.645 * sigma
    return judged(name, seconds / data.seconds, inside)


def of_products(
    name: str, predictor: Predictor, measured: list[Product], card: Any
) -> dict[str, Any]:
    """Returns the errors of whole programs."""
    sums = [
        predictor.predict(launches, card)[0] @ [one.executions for one in launches]
        for _, launches, _ in measured
    ]
    return judged(name, np.array(sums) / [seconds for *_, seconds in measured])


def with_rows(data: Dataset, rows: list[tuple[OpRecord, float]]) -> Dataset:
    """Returns the dataset with these rows of the same device added."""
    seconds = np.concatenate([data.seconds, [seconds for _, seconds in rows]])
    every = [*data.records, *(one for one, _ in rows)]
    return Dataset(every, seconds, [DEVICE] * len(every), data.cards, data.facts)


def of_attention(name: str, before: Predictor, data: Dataset, rows: Any) -> dict[str, Any]:
    """Returns the errors of each attention by a predictor adapted to all other rows."""
    ratios = []
    for one, seconds in rows:
        others = [row for row in rows if row[0] is not one]
        adapted = before.adapt(with_rows(data, others))
        ratios.append(adapted.predict([one], data.cards[DEVICE])[0][0] / seconds)
    return judged(name, np.array(ratios))


def of_step(predictors: dict[str, Predictor]) -> list[dict[str, Any]]:
    """Returns errors of the train step that gpu_session/training.py measured, predicted from its
    compiled program."""
    file = json.loads((FOLDER / "nvidia_h200_train.json").read_text())
    [row] = [row for row in file["rows"] if row["item"] == "step" and "median_s" in row]
    cluster = parse_cluster("h200:1x1")
    cfg = training.configuration(row["variant"], rehearsal=False)
    program = steps.compile_step(cfg, cluster, fused=True)
    assert program.attention == "hopper"
    all_times = {"assumed efficiencies": step.assumed}
    all_times |= {name: one.predict for name, one in predictors.items()}
    rows = []
    for name, times in all_times.items():
        told = step.predict(program.text, cluster, times, live_pairs=1 / row["segments"])
        inside = abs(told.seconds - row["median_s"]) <= 1.645 * told.sigma
        rows.append(
            judged(f"step of the 1.2B decoder, {name}", np.array([told.seconds / row["median_s"]]))
            | {
                "coverage": float(inside),
                "predicted_s": told.seconds,
                "sigma_s": told.sigma,
                "measured_s": row["median_s"],
            }
        )
    return rows


def main(_: list[str]) -> int:
    """Writes cdmpp_h200.json; with --save also the shipped predictor, adapted to all rows."""
    warnings.simplefilter("ignore", FarFromTraining)  # that is what this measures
    labels = Labels.load(FOLDER / "cdmpp_h200_labels.npz")
    small = labels.dataset
    first = unique_rows(small)
    is_one = np.isin(labels.families[first], FAMILIES)
    small, card = small[first], small.cards[DEVICE]
    file = json.loads((FOLDER / "nvidia_h200_kernels.json").read_text())
    every, attended = products(file), attentions(file)
    one = [each for each in every if len(each[1]) == 1]
    two = [each for each in every if len(each[1]) > 1]
    multiplied = with_rows(small, [(launches[0], seconds) for _, launches, seconds in one])
    before = unknowing(Predictor.load())
    after = before.adapt(with_rows(multiplied, attended))
    rows = [
        of_rows("instructions, nothing known of the GPU", before, small),
        of_rows(
            "instructions of other families, adapted on encoders and ViT",
            before.adapt(small[is_one]),
            small[~is_one],
        ),
        of_rows(
            "instructions of other families, adapted on decoders and experts",
            before.adapt(small[~is_one]),
            small[is_one],
        ),
        of_products("products of two launches, nothing known of the GPU", before, two, card),
        of_products(
            "products of two launches, adapted on instructions and products of one",
            after,
            two,
            card,
        ),
        of_attention("attention, adapted on all other rows", before, multiplied, attended),
        *of_step({"nothing known of the GPU": before, "adapted": after}),
    ]
    facts = results.facts(small.facts["device"], "measured on NVIDIA H200, predicted on a CPU")
    results.write(FOLDER / "cdmpp_h200.json", facts, rows)
    print(json.dumps(rows, indent=2))
    if SAVE.value:
        after.save(DEFAULT)
    return 0


if __name__ == "__main__":
    script.start(main)
