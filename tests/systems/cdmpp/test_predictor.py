"""The predictor against devices whose times are known, and what it guarantees by construction."""

import dataclasses
import os
import pathlib
import warnings

import known_gpu
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, DeviceCard
from megajax.cost.record import product, record, rowwise
from megajax.systems.cdmpp import Dataset, FarFromTraining, Predictor, choose, neusight

KNOWN = ("small", "wide", "large")


@pytest.fixture(scope="module")
def fitted() -> Predictor:
    data = known_gpu.dataset(KNOWN, 100, seed=0)
    return Predictor.fit(data, seed=0, members=2, steps=400, fold_steps=100)


def error(predictor: Predictor, data: Dataset) -> float:
    """Mean relative error of a data set of one device."""
    seconds, _ = predictor.predict(data.records, data.cards[data.devices[0]])
    return float(np.mean(np.abs(seconds / data.seconds - 1)))


def roofline_error(data: Dataset) -> float:
    card = data.cards[data.devices[0]]
    floor = np.array([r.floor_s(card) for r in data.records])
    return float(np.mean(np.abs(floor / data.seconds - 1)))


def test_new_programs_and_a_new_device_are_predicted(fitted):
    for name, most in (("wide", 0.12), ("largest", 0.2)):
        new = known_gpu.dataset((name,), 120, seed=1)
        assert error(fitted, new) < most < roofline_error(new)


def test_adapting_learns_what_the_card_does_not_say(fitted):
    slow = known_gpu.dataset(("largest",), 150, seed=2, efficiency=0.4)
    rows = choose(slow, 32, seed=0)
    unread = np.setdiff1d(np.arange(len(slow)), rows)
    adapted = fitted.adapt(slow[rows])
    before, after = error(fitted, slow[unread]), error(adapted, slow[unread])
    assert after < 0.15 and after < before / 2
    assert error(fitted, slow[unread]) == before  # the old predictor stays
    old = known_gpu.dataset(("wide",), 50, seed=3)
    assert error(adapted, old) == error(fitted, old)


def test_bands_cover_nine_in_ten(fitted):
    new = known_gpu.dataset(("wide",), 300, seed=4)
    seconds, sigma = fitted.predict(new.records, new.cards["wide"])
    covered = np.mean(np.abs(new.seconds - seconds) <= 1.645 * sigma)
    assert covered > 0.8 and np.all(sigma > 0)


def test_the_band_of_an_unseen_device_is_wider_the_further_it_is(fitted):
    records = known_gpu.programs(60, seed=4)
    wide, near = (
        fitted.predict(records, dataclasses.replace(known_gpu.CARDS["wide"], name=name))
        for name in ("wide", "another")
    )
    seconds, sigma = fitted.predict(records, known_gpu.CARDS["largest"])
    assert np.mean(near[1] / near[0]) > np.mean(wide[1] / wide[0])
    assert np.mean(sigma / seconds) > np.mean(near[1] / near[0])


@pytest.mark.filterwarnings("ignore::megajax.systems.cdmpp.FarFromTraining")
def test_the_numbers_of_a_card_count_and_not_its_name(fitted):
    """Unless rows of a card of that name were read, which `basis` then says."""
    shipped, records = Predictor.load(), known_gpu.programs(40, seed=11)
    names = ("NVIDIA H100 PCIe", "Tesla T4 of a friend", "x")
    bare = dataclasses.replace(CARDS["B200"], capability=0, power_w=0)
    for predictor in (fitted, fitted.adapt(known_gpu.dataset(("largest",), 12, seed=6)), shipped):
        for card in (known_gpu.CARDS["largest"], CARDS["H100"], CARDS["L4"], bare):
            renamed = [dataclasses.replace(card, name=name) for name in names]
            predictions = [predictor.predict(records, one) for one in renamed]
            for one, (seconds, sigma) in zip(renamed, predictions, strict=True):
                np.testing.assert_array_equal(seconds, predictions[0][0])
                np.testing.assert_array_equal(sigma, predictions[0][1])
                assert predictor.basis(one).startswith(f"There are no rows of {one.name}: it is")
    weaker = dataclasses.replace(CARDS["H100"], power_w=350.0)
    assert np.any(shipped.predict(records, weaker)[0] > shipped.predict(records, CARDS["H100"])[0])
    assert "from rows of H200" in shipped.basis(CARDS["H100"])
    assert shipped.basis(CARDS["H200"]).endswith("has rows of H200, which it found by that name.")
    slow = dataclasses.replace(CARDS["H200"], sms=100)
    assert shipped.basis(slow).endswith("by that name; the card asked for differs in sms.")


