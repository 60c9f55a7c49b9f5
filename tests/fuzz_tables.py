"""What the fuzzer (tests/fuzz.py) feeds: vocabularies, chat templates, tables of metrics, archives
of arrays, and profiles.

These files come from other programs. Most edits here keep a file well-formed: they move, repeat,
remove or renumber the fields of a protobuf message, the lines of a text, the cells of a table, or
the headers of arrays, and everything around them fits again.
"""

import contextlib
import gzip
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.source import open_source
from megajax.data.tokenizer import ByteTokenizer, open_tokenizer, train_bpe
from megajax.monitor.sources import files as metric_files
from tests import mutations
from tests.fuzz_local import Target

TEXTS = ("hello world", "", "é<s> 1 [SEP]##s", "▁a\u0000b")

# ---- protobuf

Field = tuple[int, int, Any]  # number, wire type, value: an int, bytes, or a list of fields


def varint(number: int) -> bytes:
    """Writes a number of protobuf."""
    number %= 2**64
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def message(fields: Sequence[Field]) -> bytes:
    """Writes a message of protobuf."""
    out = []
    for number, wire, value in fields:
        out.append(varint(number << 3 | wire))
        if wire == 0:
            out.append(varint(value))
        elif wire == 2:
            body = message(value) if isinstance(value, list) else value
            out += [varint(len(body)), body]
        else:
            out.append(value)
    return b"".join(out)


def parsed(data: bytes, depth: int = 5) -> list[Field] | None:
    """Returns the fields of a message, and of those in it; None for what is none."""
    fields, at = list[Field](), 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    try:
        while at < len(data):
            key = number()
            wire = key & 7
            if wire == 0:
                fields.append((key >> 3, 0, number()))
                continue
            size = number() if wire == 2 else {1: 8, 5: 4}[wire]
            value: Any = data[at : at + size]
            if len(value) < size or key < 8:
                return None
            at += size
            inner = parsed(value, depth - 1) if wire == 2 and size and depth else None
            printable = inner is not None and value.decode(errors="replace").isprintable()
            fields.append((key >> 3, wire, value if inner is None or printable else inner))
    except (IndexError, KeyError):
        return None
    return fields


def edit_message(rng: random.Random, data: bytes) -> bytes:
    """Moves, copies, removes, renumbers or changes fields of a protobuf message, at any depth."""
    if (fields := parsed(data)) is None:
        return data
    for _ in range(rng.randint(1, 4)):
        home = fields
        while inner := [f[2] for f in home if isinstance(f[2], list)]:
            if rng.random() < 0.3:
                break
            home = rng.choice(inner)
        if not home:
            continue
        at = rng.randrange(len(home))
        number, wire, value = home[at]
        match rng.randrange(6):
            case 0:
                del home[at]
            case 1:
                room = mutations.LONGEST // max(len(message([home[at]])), 1)
                home[at:at] = [home[at]] * min(int(2 ** rng.uniform(0, 10)), room)
            case 2:
                home.insert(rng.randrange(len(home)), home.pop(at))
            case 3:
                home[at] = (rng.choice([*range(1, 12), 24, 35, 40, 41, 45, 2**28]), wire, value)
            case 4:
                home[at] = (number, 0, rng.choice(mutations.NUMBERS) % 2**64)
            case _:
                if isinstance(value, bytes) and wire == 2:
                    home[at] = (number, wire, _other_bytes(rng, value))
                elif isinstance(value, bytes):
                    bad = [float("nan"), float("inf"), -1e38, 0.0, 3e38]
                    body = struct.pack("<d" if wire == 1 else "<f", rng.choice(bad))
                    home[at] = (number, wire, body)
                elif isinstance(value, int):
                    home[at] = (number, wire, (value + rng.choice((-1, 1, 2**32))) % 2**64)
    return message(fields)


def _other_bytes(rng: random.Random, value: bytes) -> bytes:
    words = [b"", b"<unk>", b"<0x41>", b"</s>", "▁".encode(), b"\xff", b"\xed\xa0\x80", b"a" * 300,
             value * 2, value[:-1], b"a\x00b", b"(?P<", b"|" * 50, b"x" * 20_000]  # fmt: skip
    return rng.choice(words)


