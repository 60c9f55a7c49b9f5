"""A table of measured times as a cost model."""

import json
import warnings

import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost.base import Op
from megajax.cost.kernels import Attention, Matmul, Rowwise
from megajax.cost.roofline import Roofline
from megajax.cost.table import Table

H100 = CARDS["H100"]
SEEN = Op("input", Matmul(64, 128, 256))
WINDOW = Op("attention", Attention(2, 64, 64, 4, 2, 32, window=None))


def written(path, *ops, device="H100", seconds=3e-5):
    rows = [
        {"kernel": name, "shape": shape, "dtypes": dtypes, "seconds": seconds, "sigma": 1e-6}
        for name, shape, dtypes in (op.key for op in ops)
    ]
    path.write_text(json.dumps({"device": device, "rows": rows}))
    return path


def test_rows_answer_and_the_rest_falls_back_with_one_warning(tmp_path):
    table = Table.load(written(tmp_path / "t.json", SEEN, WINDOW))
    assert table.op_time(SEEN, H100) == (3e-5, 1e-6)
    assert table.op_time(WINDOW, H100) == (3e-5, 1e-6)  # with None and booleans in its shape
    other = Op("input", Matmul(64, 128, 512))
    with pytest.warns(UserWarning, match="no row of some matmul.*Roofline") as told:
        assert table.op_time(other, H100) == Roofline().op_time(other, H100)
        assert table.op_time(SEEN, H100, "float32") == Roofline().op_time(SEEN, H100, "float32")
    assert len(told) == 1
    with pytest.warns(UserWarning, match="no row of some norm"):
        table.op_time(Op("norm", Rowwise("norm", 8, 8)), H100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.op_time(Op("norm", Rowwise("norm", 8, 16)), H100)
    assert table.transfer_time(1e6, H100.inside) == Roofline().transfer_time(1e6, H100.inside)


def test_what_is_no_table_is_refused(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Table.load(path)
    for text, said in (
        ("{", "is no table"),
        ("[]", "is no table"),
        ('{"rows": []}', "member 'device' is missing"),
        ('{"device": "H100", "rows": [{"kernel": "matmul"}]}', "member 'shape' is missing"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            Table.load(path)
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="matmul .* takes"):
            Table.load(written(path, SEEN, seconds=seconds))
    with pytest.raises(UserError, match="times of H100, not of H200"):
        Table.load(written(path, SEEN)).op_time(SEEN, CARDS["H200"])
