"""What the fuzzer (tests/fuzz.py) feeds: each parser of bytes that strangers write.

Here are those of checkpoints, weights, text and the network; tests/fuzz_tables.py has those of
vocabularies, templates, metrics, arrays and profiles, tests/fuzz_local.py has the others.
"""

import contextlib
import gzip
import io
import json
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megajax.checkpoint import trust
from megajax.checkpoint.memory_tier import ALIGN, HEADER, MAGIC, PAGE, Segment
from megajax.core import files
from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.source import open_source
from megajax.data.tokenizer import open_tokenizer
from megajax.foreign import pickles, readers, safetensors
from megajax.foreign.torch_files import Plain, tensors
from megajax.quant.formats import Format
from megajax.systems.elastic import wire
from megajax.systems.elastic.wire import Door
from tests import fuzz_local as local
from tests import fuzz_tables, gguf_writer, mutations
from tests.foreign_writer import (
    Name,
    Object,
    Pairs,
    dumps,
    old_tensor,
    tensor,
    torch_legacy,
    torch_zip,
)
from tests.fuzz_local import Target

GOLDEN = Path(__file__).parent / "golden" / "foreign"
SECRET = "0123456789abcdef"


def _read_all(source: readers.Foreign) -> None:
    """Reads every tensor, as an import does."""
    for name in source.shapes:
        source.view(name).tobytes()
    json.dumps(source.notes)


# ---- wire.py


class FakeSocket:
    """A socket that hears given bytes, a few at a time, and keeps nothing of what it is told."""

    def __init__(self, data: bytes):
        self._data = io.BytesIO(data)

    def recv(self, most: int) -> bytes:
        return self._data.read(min(most, 1000))

    def sendall(self, data: bytes) -> None:
        pass

    def fileno(self) -> int:
        return 0

    settimeout = setsockopt = setblocking = sendall
    setsockopt = lambda self, *words: None  # noqa: E731

    def close(self) -> None:
        pass


def _wire_seeds(folder: Path) -> list[bytes]:
    nonce = "ab" * wire.NONCE_BYTES
    hello = json.dumps({"purpose": "agent", "name": "host", "nonce": nonce}).encode()
    proof = json.dumps({"nonce": nonce, "proof": "0" * 64}).encode()
    beats = json.dumps({"kind": "beat", "ranks": [{"rank": 0, "step": 7}], "time": 1.5}).encode()
    return [hello + b"\n" + proof + b"\n", proof + b"\n", beats + b"\n" + beats + b"\n"]


def _wire(data: bytes, folder: Path) -> None:
    for calls in (False, True):
        line: Any = wire.Line(FakeSocket(data), SECRET, calls)  # type: ignore[arg-type]
        _hear(line)
    signed = b"".join(
        wire._sign(b"key", i.to_bytes(8), body) + b" " + body + b"\n"
        for i, body in enumerate(data.split(b"\n", 999))  # signatures are longer than lines
    )
    line = wire.Line(FakeSocket(signed), SECRET, True)  # type: ignore[arg-type]
    line.ready, line._keys = True, (b"key", b"key")
    _hear(line)
    lines: list[Any] = []
    selector: Any = SimpleNamespace(register=lambda x, _: lines.append(x), unregister=lines.remove)
    accept = lambda: (FakeSocket(data), ("127.0.0.1", 1))  # noqa: E731
    listener: Any = SimpleNamespace(accept=accept, setblocking=lambda _: None, close=lambda: None)
    door = Door(listener, selector, SECRET, ("agent",))
    door.accept()
    try:
        _hear(lines[-1])
        door.admits(lines[-1])
    finally:
        door.sweep()
        door.close()


def _hear(line: wire.Line) -> None:
    try:
        while True:
            line.receive()
    except OSError:
        pass


# ---- records, safetensors


