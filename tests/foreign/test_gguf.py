"""GGUF files in: models that llama.cpp's own writer wrote, and files that must be refused."""

import json
import math
import struct
import time

import gguf as theirs
import jax
import numpy as np
import pytest

from megajax.checkpoint import gguf as public_gguf
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.foreign import gguf, hf
from megajax.foreign.gguf_file import GgufFile
from megajax.parallel import sharding
from megajax.quant.kernel import QuantKernel
from tests import gguf_writer as w
from tests.foreign.test_hf import assert_same, unpack

ARCHITECTURES = {
    "llama3_tied": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}


def permute(weights, heads):
    """As convert_hf_to_gguf.py orders the rows of a head for llama.cpp's rotary embedding."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def rope_factors(metadata, width):
    """Llama 3's factors as convert_hf_to_gguf.py writes them (Llama 3.1's own definition)."""
    base, rope = metadata["rope_parameters"]["rope_theta"], metadata["rope_parameters"]
    old = rope["original_max_position_embeddings"]
    low, high = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
    factors = []
    for i in range(0, width, 2):
        length = 2 * math.pi * base ** (i / width)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = old / length - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def write_golden(name, folder, alone=False):
    """Writes a golden Hugging Face folder as the GGUF file of llama.cpp's converter.

    alone: experts as tensors of their own, as in files of 2023.
    """
    _, tensors = unpack(name, folder / name)
    config = json.loads((folder / name / "config.json").read_text())
    kind = ARCHITECTURES.get(name, name)
    arch = {v: k for k, v in theirs.MODEL_ARCH_NAMES.items()}[kind]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    out = theirs.GGUFWriter(folder / f"{name}.gguf", kind)
    out.add_block_count(layers)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(width)
    out.add_value_length(width)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        out.add_sliding_window(config["sliding_window"])
    if experts := config.get("num_local_experts"):
        out.add_expert_count(experts)
        out.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        out.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["rope_parameters"]["rope_type"] == "llama3":
        out.add_rope_scaling_orig_ctx_len(
            config["rope_parameters"]["original_max_position_embeddings"]
        )
        out.add_tensor("rope_freqs.weight", rope_factors(config, width))
    names = theirs.get_tensor_name_map(arch, layers)
    stacked = {}
    for key, x in tensors.items():
        if kind == "llama" and ("q_proj" in key or "k_proj" in key):
            x = permute(x, heads if "q_proj" in key else config["num_key_value_heads"])
        if ".experts." in key:
            head, number, end = key.split(".experts.")[0], *key.split(".experts.")[1].split(".", 1)
            gate = names.get_name(f"{head}.experts.{end.removesuffix('.weight')}")
            stacked.setdefault(gate, []).append((int(number), x))
            continue
        out.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), np.float32(x))
    for key, parts in stacked.items():
        parts = [x for _, x in sorted(parts, key=lambda p: p[0])]
        if alone:
            for number, x in enumerate(parts):
                out.add_tensor(f"{key.removesuffix('_exps')}.{number}.weight", x)
        else:
            out.add_tensor(f"{key}.weight", np.stack(parts))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder / f"{name}.gguf"


@pytest.mark.parametrize(
    "name", ["llama", "llama3_tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
)
def test_models_are_those_of_the_hugging_face_folder(name, tmp_path):
    """Whose logits are transformers', by test_hf.py; and a piece for each device by itself."""
    opened = gguf.GgufModel(write_golden(name, tmp_path))
    cfg, params = hf.load(tmp_path / name)
    assert opened.cfg == cfg
    assert_same(opened.params(), params)
    if name in ("llama", "mixtral"):
        layout = sharding.layout(MeshSpec(tensor=2, expert=2, data=2).build(), model=cfg)
        cut = opened.params(layout)
        assert_same(cut, params)
        query = cut["blocks"]["attention"]["query"]
        assert query.addressable_shards[0].data.shape[2] * 2 == query.shape[2]