# ---- vocabularies

PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    ("<user>", 0.0, 4),
    *((f"<0x{b:02X}>", 0.0, 6) for b in range(0, 256, 16)),
    *((p, -float(i), 1) for i, p in enumerate("▁ h e l o w r d he ll hell hello".split())),
]


def model(kind: int, **trainer: int) -> bytes:
    """Writes a tokenizer.model. kind: 1 for Unigram, 2 for BPE."""
    fields: list[Field] = []
    for text, score, what in PIECES:
        inner = [(1, 2, text.encode()), (2, 5, struct.pack("<f", score)), (3, 0, what)]
        fields.append((1, 2, inner))
    fields.append((2, 2, [(3, 0, kind), (35, 0, 1), (40, 0, 0), (41, 0, 1), (42, 0, 2),
                          (45, 2, b"<unk>"), (46, 2, b"<s>"), (47, 2, b"</s>")]))  # fmt: skip
    fields.append((3, 2, [(1, 2, b"identity"), (3, 0, 1), (4, 0, 0), (5, 0, 1)]))
    return message(fields)


LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "legacy": False,
    "added_tokens_decoder": {
        "0": {"content": "<unk>", "special": True, "normalized": False},
        "3": {"content": "<user>", "special": False},
    },
    "add_bos_token": True,
    "add_prefix_space": True,
    "additional_special_tokens": ["<user>"],
}


def _cut(folder: Path) -> None:
    """Opens the tokenizer of a folder, and cuts and joins some texts."""
    tokenizer: Any = open_tokenizer(str(folder))
    for ids in tokenizer.encode(list(TEXTS)):
        tokenizer.decode(ids)
    with contextlib.suppress(UserError):
        tokenizer.pieces()
    tokenizer.prefix()


def _models(folder: Path) -> list[bytes]:
    import tokenizers  # noqa: F401  # it is large

    return [model(2), model(1)]