def odd_programs() -> list:
    """Sizes around tiles, tiny and huge ones: where a time jumps."""
    asked = [
        product(b, m, n, k, "float32")
        for b, m, n, k in (
            (1, 1, 1, 1),
            (1, 127, 129, 64),
            (7, 128, 128, 128),
            (1, 8192, 50257, 4096),
            (4096, 64, 64, 64),
            (109, 128, 128, 2048),
        )
    ]
    asked += [rowwise(("add",), rows, 256, 2, "float32") for rows in (1, 1000, 10**6)]
    return asked + known_gpu.programs(60, seed=5)


@pytest.mark.filterwarnings("ignore::megajax.systems.cdmpp.FarFromTraining")
@pytest.mark.parametrize("name", ["large", "largest", "adapted", "at its power limit"])
def test_more_of_anything_never_makes_a_program_slower(fitted, name):
    predictor, records = fitted, odd_programs()
    card = known_gpu.CARDS["large" if name == "large" else "largest"]
    if name == "at its power limit":
        card = dataclasses.replace(card, capability=8.9, power_w=72.0)
    if name == "adapted":
        predictor = fitted.adapt(known_gpu.dataset(("largest",), 24, seed=6, efficiency=0.5))
    for field in ("memory_bytes_per_s", "sms", "l2_bytes", "flops"):
        before = np.full(len(records), np.inf)
        for factor in (0.1, 0.5, 0.9, 1, 1.01, 1.5, 2, 3.7, 10):
            value = getattr(card, field)
            if field == "flops":
                value = {k: v * factor for k, v in card.flops.items()}
            else:
                value = type(value)(value * factor)
            other = dataclasses.replace(card, **{field: value})
            seconds, _ = predictor.predict(records, other)
            assert np.all(seconds <= before * (1 + 1e-12)), (field, factor)
            assert np.all(seconds >= [r.floor_s(other) for r in records]), (field, factor)
            before = seconds


@pytest.mark.filterwarnings("ignore::megajax.systems.cdmpp.FarFromTraining")
def test_a_prediction_is_of_the_record_alone(fitted):
    """Its place among others, their number, its name and its executions change nothing."""
    records, card = odd_programs(), known_gpu.CARDS["wide"]
    together, _ = fitted.predict(records, card)
    alone = [fitted.predict([r], card)[0][0] for r in records[:9]]
    np.testing.assert_allclose(together[:9], alone, rtol=1e-5)
    renamed = [dataclasses.replace(r, name="x", executions=3.0) for r in records]
    np.testing.assert_allclose(fitted.predict(renamed[::-1], card)[0], together[::-1], rtol=1e-5)


