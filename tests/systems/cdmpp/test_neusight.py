"""The importer of NeuSight's kernel latencies, on files of its columns."""

import gzip
import json

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.systems.cdmpp import neusight

CARD = {
    "Device": "GPU A",
    "Dev_Mem": 24,
    "Mem_Bw": 300,
    "Num_Sm": 60,
    "Core_Per_SM": 128,
    "Freq": 2040,
    "SingleFLOPs": 31334,
    "L2Cache": 48,
}
PRODUCTS = """OPName,Latency,Device,Kernel Name,Grid x,B,M,N,K
bmm,0.25,GPU A,sgemm_128x64_nn,9,13,27,15,29
bmm,,GPU A,sgemm_128x64_nn,9,22,18,10,14
bmm,0.5,GPU B,"a, b",9,22,18,10,14
"""
LINEAR = """OPName,Latency,Device,Kernel Name,B,M,N,K
linear,-1,GPU A,x,1,58,13,141
linear,2.0,GPU A,y,1,58,13,141
"""
ROWS = """OPName,Latency,Device,Kernel Name,B,H,large
add,1.5,GPU A,x,100,64,True
softmax,1.25,GPU A,x,100,64,True
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("collect", "train", "test", "devices"):
        (tmp_path / name).mkdir()
    with gzip.open(tmp_path / "collect" / "bmm_a.csv.gz", "wt") as file:
        file.write(PRODUCTS)
    (tmp_path / "train" / "elem.csv").write_text(ROWS)
    (tmp_path / "test" / "linear.csv").write_text(LINEAR)
    (tmp_path / "devices" / "a.json").write_text(json.dumps(CARD))
    return tmp_path


def test_rows_keep_their_order_and_missing_latencies(folder):
    data = neusight.load(folder, devices=["GPU A"])
    assert [r.kind for r in data.records] == [
        "batched_product",
        "batched_product",
        "fusion",
        "reduction",
        "product",
        "product",
    ]
    np.testing.assert_array_equal(data.seconds, [0.25e-3, np.nan, 1.5e-3, 1.25e-3, np.nan, 2e-3])
    assert data.records[0].flops == 2 * 13 * 27 * 15 * 29
    assert data.records[2].nbytes == 3 * 4 * 6400 and data.records[3].nbytes == 2 * 4 * 6400
    assert data.records[4]["m"] == 58 and data.records[4]["transposed"] == 1
    card = data.cards["GPU A"]
    assert card.flops["float32"] == 31.334e12 and card.memory_bytes_per_s == 300e9
    assert (card.sms, card.l2_bytes, card.clock_hz) == (60, 48 * 2**20, 2.04e9)


def test_operations_are_chosen_by_name_or_group(folder):
    assert len(neusight.load(folder, ops="elem", devices="GPU A")) == 1
    assert len(neusight.load(folder, ops=("linear", "add"), devices=("GPU A",))) == 3
    with pytest.raises(UserError, match="operation liner must be one of .* Did you mean linear"):
        neusight.load(folder, ops=["liner"])


def test_labels_of_a_run_are_no_features(folder):
    before = neusight.load(folder, ops="bmm", devices="GPU A").records[0]
    text = PRODUCTS.replace("sgemm_128x64_nn,9", "other_kernel,77").replace("0.25", "9.5")
    with gzip.open(folder / "collect" / "bmm_a.csv.gz", "wt") as file:
        file.write(text)
    after = neusight.load(folder, ops="bmm", devices="GPU A").records[0]
    assert after.hash == before.hash and after.name == before.name == "bmm"


def test_a_device_without_a_card_is_refused_by_name(folder):
    with pytest.raises(UserError, match=r"bmm_a.csv.gz:4: device GPU B has no card"):
        neusight.load(folder)
    with pytest.raises(UserError, match="device GPU C must be one of GPU A, GPU B. Did you"):
        neusight.load(folder, devices=["GPU C"])


def test_damaged_folders_are_refused(folder):
    with pytest.raises(UserError, match="no CSV file"):
        neusight.load(folder / "nothing")
    file = folder / "test" / "linear.csv"
    for text, message in (
        ("OPName,Device\nlinear,GPU A\n", "no column Latency"),
        (LINEAR.replace("141", "0"), r"linear.csv:2: the row is damaged: .*positive"),
        (LINEAR.replace("2.0", "fast"), r"linear.csv:3: the row is damaged"),
        (LINEAR.replace("linear,2.0", "conv,2.0"), "operation conv must be one of"),
        (LINEAR + "linear,2.0\n", r"linear.csv:4: the row is damaged: it ends"),
        (LINEAR.replace(",58,13,141", "", 1), r"linear.csv:2: the row is damaged"),
        (LINEAR + 'x,"' + "y" * 200_000, r"linear.csv is damaged: field larger"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            neusight.load(folder, devices="GPU A")
    file.write_text(LINEAR)
    content = (folder / "collect" / "bmm_a.csv.gz").read_bytes()
    for broken in (content[:60], content[:40] + bytes([content[40] ^ 255]) + content[41:]):
        (folder / "collect" / "bmm_a.csv.gz").write_bytes(broken)
        with pytest.raises(UserError, match="damaged"):
            neusight.load(folder, devices="GPU A")
    (folder / "devices" / "a.json").write_text("{}")
    with pytest.raises(UserError, match="no device card"):
        neusight.load(folder, devices="GPU A")