def test_matrices_in_few_bits_stay_so_and_are_the_same_weights(tmp_path):
    """Except where layers have unlike types, and tables."""
    kind = theirs.GGMLQuantizationType
    ends = {"attn_q": kind.Q4_1, "attn_output": kind.Q4_0, "ffn_gate": kind.Q8_0}
    kinds = {f"blk.{i}.{end}": one for i in (0, 1) for end, one in ends.items()}
    kinds |= {"blk.0.ffn_up": kind.Q4_0, "blk.1.ffn_up": kind.Q8_0, "token_embd": kind.Q8_0}
    tensors = []
    for tensor in w.llama_tensors(np.random.default_rng(0)):
        if one := kinds.get(tensor.name.removesuffix(".weight")):
            x = np.frombuffer(tensor.data, np.float32).reshape(tensor.sizes[::-1])
            tensor = tensor._replace(kind=int(one), data=theirs.quants.quantize(x, one).tobytes())
        tensors.append(tensor)
    (tmp_path / "x.gguf").write_bytes(w.gguf(w.llama() | w.vocabulary(), tensors))
    opened = gguf.GgufModel(tmp_path / "x.gguf")
    dense, packed = opened.params(), opened.params(packed=True)
    outline = opened.outline(packed=True)
    assert jax.tree.structure(outline) == jax.tree.structure(packed)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), outline) == jax.tree.map(
        lambda x: (x.shape, x.dtype), packed
    )
    leaves = dict(named_leaves(packed, lambda x: isinstance(x, QuantKernel)))
    few = {n: x for n, x in leaves.items() if isinstance(x, QuantKernel)}
    assert set(few) == {f"blocks.{n}" for n in ("attention.query", "attention.out", "mlp.gate")}
    for name, expected in named_leaves(dense):
        if name not in few:
            np.testing.assert_array_equal(leaves[name], expected)
            continue
        for i in range(opened.cfg.layers):
            one = jax.tree.map(lambda x, i=i: x[i], few[name]).piece()
            inputs = one.weight.shape[0]
            rows = one.ndim - 1 if name.endswith("out") else 1
            eye = np.eye(inputs, dtype=np.float32).reshape(inputs, *one.shape[:rows])
            got = one.matmul(eye, rows)
            np.testing.assert_array_equal(got, expected[i].reshape(got.shape))


def test_experts_may_be_tensors_of_their_own(tmp_path):
    opened = gguf.GgufModel(write_golden("mixtral", tmp_path, alone=True))
    assert_same(opened.params(), hf.load(tmp_path / "mixtral")[1])


def model(rng=0, pairs=None, tensors=None, **changes):
    """Returns a small model's file."""
    pairs_written = w.llama() | w.vocabulary() | (pairs or {}) | changes
    made = w.llama_tensors(np.random.default_rng(rng))
    return w.gguf(
        {k: v for k, v in pairs_written.items() if v is not None},
        made if tensors is None else tensors,
    )


@pytest.fixture
def read(tmp_path):
    """Loads the file of given bytes."""

    def load(data):
        (tmp_path / "x.gguf").write_bytes(data)
        return public_gguf.load(tmp_path / "x.gguf")

    return load


def test_a_file_of_version_2_another_alignment_and_every_type_of_value(read):
    cfg, params, tokenizer = read(model())
    metadata = w.llama() | w.vocabulary()
    for kind in w.SCALARS:
        metadata[f"some.{kind}"] = w.Typed(kind, 1)
        metadata[f"some.array.{kind}"] = [w.Typed(kind, 1)] * 3
    metadata |= {"some.empty": [], "general.alignment": 128, "some.text": "é" * 99}
    other = w.gguf(metadata, w.llama_tensors(np.random.default_rng(0)), version=2, alignment=128)
    cfg2, params2, tokenizer2 = read(other)
    assert cfg == cfg2 and tokenizer.identity == tokenizer2.identity
    assert_same(params, params2)


def test_quantized_weights_are_cut_at_any_place(tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 120, (4, 6, 3 * 34), np.uint8)
    (tmp_path / "x").write_bytes(w.gguf({}, [w.Tensor("x", (96, 6, 4), 8, raw.tobytes())]))
    file = GgufFile(tmp_path / "x")
    full = file.read("x")
    np.testing.assert_array_equal(file.read("x", (7, 19), (5, 77)), full[7:19, 5:77])
    assert full.shape == (24, 96) and file.read("x", (3, 3), (9, 9)).shape == (0, 0)


def _stretched(rank, sizes):
    return w.text("x") + struct.pack("<I", rank) + b"".join(struct.pack("<Q", n) for n in sizes)