def _record_seeds(folder: Path) -> list[bytes]:
    files = {"state/a": trust.FileSum(5, [907060870]), "b": trust.FileSum(0, [])}
    leaves = {
        "params.w": trust.LeafSum([2, 3], "float32", [1, 2]),
        "params.layers": trust.LeafSum([4, 3], "float32", [1, 2], [0, 2, 1, 3]),
    }
    many = {f"leaf{i}": trust.LeafSum([i], "int8", [i, i]) for i in range(50)}
    records = [trust.Record(3, files, leaves, 0.5), trust.Record(4, files, many)]
    return [r.text().encode() for r in records]


def _record(data: bytes, folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "state" / "a").write_bytes(b"hello")
    (folder / "b").write_bytes(b"")
    for text in (data, trust.seal_text(data.decode(errors="replace")).encode()):
        (folder / trust.RECORD).write_bytes(text)
        try:
            record = trust.read_record(folder)
        except trust.DamagedError:
            continue
        if damage := trust.find_damage(folder, record):
            trust.damaged(folder, damage, ["x"])  # without the names: tensorstore reads the index


def _safetensors_seeds(folder: Path) -> list[bytes]:
    kinds = {"a.w": ((2, 3), "F32"), "b": ((4,), "BF16"), "c": ((), "I64"), "d": ((0, 2), "U8")}
    arrays = {n: np.ones(s, safetensors.DTYPES[c]) for n, (s, c) in kinds.items()}
    safetensors.write_folder(folder, kinds, arrays.__getitem__)
    index = {"metadata": {}, "weight_map": {"a.w": "x", "c": "x", "d": "x", "b": "x"}}
    return [(folder / safetensors.SINGLE).read_bytes(), json.dumps(index).encode()]


def _safetensors(data: bytes, folder: Path) -> None:
    if data[:1] == b"{":
        (folder / safetensors.INDEX).write_bytes(data)
        (folder / "x").write_bytes(_safetensors_seeds(folder)[0])
    else:
        (folder / safetensors.SINGLE).write_bytes(data)
    _read_all(readers.open_foreign(folder, readers.detect(folder)))


