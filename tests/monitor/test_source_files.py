"""Files in long form: what other programs write is read, and what is wrong is named by its row."""

import csv
import datetime
import gzip
import math

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.sources import files

T0 = 1_700_000_000
HEAD = "timestamp,machine,metric,value\n"


def rows(samples):
    return sorted(samples.rows())


def random_rows(rng, size=500):
    return [
        (round(T0 + float(t), 3), f"m{n}", f"x{c}", float(v))
        for t, n, c, v in zip(
            np.sort(rng.uniform(0, 100, size)), rng.integers(0, 5, size), rng.integers(0, 3, size),
            rng.normal(size=size), strict=True,
        )
    ]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_the_standard_library_writes_is_read(tmp_path, seed, packed, end, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 1 << 10)  # many blocks
    wanted = random_rows(np.random.default_rng(seed))
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    with (gzip.open if packed else open)(path, "wt", newline="") as f:
        writer = csv.writer(f, lineterminator=end)
        writer.writerow(["machine", "timestamp", "value", "metric"])  # in any order
        writer.writerows([(m, t, repr(v), c) for t, m, c, v in wanted])
    found = files.read(path)
    assert rows(found) == sorted(wanted) and found.notes == ()
    part = files.read(path, T0 + 20, T0 + 30)
    assert rows(part) == sorted(r for r in wanted if T0 + 20 <= r[0] < T0 + 30)
    assert (part.start, part.end) == (T0 + 20, T0 + 30)


def test_parquet_of_numbers_and_of_timestamps(tmp_path, seed):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    wanted = random_rows(np.random.default_rng(seed))
    times, machines, metrics, values = (list(c) for c in zip(*wanted, strict=True))
    moments = [datetime.datetime.fromtimestamp(t, datetime.UTC) for t in times]
    names = pa.array(machines).dictionary_encode()
    for k, column in enumerate((pa.array(times), pa.array(moments, pa.timestamp("ms", "UTC")))):
        table = pa.table(
            {"timestamp": column, "machine": names, "metric": metrics, "value": values}
        )
        parquet.write_table(table, tmp_path / f"{k}.parquet")
        assert rows(files.read(tmp_path / f"{k}.parquet")) == sorted(wanted)
    (tmp_path / "no.parquet").write_bytes(b"PAR1, not")
    with pytest.raises(UserError, match=r"no\.parquet"):
        files.read(tmp_path / "no.parquet")


def test_labels_in_quotes_and_in_columns_tell_devices_apart(tmp_path):
    raw, name = "DCGM_FI_DEV_GPU_UTIL", "gpu_duty_cycle"
    (tmp_path / "quoted.csv").write_text(
        HEAD + "".join(f'{T0},a,"{raw}{{gpu=""{g}""}}",{10 * g}\n' for g in range(1, 9))
    )
    (tmp_path / "column.csv").write_text(
        HEAD.replace("\n", ",gpu\n") + "".join(f"{T0},a,{raw},{10 * g},{g}\n" for g in range(1, 9))
    )
    wanted = {"gpu_count": 8, name: 0.45, f"{name}_max": 0.8, f"{name}_min": 0.1}
    for path in ("quoted.csv", "column.csv"):
        found = {c: v for _, _, c, v in files.read(tmp_path / path).rows()}
        assert found == pytest.approx(wanted)


def test_bad_rows_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(
        HEAD + f"{T0},a,x,1\n\n{T0 + 1},a,x,nan\n{T0 + 2},a,x,\n{T0 + 3},a,x,four\n"
        f"{T0 + 4},a,x,1,9\n{T0 + 1},b,x,inf\n{T0 + 6}000,a,x,1\n{T0},b,x,2\n{T0 + 7},a,x"
    )
    found = files.read(path)
    assert len(found) == 5 and math.isnan(rows(found)[2][3])
    assert "row 6: value='four' is no number; 4 of 9 rows were left out" in found.notes[0]
    assert "go back within a series 1 times, first in row 10" in found.notes[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time,machine,metric,value\n1,a,x,1\n", "Did you mean time"),
        ("1,a,x,1\n", "without 'timestamp'"),
        ("", "its columns are none"),
        (HEAD + f"{T0}123,a,x,1\n", "nearest: 1700000000.123, if it is in milliseconds"),
        (HEAD + "2026-11-24T00:00:00,a,x,1\n", "row 2: timestamp='2026-11-24T00:00:00'"),
    ],
)
def test_a_file_that_holds_nothing_readable_is_refused(tmp_path, text, words):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        files.read(tmp_path / "a.csv")


def test_an_interval_without_a_row_is_named_with_the_times_of_the_rows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{HEAD}{T0},m,x,1\n{T0 + 50},m,x,2\n")
    assert not files.read(path, T0, T0 + 60).notes
    (note,) = files.read(path, T0 + 100, T0 + 160).notes
    assert "none of its 2 rows" in note and f"they are from {T0} to {T0 + 50}" in note


def test_half_a_file_is_read_as_far_as_it_goes(tmp_path, seed):
    wanted = random_rows(np.random.default_rng(seed), 20_000)
    text = HEAD + "".join(f"{t},{m},{c},{v!r}\n" for t, m, c, v in wanted)
    packed = gzip.compress(text.encode())
    (tmp_path / "half.csv.gz").write_bytes(packed[: len(packed) // 2])
    found = files.read(tmp_path / "half.csv.gz")
    assert 5000 < len(found) < 15_000 and set(rows(found)) <= set(wanted)
    assert f"breaks off after row {len(found) + 1}" in found.notes[0]
    (tmp_path / "none.csv.gz").write_bytes(packed[:12])
    with pytest.raises(UserError, match="cannot be read"):
        files.read(tmp_path / "none.csv.gz")
    with pytest.raises(UserError, match="No such file"):
        files.read(tmp_path / "nothing.csv")
    (tmp_path / "empty.csv").write_text(HEAD)
    assert "has no rows" in files.read(tmp_path / "empty.csv").notes[0]
