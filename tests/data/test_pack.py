import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.pack import PATTERN, MixedRows, PackedRows, Split, parse, permute, whole_documents

S = 16


@pytest.fixture
def split(tmp_path, seed):
    """Documents whose tokens name their document and place: token = 100 * document + place."""
    random = np.random.default_rng(seed)
    lengths = [0, 1, *random.integers(1, 60, 30).tolist()]
    with TokenWriter(tmp_path / "x", 10_000) as writer:
        for i, n in enumerate(lengths):
            writer.add(100 * i + np.arange(n))
    file = TokenFile(tmp_path / "x")
    return whole_documents(file, np.arange(len(file)))


def test_rows_are_full_and_consistent(split):
    rows = PackedRows(split, S, seed=1)
    for i in range(2 * rows.rows_per_epoch):
        row = rows[i]
        tokens, segments, positions = row["tokens"], row["segments"], row["positions"]
        assert all(v.shape == (S,) and v.dtype == np.int32 for v in row.values())
        document = tokens // 100
        for s in range(1, S):
            same = segments[s] == segments[s - 1]
            assert same == (document[s] == document[s - 1])
            assert positions[s] == (positions[s - 1] + 1 if same else 0)
            if same:  # the next token of the same document is the target
                assert row["targets"][s - 1] == tokens[s] == tokens[s - 1] + 1
            else:  # nothing is predicted across a boundary
                assert row["targets"][s - 1] == -1
        assert positions[0] == 0 and segments[0] == 1


def test_an_epoch_holds_every_token_once(split):
    """Only the tail of the shuffled stream, less than one row, is left out."""
    rows = PackedRows(split, S, seed=3)
    seen = np.concatenate([rows[i]["tokens"] for i in range(rows.rows_per_epoch)])
    assert len(set(seen.tolist())) == len(seen)
    assert split.tokens - len(seen) <= S


def test_a_row_depends_on_seed_and_number_only(split):
    forwards = [PackedRows(split, S, 5)[i]["tokens"].tolist() for i in range(40)]
    rows = PackedRows(split, S, 5)
    backwards = [rows[i]["tokens"].tolist() for i in reversed(range(40))][::-1]
    assert forwards == backwards
    assert forwards != [PackedRows(split, S, 6)[i]["tokens"].tolist() for i in range(40)]


def test_epochs_are_shuffled_differently(split):
    rows = PackedRows(split, S, 0)
    n = rows.rows_per_epoch
    assert [rows[i]["tokens"].tolist() for i in range(n)] != [
        rows[n + i]["tokens"].tolist() for i in range(n)
    ]


def test_unshuffled_rows_follow_the_file(split):
    rows = PackedRows(split, S, 0, shuffle=False)
    stream = np.concatenate(
        [split.file.read(d, 0, n) for d, n in zip(split.document, split.stop, strict=True)]
    )
    assert rows[2]["tokens"].tolist() == stream[2 * S : 3 * S].tolist()


def test_ranges_of_documents(split):
    """A split may hold parts of documents: the held-out tail of a single file."""
    longest = int(np.argmax(split.stop))
    part = Split(split.file, np.array([longest]), np.array([3]), np.array([3 + S + 1]))
    row = PackedRows(part, S, 0)[0]
    assert row["tokens"].tolist() == (100 * longest + 3 + np.arange(S)).tolist()


def test_too_little_text_is_refused(split):
    with pytest.raises(UserError, match="fewer than one row of 100000"):
        PackedRows(split, 100_000, 0)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("key", [0, 1, 2**63 + 12345])
def test_permute_is_a_permutation(n, key):
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_permute_mixes():
    n = 4096
    image = np.array([permute(i, n, 99) for i in range(n)])
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 0.06
    assert not np.array_equal(image, [permute(i, n, 100) for i in range(n)])


class Numbered:
    def __init__(self, name):
        self.name = name

    def __getitem__(self, i):
        return (self.name, i)


def test_mixtures_keep_proportion_and_order():
    mixed = MixedRows([Numbered("a"), Numbered("b"), Numbered("c")], [7, 2, 1], seed=0)
    count = 3 * PATTERN // 2
    rows = [mixed[i] for i in range(count)]
    for name, share in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
        numbers = [i for n, i in rows if n == name]
        assert numbers == list(range(len(numbers)))  # nothing skipped, nothing repeated
        assert len(numbers) / count == pytest.approx(share, abs=0.01)
    assert sum(n == "c" for n, _ in rows[:PATTERN]) == round(0.1 * PATTERN)


def test_mixture_names():
    assert parse("stdlib") == [("stdlib", 1.0)]
    assert parse("stdlib:0.7, notes/:0.3") == [("stdlib", 0.7), ("notes/", 0.3)]
    assert parse("stdlib:2") == [("stdlib", 1.0)]
    for weight in ("-1", "x", "nan", "inf", "-inf", "0", "-0.0", "1e999", ""):
        with pytest.raises(UserError, match="needs a positive, finite weight"):
            parse(f"a:0.5,b:{weight}")
    for source in ("stdlib,notes/", "stdlib:nan", "stdlib:0", "stdlib:-2", ":1,b:2"):
        with pytest.raises(UserError, match="needs a positive, finite weight"):
            parse(source)


def test_mixture_weights_are_positive_and_finite():
    for weights in ([1, np.nan], [1, -1], [0, 0], [1, np.inf]):
        with pytest.raises(UserError, match="must be positive and finite"):
            MixedRows([Numbered("a"), Numbered("b")], weights, seed=0)
    mixed = MixedRows([Numbered("a"), Numbered("b")], [1e308, 1.5e308], seed=0)
    assert sum(mixed[i][0] == "a" for i in range(PATTERN)) == round(0.4 * PATTERN)


def test_a_path_that_exists_is_one_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b", "a:1", "a:0.5,b:0.5", "trail "):
        (tmp_path / name).mkdir()
        assert parse(name) == [(name, 1.0)]
    (tmp_path / "x:1.idx").touch()
    assert parse("x:1") == [("x:1", 1.0)]
    assert parse("a:1:3,b:1") == [("a:1", 3.0), ("b", 1.0)]


def test_a_name_that_comes_twice_is_one_part():
    assert parse("a:1,b:2,a:0.5") == [("a", 1.5), ("b", 2.0)]
    assert parse("a:1,a:1") == [("a", 1.0)]


def test_a_share_that_no_place_of_the_pattern_has_is_refused_at_once():
    assert len(parse(f"a:1,b:{1 / 2**15}")) == 2
    with pytest.raises(UserError, match="weight 1e-09 is below 1/65536 of the sum"):
        parse("a:1,b:1e-9")


def test_documents_that_predict_nothing_are_refused(tmp_path):
    with TokenWriter(tmp_path / "x", 300) as writer:
        for i in range(100):
            writer.add(np.array([i]))
    file = TokenFile(tmp_path / "x")
    with pytest.raises(UserError, match="no document of two tokens"):
        PackedRows(whole_documents(file, np.arange(100)), 8, 0)
