"""A predictor in a plan's place of the roofline: what it is asked, and what it is not."""

import dataclasses
import time
import warnings

import numpy as np
import pytest

from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.base import Op
from megajax.cost.kernels import (
    Attention,
    Collective,
    Embedding,
    Experts,
    Matmul,
    Rowwise,
    TileSparse,
)
from megajax.cost.record import KINDS
from megajax.cost.roofline import Roofline
from megajax.systems import aot
from megajax.systems.cdmpp.backend import Learned, records_of
from megajax.training.presets import PRESETS

H100 = CARDS["H100"]


class Twice:
    """Predicts twice the roofline, and counts how often it is asked; knows all but A100."""

    def __init__(self, kinds=KINDS, delay=0.0):
        self.kinds, self.asked, self.delay = kinds, 0, delay

    def learnt_from(self, card):
        return None if card.name == "A100" else card.name

    def predict(self, records, card):
        self.asked += 1
        time.sleep(self.delay)
        seconds = np.array([2 * r.floor_s(card) for r in records])
        return seconds, 0.1 * seconds


KERNELS = [
    Matmul(64, 128, 256),
    Matmul(64, 128, 256, batch=4),
    Attention(2, 64, 64, 4, 2, 32),
    Attention(2, 64, 64, 4, 4, 32, fused=False),
    Rowwise("norm", 64, 128),
    Rowwise("activation", 64, 128, 2),
    Rowwise("something", 64, 128),
    Embedding(64, 1000, 128),
    Experts(64, 8, 2, 128, 256, True, 2.0),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k.name}-{k.shape}")
def test_the_records_of_an_operation_have_its_work_and_traffic(kernel):
    op = Op("input", kernel, dtypes=("bfloat16",))
    launched = records_of(op)
    products = sum(
        r.flops for r in launched if r.kind in ("product", "batched_product", "attention")
    )
    assert products == pytest.approx(kernel.flops)
    assert all(r.dtype == "bfloat16" for r in launched)
    if len(launched) == 1:
        assert launched[0].nbytes == pytest.approx(op.nbytes)
    else:  # inner arrays are written and read again
        assert sum(r.nbytes for r in launched) > op.nbytes


def test_an_operation_is_asked_once_a_card():
    predictor = Twice()
    model, op = Learned(predictor), Op("input", Matmul(512, 512, 512))
    floor = H100.floor_s(op.flops, op.nbytes)
    assert model.op_time(op, H100) == pytest.approx((2 * floor, 0.2 * floor))
    assert model.op_time(dataclasses.replace(op, count=7), H100) == model.op_time(op, H100)
    assert predictor.asked == 1
    assert model.op_time(op, H100, "float32")[0] > 2 * floor  # another data type is another row
    model.op_time(op, CARDS["H200"])
    assert predictor.asked == 3


def test_collectives_and_empty_passes_are_not_asked():
    predictor = Twice()
    model = Learned(predictor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sent = Op("transfer", Collective("all-gather", 1e6, 8, 1))
        assert model.op_time(sent, H100) == Roofline().op_time(sent, H100)
        assert model.op_time(Op("update", Rowwise("quantize", 0, 1, 0)), H100) == (0, 0)
    assert predictor.asked == 0
    assert model.transfer_time(1e6, H100.inside) == Roofline().transfer_time(1e6, H100.inside)
    assert model.memory({}) == {}


def test_what_the_predictor_never_saw_falls_back_with_one_warning():
    model = Learned(Twice(kinds=("product",)))
    wide, wider = (Op("norm", Rowwise("norm", 8, n)) for n in (64, 128))
    with pytest.warns(UserWarning, match="not fitted on records of kind reduction.*Roofline") as t:
        assert model.op_time(wide, H100) == Roofline().op_time(wide, H100)
        assert model.op_time(wider, H100) == Roofline().op_time(wider, H100)
    assert len(t) == 1
    sparse = Op("input", TileSparse(64, 64, 64, 2048.0))
    with pytest.warns(UserWarning, match="no record describes the kernel tilesparse"):
        assert model.op_time(sparse, H100) == Roofline().op_time(sparse, H100)
    bare = dataclasses.replace(H100, name="bare", sms=0, clock_hz=0.0)
    product = Op("input", Matmul(64, 64, 64))
    with pytest.warns(UserWarning, match="card of bare has no sms, clock_hz"):
        assert model.op_time(product, bare) == Roofline().op_time(product, bare)


def test_a_gpu_without_rows_has_the_times_of_the_cost_model():
    model, op = Learned(Twice()), Op("input", Matmul(64, 64, 64))
    a100 = CARDS["A100"]
    with pytest.warns(UserWarning, match="A100 has no rows of compiled programs; .*Roofline"):
        assert model.op_time(op, a100) == Roofline().op_time(op, a100)
    assert model.unknown(a100).startswith("A100 has no rows of compiled programs: its times are")
    assert model.unknown(H100) == ""


def test_two_cards_of_one_name_have_times_of_their_own():
    model, op = Learned(Twice()), Op("input", Matmul(64, 128, 256))
    slow = dataclasses.replace(H100, memory_bytes_per_s=H100.memory_bytes_per_s / 10)
    assert 9 < model.op_time(op, slow)[0] / model.op_time(op, H100)[0] < 11


def test_operands_of_several_types_count_by_their_bytes():
    kernel, types = Matmul(8, 8192, 8192), ("bfloat16", "int4/128", "bfloat16")
    quantized = Op("input", kernel, dtypes=types)
    [one] = records_of(quantized)
    assert one.nbytes == pytest.approx(quantized.nbytes) and one.dtype == "bfloat16"
    assert one["bytes_written"] == 2 * 8 * 8192
    with pytest.warns(UserWarning, match="operations of mixed types, such as bfloat16, int4/128"):
        seconds, _ = Learned(Twice()).op_time(quantized, H100)
    assert seconds == pytest.approx(2 * quantized.nbytes / H100.memory_bytes_per_s)

    # What an operation writes in a wider type is in its time too.
    widened = Op("input", Rowwise("dequantize", 8192, 8192), dtypes=("int4/128", "bfloat16"))

    class Free(Twice):
        def predict(self, records, card):
            return np.zeros(len(records)), np.zeros(len(records))

    with pytest.warns(UserWarning, match="mixed types"):
        assert Learned(Free()).op_time(widened, H100)[0] >= (2 * 8192**2) / H100.memory_bytes_per_s


def test_a_plan_of_12288_gpus_asks_for_few_operations():
    cfg = PRESETS["megascale_175b"]()
    mesh = dataclasses.replace(cfg.mesh, tensor=8, pipe=8)
    cfg = dataclasses.replace(cfg, mesh=mesh)
    cluster = parse_cluster("h100:1536x8")
    predictor = Twice()
    planned = aot.outline(cfg, cluster, model=Learned(predictor))
    default = aot.outline(cfg, cluster)
    assert predictor.asked <= 20  # at 10 ms each this adds 0.2 s
    assert planned.estimate.step_s != default.estimate.step_s
    assert planned.estimate.exposed_s.keys() == default.estimate.exposed_s.keys()
    assert planned.terms == default.terms
