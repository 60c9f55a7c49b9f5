"""The cost model that a flag names."""

import pytest

from megajax.core.errors import UserError
from megajax.cost.roofline import Roofline
from megajax.cost.table import Table
from megajax.systems.cdmpp import backend


def test_a_flag_names_a_model(tmp_path):
    assert backend.load("roofline", None) == Roofline()
    path = tmp_path / "times.json"
    path.write_text('{"device": "H100", "rows": []}')
    assert isinstance(backend.load("table", str(path)), Table)


def test_files_that_are_missing_damaged_or_not_asked_for_are_refused(tmp_path):
    with pytest.raises(UserError, match="needs --cost=learned or --cost=table"):
        backend.load("roofline", "x.json")
    with pytest.raises(UserError, match="needs a file"):
        backend.load("table", None)
    for name in ("table", "learned"):
        with pytest.raises(UserError, match=r"nowhere.*(cannot be read|does not exist)"):
            backend.load(name, str(tmp_path / "nowhere"))
        (tmp_path / "cut").write_bytes(b"PK\x03\x04 and nothing more")
        with pytest.raises(UserError, match="cut"):
            backend.load(name, str(tmp_path / "cut"))
