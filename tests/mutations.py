"""Bytes made worse: what the fuzzer (tests/fuzz.py) does to files that are good.

Each edit takes a generator of random numbers and bytes, and returns bytes. Some know what they
edit: binary numbers, numbers in text, nodes of JSON, opcodes of pickles, the pickle in a zip.
"""

import copy
import gzip
import io
import json
import math
import random
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence

Edit = Callable[[random.Random, bytes], bytes]

LONGEST = 256 * 2**10  # bytes of what is made
NUMBERS = [0, 1, 2, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**61,
           2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63),
           10**30]  # fmt: skip
NODES = [None, True, [], {}, "", "x", "\ud800", "é", 0.5, 1e308, float("nan"), float("-inf"), [[]],
         [0] * 100, {"a": {"b": [1]}}, "1", "../x", "a" * 5000, *NUMBERS]  # fmt: skip
# Pickles: what takes little and makes much, and what refers to what is there.
OPCODES = [b"]", b"}", b")", b"\x8f", b"N", b"(", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s",
           b"u", b"R", b"\x81", b"b", b"0", b"1", b"2", b"\x94", b"Q", b"\x93", b"\x90", b"\x91",
           b"h\x00", b"h\x01", b"h\x02", b"h\x07", b"q\x00", b"q\x01", b"q\x02", b"K\x05",
           b"M\xff\xff",
           b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 8, b"X\x01\x00\x00\x00w", b"X" + bytes(4),
           b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"c_codecs\nencode\n",
           b"c__builtin__\nset\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"G" + b"\x7f" * 8,
           b"h\x00h\x00\x86q\x00", b"h\x00R0", b"h\x01h\x00\x85R0",
           b"h\x01h\x00\x85R", b"](h\x00h\x00h\x00e",
           b"}q\x00(X\x01\x00\x00\x00ah\x00u",
           b"."]  # fmt: skip


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + int(2 ** rng.uniform(0, 12)))


def flip(rng: random.Random, data: bytes) -> bytes:
    """Flips one to eight bits."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def set_bytes(rng: random.Random, data: bytes) -> bytes:
    """Replaces a few bytes by any others."""
    begin = rng.randrange(len(data) + 1)
    return data[:begin] + rng.randbytes(rng.randint(1, 4)) + data[begin + rng.randint(0, 4) :]


def truncate(rng: random.Random, data: bytes) -> bytes:
    """Cuts the end off."""
    return data[: rng.randrange(len(data) + 1)]


def remove(rng: random.Random, data: bytes) -> bytes:
    """Takes a part out."""
    begin, end = _span(rng, data)
    return data[:begin] + data[end:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    """Writes a part many times over."""
    begin, end = _span(rng, data)
    end = min(end, begin + int(2 ** rng.uniform(0, 7)))
    return data[:end] + data[begin:end] * int(2 ** rng.uniform(0, 15)) + data[end:]


def set_number(rng: random.Random, data: bytes) -> bytes:
    """Writes a number of one to eight bytes, of either order, that lies at a limit."""
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "little", "big"))
    begin = rng.randrange(len(data) + 1)
    number = rng.choice([*NUMBERS, len(data), len(data) + 1, len(data) - begin, begin])
    wrapped = (number % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
    return data[:begin] + wrapped + data[begin + size :]


def set_digits(rng: random.Random, data: bytes) -> bytes:
    """Replaces a number in text."""
    numbers = list(re.finditer(rb"-?[0-9]+(\.[0-9]+)?", data))
    if not numbers:
        return data
    place = rng.choice(numbers)
    number = rng.choice(
        [*NUMBERS, len(data), "1e999", "-0", "1" * 5000, "0.5", int(rng.random() * 99)]
    )
    return data[: place.start()] + str(number).encode() + data[place.end() :]


def nest(rng: random.Random, data: bytes) -> bytes:
    """Puts opening brackets, and perhaps as many closing ones, somewhere."""
    begin, depth = rng.randrange(len(data) + 1), int(2 ** rng.uniform(4, 17))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b"t"), (b"]", b"a")))
    depth = min(depth, LONGEST // len(opening))
    tail = closing * depth if rng.random() < 0.5 else b""
    return data[:begin] + opening * depth + rng.choice((b"", b"1")) + tail + data[begin:]


def _nodes(tree: object) -> list[tuple[dict | list, object]]:
    """Returns (container, key) of every value."""
    todo, places = [tree], []
    while todo and len(places) < 2000:
        x = todo.pop()
        pairs = (
            list(x.items())
            if isinstance(x, dict)
            else list(enumerate(x))
            if isinstance(x, list)
            else []
        )
        places += [(x, k) for k, _ in pairs]
        todo += [v for _, v in pairs]
    return places


def edit_json(rng: random.Random, data: bytes) -> bytes:
    """Replaces, removes, copies or renames values of JSON; text that is none stays as it is."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    for _ in range(rng.randint(1, 3)):
        if not (places := _nodes(tree)):
            return json.dumps(rng.choice(NODES)).encode()
        home, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0 and isinstance(home, dict):
            del home[key]
        elif kind == 1 and isinstance(home, dict):
            home[rng.choice(["", "a", "a.b", "é", "x" * 3000, f"{key} ", "__metadata__"])] = home[
                key
            ]
        elif kind == 2:
            other, place = rng.choice(places)
            try:
                home[key] = json.loads(json.dumps(other[place]))
            except (LookupError, TypeError):
                continue
        elif kind == 3 and isinstance(home[key], int):
            home[key] += rng.choice((-1, 1, 2**32))
        else:
            home[key] = copy.deepcopy(rng.choice(NODES))  # later edits change what it holds
    return json.dumps(tree).encode()