HUGE = 2**62
REFUSED = {
    "nothing": (b"", "is empty"),
    "magic": (b"GGML" + bytes(40), "begins with b'GGML'"),
    "older": (b"tjgg" + bytes(40), "from before GGUF"),
    "no version": (b"GGUF\3", "ends too early"),
    "version": (w.gguf({}, version=1), "version 1; 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many keys": (w.gguf({}, counts=(0, HUGE)), "keys; at most"),
    "many tensors": (w.gguf({}, counts=(HUGE, 0)), "tensors; at most"),
    "fewer keys": (w.gguf({"a": 1}, counts=(0, 9)), "ends too early"),
    "long key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), "bytes in a key"),
    "key beyond": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 900), "of 900 bytes at 32"),
    "a key twice": (w.gguf([("a", 1), ("a", 2)]), "the key a comes twice"),
    "key no text": (
        w.gguf([("a", 1)]).replace(b"\1\0\0\0\0\0\0\0a", b"\1\0\0\0\0\0\0\0\xff"),
        "can't decode",
    ),
    "text beyond": (w.gguf({"a": w.Raw(struct.pack("<IQ", 8, 2**23))}), "a of 8,388,608 bytes"),
    "long text": (w.gguf({"a": w.Raw(struct.pack("<IQ", 8, HUGE))}), "bytes in a; at most"),
    "type": (w.gguf({"a": w.Raw(struct.pack("<I", 13))}), "a has the type 13"),
    "array type": (w.gguf({"a": w.Raw(struct.pack("<IIQ", 9, 13, 0))}), "array of the type 13"),
    "nested": (w.gguf({"a": w.Raw(struct.pack("<IIQ", 9, 9, 2))}), "array of arrays"),
    "long array": (w.gguf({"a": w.Raw(struct.pack("<IIQ", 9, 0, HUGE))}), "a of 4,611,686"),
    "many strings": (w.gguf({"a": w.Raw(struct.pack("<IIQ", 9, 8, HUGE))}), "strings"),
    "string beyond": (w.gguf({"a": w.Raw(struct.pack("<IIQQ", 9, 8, 1, HUGE))}), "string of a"),
    "alignment": (w.gguf({"general.alignment": 24}), "alignment is 24; it must be a power"),
    "alignment 0": (w.gguf({"general.alignment": 0}), "alignment is 0"),
    "alignment text": (w.gguf({"general.alignment": "32"}), "alignment is '32'"),
    "tensor twice": (w.gguf({}, [w.f32("a", np.ones(8))] * 2), "the tensor a comes twice"),
    "unknown format": (w.gguf({}, [w.Tensor("a", (32,), 4, bytes(64))]), "a has the type 4"),
    "rank 0": (w.gguf({}, [w.Tensor("a", (), 0, bytes(4))]), "sizes must be at least 1"),
    "rank 5": (w.gguf({}, [w.Tensor("a", (1,) * 5, 0, bytes(4))]), "5 dimensions of a"),
    "size 0": (w.gguf({}, [w.Tensor("a", (0, 4), 0, b"")]), "sizes must be at least 1"),
    "product": (w.gguf({}, [w.Tensor("a", (2**32, 2**32), 0, b"")]), "sizes must be"),
    "product wraps": (w.gguf({}, [w.Tensor("a", (2**63, 2, 1, 1), 0, b"")]), "sizes must be"),
    "blocks": (w.gguf({}, [w.Tensor("a", (33,), 2, bytes(36))]), "have 33 weights; Q4_0 needs 32"),
    "beyond": (w.gguf({}, [w.Tensor("a", (64,), 0, bytes(128))]), "ends beyond the file"),
    "offset": (w.gguf({}, [w.Tensor("a", (8,), 0, bytes(32), 2**63)]), "ends beyond the file"),
    "unaligned": (w.gguf({}, [w.Tensor("a", (8,), 0, bytes(64), 4)]), "begins at 4, no multiple"),
    "shared": (
        w.gguf({}, [w.f32("a", np.ones(16)), w.Tensor("b", (8,), 0, bytes(64), 32)]),
        "a and b share bytes",
    ),
    "split": (
        model(**{"split.count": w.Typed("u16", 3), "split.no": w.Typed("u16", 1)}),
        "number 1 of 3 parts of a model",
    ),
    "no architecture": (w.gguf({"a": 1}), "general.architecture is None; it must be one of llama"),
    "architecture": (model(**{"general.architecture": "gemma2"}), "'gemma2'; it must be one of"),
    "no layers": (model(**{"llama.block_count": None}), "it has no llama.block_count"),
    "layers": (model(**{"llama.block_count": 2**20}), "llama.block_count is 1048576, it must be"),
    "a text": (model(**{"llama.embedding_length": "32"}), "it must be a whole number"),
    "an array": (model(**{"llama.attention.head_count": [4, 4]}), "it must be a whole number"),
    "epsilon": (model(**{"llama.attention.layer_norm_rms_epsilon": math.nan}), "above 0"),
    "heads": (model(**{"llama.attention.head_count_kv": 3}), "must divide model.heads=4"),
    "partial rotation": (model(**{"llama.rope.dimension_count": 4}), "it must be 8, the width"),
    "yarn": (model(**{"llama.rope.scaling.type": "yarn"}), "only none, and Llama 3's"),
    "linear": (
        model(**{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        "rope.scaling.type is 'linear'",
    ),
    "unknown setting": (model(**{"llama.attn_logit_softcapping": 50.0}), "softcapping is 50.0"),
    "scale": (model(**{"llama.expert_weights_scale": 2.5}), "only 0.0 or 1.0 is supported"),
    "a shape": (model(**{"llama.feed_forward_length": 65}), "(64, 32), its metadata says"),
    "no tensor": (model(**{"llama.block_count": 3}), "has no tensor blk.2."),
    "strangers": (model(**{"llama.block_count": 1}), "does not have here: blk.1.attn_k.weight"),
    "no table": (model(tensors=[]), "no table token_embd.weight"),
    "no tokens": (model(**{"tokenizer.ggml.tokens": None}), "it has no tokens"),
    "tokens no array": (model(**{"tokenizer.ggml.tokens": "abc"}), "tokens is no array"),
    "no vocabulary model": (model(**{"tokenizer.ggml.model": "bert"}), "must be gpt2 or llama"),
    "pre-tokenizer": (model(**{"tokenizer.ggml.pre": "default"}), "pre is 'default'; the ways"),
    "a merge": (model(**{"tokenizer.ggml.merges": ["he"]}), "a merge is 'he'"),
    "merge of none": (model(**{"tokenizer.ggml.merges": ["h qq"]}), "is not a tokenizer.json"),
    "types": (model(**{"tokenizer.ggml.token_type": [w.Typed("i32", 1)]}), "262 tokens and 1"),
    "token twice": (model(**w.vocabulary(("h e", "h e"))), "are both 'he'"),
    "begin": (model(**{"tokenizer.ggml.bos_token_id": 262}), "bos_token_id is 262; tokens have"),
    "template": (model(**{"tokenizer.chat_template": 7}), "chat_template is 7, not a text"),
    "flag": (model(**{"tokenizer.ggml.add_bos_token": 1}), "add_bos_token is 1, not true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_read_are_refused(name, read):
    data, words = REFUSED[name]
    begun = time.process_time()
    with pytest.raises(UserError) as error:
        read(data)
    assert words in str(error.value)
    assert len(str(error.value)) < 1000 and time.process_time() - begun < 5


def test_formats_that_are_not_read_are_named(read):
    tensors = w.llama_tensors(np.random.default_rng(0))
    table = w.Tensor("token_embd.weight", (32, 262), 39, bytes(17 * 262))
    with pytest.raises(UserError, match="has the format MXFP4; F32, F16, .* are read"):
        read(model(tensors=[table, *tensors[1:]]))


def test_every_cut_of_a_file_is_refused(tmp_path):
    complete = model()
    for size in [*range(0, 200, 3), *range(200, len(complete), 4001)]:
        (tmp_path / "x.gguf").write_bytes(complete[:size])
        with pytest.raises(UserError):
            gguf.load(tmp_path / "x.gguf")


def test_factors_that_are_no_scaling_of_llama_3_are_refused(read):
    made = w.llama_tensors(np.random.default_rng(0))

    def load(factors):
        return read(model(tensors=[*made, w.f32("rope_freqs.weight", factors)]))

    assert load(np.ones(4))[0].rope.factor == 1.0
    for factors in ([1, 3, 2, 8], [0, 1, 1, 1], [1, 1, 1, np.nan], [np.inf] * 4, [1, 1, -1, 8]):
        with pytest.raises(UserError, match="no scaling of Llama 3's kind"):
            load(np.array(factors, np.float32))
    with pytest.raises(UserError, match=r"has the shape \(3,\), not \(4,\)"):
        load(np.ones(3))
