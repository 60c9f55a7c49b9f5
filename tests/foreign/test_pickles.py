"""The reader of pickles against pickle itself, and against streams that want code run."""

import collections
import os
import pathlib
import pickle
import tracemalloc

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.foreign import pickles
from megajax.foreign.pickles import Global, Record
from tests.foreign_writer import Name, Object, Raw, code, dumps

SHARED = [1, 2]
PLAIN = {
    "numbers": [0, 1, -1, 255, 65536, -(2**31), 2**62, -(2**200), 1.5, float("inf"), True, None],
    "text": ["", "a", "\u00e9\u4e2d", "x" * 300, b"", b"\x00\xff" * 200],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, (4, [5]))],
    "shared": [SHARED, SHARED],
    (1, "key"): {"nested": {"deep": {}}},
    "sets": [set(), {1, "a"}, frozenset({2})],
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_what_pickle_wrote(protocol):
    value = pickles.loads(pickle.dumps(PLAIN, protocol), "here")
    assert value == PLAIN and list(value["ordered"]) == ["b", "a"]
    assert value["shared"][0] is value["shared"][1]


class Evil:
    """Whoever unpickles it runs a command."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_command_is_refused_by_name_and_leaves_no_trace(protocol, tmp_path):
    data = pickle.dumps({"a": 1, "b": Evil(tmp_path / "trace")}, protocol)
    with pytest.raises(UserError, match=r"here: refused: it names 'posix\.system'.*nothing was"):
        pickles.loads(data, "here")
    assert not (tmp_path / "trace").exists()
    pickle.loads(data)  # so the stream does what it says
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"(ios\nsystem\n.", "opcode INST"),
        (b"(cos\nsystem\nX\x01\0\0\0xo.", "os.system"),
        (b"(ctorch\nf\nX\x01\0\0\0xo.", "opcode OBJ"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"\x83\x01\x01.", "opcode EXT2"),
        (b"\x84\x01\x01\x01\x01.", "opcode EXT4"),
        (b"P0\n.", "opcode PERSID"),
        (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
        (b"K\x01Q.", "persistent id"),
        (dumps(Object(Name("builtins", "eval"), ("1",))), "__builtin__.eval"),
        (dumps(Object(Name("builtins", "getattr"), (1, "x"))), "__builtin__.getattr"),
        (dumps(Object(Name("torchevil", "f"))), "torchevil.f"),
        (dumps(Object(Name("subprocess", "Popen"), (["x"],))), "subprocess.Popen"),
        (dumps(Raw(code(Object(Name("torch", "f"))) + b")R")), "a call of what is no name"),
        (dumps(Raw(b"X\x01\0\0\0x)R")), "a call of what is no name"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", "os.system"),
        (b"\x80\x02" + b"(" * 2000 + b".", "more than 1000 levels"),
        (b"\x8b" + (10**6).to_bytes(4, "little") + b"\x01" * 10**6 + b".", "an integer of"),
    ],
)
def test_what_no_checkpoint_needs_is_refused(data, said):
    with pytest.raises(UserError, match=f"here: refused: .*{said}.*nothing was run"):
        pickles.loads(data, "here")


def test_code_of_known_packages_stays_a_name():
    value = pickles.loads(dumps(Object(Name("torch.hub", "load"), ("x",), {"y": 2})), "here")
    assert isinstance(value, Record)
    assert (value.kind, value.args, value.member("y")) == ("torch.hub.load", ("x",), 2)
    value = pickles.loads(dumps([Name("torch", "bfloat16")]), "here")[0]
    assert isinstance(value, Global) and value.name == "torch.bfloat16"


def test_a_builder_of_ours_is_all_that_runs():
    value = Object(Name("torch", "Size"), ((2, 3),))
    assert pickles.loads(dumps(value), "here", {"torch.Size": lambda x: ("ours", *x)}) == (
        "ours",
        2,
        3,
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"}",
        b".",
        b"t.",
        b"}N.N",  # fine up to its end
        b"\x85.",
        b"h\x07.",  # a memo that is not there
        b"]K\x01K\x02s.",
        b"}(K\x01u.",
        b"}]K\x01s.",  # a list as a key
        b"\x8d" + (2**60).to_bytes(8, "little") + b"x.",
        b"\x8e" + (2**63).to_bytes(8, "little") + b"x.",
        dumps(Object(Name("collections", "OrderedDict"), (1, 2, 3))),
        dumps(Raw(b"}" + b")" + b"\x85" * 50_000 + b"Ns")),  # hashing it could end the process
    ],
)
def test_nonsense_is_damage(data):
    if data == b"}N.N":
        assert pickles.loads(data, "here") is None
        return
    with pytest.raises(UserError, match="here is damaged"):
        pickles.loads(data, "here")


def test_laughs_cost_nothing():
    """Each level refers twice to the one below: 2^200 leaves, and a key of such would never end."""
    levels = (b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(200))
    laugh = b")q\x000" + b"".join(levels) + b"h\xc8"
    assert len(pickles.loads(b"\x80\x02" + laugh + b".", "here")) == 2
    with pytest.raises(UserError, match="key"):
        pickles.loads(b"\x80\x02}" + laugh + b"Ns.", "here")


def test_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(pickles, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="a pickle of 1,0.. bytes; 100 are read at most"):
        pickles.loads(pickle.dumps(b"x" * 1000), "here")


def test_damage_never_escapes():
    """Cut anywhere: an error. Any byte changed: an error or some value, and nothing else."""
    data = pickle.dumps(PLAIN, 4)
    for end in range(len(data)):
        with pytest.raises(UserError):
            pickles.loads(data[:end], "here")
    random = np.random.default_rng(0)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= int(random.integers(1, 256))
        try:
            pickles.loads(bytes(changed), "here")
        except UserError:
            pass


ONES = b"](" + b"K\x01" * 500 + b"e"
AGAIN = b"h\x00h\x01\x85R0"  # calls what was kept first with what was kept second
KEYS = 40  # tuples as keys, of the ten that this test allows


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"ctorch\nSize\nq\x00" + ONES + b"q\x01" + AGAIN * 300, "bytes of memory"),
        (b"c_codecs\nencode\nq\x00X\xff\x1f\0\0" + b"x" * 8191 + b"q\x01" + AGAIN * 90, "bytes of"),
        (b"c__builtin__\nset\nq\x00" + ONES + b"q\x01" + AGAIN * 40, "bytes of memory"),
        (b"\x8f" * 9000, "bytes of memory"),
        (b"](" + b"}NNs" * 9000 + b"e", "bytes of memory"),
        (b"ctorch\nf\n" + b"q\x00" + b"h\x00)\x81" * 9000, "bytes of memory"),
        (b"}(\x8a\x09" + (2**64 + 1).to_bytes(9, "little") + b"Nu", "a key of 65 bits"),
        (b"}(" + b"K\x01\x85N" * KEYS + b"u", "tuples as keys"),
        (b"](" + b"K\x01\x85" * KEYS + b"eq\x000c__builtin__\nset\nh\x00\x85R", "tuples as keys"),
    ],
)
def test_what_costs_far_more_than_its_length_is_refused(body, said, monkeypatch):
    monkeypatch.setattr(pickles, "SLACK", 2**16)
    monkeypatch.setattr(pickles, "MAX_TUPLE_KEYS", 10)

    def refused():
        with pytest.raises(UserError, match=f"here: refused: .*{said}"):
            pickles.loads(b"\x80\x02" + body + b".", "here", {"torch.Size": tuple})

    refused()  # what is made once (modules, compiled patterns) is not counted
    tracemalloc.start()
    try:
        refused()
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**16 + 20 * len(body)
    finally:
        tracemalloc.stop()


def test_honest_structures_pay_with_their_length_alone(monkeypatch):
    monkeypatch.setattr(pickles, "SLACK", 0)
    sizes = [tuple(range(i, i + 3)) for i in range(100)]
    value = {f"layers.{i}.w": {"offsets": s, "sizes": s, "index": i} for i, s in enumerate(sizes)}
    for protocol in (2, 4):
        assert pickles.loads(pickle.dumps(value, protocol), "here") == value
    file = pathlib.Path(__file__).parent.parent / "golden" / "foreign" / "dcp" / ".metadata"
    assert pickles.loads(file.read_bytes(), "here", {"torch.Size": tuple}).last == "Metadata"
