"""The predictor that ships: where it is from, what it knows, and a plan that asks it."""

import dataclasses
import time
import warnings

import numpy as np
import pytest

from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.record import product, rowwise
from megajax.systems import aot
from megajax.systems.cdmpp import FarFromTraining, Predictor, backend, step
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.predictor import DEFAULT
from megajax.training.presets import PRESETS
from tests.experiments.test_pretrain import ROOT


@pytest.fixture(scope="module")
def shipped() -> Predictor:
    return Predictor.load()


def test_it_is_small_and_says_where_it_is_from(shipped):
    assert DEFAULT.stat().st_size <= 2**20
    facts = shipped.facts
    assert "NeuSight" in facts["source"] and "MIT licence" in facts["source"]
    assert facts["fitted"]["date"] >= "2026-11-24" and facts["rows"] > 10_000
    assert len(shipped.trained) == 7 and set(shipped.cards) == {*shipped.trained, "H200"}


def test_known_gpus_run_a_layer_at_a_plausible_share_of_their_peak(shipped):
    """A large float32 product: from 40 % of the peak (a card at its power limit) to all of it."""
    layer = product(1, 8192, 4096, 4096, "float32", transposed=1)
    add = rowwise(("add",), 8192, 8192, 2, "float32")
    for name, card in ((name, shipped.cards[name]) for name in shipped.trained):
        seconds, sigma = shipped.predict([layer, add], card)
        share = np.array([record.floor_s(card) for record in (layer, add)]) / seconds
        least = 0.2 if name == "NVIDIA L4" else 0.4
        assert least < share[0] <= 1 and 0.6 < share[1] <= 1, (name, share)
        assert np.all(sigma / seconds < 0.5)


def test_an_h200_and_its_twin_are_known_by_what_was_measured(shipped):
    """A bf16 product of 8192 x 6144 x 4096 took 566 us there, XLA's small reductions 1 us."""
    layer = product(1, 8192, 6144, 4096, "bfloat16")
    larger = [product(1, *size, "bfloat16") for size in ((8192, 8192, 8192), (16384, 16384, 8192))]
    small = rowwise(("add",), 128, 128, 2, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FarFromTraining)
        h200, h100, a100 = (
            shipped.predict([layer, small, *larger], CARDS[name])[0]
            for name in ("H200", "H100", "A100")
        )
    assert 0.6 < h200[0] / 566e-6 < 1.6 and h200[1] < 5e-6

    # The chips are the same, and these products wait for no memory.
    of_products = h100[[0, 2, 3]] / h200[[0, 2, 3]]
    assert np.all((of_products >= 1) & (of_products < 1.03)) and h100[1] < 5e-6
    assert a100[0] > 1.5 * h200[0] and a100[1] > 5e-6


@pytest.mark.filterwarnings("ignore::megajax.systems.cdmpp.FarFromTraining")
@pytest.mark.parametrize("name", ["H100", "H200", "A100"])
def test_a_better_card_of_the_same_name_is_never_slower(shipped, name):
    rows = [
        product(1, 512, 512, 512, "bfloat16"),
        product(1, 4096, 4096, 4096, "float32"),
        rowwise(("add",), 8, 128, 2, "float32"),
        rowwise(("add", "reduce"), 4096, 4096, 1, "float32"),
    ]
    card = CARDS[name]
    before = shipped.predict(rows, card)[0]
    for times in (1.5, 2, 8):
        flops = {dtype: times * peak for dtype, peak in card.flops.items()}
        for better in (
            {"flops": flops},
            {"memory_bytes_per_s": times * card.memory_bytes_per_s},
            {"sms": round(times * card.sms), "l2_bytes": times * card.l2_bytes},
        ):
            after = shipped.predict(rows, dataclasses.replace(card, **better))[0]
            assert np.all(after <= before * (1 + 1e-9)), (times, list(better))


def test_what_was_measured_on_an_h200_is_near_on_its_chip(shipped):
    """Its four bfloat16 products were learnt, no other operation in bfloat16 and no A100 was."""
    layer = product(1, 8192, 6144, 4096, "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FarFromTraining)
        for name in ("H200", "H100"):
            shipped.predict([layer], CARDS[name])
    norm = rowwise(("multiply", "reduce", "multiply"), 8192, 4096, 1, "bfloat16")
    for one, name in ((norm, "H100"), (layer, "A100")):
        with pytest.warns(FarFromTraining, match="of data type bfloat16|no data type bfloat16"):
            shipped.predict([one], CARDS[name])
    with pytest.warns(FarFromTraining, match="of B200 and its like are of PyTorch's kernels"):
        shipped.predict([layer], CARDS["B200"])


def test_only_an_h200_and_its_chip_have_rows_of_compiled_programs(shipped):
    """NeuSight's rows are PyTorch's kernels in float32, also those of an A100."""
    known = {name: shipped.learnt_from(card) for name, card in CARDS.items()}
    assert {name for name, rows in known.items() if rows} == {"H100", "H200", "H800"}
    assert set(known.values()) == {"H200", None}
    assert shipped.learnt_from(shipped.cards["NVIDIA A100-PCIE-40GB"]) is None


def test_sums_of_an_h200s_rows_are_in_the_band_of_the_cost_model():
    """Which has none of them: 90 % of 2,000 sums of 8, 32 or 128 rows of its compiled programs."""
    data = Labels.load(ROOT / "experiments/results/cdmpp_gpu_labels.npz").dataset.labelled
    seconds = step.assumed(data.records, CARDS["H200"])[0]
    rng = np.random.default_rng(0)
    for rows in (8, 32, 128):
        drawn = rng.integers(len(data), size=(2000, rows))
        ratio = data.seconds[drawn].sum(1) / seconds[drawn].sum(1)
        low, high = step.ASSUMED_BAND
        assert np.mean((low <= ratio) & (ratio <= high)) >= 0.9, rows
    # Without a kernel's least time most small ones would be far above the band.
    bare = np.array([record.floor_s(CARDS["H200"]) for record in data.records])
    small = data.seconds < 5e-6
    assert np.median(data.seconds[small] / bare[small]) > 2 * high


def test_a_plan_of_12288_gpus_asks_it_without_a_file():
    """Reductions in bfloat16 on H100s are far from the training, which is said; products are not.

    The predictor adds under 20 seconds.
    """
    cfg = PRESETS["megascale_175b"]()
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, tensor=8, pipe=8))
    cluster = parse_cluster("h100:1536x8")
    began = time.monotonic()
    plain = aot.outline(cfg, cluster)
    middle = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = backend.load("learned", None)
        planned = aot.outline(cfg, cluster, model=model)
    spent = (time.monotonic() - middle) - (middle - began)
    assert spent < 20
    assert any(issubclass(w.category, FarFromTraining) for w in caught)
    said = " ".join(str(w.message) for w in caught)
    assert "no reduction of data type bfloat16" in said and "FLOP/s of H100" not in said
    assert "no product of data type bfloat16" not in said
    assert planned.estimate.step_s > 0.5 * plain.estimate.step_s
    assert planned.estimate.step_s != plain.estimate.step_s
    assert CARDS["H100"].name not in Predictor.load().cards
