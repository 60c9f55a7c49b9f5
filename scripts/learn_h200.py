"""What one H200 says of the shipped predictor, and what the predictor learns from it.

    uv run --extra aot scripts/learn_h200.py           # measures errors
    uv run --extra aot scripts/learn_h200.py --save    # and ships what is learnt

Rows: instructions of this library's programs, timed by scripts/profile_programs.py (labels.npz),
and bf16 products that gpu_check.py timed beside its kernels and of which XLA makes one launch.
Judged: programs of other families, each half adapted on the other; and products of which XLA makes
two launches, which no fit reads: their sum is compared. Writes experiments/results/cdmpp_h200.json.
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
from megajax.cost.program import records
from megajax.cost.record import OpRecord
from megajax.monitor import results
from megajax.systems.cdmpp import Dataset, FarFromTraining, Predictor
from megajax.systems.cdmpp.files import DEFAULT
from megajax.systems.cdmpp.labels import Labels
from pallas_kernels import aot
from pallas_kernels.gemm import bench as gemm
from pallas_kernels.quant_gemm import bench as quant_gemm

FOLDER = Path(__file__).parents[1] / "experiments" / "results"
DEVICE, FAMILIES = "H200", ("encoder", "vit")
SAVE = flags.DEFINE_boolean("save", False, "replace the shipped predictor by what was learnt")
Product = tuple[str, list[OpRecord], float]  # a case, its launches, seconds


def products(file: dict[str, Any]) -> list[Product]:
    """The library's bf16 products of a file of gpu_check.py, compiled for the same chip here.

    Of cases that are the same product (its weight had other bits beside it), the first.
    """
    place = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())
    sides = {("gemm", c.name, "xla"): gemm.sides(c, "reference")["xla"] for c in gemm.CASES}
    sides |= {
        ("quant_gemm", c.name, "dense"): quant_gemm.sides(c, "reference")["dense"]
        for c in quant_gemm.CASES
    }
    found: dict[tuple[str, ...], Product] = {}
    for row in file["rows"]:
        key = row.get("folder"), row.get("case"), row.get("implementation")
        if key in sides and row["direction"] == "forward" and "median_s" in row:
            function, like = sides[key]()
            args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in like]
            compiled = aot.compile(jax.jit(function).lower(*args))
            launches = records(compiled)
            each = f"{key[0]} {key[1]}", launches, row["median_s"]
            found.setdefault(tuple(one.hash for one in launches), each)
    return list(found.values())


def unknowing(predictor: Predictor) -> Predictor:
    """The predictor without what it learnt from this device."""
    return dataclasses.replace(
        predictor,
        devices={k: v for k, v in predictor.devices.items() if k != DEVICE},
        cards={k: v for k, v in predictor.cards.items() if k != DEVICE},
        errors={k: v for k, v in predictor.errors.items() if k != f"adapted {DEVICE}"},
        learnt={k: v for k, v in predictor.learnt.items() if k != DEVICE},
    )


def judged(name: str, ratio: np.ndarray, inside: np.ndarray | None = None) -> dict[str, Any]:
    """A row of the result. ratio: predicted over measured."""
    wrong = np.abs(ratio - 1)
    return {
        "what": name, "rows": len(ratio), "mean": float(wrong.mean()),
        "median": float(np.median(wrong)), "ratio": float(np.median(ratio)),
        "coverage": None if inside is None else float(inside.mean()),
    }  # fmt: skip


def of_rows(name: str, predictor: Predictor, data: Dataset) -> dict[str, Any]:
    """Errors of single launches."""
    seconds, sigma = predictor.predict(data.records, data.cards[DEVICE])
    inside = np.abs(seconds - data.seconds) <= 1.645 * sigma
    return judged(name, seconds / data.seconds, inside)


def of_products(name: str, predictor: Predictor, found: list[Product], card: Any) -> dict[str, Any]:
    """Errors of whole programs."""
    sums = [
        predictor.predict(launches, card)[0] @ [one.executions for one in launches]
        for _, launches, _ in found
    ]
    return judged(name, np.array(sums) / [seconds for *_, seconds in found])


def main(_: list[str]) -> int:
    """Writes cdmpp_h200.json; with --save also the shipped predictor, adapted to all rows."""
    warnings.simplefilter("ignore", FarFromTraining)  # that is what this measures
    labels = Labels.load(FOLDER / "cdmpp_h200_labels.npz")
    small = labels.dataset
    first = unique_rows(small)
    is_one = np.isin(labels.families[first], FAMILIES)
    small, card = small[first], small.cards[DEVICE]
    every = products(json.loads((FOLDER / "nvidia_h200_kernels.json").read_text()))
    one = [each for each in every if len(each[1]) == 1]
    two = [each for each in every if len(each[1]) > 1]
    whole = Dataset(
        [*small.records, *(launches[0] for _, launches, _ in one)],
        np.concatenate([small.seconds, [seconds for *_, seconds in one]]),
        [DEVICE] * (len(small) + len(one)), small.cards, small.facts,
    )  # fmt: skip
    before = unknowing(Predictor.load())
    after = before.adapt(whole)
    rows = [
        of_rows("instructions, nothing known of the GPU", before, small),
        of_rows("instructions of other families, adapted on encoders and ViT",
                before.adapt(small[is_one]), small[~is_one]),
        of_rows("instructions of other families, adapted on decoders and experts",
                before.adapt(small[~is_one]), small[is_one]),
        of_products("products of two launches, nothing known of the GPU", before, two, card),
        of_products("products of two launches, adapted on instructions and products of one",
                    after, two, card),
    ]  # fmt: skip
    facts = results.facts(small.facts["device"], "measured on NVIDIA H200, predicted on a CPU")
    results.write(FOLDER / "cdmpp_h200.json", facts, rows)
    print(json.dumps(rows, indent=2))
    if SAVE.value:
        after.save(DEFAULT)
    return 0


if __name__ == "__main__":
    script.start(main)