def test_a_file_gives_the_same_predictions(fitted, tmp_path):
    path = tmp_path / "predictor.npz"
    adapted = fitted.adapt(known_gpu.dataset(("largest",), 16, seed=7))
    adapted.save(path)
    again = Predictor.load(path)
    records = known_gpu.programs(20, seed=8)
    assert set(again.cards) == {*KNOWN, "largest"}
    for name in ("wide", "largest"):
        for one, other in zip(
            adapted.predict(records, known_gpu.CARDS[name]),
            again.predict(records, known_gpu.CARDS[name]),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
    content = path.read_bytes()
    for text in (b"", content[: len(content) // 2], content[:2000] + b"0" * 50 + content[2050:]):
        path.write_bytes(text)
        with pytest.raises(UserError, match="damaged"):
            Predictor.load(path)
    known_gpu.dataset(("wide",), 3, seed=0).save(path)
    with pytest.raises(UserError, match="no predictor"):
        Predictor.load(path)
    with pytest.raises(UserError, match="does not exist"):
        Predictor.load(tmp_path / "none.npz")


def test_what_the_training_had_not_is_warned_of(fitted):
    wide = known_gpu.CARDS["wide"]
    reduction = rowwise(("reduce",), 4096, 4096, 1, "float32")
    for records, card, message in (
        ([reduction], wide, "no kind reduction; the training had no operation reduce"),
        ([record("fusion", [{"opcode": "other"}], {"flops": 1e9})], wide, "no operation other"),
        ([product(1, 512, 512, 512, "bfloat16")], wide, "no data type bfloat16"),
        ([product(1, 10**6, 512, 512, "float32")], wide, "m of 1 operations, e.g. 1e\\+06"),
        (known_gpu.programs(3, 0), CARDS["B200"], "FLOP/s of B200, 7.5e\\+13, is more than 4"),
    ):
        with pytest.warns(FarFromTraining, match=message):
            seconds, _ = fitted.predict(records, card)
        assert np.all(seconds > 0) and np.all(np.isfinite(seconds))


def test_rows_of_a_device_are_near_on_it_in_their_kinds(fitted, tmp_path):
    """A data type that only an adaptation had is known on that device, in the kinds it had it."""
    half = [product(1, 256 * i, 512, 256, "bfloat16") for i in range(1, 9)]
    data = Dataset(half, np.full(8, 1e-4), ["largest"] * 8, known_gpu.CARDS)
    path = tmp_path / "predictor.npz"
    fitted.adapt(data).save(path)
    adapted = Predictor.load(path)
    near = product(1, 640, 512, 256, "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FarFromTraining)
        adapted.predict([near], known_gpu.CARDS["largest"])
    added = rowwise(("add",), 512, 256, 2, "bfloat16")
    for record_, name, message in (
        (near, "wide", "no data type bfloat16"),
        (added, "largest", "the training had no fusion of data type bfloat16"),
        (product(1, 10**6, 512, 256, "bfloat16"), "largest", "m of 1 operations"),
        (rowwise(("add",), 512, 256, 2, "float16"), "largest", "no data type float16"),
    ):
        with pytest.warns(FarFromTraining, match=message):
            adapted.predict([record_], known_gpu.CARDS[name])
    again = adapted.adapt(known_gpu.dataset(("largest",), 12, seed=1))
    assert "product bfloat16" in again.learnt["largest"].pairs  # rows of before stay known


def test_bad_input_is_refused(fitted):
    data = known_gpu.dataset(("wide",), 5, seed=0)
    unknown = Dataset(data.records, np.full(5, np.nan), data.devices, data.cards)
    for empty in (data[:0], unknown):
        with pytest.raises(UserError, match="rows with measured seconds"):
            Predictor.fit(empty)
        with pytest.raises(UserError, match="rows with measured seconds"):
            fitted.adapt(empty)
    bare = DeviceCard("bare", {"float32": 1e12}, 1, 1e11, 0, 0)
    with pytest.raises(UserError, match="the card of bare has sms=0"):
        fitted.predict(data.records, bare)
    with pytest.raises(UserError, match="the card of wide has sms=0"):
        Predictor.fit(dataclasses.replace(data, cards={"wide": bare}))
    assert fitted.predict([], known_gpu.CARDS["wide"])[0].shape == (0,)
    wide = known_gpu.CARDS["wide"]
    for wrong in (
        {"clock_hz": np.nan},
        {"clock_hz": -1.0},
        {"flops": {"float32": 1e12, "int8": -1}},
    ):
        with pytest.raises(UserError, match="a prediction needs a positive number"):
            fitted.predict(data.records, dataclasses.replace(wide, **wrong))
    for small in ({"members": 0}, {"steps": 0}, {"fold_steps": -1}):
        with pytest.raises(UserError, match=f"{next(iter(small))}=.*must be at least"):
            Predictor.fit(data, **small)


def test_chosen_rows_cover_the_programs():
    data = known_gpu.dataset(("wide",), 200, seed=9)
    unlabelled = dataclasses.replace(data, seconds=np.full(len(data), np.nan))
    rows = choose(unlabelled, 12, seed=0)
    assert len(set(rows.tolist())) == 12
    assert {data.records[i].kind for i in rows} == {"product", "batched_product", "fusion"}
    np.testing.assert_array_equal(rows, choose(data, 12, seed=0))  # times are not read
    assert choose(data, len(data), seed=1).tolist() == list(range(len(data)))
    assert len(set(choose(data, 100, seed=0).tolist())) == 100  # more than begin apart
    for wrong in (0, 201):
        with pytest.raises(UserError, match=f"n={wrong} rows"):
            choose(data, wrong)


SHAPES = (
    (1, 64, 64, 64),
    (1, 64, 4096, 512),
    (1, 4096, 64, 4096),
    (1, 4096, 4096, 4096),
    (64, 128, 128, 64),
    (1, 512, 512, 16384),
)


def clusters(counts: tuple, width: float | tuple, seed: int) -> tuple[Dataset, np.ndarray]:
    """Products around SHAPES, as many of each, whose sizes vary by a factor of exp(width)."""
    rng = np.random.default_rng(seed)
    records, labels = [], np.repeat(np.arange(len(counts)), counts)
    for label in labels.tolist():
        spread = width if isinstance(width, float) else width[label]
        batch, *sizes = SHAPES[label]
        sizes = np.round(sizes * np.exp(rng.uniform(-spread, spread, 3))).astype(int).tolist()
        records.append(product(batch, *sizes, "float32"))
    order = rng.permutation(len(labels))
    unknown, names = np.full(len(labels), np.nan), ["wide"] * len(labels)
    return Dataset([records[i] for i in order], unknown, names, known_gpu.CARDS), labels[order]


@pytest.mark.parametrize(
    "counts, width",
    [
        ((20,) * 6, 0.1),
        ((20,) * 6, 0.0),  # duplicates: six different rows
        ((300, 5, 5, 5, 5, 5), 0.2),
        ((5, 5, 100, 2, 1, 1), 0.05),
        ((60, 30, 20, 10, 5, 5), (0.001, 0.01, 0.05, 0.1, 0.2, 0.3)),
    ],
)
def test_one_row_of_each_clear_cluster_is_chosen(counts, width):
    for seed in range(3):
        data, labels = clusters(counts, width, seed)
        rows = choose(data, 6, seed=seed)
        assert sorted(labels[rows].tolist()) == [0, 1, 2, 3, 4, 5], seed
        for n in (7, 80):  # of each at least one
            rows = choose(data, n, seed=seed)
            assert set(labels[rows].tolist()) == set(range(6)), (seed, n)
            assert len(set(rows.tolist())) == n


def test_a_fine_cluster_counts_as_much_as_a_coarse_one():
    """Three clusters lie nearer to each other than the rows of the fourth: one row of each."""
    sizes = [(32 * i, 32 * j, 1056) for i in (33, 49, 73) for j in (95, 97, 99)]
    sizes += [(32 * i, 96, 32800) for i in (33, 67, 133, 267, 533, 1067, 2133)]
    records = [product(1, *size, "float32") for size in sizes]
    data = Dataset(records, np.full(16, np.nan), ["wide"] * 16, known_gpu.CARDS)
    for seed in range(3):
        assert np.minimum(choose(data, 4, seed=seed) // 3, 3).tolist() == [0, 1, 2, 3]


def test_fewer_different_rows_than_are_asked_for():
    records = [product(1, 128 * 2 ** (i % 3), 256, 256, "float32") for i in range(30)]
    data = Dataset(records, np.full(30, np.nan), ["wide"] * 30, known_gpu.CARDS)
    for n in (1, 2, 3, 4, 10, 30):
        rows = choose(data, n, seed=n)
        assert len(set(rows.tolist())) == n and len(set((rows % 3).tolist())) == min(n, 3)
    same = Dataset(records[:1] * 5, np.full(5, np.nan), ["wide"] * 5, known_gpu.CARDS)
    assert len(set(choose(same, 4).tolist())) == 4


FOLDER = os.environ.get("MEGAJAX_NEUSIGHT", "")
UNSEEN = ("NVIDIA L4", "NVIDIA A100 80GB PCIe")


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path(FOLDER, "devices").is_dir(), reason="MEGAJAX_NEUSIGHT is unset"
)
def test_kernels_of_unseen_gpus_are_predicted():
    """Mean errors over both GPUs and three choices of 32 rows, from a fit on five others.

    The bounds without rows are what was measured (docs/log/2026-Q4.md, 2026-11-27) and a tenth
    more, for element-wise rows a third; linear layers have their goal. The goals are 0.12 and 0.08,
    0.22 and 0.16, 0.04.
    """
    data = neusight.load(FOLDER)
    train = data.of(*sorted(set(data.devices) - set(UNSEEN)))
    predictor = Predictor.fit(train, seed=0)
    bounds = {"linear": (0.12, 0.08), "bmm": (0.159, 0.16), "elem": (0.03, 0.011)}
    for op, (without, with_rows) in bounds.items():
        zero, few = [], []
        for name in UNSEEN:
            test = neusight.load(FOLDER, ops=op, devices=name).labelled
            zero.append(error(predictor, test))
            for seed in range(3):
                rows = choose(test, 32, seed=seed)
                unread = np.setdiff1d(np.arange(len(test)), rows)
                few.append(error(predictor.adapt(test[rows]), test[unread]))
        assert np.mean(zero) <= without and np.mean(few) <= with_rows, (op, zero, few)