def _edit_header(rng: Any, data: bytes) -> bytes:
    """Changes the JSON header of a safetensors file and its length with it."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data):
        return data
    header = rng.choice(mutations.TEXT)(rng, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


# ---- torch


def _structure() -> dict[Any, Any]:
    model = {
        "w": tensor(0, (2, 3), (3, 1)),
        "b": tensor(0, (6,), (1,)),
        "e": tensor(0, (0, 2), (2, 1)),
    }
    group = Object(
        Name("argparse", "Namespace"), (), {"lr": 0.5, "dtype": Name("torch", "float32")}
    )
    return {
        "model": model,
        "args": group,
        "iteration": 3,
        "note": "hello",
        "list": [1, None, (2, "x")],
        "size": Object(Name("torch", "Size"), ((2, 3),)),
        "ordered": Object(Name("collections", "OrderedDict"), ([("a", 1), ("b", 2)],)),
        "set": Object(Name("__builtin__", "set"), ([1, 2],)),
        "pairs": Pairs([(1, "a"), ("1.5", "b")]),
    }


def _pickle_seeds(folder: Path) -> list[bytes]:
    plain = {k: v for k, v in _structure().items() if k != "model"}
    laugh = b")q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(40)) + b"h\x28"
    wide = (
        b"](K\x01eq\x000"
        + b"".join(b"](" + b"h%c" % i * 9 + b"eq%c0" % (i + 1) for i in range(20))
        + b"}X\x01\x00\x00\x00wh\x14s"
    )
    loop = b"}q\x00X\x01\x00\x00\x00ah\x00s"
    many = b"](" + b"K\x01" * 500 + b"eq\x000ctorch\nSize\nq\x01" + b"h\x01h\x00\x85R0" * 30 + b"N"
    contents = [b"\x80\x02" + body + b"." for body in (laugh, loop, many, wide)]
    return [dumps(plain), *contents, (GOLDEN / "dcp" / ".metadata").read_bytes()]


def _pickle(data: bytes, folder: Path) -> None:
    value = pickles.loads(data, "here", {"torch.Size": tuple})
    plain = Plain()
    for _, x in tensors(value):
        try:
            plain(x)
        except ValueError:
            pass


def _zip_seeds(folder: Path) -> list[bytes]:
    six = np.arange(6, dtype=np.float32).tobytes()
    return [torch_zip(_structure(), {"0": six}), (GOLDEN / "kinds.pt").read_bytes()]


def _zip(data: bytes, folder: Path) -> None:
    (folder / "file.pt").write_bytes(data)
    _read_all(readers.open_foreign(folder / "file.pt", "torch"))


def _legacy_seeds(folder: Path) -> list[bytes]:
    tensors = {"w": old_tensor((2, 3), (3, 1)), "b": old_tensor((6,), (1,)), "n": 3}
    tensors |= {"h": old_tensor((4,), (1,), "8", 4, "HalfStorage")}
    storages = {"7": (6, bytes(24)), "8": (4, bytes(8))}
    return [torch_legacy(tensors, storages), torch_legacy({"a": {"b": tensors}}, storages)]


def _legacy(data: bytes, folder: Path) -> None:
    (folder / "file.pth").write_bytes(data)
    _read_all(readers.open_foreign(folder / "file.pth", "torch"))


# ---- GGUF


def _gguf_seeds(folder: Path) -> list[bytes]:
    import megajax.foreign.gguf  # noqa: F401  # it takes jax, which takes long, and much memory

    rng = np.random.default_rng(0)
    tensors = gguf_writer.llama_tensors(rng)
    metadata = gguf_writer.llama() | gguf_writer.vocabulary()
    quantized = [
        t
        if len(t.sizes) == 1
        else t._replace(kind=8, data=bytes(34 * t.sizes[0] // 32 * t.sizes[1]))
        for t in tensors
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "ab"]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1]
    sentencepiece = metadata | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(i) for i in range(262)],
        "tokenizer.ggml.token_type": [gguf_writer.Typed("i32", k) for k in kinds],
    }
    return [
        gguf_writer.gguf(metadata, tensors),
        gguf_writer.gguf(sentencepiece, quantized),
        gguf_writer.gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, quantized),
    ]


def _gguf(data: bytes, folder: Path) -> None:
    from megajax.foreign import gguf  # here: it takes jax

    (folder / "x.gguf").write_bytes(data)
    opened = gguf.GgufModel(folder / "x.gguf")
    with contextlib.suppress(UserError):
        tokenizer = opened.tokenizer()
        for ids in tokenizer.encode(["hello world", "", "é<|end|> 1"]):
            tokenizer.decode(ids)
    opened.params()


def _dcp_seeds(folder: Path) -> list[bytes]:
    return [(GOLDEN / "dcp" / ".metadata").read_bytes()]


def _dcp(data: bytes, folder: Path) -> None:
    for file in (GOLDEN / "dcp").glob("*.distcp"):
        (folder / file.name).symlink_to(file)
    (folder / ".metadata").write_bytes(data)
    _read_all(readers.open_foreign(folder, "dcp"))


def _megatron_seeds(folder: Path) -> list[bytes]:
    import megajax.foreign.megatron  # noqa: F401  # it takes jax, which takes long, and memory

    homes = [GOLDEN / "megatron_core" / "iter_0000007", GOLDEN / "megatron_dist" / "iter_0000007"]
    return [
        (homes[0] / "mp_rank_00_000" / "model_optim_rng.pt").read_bytes(),
        (homes[1] / ".metadata").read_bytes(),
    ]


def _megatron(data: bytes, folder: Path) -> None:
    stacked = data[:2] == b"\x80\x02"
    home = folder / "copy"
    shutil.copytree(GOLDEN / ("megatron_dist" if stacked else "megatron_core"), home)
    step = home / "iter_0000007"
    file = step / ".metadata" if stacked else step / "mp_rank_00_000" / "model_optim_rng.pt"
    file.write_bytes(data)
    _read_all(readers.open_foreign(home, "megatron"))


# ---- .idx, config.json, JSONL, tokenizer.json


def _idx_seeds(folder: Path) -> list[bytes]:
    with TokenWriter(folder / "x", 512) as writer:
        for n in (5, 0, 3, 40):
            writer.add(np.arange(n))
    return [(folder / "x.idx").read_bytes()]


def _idx(data: bytes, folder: Path) -> None:
    (folder / "x.bin").write_bytes(bytes(96))
    (folder / "x.idx").write_bytes(data)
    file = TokenFile(folder / "x", 512)
    for i in range(min(len(file), 1000)):
        length = int(file.lengths[i])
        content = file.read(i, 0, length)
        if len(content) != length:
            raise AssertionError(f"document {i} has {length} tokens, {len(content)} were read")
        file.check_ids(content, i)


def _config_seeds(folder: Path) -> list[bytes]:
    import megajax.foreign.hf  # noqa: F401  # it takes jax, which takes long, and much memory

    llama = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "rope_theta": 1e4, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }  # fmt: skip
    mixtral = llama | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 512,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    }
    bert = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512,
            "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 128,
            "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0,
            "hidden_dropout_prob": 0.1, "architectures": ["BertModel"]}  # fmt: skip
    qwen = llama | {
        "model_type": "qwen3",
        "head_dim": 16,
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    return [json.dumps(x).encode() for x in (llama, mixtral, gpt2, bert, qwen)]


def _config(data: bytes, folder: Path) -> None:
    from megajax.foreign import hf  # here: it takes jax

    (folder / "config.json").write_bytes(data)
    cfg = hf.load_config(folder)
    for name, kinds in (("model.norm.weight", (4,)), ("x", (0,))):
        safetensors.write_folder(folder, {name: (kinds, "F32")}, lambda _, k=kinds: np.zeros(k))
        try:
            hf.load_params(folder, cfg)
        except (ValueError, OSError):
            continue


def _quantization_seeds(folder: Path) -> list[bytes]:
    import megajax.foreign.hf_quantized  # noqa: F401  # it takes jax, which takes long, and memory

    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "checkpoint_format": "gptq_v2",
        "desc_act": True,
        "dynamic": {r"+:^model\.layers\.1\.": {"bits": 8, "group_size": 32}},
    }
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "gemm"}
    return [json.dumps(x).encode() for x in (gptq, awq)]


def _quantization(data: bytes, folder: Path) -> None:
    from megajax.foreign import hf_quantized  # here: it takes jax

    (folder / "config.json").write_bytes(data)
    settings = hf_quantized.checked_settings(files.read_object(folder / "config.json", 2**24))
    kind = settings.of("model.layers.1.mlp.up_proj")
    if kind is not None:
        np.arange(256) // Format(kind[0], kind[1], 0, symmetric=False).group_of(256)


def _segment_seeds(folder: Path) -> list[bytes]:
    rows = [
        ["params.w", [4, 6], [0, 0], [2, 6], "float32", 0],
        ["b", [3], [0], [3], "bfloat16", 64],
    ]
    return [json.dumps({"data_state": {"attempt": 0, "rows": 7}, "pieces": rows}).encode()]


def _segment(data: bytes, folder: Path) -> None:
    """A table whose checksums are good, with all that follows it."""
    segment = Segment.create(folder / "memory", 2**16)
    body = data[:30_000].ljust(-(-len(data[:30_000]) // ALIGN) * ALIGN) + bytes(128)
    header = HEADER.pack(MAGIC, 1, 5, min(len(data), 30_000), len(body), zlib.crc32(body))
    with open(folder / "memory", "r+b") as file:
        file.write(header + struct.pack("<I", zlib.crc32(header)))
        file.seek(2 * PAGE)
        file.write(body)
    for snapshot in segment.snapshots():
        for piece in snapshot.pieces:
            piece.array.tobytes()
        json.dumps(snapshot.data_state)


def _jsonl_seeds(folder: Path) -> list[bytes]:
    lines = ['{"text": "one"}', '{"text": "\\u00e9\\ud83d\\ude00 two", "id": 7}', '{"text": ""}']
    text = "\n".join(lines).encode()
    return [text, gzip.compress(text), gzip.compress(b" " * 50_000_000)]


def _jsonl(data: bytes, folder: Path) -> None:
    name = "a.jsonl.gz" if data[:2] == b"\x1f\x8b" else "a.jsonl"
    names = (name, name.replace("jsonl", "json"))
    for undecodable in ("error", "replace", "skip"):
        cfg = DataConfig(undecodable=undecodable)
        for name in names:
            (folder / name).write_bytes(data)
            for document in open_source(str(folder / name), cfg).documents():
                document.text.encode()


def _tokenizer_seeds(folder: Path) -> list[bytes]:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from megajax.data.tokenizer import train_bpe

    train_bpe(["hello world, hello there"] * 3, 270, folder / "bpe.json")
    words = {"[UNK]": 0, "hello": 1, "world": 2, "##s": 3}
    made = [
        tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("he", -1.0), ("l", -2.0)], 0)),
    ]
    for x in made:
        x.pre_tokenizer = pre_tokenizers.Whitespace()
        x.add_special_tokens(["<s>", "</s>"])
    return [(folder / "bpe.json").read_bytes(), *(x.to_str().encode() for x in made)]


def _tokenizer(data: bytes, folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(data)
    tokenizer = open_tokenizer(str(file))
    for ids in tokenizer.encode(["hello world", "", "é<s> 1"]):
        tokenizer.decode(ids)


_NUMBERS = (*mutations.COMMON, mutations.set_number)
TARGETS = local.TARGETS | fuzz_tables.TARGETS | {
    "wire": Target(_wire_seeds, mutations.TEXT, _wire),
    "records": Target(_record_seeds, mutations.TEXT, _record),
    "safetensors": Target(_safetensors_seeds, (*mutations.TEXT, *[_edit_header] * 8), _safetensors),
    "pickles": Target(_pickle_seeds, mutations.PICKLE, _pickle),
    "zips": Target(
        _zip_seeds, (*mutations.COMMON, *[mutations.inside_zip(mutations.PICKLE)] * 6), _zip
    ),
    "legacy": Target(_legacy_seeds, mutations.PICKLE, _legacy),
    "gguf": Target(
        _gguf_seeds,
        (*mutations.COMMON, *[mutations.in_front(_NUMBERS, 2**14)] * 9),
        _gguf,
    ),
    "dcp": Target(_dcp_seeds, mutations.PICKLE, _dcp),
    "megatron": Target(
        _megatron_seeds,
        (*mutations.COMMON, mutations.edit_pickle, *[mutations.inside_zip(mutations.PICKLE)] * 9),
        _megatron,
    ),
    "idx": Target(
        _idx_seeds,
        (*mutations.COMMON, *[mutations.set_field] * 6, *[mutations.move_field] * 6),
        _idx,
    ),
    "quantization": Target(_quantization_seeds, mutations.TEXT, _quantization),
    "segment": Target(_segment_seeds, (*mutations.TEXT, *[mutations.edit_json] * 9), _segment),
    "config": Target(_config_seeds, mutations.TEXT, _config),
    "jsonl": Target(
        _jsonl_seeds, (*mutations.TEXT, *[mutations.inside_gzip(mutations.TEXT)] * 6), _jsonl
    ),
    "tokenizer": Target(_tokenizer_seeds, mutations.TEXT, _tokenizer),
}  # fmt: skip
