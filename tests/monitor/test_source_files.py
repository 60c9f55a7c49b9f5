"""Files in long form: what other programs write is read, and what is wrong is named by its row."""

import csv
import datetime
import gzip
import math
import os
import socket

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.samples import Samples, to_grid
from megajax.monitor.sources import convert, files

T0 = 1_700_000_000
HEAD = "timestamp,machine,metric,value\n"


def rows(samples):
    return sorted(samples.rows())


def random_rows(rng, size=500):
    return [
        (round(T0 + float(t), 3), f"m{n}", f"x{c}", float(v))
        for t, n, c, v in zip(
            np.sort(rng.uniform(0, 100, size)),
            rng.integers(0, 5, size),
            rng.integers(0, 3, size),
            rng.normal(size=size),
            strict=True,
        )
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_the_standard_library_writes_is_read(tmp_path, seed, packed, end, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 1 << 10)  # many blocks
    expected = random_rows(np.random.default_rng(seed))
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    with (gzip.open if packed else open)(path, "wt", newline="") as f:
        writer = csv.writer(f, lineterminator=end)
        writer.writerow(["machine", "timestamp", "value", "metric"])  # in any order
        writer.writerows([(m, t, repr(v), c) for t, m, c, v in expected])
    samples = files.read(path)
    assert rows(samples) == sorted(expected) and samples.notes == ()
    part = files.read(path, T0 + 20, T0 + 30)
    assert rows(part) == sorted(r for r in expected if T0 + 20 <= r[0] < T0 + 30)
    assert (part.start, part.end) == (T0 + 20, T0 + 30)


def test_parquet_of_numbers_and_of_timestamps(tmp_path, seed):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    expected = random_rows(np.random.default_rng(seed))
    times, machines, metrics, values = (list(c) for c in zip(*expected, strict=True))
    moments = [datetime.datetime.fromtimestamp(t, datetime.UTC) for t in times]
    names = pa.array(machines).dictionary_encode()
    for k, column in enumerate((pa.array(times), pa.array(moments, pa.timestamp("ms", "UTC")))):
        table = pa.table(
            {"timestamp": column, "machine": names, "metric": metrics, "value": values}
        )
        parquet.write_table(table, tmp_path / f"{k}.parquet")
        assert rows(files.read(tmp_path / f"{k}.parquet")) == sorted(expected)
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
    expected = {"gpu_count": 8, name: 0.45, f"{name}_max": 0.8, f"{name}_min": 0.1}
    for path in ("quoted.csv", "column.csv"):
        values = {c: v for _, _, c, v in files.read(tmp_path / path).rows()}
        assert values == pytest.approx(expected)


def test_bad_rows_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(
        HEAD + f"{T0},a,x,1\n\n{T0 + 1},a,x,nan\n{T0 + 2},a,x,\n{T0 + 3},a,x,four\n"
        f"{T0 + 4},a,x,1,9\n{T0 + 1},b,x,inf\n{T0 + 6}000,a,x,1\n{T0},b,x,2\n{T0 + 7},a,x"
    )
    samples = files.read(path)
    assert len(samples) == 5 and math.isnan(rows(samples)[2][3])
    assert "row 6: value='four' is no number; 4 of 9 rows were left out" in samples.notes[0]
    assert "go back within a series 1 times, first in row 10" in samples.notes[1]


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
    expected = random_rows(np.random.default_rng(seed), 20_000)
    text = HEAD + "".join(f"{t},{m},{c},{v!r}\n" for t, m, c, v in expected)
    packed = gzip.compress(text.encode())
    (tmp_path / "half.csv.gz").write_bytes(packed[: len(packed) // 2])
    samples = files.read(tmp_path / "half.csv.gz")
    assert 5000 < len(samples) < 15_000 and set(rows(samples)) <= set(expected)
    assert f"breaks off after row {len(samples) + 1}" in samples.notes[0]
    (tmp_path / "none.csv.gz").write_bytes(packed[:12])
    with pytest.raises(UserError, match="cannot be read"):
        files.read(tmp_path / "none.csv.gz")
    with pytest.raises(UserError, match="No such file"):
        files.read(tmp_path / "nothing.csv")
    (tmp_path / "empty.csv").write_text(HEAD)
    assert "has no rows" in files.read(tmp_path / "empty.csv").notes[0]


def test_quotes_may_hold_line_ends_wherever_a_block_ends(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 1 << 10)
    rng = np.random.default_rng(seed)
    expected = [
        (t, f'm{n}\n"{n}",\n' if quoted else f"m{n}", c, v)
        for (t, n, c, v), quoted in zip(
            [(t, int(m[1:]), c, v) for t, m, c, v in random_rows(rng)],
            rng.random(500) < 0.3,
            strict=True,
        )
    ]
    with open(tmp_path / "a.csv", "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows([HEAD.strip().split(","), *expected])
    assert rows(files.read(tmp_path / "a.csv")) == sorted(expected)


def packed(text, times=1):
    return b"".join(gzip.compress(text.encode()) for _ in range(times))


def parquet_of(path, **columns):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    size = len(next(iter(columns.values())))
    full = {
        "timestamp": [float(T0)] * size,
        "machine": ["h"] * size,
        "metric": ["x"] * size,
        "value": [1.0] * size,
    } | columns
    parquet.write_table(pa.table(full), path, compression="zstd")


ROW = f"{T0},h,x,1\n"
BOMBS = {  # a few kilobytes each, which would be thousands of times as much
    "line.csv.gz": (packed(HEAD) + packed("a" * 2**21, 20), "row 2 has more than 1,048,576 bytes"),
    "header.csv.gz": (packed("machine," * 2**20), "row 1 has more than 1,048,576 bytes"),
    "columns.csv": (",".join(f"c{k}" for k in range(30_000)).encode(), "has 30,000 columns; 256"),
    "quote.csv.gz": (packed(HEAD + '"' + "\n" * 2**21), "cannot be read: field larger than"),
    "rows.csv.gz": (packed(HEAD) + packed(ROW * 60_000, 2), "more than 50,000 rows"),
    "empty.csv.gz": (packed(HEAD) + packed("\n" * 60_000, 2), "more than 50,000 lines"),
    "expanded.csv.gz": (packed(HEAD) + packed((ROW[:-1] + " " * 999 + "\n") * 9000), "unpacked"),
    "twice.csv": ((HEAD[:-1] + ",value\n" + ROW[:-1] + ",2\n").encode(), "'value' twice"),
    "machines.csv": (
        (HEAD + "".join(f"{T0},h{k},x,1\n" for k in range(300))).encode(),
        "more than 200 machines",
    ),
    "labels.csv": (
        (HEAD[:-1] + ",id\n" + "".join(f"{ROW[:-1]},{k}\n" for k in range(600))).encode(),
        "more than 500 metrics",
    ),
    "metrics.csv": (
        (HEAD + "".join(f"{T0},h,x{k},1\n" for k in range(60))).encode(),
        "60 names of metrics",
    ),
    "name.csv": ((HEAD + f"{T0},{'h' * 2000},x,1\n").encode(), "a machine of 2,000 characters"),
    "devices.csv": ((HEAD + ROW * 5000).encode(), "h has 5,000 values of x at 1700000000"),
    "pattern.csv": ((HEAD + f"{T0},h,x{{{'a' * 1000}}},1\n" * 3).encode(), ""),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_holds_very_much_is_refused(tmp_path, name, monkeypatch):
    monkeypatch.setattr(files, "ROWS", 50_000)
    monkeypatch.setattr(files, "EXPANDED", 2**23)
    monkeypatch.setattr(files, "MACHINES", 200)
    monkeypatch.setattr(files, "METRICS", 500)
    monkeypatch.setattr(convert, "NAMES", 50)
    content, words = BOMBS[name]
    (tmp_path / name).write_bytes(content)
    if words:
        with pytest.raises(UserError, match=words) as caught:
            files.read(tmp_path / name)
        assert name in str(caught.value) and len(str(caught.value)) < 400
    else:
        assert len(files.read(tmp_path / name)) == 3


def test_a_small_parquet_file_that_holds_very_much_is_refused(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr(files, "ROWS", 50_000)
    monkeypatch.setattr(files, "GROUP", 2**22)
    one = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), ["h"])
    parquet_of(tmp_path / "rows.parquet", machine=one)
    assert (tmp_path / "rows.parquet").stat().st_size < 50_000
    big = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), ["h" * 2**20])
    parquet_of(tmp_path / "name.parquet", metric=big)
    parquet_of(tmp_path / "value.parquet", value=big)
    parquet_of(tmp_path / "chunk.parquet", machine=[f"{k}" + "h" * 1000 for k in range(9000)])
    parquet_of(tmp_path / "columns.parquet", **{f"c{k}": [1.0] for k in range(300)})
    parquet_of(tmp_path / "lists.parquet", gpu=[[1, 2], [3]])
    parquet_of(tmp_path / "bytes.parquet", machine=[b"\xff", b"a"])
    for name, words in {
        "rows": "has 200,000 rows; 50,000",
        "name": "a metric of 1,048,576 bytes",
        "value": "a value of 1,048,576 bytes",
        "chunk": "its group 0 of rows has",
        "columns": "has 304 columns",
        "lists": "'gpu' is of type list",
        "bytes": "of type binary",
    }.items():
        with pytest.raises(UserError, match=rf"{name}\.parquet.*{words}"):
            files.read(tmp_path / f"{name}.parquet")


def test_parquet_columns_of_other_types_are_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    moments = pa.array([T0 * 10**9 + 123_456_789, None], pa.timestamp("ns"))
    parquet_of(
        tmp_path / "a.parquet",
        timestamp=moments,
        value=pa.array([3, None], pa.int64()),
        gpu=pa.array([7, None], pa.int8()),
        ok=[True, False],
    )
    samples = files.read(tmp_path / "a.parquet")
    assert samples.metrics == ("x",) and rows(samples) == [(T0 + 0.123456, "h", "x", 3.0)]
    assert "row 2: timestamp=" in samples.notes[0]
    parquet_of(tmp_path / "b.parquet", value=["1.5", "", "four"], timestamp=["5", "6", "7"])
    samples = files.read(tmp_path / "b.parquet")
    assert [v for *_, v in samples.rows()][0] == 1.5 and math.isnan(samples.value_N[1])
    assert "row 3: value='four' is no number; 1 of 3" in samples.notes[0]


def test_a_damaged_parquet_file_is_named_or_read(tmp_path, seed):
    parquet_of(
        tmp_path / "a.parquet", machine=[f"m{k % 7}" for k in range(3000)], value=np.arange(3000.0)
    )
    intact, rng = (tmp_path / "a.parquet").read_bytes(), np.random.default_rng(seed)
    expected, refused = set(files.read(tmp_path / "a.parquet").rows()), 0
    for k in range(60):
        bent = bytearray(intact)
        if k % 3:
            for place in rng.integers(4, len(intact), 1 + k % 5):
                bent[place] ^= 1 << rng.integers(8)
        else:
            del bent[rng.integers(4, len(intact)) :]
        (tmp_path / "b.parquet").write_bytes(bent)
        try:
            files.read(tmp_path / "b.parquet")
        except UserError as error:
            refused += 1
            assert "b.parquet" in str(error)
    assert refused >= 20 and expected


def test_parquet_with_names_that_are_no_text_is_refused(tmp_path):
    parquet_of(tmp_path / "a.parquet", machine=["m"] * 3, value=np.arange(3.0))
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data.replace(b"machine", b"mach\x80ne"))
    with pytest.raises(UserError, match=r"a\.parquet: .*(utf-8|machine)"):
        files.read(tmp_path / "a.parquet")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    os.symlink("/dev/zero", tmp_path / "device.csv")
    (tmp_path / "folder.parquet").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.csv"))
        for name, what in {
            "pipe.csv": "a named pipe",
            "device.csv": "a device",
            "folder.parquet": "a folder",
        }.items():
            with pytest.raises(UserError, match=f"{name}: it is {what}"):
                files.read(tmp_path / name)
        with pytest.raises(UserError, match=r"socket\.csv"):
            files.read(tmp_path / "socket.csv")


def test_few_rows_far_apart_make_no_huge_grid():
    samples = Samples.of([(T0 + 10.0 * k, f"m{k % 300}", f"x{k % 30}", 1.0) for k in range(3000)])
    with pytest.raises(UserError, match="more than 134,217,728: the 3,000 rows are from 17"):
        to_grid(samples)