def _model(data: bytes, folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(data)
    with contextlib.suppress(UserError):
        _cut(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    _cut(folder)


def _settings_seeds(folder: Path) -> list[bytes]:
    import tokenizers  # noqa: F401

    plain = {k: v for k, v in LLAMA.items() if k != "tokenizer_class"}
    listed = [{"config": c, "added": {"<x>": 33, "<y>": 34}} for c in (LLAMA, plain)]
    listed.append(
        {"config": {k: v for k, v in plain.items() if "added" not in k}, "added": {"<new>": 33}}
    )
    return [json.dumps(x).encode() for x in listed]


def _settings(data: bytes, folder: Path) -> None:
    """The files beside a good tokenizer.model."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        config = None
    config = config if isinstance(config, dict) else {}
    for name, key in (("tokenizer_config.json", "config"), ("added_tokens.json", "added")):
        (folder / name).write_bytes(json.dumps(config[key]).encode() if key in config else data)
    for kind in (1, 2):
        (folder / "tokenizer.model").write_bytes(model(kind))
        with contextlib.suppress(UserError):
            _cut(folder)


BERT = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}


def _words_seeds(folder: Path) -> list[bytes]:
    import tokenizers  # noqa: F401

    listed = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "1", "é", "<"]
    return ["\n".join([*listed, ""]).encode(), "\r\n".join(listed).encode()]


def _words(data: bytes, folder: Path) -> None:
    (folder / "vocab.txt").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(BERT))
    _cut(folder)


def _merges_seeds(folder: Path) -> list[bytes]:
    import tokenizers  # noqa: F401

    vocab = {t: i for i, t in enumerate(["<|endoftext|>", *"helowrdĠ", "he", "ll", "hell"])}
    members = {"vocab": vocab, "merges": "#version: 0.2\nh e\nl l\nhe ll\n"}
    kinds = ("GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
    return [json.dumps({**members, "config": {"tokenizer_class": k}}).encode() for k in kinds]


def _merges(data: bytes, folder: Path) -> None:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        config = None
    config = config if isinstance(config, dict) else {}
    for name, key in (("vocab.json", "vocab"), ("tokenizer_config.json", "config")):
        (folder / name).write_bytes(json.dumps(config[key]).encode() if key in config else data)
    merges = config.get("merges", "")
    text = merges if isinstance(merges, str) else json.dumps(merges)
    (folder / "merges.txt").write_bytes(text.encode(errors="surrogatepass"))
    _cut(folder)


def edit_rows(rng: random.Random, data: bytes) -> bytes:
    """Moves, repeats, removes or exchanges lines, or cells of lines, of a text."""
    rows = data.split(b"\n")
    for _ in range(rng.randint(1, 4)):
        at, other = rng.randrange(len(rows)), rng.randrange(len(rows))
        cells = rows[at].split(b",")
        k = rng.randrange(len(cells))
        match rng.randrange(7):
            case 0:
                rows[at], rows[other] = rows[other], rows[at]
            case 1:
                rows[at:at] = [rows[other]] * int(2 ** rng.uniform(0, 12))
            case 2 if len(rows) > 1:
                del rows[at]
            case 3:
                numbers = [*mutations.NUMBERS, "nan", "-inf", "1e309", "0x1p3", "1_0", "+1"]
                cells[k] = str(rng.choice(numbers)).encode()
                rows[at] = b",".join(cells)
            case 4:
                words = [b"", b'"', b'""', b'"a\nb"', b"a,b", b"\x00", b"\xff", b"{"]
                words += [b'm{gpu="1"}', b"m{", b"a" * 2000, "é".encode()]
                cells[k] = rng.choice(words)
                rows[at] = b",".join(cells)
            case 5:
                rng.shuffle(cells)
                rows[at] = b",".join(cells)
            case _:
                rows[at] = rows[at] + rng.choice([b"\r", b",", b'"', b" "])
    return b"\n".join(rows)


# ---- chat templates

TEMPLATES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- set ns = namespace(a=0) -%}{% for m in messages %}{% if m.content is string %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}{% set ns.a = ns.a + loop.index0 %}{% endfor %}"
    "{% generation %}{{ bos_token }}{% endgeneration %}",
    "{% macro f(x, y=1) %}{{ x | tojson }}{% endmacro %}{% for m in messages %}"
    "{{ f(m) }}{{ raise_exception('no') if m.role == 'x' }}{{ strftime_now('%Y') }}{% endfor %}",
)
PARTS = [
    *b"{{ }} {% %} {# -%} |tojson |join |sort |map('x') [1:] .x.y () |int **9".split(),
    *b"|format(1) |batch(0) |indent(3) 1//0 x.__class__ lipsum()".split(),
    b"{% for a in b %}", b"{% endfor %}", b"{% if x %}", b"{% endif %}", b"{{ f(f) }}",
    b"{% break %}", b"{% set a = a %}", b"{% include 'x' %}", b"{% generation %}",
    b"{% endgeneration %}", b"is defined", b"{{ messages[99].x }}", b"(" * 300, b"[" * 300,
    b"not " * 2000, b"-" * 1000, b"{% if x %}" * 300,
]  # fmt: skip


def edit_template(rng: random.Random, data: bytes) -> bytes:
    """Writes words of Jinja into a template."""
    at = rng.randrange(len(data) + 1)
    part = b"".join(rng.choice(PARTS) for _ in range(rng.randint(1, 3)))
    return data[:at] + part + data[at + rng.choice((0, 0, 3, 12)) :]


def _templates(folder: Path) -> list[bytes]:
    from megajax.data import chat  # noqa: F401

    return [t.encode() for t in TEMPLATES]


def _template(data: bytes, folder: Path) -> None:
    """A template that its file or tokenizer_config.json holds, in the trial and in a chat."""
    from megajax.data.chat import Chat, chat_template

    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"fuzz-chat-{os.getppid()}.json"
    if not file.exists():
        train_bpe(["hello world, hello there"] * 3, 270, file)
    (folder / "tokenizer.json").symlink_to(file)
    (folder / "chat_template.jinja").write_bytes(data)
    tokenizer = open_tokenizer(str(folder))
    chat = Chat(chat_template(folder, tokenizer), tokenizer)
    with contextlib.suppress(UserError):
        chat.encode([{"role": "user", "content": "hello <|eos|>"}])


# ---- tables of metrics and of texts


def _csv_seeds(folder: Path) -> list[bytes]:
    rows = ["timestamp,machine,metric,value,gpu"]
    rows += [
        f"{1_700_000_000 + t},h{m},DCGM_FI_DEV_GPU_UTIL,{t * m},{g}"
        for t in range(6)
        for m in range(3)
        for g in range(2)
    ]
    rows += [f'{1_700_000_000 + 15 * t},h1,node_cpu_seconds_total,{t},"idle"' for t in range(9)]
    text = "\n".join(rows).encode()
    return [text, gzip.compress(text)]


def _csv(data: bytes, folder: Path) -> None:
    name = "x.csv.gz" if data[:2] == b"\x1f\x8b" else "x.csv"
    _metrics(data, folder / name)


def _metrics(data: bytes, file: Path) -> None:
    from megajax.systems.minder.detector import grid_of

    file.write_bytes(data)
    for limits in ((), (1_700_000_000, 1_700_000_004)):
        grid_of(metric_files.read(file, *limits))


def _parquet_seeds(folder: Path) -> list[bytes]:
    import pyarrow
    from pyarrow import parquet

    from megajax.systems.minder.detector import grid_of  # noqa: F401

    rows = 60
    columns = {
        "timestamp": [1_700_000_000 + k // 6 for k in range(rows)],
        "metric": ["m"] * rows,
        "machine": [f"h{k % 3}" for k in range(rows)],
        "value": [float(k) for k in range(rows)],
        "gpu": [k % 2 for k in range(rows)],
    }
    made = []
    for compression, moments in (("none", False), ("zstd", True), ("snappy", False)):
        table = pyarrow.table(columns)
        if moments:
            kind = pyarrow.timestamp("s")
            table = table.set_column(0, "timestamp", pyarrow.array(columns["timestamp"], kind))
        out = io.BytesIO()
        parquet.write_table(table, out, compression=compression, row_group_size=25)
        made.append(out.getvalue())
    return made


def edit_footer(rng: random.Random, data: bytes) -> bytes:
    """Changes bytes of Parquet's footer, which holds sizes, counts, offsets and types."""
    size = int.from_bytes(data[-8:-4], "little")
    if data[-4:] != b"PAR1" or not 0 < size < len(data) - 8:
        return data
    begin = len(data) - 8 - size
    edits = (mutations.flip, mutations.set_bytes, mutations.set_number, mutations.move_field)
    footer = bytearray(data[begin:-8])
    match rng.randrange(4):
        case 0:  # a varint becomes a large one
            at = rng.randrange(len(footer))
            footer[at : at + 1] = varint(rng.choice(mutations.NUMBERS))
        case 1:
            at, other = (rng.randrange(len(footer)) for _ in range(2))
            footer[at], footer[other] = footer[other], footer[at]
        case 2:
            at = rng.randrange(len(footer))
            footer[at] = (footer[at] + rng.choice((-2, -1, 1, 2))) % 256
        case _:
            footer = bytearray(rng.choice(edits)(rng, bytes(footer)))
    return data[:begin] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _parquet(data: bytes, folder: Path) -> None:
    _metrics(data, folder / "x.parquet")


def _rows_seeds(folder: Path) -> list[bytes]:
    import pyarrow
    from pyarrow import parquet

    made = []
    texts = [f"text {k} é" for k in range(30)]
    for compression, column in (("zstd", texts), ("none", [t.encode() for t in texts])):
        out = io.BytesIO()
        table = pyarrow.table({"text": column, "id": list(range(30))})
        parquet.write_table(table, out, compression=compression, row_group_size=12)
        made.append(out.getvalue())
    return made


def _rows(data: bytes, folder: Path) -> None:
    (folder / "a.parquet").write_bytes(data)
    for undecodable in ("error", "replace"):
        cfg = DataConfig(undecodable=undecodable)
        for document in open_source(str(folder / "a.parquet"), cfg).documents():
            ByteTokenizer().encode([document.text])


# ---- archives of arrays


def edit_array(rng: random.Random, data: bytes) -> bytes:
    """Changes what the header of a .npy says of its shape, type or order, or numbers behind it."""
    if data[:6] != b"\x93NUMPY" or len(data) < 12:
        return data
    size = int.from_bytes(data[8:10], "little")
    try:
        head, body = eval(data[10 : 10 + size], {"__builtins__": {}}), data[10 + size :]  # noqa: S307
        head = dict(head)
    except Exception:
        return data
    match rng.randrange(5):
        case 0:
            shape = list(head.get("shape") or (1,))
            shape[rng.randrange(len(shape))] = rng.choice(mutations.NUMBERS)
            head["shape"] = tuple(shape)
        case 1:
            head["descr"] = rng.choice(
                [
                    "<f8",
                    "<i8",
                    "<U7",
                    "|O",
                    "<M8[s]",
                    "|V3",
                    ">f2",
                    "|b1",
                    "<c16",
                    "|S0",
                    "<U99999999",
                    [("a", "<i4")],
                    "x",
                ]
            )
        case 2:
            head["shape"] = rng.choice([(), (0,), (-1,), (2, 2), (1,) * 40, (2**40, 0), [3], 3])
        case 3:
            head["fortran_order"] = rng.choice([True, None, "x"])
        case _:
            at = rng.randrange(len(body) + 1)
            values = [np.nan, np.inf, -1.0, 1e300, 0.0]
            packed = rng.choice(
                [
                    struct.pack("<d", rng.choice(values)),
                    struct.pack("<q", rng.choice(mutations.NUMBERS[:13])),
                ]
            )
            body = body[:at] + packed + body[at + 8 :]
    text = repr(head).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return data[:8] + struct.pack("<H", len(text)) + text + body


def edit_member(rng: random.Random, data: bytes) -> bytes:
    """Changes, drops, renames or exchanges one array of an archive, which is packed anew."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {n: archive.read(n) for n in archive.namelist()}
    except Exception:  # whatever an earlier edit made of it
        return data
    if not members:
        return data
    name, other = rng.choice([*members]), rng.choice([*members])
    match rng.randrange(8):
        case 0:
            del members[name]
        case 1:
            members[name], members[other] = members[other], members[name]
        case 2:
            members[rng.choice(["x.npy", "../x.npy", "a", ""])] = members[name]
        case 3:
            members[name] = rng.choice([*mutations.COMMON])(rng, members[name])
        case 4:
            members[name] = _other_text(rng, members[name])
        case _:
            members[name] = edit_array(rng, members[name])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as made:
        for n, body in members.items():
            made.writestr(zipfile.ZipInfo(n), body[: 2**20], made.compression)
    return out.getvalue()


def _other_text(rng: random.Random, data: bytes) -> bytes:
    """Changes the JSON that an array of one string holds."""
    try:
        text = str(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))
    except Exception:
        return data
    out = io.BytesIO()
    changed = mutations.edit_json(rng, text.encode()).decode(errors="replace")
    with contextlib.suppress(ValueError):
        np.lib.format.write_array(out, np.array(changed), allow_pickle=False)
    return out.getvalue() or data


def _dataset_seeds(folder: Path) -> list[bytes]:
    from megajax.core.hardware import CARDS
    from megajax.cost.record import product, rowwise
    from megajax.systems.cdmpp.dataset import Dataset
    from megajax.systems.cdmpp.labels import Labels

    records = [
        product(2, 64, 32, 16, "bfloat16", bias=True),
        rowwise(("add",), 8, 128, 2, "float32"),
    ]
    devices = ["one", "one", "two"]
    cards = {"one": CARDS["H100"], "two": CARDS["A100"]}
    rows = Dataset([*records, records[0]], np.full(3, 1e-3), devices, cards, {"date": "today"})
    pairs = np.full((3, 2), 1e-3)
    Labels(rows, np.array(["mlp"] * 3), np.array([0, 0, 4]), pairs, pairs).save(
        folder / "labels.npz"
    )
    return [(folder / "labels.npz").read_bytes()]


def _dataset(data: bytes, folder: Path) -> None:
    from megajax.systems.cdmpp.labels import Labels

    (folder / "labels.npz").write_bytes(data)
    labels = Labels.load(folder / "labels.npz")
    labels.of_rows(np.arange(len(labels.dataset)))
    labels.dataset.labelled.typical()


# ---- profiles


def _profile_seeds(folder: Path) -> list[bytes]:
    from megajax.systems.cdmpp import profile  # noqa: F401

    names = {1: b"dot.1", 2: b"end: dot.1"}
    stats = {1: b"hlo_op", 2: b"hlo_module", 3: b"_p", 4: b"_c", 5: b"jit_f", 6: b"dot.1"}
    referring = [(1, 0, 1), (7, 0, 6)], [(1, 0, 2), (5, 2, b"jit_f")], [(1, 0, 3), (3, 0, 7)]
    events_ = [
        (4, 2, [(1, 0, 1), (2, 0, 1000 * k), (3, 0, 700), *((4, 2, list(s)) for s in referring)])
        for k in range(3)
    ]
    events_.append((4, 2, [(1, 0, 2), (2, 0, 4000), (3, 0, 1), (4, 2, [(1, 0, 4), (3, 0, 7)])]))
    line = [(1, 0, 1), (2, 2, b"thread"), (3, 0, 10**6), *events_]
    made = []
    for plane in (b"/host:CPU", b"/device:GPU:0"):
        fields: list[Field] = [(1, 0, 1), (2, 2, plane), (3, 2, line)]
        for number, listed in ((4, names), (5, stats)):
            fields += [
                (number, 2, [(1, 0, k), (2, 2, [(1, 0, k), (2, 2, name)])])
                for k, name in listed.items()
            ]
        made.append(message([(1, 2, fields)]))
    return made


def _profile(data: bytes, folder: Path) -> None:
    from megajax.systems.cdmpp import profile

    (folder / "host.xplane.pb").write_bytes(data)
    profile.read(str(folder))


# ---- folders of PEFT


def _adapter_seeds(folder: Path) -> list[bytes]:
    import megajax.foreign.hf  # noqa: F401

    adapter = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "x",
        "bias": "none",
    }
    return [json.dumps(adapter).encode()]


def _adapter(data: bytes, folder: Path) -> None:
    """A folder of PEFT is refused whatever its files say."""
    from megajax.foreign import hf

    for name in ("adapter_config.json", "adapter_model.safetensors", "config.json"):
        (folder / name).write_bytes(data)
    try:
        hf.load_config(folder)
    except UserError as error:
        if "has an adapter" in str(error):
            return
    raise AssertionError("the adapter was not seen")


_PARQUET = (*mutations.COMMON, *[edit_footer] * 9)
_BLOCKS = 2**28
_JSON = (*mutations.TEXT, *[mutations.edit_json] * 6)
_PACKED = mutations.inside_gzip([edit_rows, *mutations.COMMON])
_JINJA = (*mutations.COMMON, mutations.set_digits, *[edit_template] * 8)
TARGETS = {
    "spm": Target(_models, (*mutations.COMMON, *[edit_message] * 12), _model),
    "spm_settings": Target(_settings_seeds, _JSON, _settings),
    "wordpiece": Target(_words_seeds, (*mutations.COMMON, *[edit_rows] * 6), _words),
    "merges": Target(_merges_seeds, _JSON, _merges),
    "template": Target(_templates, _JINJA, _template),
    "csv": Target(_csv_seeds, (*mutations.COMMON, *[edit_rows] * 6, *[_PACKED] * 6), _csv, _BLOCKS),
    "parquet": Target(_parquet_seeds, _PARQUET, _parquet, _BLOCKS),
    "parquet_text": Target(_rows_seeds, _PARQUET, _rows),
    "npz": Target(_dataset_seeds, (*mutations.COMMON, *[edit_member] * 9), _dataset),
    "xplane": Target(_profile_seeds, (*mutations.COMMON, *[edit_message] * 9), _profile),
    "adapter": Target(_adapter_seeds, mutations.TEXT, _adapter),
}