def edit_lines(rng: random.Random, data: bytes) -> bytes:
    """Edits the JSON of one line of several, or moves a line."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), lines.pop(at))
    else:
        lines[at] = edit_json(rng, lines[at])
    return b"\n".join(lines)


def set_field(rng: random.Random, data: bytes) -> bytes:
    """Writes a number into a field of a token index: its counts, lengths, offsets or documents."""
    fields = [(9, 8), (17, 1), (18, 8), (26, 8)]
    count = min(int.from_bytes(data[18:26], "little"), len(data) // 12)
    fields += [(34 + 4 * i, 4) for i in range(count)]
    table = min(int.from_bytes(data[26:34], "little"), len(data) // 8)
    fields += [(34 + 4 * count + 8 * i, 8) for i in range(count + table)]
    begin, size = rng.choice(fields)
    number = rng.choice([*NUMBERS, 2**63 - rng.randrange(100), rng.randrange(100)])
    wrapped = (number % 2 ** (8 * size)).to_bytes(size, "little")
    return data[:begin] + wrapped + data[begin + size :]


def move_field(rng: random.Random, data: bytes, begin: int = 34) -> bytes:
    """Copies, exchanges, negates or shifts whole numbers of a table from byte `begin` on: nothing
    changes its size, and every number is one that a table may hold."""
    size = rng.choice((4, 8))
    count = (len(data) - begin) // size
    if count < 2:
        return data
    out = bytearray(data)
    one, other = (begin + size * rng.randrange(count) for _ in range(2))
    a, b = data[one : one + size], data[other : other + size]
    match rng.randrange(4):
        case 0:
            out[one : one + size] = b
        case 1:
            out[one : one + size], out[other : other + size] = b, a
        case 2:
            number = -int.from_bytes(a, "little", signed=True)
            out[one : one + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        case _:
            number = int.from_bytes(a, "little") + rng.choice((-2, -1, 1, 2, len(data)))
            out[one : one + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(out)


def edit_pickle(rng: random.Random, data: bytes) -> bytes:
    """Writes opcodes over, into or many times into a pickle."""
    begin = rng.randrange(len(data) + 1)
    chosen = b"".join(rng.choice(OPCODES) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.3:
        chosen *= int(2 ** rng.uniform(1, 14))
    return data[:begin] + chosen + data[begin + rng.choice((0, 0, 1, 2, 5)) :]


def in_front(edits: Sequence[Edit], most: int) -> Edit:
    """Makes the edit that changes some of the first bytes, where a format has its header."""

    def edit(rng: random.Random, data: bytes) -> bytes:
        size = min(len(data), int(2 ** rng.uniform(3, math.log2(most))))
        return rng.choice(edits)(rng, data[:size]) + data[size:]

    return edit


def inside_zip(edits: Sequence[Edit], member: str = "data.pkl") -> Edit:
    """Makes the edit that changes a member of a zip and writes the zip anew, so checksums fit."""

    def edit(rng: random.Random, data: bytes) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = {n: archive.read(n) for n in archive.namelist()}
        except Exception:  # whatever an earlier edit made of it
            return data
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in members.items():
                if name.endswith(member):
                    content = rng.choice(edits)(rng, content)
                if len(content) <= LONGEST:
                    archive.writestr(zipfile.ZipInfo(name), content)
        return out.getvalue()

    return edit


def inside_gzip(edits: Sequence[Edit]) -> Edit:
    """Makes the edit that changes what a gzip file holds and packs it anew, so checksums fit."""

    def edit(rng: random.Random, data: bytes) -> bytes:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                content = file.read(LONGEST)
        except (OSError, EOFError, zlib.error):  # whatever an earlier edit made of it
            return data
        return gzip.compress(rng.choice(edits)(rng, content)[:LONGEST], 1, mtime=0)

    return edit


COMMON: tuple[Edit, ...] = (flip, set_bytes, truncate, remove, repeat, set_number)
TEXT: tuple[Edit, ...] = (*COMMON, set_digits, nest, edit_json, edit_json, edit_json)
PICKLE: tuple[Edit, ...] = (*COMMON, set_digits, nest, edit_pickle, edit_pickle, edit_pickle)


def mutate(rng: random.Random, seeds: Sequence[bytes], edits: Sequence[Edit]) -> bytes:
    """Returns a seed after one to four edits, sometimes spliced with another seed."""
    data = rng.choice(seeds)
    if rng.random() < 0.1:
        other = rng.choice(seeds)
        data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        data = rng.choice(edits)(rng, data)[:LONGEST]
    return data
