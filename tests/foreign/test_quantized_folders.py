"""GPTQ's and AWQ's folders against an independent writer and decoder (tests/quant_files_oracle.py):
what the reader makes of them, what it refuses, and what our own folders hold."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.packed import LayerRuns, runs_of
from megajax.foreign import hf, hf_quantized
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.quant import Format, dequantize, quantize_model
from megajax.quant.kernel import QuantKernel
from megajax.serving import Engine, SamplingParams
from megajax.systems.open_model import open_model
from tests import quant_files_oracle as oracle
from tests.quant_files_oracle import Spec

LEAVES = {
    "self_attn.q_proj": ("attention", "query"),
    "self_attn.k_proj": ("attention", "key"),
    "self_attn.v_proj": ("attention", "value"),
    "self_attn.o_proj": ("attention", "out"),
    "mlp.gate_proj": ("mlp", "gate"),
    "mlp.up_proj": ("mlp", "up"),
    "mlp.down_proj": ("mlp", "down"),
}
TOKENS = np.array([5, 17, 80, 3, 44, 44, 91, 0])


def matrix(leaf) -> np.ndarray:
    """Returns a layer's matrix, of codes (K, N) in the order of the inputs."""
    if not isinstance(leaf, QuantKernel):
        return np.asarray(leaf, np.float64)
    one = jax.tree.map(lambda x: x[0], leaf)
    w_KN = np.asarray(dequantize(one.weight), np.float64)
    return w_KN if one.order is None else w_KN[np.argsort(np.asarray(one.order))]


def matrices(params) -> dict[str, np.ndarray]:
    """Returns {module: (K, N)} of both layers."""
    values = {}
    for layer in range(2):
        tree = runs_of(params["blocks"], 2).of(layer)
        for name, (home, leaf) in LEAVES.items():
            shape = oracle.LINEARS[name]
            values[f"model.layers.{layer}.{name}"] = matrix(tree[home][leaf]).reshape(shape)
    return values


def logits(params, cfg) -> np.ndarray:
    """Returns the logits of TOKENS."""
    tokens = jnp.asarray(TOKENS, jnp.int32)[None]
    places = jnp.arange(len(TOKENS), dtype=jnp.int32)[None]
    parts = decoder.parts(cfg, dtype="float32")
    out = parts.logits(params, {"tokens": tokens, "positions": places})
    return np.asarray(out, np.float64)[0, :, : cfg.vocab]


def check(spec: Spec, path, with_logits: bool = False):
    """Compares what the reader finds with what was written; returns the parameters."""
    expected = oracle.write(path, spec)
    cfg, params = hf_quantized.load(path)
    for name, got in matrices(params).items():
        np.testing.assert_allclose(got, expected[name], rtol=0, atol=1e-6, err_msg=name)
    if with_logits:
        np.testing.assert_allclose(
            logits(params, cfg), oracle.logits(expected, TOKENS), rtol=0, atol=1e-4
        )
    return params


def of_layers(*kinds):
    """Returns the kind of each module by its layer."""
    return lambda module: kinds[int(module.split(".")[2])]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_either_version(bits, version, tmp_path):
    """Also the zero point 0, which version 1 stores as 2^b - 1; rows of a group lie apart."""
    check(Spec(bits=bits, version=version, symmetric=False, order=True), tmp_path / "m")


@pytest.mark.parametrize(
    "spec",
    [
        Spec(bits=3, group=64, scales=ml_dtypes.bfloat16),
        Spec(group=128, shards=3, g_idx=False),  # the last group of 192 inputs is short
        Spec(bits=2, group=-1),
        Spec(method="awq", group=-1, symmetric=False),
        Spec(method="awq", group=128, symmetric=False, scales=ml_dtypes.bfloat16, shards=2),
        Spec(more={"checkpoint_format": None, "format": "gptq_v2"}),
        Spec(method="awq", more={"bits": None, "w_bit": 4, "modules_to_not_convert": ["lm_head"]}),
        Spec(of=lambda module: None if "down" in module else (4, 32)),
    ],
)
def test_other_folders(spec, tmp_path):
    check(spec, tmp_path / "m")


@pytest.mark.parametrize(
    "spec",
    [
        Spec(order=True, symmetric=False, shards=2, head=True),
        Spec(method="awq", symmetric=False, tied=True),
        Spec(  # the first pattern that matches counts
            of=of_layers((4, 32), (8, 64)),
            more={
                "dynamic": {
                    r"-:lm_head": {},
                    r"+:.*\.layers\.1\.": {"bits": 8, "group_size": 64},
                    r"+:.*": {"bits": 4},
                }
            },
        ),
        Spec(
            of=lambda m: None if m.endswith("0.mlp.down_proj") else (4, 32),
            more={"dynamic": {r"-:model\.layers\.0\.mlp\.down_proj": {}}},
        ),
        Spec(
            method="awq",
            of=of_layers(None, (4, 32)),
            more={"modules_to_not_convert": ["layers.0."]},
        ),
    ],
    ids=["head", "awq tied", "unlike layers", "one dense", "awq dense layer"],
)
def test_logits_of_a_folder(spec, tmp_path):
    params = check(spec, tmp_path / "m", with_logits=True)
    assert isinstance(params["blocks"], LayerRuns) == (spec.of is not None)


def test_unlike_layers_are_served(tmp_path):
    """The engine draws the token with the largest of the oracle's logits."""
    spec = Spec(of=of_layers(None, (4, 32)), more={"dynamic": {r"-:.*\.0\..*": {}}})
    weights = oracle.write(tmp_path / "m", spec)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "m" / "tokenizer.json"))
    mesh = MeshSpec().build(jax.devices()[:1])
    opened = open_model(hf=str(tmp_path / "m"))
    params, what = opened.load_to_serve(mesh)
    assert "(gptq, 4 bits)" in what
    engine = Engine(opened.cfg, params, mesh=mesh, pages=8, page_size=8, dtype="float32")
    engine.submit(TOKENS.tolist(), SamplingParams(max_tokens=1, temperature=0))
    (output,) = engine.run()
    assert output.tokens == [np.argmax(oracle.logits(weights, TOKENS)[-1])]


def as_older(folder, name, members, weights):
    """Moves the settings of a folder to a file of their own, and renames its weights."""
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(json.dumps({n: section.get(m, m) for n, m in members.items()}))
    (folder / "model.safetensors").rename(folder / weights)


GPTQ = {n: n for n in ("bits", "group_size", "desc_act", "sym")} | {
    "model_name_or_path": None,
    "model_file_base_name": "gptq_model-4bit-32g",
}
AWQ = {"w_bit": "bits", "q_group_size": "group_size", "zero_point": "zero_point", "version": "GEMM"}


@pytest.mark.parametrize(
    ("spec", "name", "members", "weights"),
    [
        (
            Spec(version=1, order=True, symmetric=False),
            "quantize_config.json",
            GPTQ,
            "gptq_model-4bit-32g.safetensors",
        ),
        (Spec(version=1, bits=8), "quantize_config.json", GPTQ, "llama-8bit.safetensors"),
        (Spec(method="awq", symmetric=False), "quant_config.json", AWQ, "awq_w4_g32.safetensors"),
        (Spec(method="awq", group=64), "quantize_config.json", AWQ, "model.safetensors"),
    ],
)
def test_a_folder_of_an_older_program_is_read(spec, name, members, weights, tmp_path):
    """Its parameters are bit for bit those of the same folder in today's form."""
    for folder in ("new", "old"):
        oracle.write(tmp_path / folder, spec)
    as_older(tmp_path / "old", name, members, weights)
    new, old = (hf_quantized.load(tmp_path / folder)[1] for folder in ("new", "old"))
    jax.tree.map(np.testing.assert_array_equal, new, old)


@pytest.mark.parametrize(
    ("files", "gone", "words"),
    [
        (["b.safetensors"], "", "2 other files of weights: b.safetensors, gptq.safetensors; leave"),
        (
            ["gptq.bin"],
            "gptq.safetensors",
            "nor another file of safetensors; codes are not read from gptq.bin",
        ),
        ([".x.safetensors"], "gptq.safetensors", "nor another file of safetensors (--hf)"),
        (["quant_config.json"], "", "has quantize_config.json and quant_config.json"),
    ],
)
def test_an_older_folder_says_what_is_missing(files, gone, words, tmp_path):
    oracle.write(tmp_path, Spec(version=1))
    as_older(tmp_path, "quantize_config.json", GPTQ, "gptq.safetensors")
    for name in files:
        (tmp_path / name).write_text("{}")
    if gone:
        (tmp_path / gone).unlink()
    with pytest.raises(UserError) as error:
        hf_quantized.load(tmp_path)
    assert words in str(error.value)


def test_an_older_form_of_awq_that_is_not_read_is_named(tmp_path):
    oracle.write(tmp_path, Spec(method="awq"))
    as_older(tmp_path, "quant_config.json", AWQ | {"version": "GEMV"}, "a.safetensors")
    with pytest.raises(UserError, match="quant_config.json: .*version='GEMV' of awq must be gemm"):
        hf_quantized.load(tmp_path)


# ---- refused


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{method: folder}."""
    home = tmp_path_factory.mktemp("written")
    specs = {"gptq": Spec(order=True), "awq": Spec(method="awq"), "head": Spec(head=True)}
    for name, spec in specs.items():
        oracle.write(home / name, spec)
    return home


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("method", "name", "change"),
    [
        ("gptq", f"{DOWN}.qweight", None),
        ("gptq", f"{DOWN}.qzeros", None),
        ("awq", f"{DOWN}.scales", None),
        ("head", "lm_head.scales", None),
        ("gptq", f"{DOWN}.qweight", lambda x: x[:-1]),
        ("awq", f"{DOWN}.qweight", lambda x: x.T),
        ("gptq", f"{DOWN}.qzeros", lambda x: x.astype(np.int64)),
        ("awq", f"{DOWN}.scales", lambda x: x[:1]),
        ("gptq", f"{DOWN}.scales", lambda x: np.where(x == x[1, 2], np.float16("nan"), x)),
        ("gptq", f"{DOWN}.g_idx", lambda x: np.where(x == 3, 1000, x).astype(np.int32)),
        ("gptq", f"{DOWN}.g_idx", lambda x: x - 1),
        ("gptq", f"{DOWN}.g_idx", lambda x: 0 * x),
        ("gptq", "model.norm.weight", lambda x: x.astype(np.int32)),
        ("head", "lm_head.qweight", lambda x: x[:, :-8]),
    ],
)
def test_a_damaged_tensor_is_named(method, name, change, written, tmp_path):
    tensors = oracle.read(written / method)
    config = json.loads((written / method / "config.json").read_text())
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    oracle.save(tmp_path / "m", tensors, config)
    with pytest.raises(UserError, match=f"^{re.escape(str(tmp_path / 'm'))}.*{re.escape(name)}"):
        hf_quantized.load(tmp_path / "m")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_named(share, written, tmp_path):
    shutil.copytree(written / "awq", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=re.escape(str(file))):
        hf_quantized.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("method", "members", "words"),
    [
        (
            "gptq",
            {"quant_method": "compressed-tensors"},
            r"'compressed-tensors' is not supported; gptq \(2, 3, 4 and 8 bits\) and awq",
        ),
        ("gptq", {"is_marlin_format": True}, "not for Marlin"),
        ("gptq", {"pack_dtype": "int64"}, "words of int32"),
        ("awq", {"version": "gemv"}, "version='gemv' of awq must be gemm"),
        ("awq", {"checkpoint_format": "gemv"}, "format='gemv' of awq must be gemm"),
        ("awq", {"bits": 8}, r"bits=8 of awq must be one of \(4,\)"),
        ("gptq", {"checkpoint_format": []}, r"checkpoint_format=\[\] must be gptq or gptq_v2"),
        ("gptq", {"dynamic": [1]}, "dynamic must be an object"),
        (
            "gptq",
            {"dynamic": {f"-:a{i}": {} for i in range(10_001)}},
            "dynamic has 10,001 patterns; at most 10,000 are read",
        ),
        ("gptq", {"dynamic": {"+:(a": {}}}, r"dynamic '\+:\(a' is no regular expression"),
        ("gptq", {"dynamic": {"+:a{99999999999}": {}}}, "is no regular expression"),
        ("gptq", {"dynamic": {"+:(.|.)*$": {}}}, "no repeated group"),
        ("gptq", {"dynamic": {"+:.*.*.*.*.*": {}}}, "4 repeats without end"),
        ("gptq", {"dynamic": {f"+:.*.*.*{n}": {} for n in range(90)}}, "5,760,000 steps"),
        ("gptq", {"dynamic": {"+:.*": 8}}, "must have an object of members"),
        ("gptq", {"dynamic": {".*": {"bits": 5}}}, r"dynamic '\.\*': bits=5 of gptq must be"),
        ("gptq", {"dynamic": {".*": {"method": "awq"}}}, "one method and form, found 'awq'"),
        ("gptq", {"dynamic": {"-:.*q_proj": {}}}, "q_proj is quantized, and a dynamic rule"),
    ],
)
def test_settings_that_are_refused(method, members, words, written, tmp_path):
    shutil.copytree(written / method, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] |= members
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        hf_quantized.load(tmp_path / "m")


# ---- out


@pytest.fixture(scope="module")
def dense(written):
    """(configuration, parameters that float16 holds)."""
    cfg, _ = hf_quantized.load(written / "gptq")
    params = jax.jit(decoder.parts(cfg).init)(jax.random.key(0))
    return cfg, jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params)


def format_of(bits, group=32):
    return Format(bits, group, 0, scale_dtype="float16")


def decoded(path, form) -> dict[str, np.ndarray]:
    """Returns {module: (K, N)} of a folder's blocks, by its quantization_config alone."""
    members = json.loads((path / "config.json").read_text())["quantization_config"]
    tensors, weights = oracle.read(path), {}
    for name in [n for n in tensors if "layers." in n]:
        module, end = name.rsplit(".", 1)
        part = {e: tensors.get(f"{module}.{e}") for e in ("qweight", "qzeros", "scales", "g_idx")}
        if end == "weight" and tensors[name].ndim == 2:
            weights[module] = tensors[name].astype(np.float64).T
        elif end == "qweight" and form == "awq":
            weights[module], *_ = oracle.decode_awq(part, members["group_size"])
        elif end == "qweight":
            kinds = [
                more
                for pattern, more in members.get("dynamic", {}).items()
                if re.match(pattern[2:], module)
            ]
            bits = (kinds or [members])[0]["bits"]
            weights[module], *_ = oracle.decode_gptq(part, bits, 2)
    return weights


@pytest.mark.parametrize(
    ("formats", "form", "dynamic"),
    [
        (format_of(2, None), "gptq", {}),
        (format_of(3, 128), "gptq", {}),
        (format_of(4), "awq", {}),
        (format_of(4, 64), "awq", {}),
        (format_of(4, None), "awq", {}),
        (
            [format_of(4), format_of(8)],
            "gptq",
            {r"+:^model\.layers\.1\.": {"bits": 8, "group_size": 32}},
        ),
        ([None, format_of(3, 64)], "gptq", {r"-:^model\.layers\.0\.": {}}),
        ([format_of(4), None], "awq", None),
    ],
)
def test_our_folders_by_another_decoder(formats, form, dynamic, dense, tmp_path):
    """Bit for bit, what is dense too; and our reader gives the same parameters again."""
    cfg, params = dense
    params = quantize_model(params, cfg, formats)
    hf_quantized.save(params, cfg, tmp_path / "m", form=form)
    theirs, ours = decoded(tmp_path / "m", form), matrices(params)
    assert theirs.keys() == ours.keys()
    for name, w_KN in ours.items():
        np.testing.assert_array_equal(theirs[name], w_KN, err_msg=name)
    members = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    if dynamic is None:
        (home,) = {".".join(n.split(".")[:3]) for n in members["modules_to_not_convert"][1:]}
        assert home == "model.layers.1" and len(members["modules_to_not_convert"]) == 8
        assert members["dynamic"] == {r"-:^model\.layers\.1\.": {}}  # which GPTQModel reads
    else:
        assert members.get("dynamic", {}) == dynamic
    assert members.get("sym") == (True if form == "gptq" else None)
    _, again = hf_quantized.load(tmp_path / "m")
    for name, w_KN in matrices(again).items():
        np.testing.assert_array_equal(w_KN, ours[name], err_msg=name)


def test_a_module_of_another_width_has_a_pattern_of_its_own():
    """Layers that are alike share one, which also matches names that a server fuses."""
    kinds = {f"model.layers.{i}.mlp.{n}": (4, 128) for i in range(12) for n in ("up", "down")}
    kinds |= dict.fromkeys(["model.layers.1.mlp.up", "model.layers.1.mlp.down"], (8, 64))
    kinds["model.layers.11.mlp.up"] = (8, None)
    section = hf_quantized.section_of("gptq", kinds, [], desc_act=False, symmetric=True)
    assert section["dynamic"] == {
        r"+:^model\.layers\.1\.": {"bits": 8, "group_size": 64},
        r"+:^model\.layers\.11\.mlp\.up$": {"bits": 8, "group_size": -1},
    }
    settings = hf_quantized.checked_settings(section)
    for module, kind in kinds.items():
        assert settings.of(module) == kind
    assert settings.of("model.layers.1.mlp.gate_up") == (8, 64)
    anchored = hf_quantized.checked_settings(
        section | {"dynamic": {"mlp": {"bits": 2}, "model": {}}}
    )
    assert anchored.of("model.layers.0.mlp.up") == (4, 128)  # patterns match from the beginning


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_as_many_rules_are_written_as_are_read(form):
    """One more is refused before a file is written that no reader of ours takes."""
    kinds = {f"h.{i}.up": (4, 32) for i in range(20_003)}
    dense = [f"h.{i}.down" for i in range(hf_quantized.MAX_RULES)]
    options = {"desc_act": False, "symmetric": True}
    section = hf_quantized.section_of(form, kinds, dense, **options)
    settings = hf_quantized.checked_settings(section)
    assert len(settings.dynamic) == hf_quantized.MAX_RULES
    assert settings.of(dense[-1]) is None and settings.of("h.20002.up") == (4, 32)
    with pytest.raises(UserError, match="10,001 modules or layers differ .* may have 10,000 rules"):
        hf_quantized.section_of(form, kinds, [*dense, "h.20001.down"], **options)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_matrix_that_is_dense_in_all_layers_is_named(method, tmp_path):
    """Other programs expect codes of every Linear that no member names."""
    spec = Spec(method=method, of=lambda m: None if m.endswith("down_proj") else (4, 32))
    oracle.write(tmp_path / "in", spec)
    cfg, params = hf_quantized.load(tmp_path / "in")
    hf_quantized.save(params, cfg, tmp_path / "out", form=method)
    members = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    dense = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert members["dynamic"] == {f"-:^{re.escape(n)}$": {} for n in dense}
    assert members.get("modules_to_not_convert", ["lm_head", *dense]) == ["lm_head", *dense]
    for name, x in oracle.read(tmp_path / "in").items():
        if name.endswith(".weight"):
            np.testing.assert_array_equal(oracle.read(tmp_path / "out")[name], x, err_msg=name)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_that_came_in_say_whether_they_are_symmetric(symmetric, tmp_path):
    """Programs choose kernels by `sym`; what we read has zero points in any case."""
    oracle.write(tmp_path / "in", Spec(symmetric=symmetric, version=1))
    cfg, params = hf_quantized.load(tmp_path / "in")
    hf_quantized.save(params, cfg, tmp_path / "out")
    members = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert members["sym"] is symmetric
    if symmetric:
        hf_quantized.save(params, cfg, tmp_path / "older", form="gptq_v1")
        theirs, ours = oracle.read(tmp_path / "in"), oracle.read(tmp_path / "older")
        for name in [n for n in theirs if n.endswith("qzeros")]:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    else:  # one is 0
        with pytest.raises(UserError, match=r"zero point of 0.*--form=gptq\)"):
            hf_quantized.save(params, cfg, tmp_path / "older", form="gptq_v1")
        assert not (tmp_path / "older").exists()


def test_experts_in_few_bits(tmp_path):
    oracle.write(tmp_path / "m", Spec())
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="m is a model with experts in few bits .gptq., which is"):
        hf_quantized.load(tmp_path / "m")


def test_a_fused_matrix_has_all_its_parts(tmp_path):
    """GPT-2's c_attn: queries, keys and values beside each other, in and out."""
    cfg = DecoderConfig(
        layers=2, width=64, heads=2, kv_heads=2, head_width=32, mlp=128, vocab=96,
        max_positions=32, position="learned", norm="layer", activation="gelu_tanh", bias="all",
        tied=True,
    )  # fmt: skip
    params = jax.jit(decoder.parts(cfg).init)(jax.random.key(0))
    params = jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params)
    params = quantize_model(params, cfg, format_of(4))
    hf_quantized.save(params, cfg, tmp_path / "m")
    tensors, home = oracle.read(tmp_path / "m"), "transformer.h.1.attn.c_attn"
    part = {e: tensors[f"{home}.{e}"] for e in ("qweight", "qzeros", "scales", "g_idx")}
    w_KN, *_ = oracle.decode_gptq(part, 4, 2)
    tree = jax.tree.map(lambda x: x[1], params["blocks"]["attention"])
    ours = [matrix(tree[name]) for name in ("query", "key", "value")]
    np.testing.assert_array_equal(np.concatenate(ours, 1), w_KN)
    again = hf_quantized.load(tmp_path / "m")[1]
    np.testing.assert_array_equal(logits(again, cfg), logits(params, cfg))


def test_what_awqs_form_cannot_hold(dense, written, tmp_path):
    cfg, params = dense
    for formats, words in (
        (format_of(8), "AWQ's form has 4 bits .* this one has 8 bits"),
        ([format_of(4), format_of(4, 64)], "one size of groups"),
        (format_of(4, 128), "mlp.down.*: AWQ's .* 128 does not divide the 192 inputs"),
        (format_of(4, 256), "AWQ's .* 256 does not divide the 128 inputs"),
    ):
        if isinstance(formats, Format):
            with pytest.raises(UserError, match=words):
                hf_quantized.check(cfg, formats, "awq")
        with pytest.raises(UserError, match=words):
            quantized = quantize_model(params, cfg, formats)
            hf_quantized.save(quantized, cfg, tmp_path / "m", form="awq")
    apart = hf_quantized.load(written / "gptq")[1]
    with pytest.raises(UserError, match="rows in the order of the inputs, not desc_act"):
        hf_quantized.save(apart, cfg, tmp_path / "m", form="awq")
    headless = {n: x for n, x in apart.items() if n != "head"}
    with pytest.raises(UserError, match="the parameters are not this configuration's: head"):
        hf_quantized.save(headless, cfg, tmp_path / "m")
    with pytest.raises(UserError, match="form='exl2' must be one of gptq, gptq_v1, awq"):
        hf_quantized.save(apart, cfg, tmp_path / "m", form="exl2")
    with pytest.raises(UserError, match="cfg must be a DecoderConfig, got dict"):
        hf_quantized.save(cfg, apart, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_dense_reader_names_the_reader_of_codes(written):
    with pytest.raises(
        UserError, match=r"is quantized \(quantization_config\); only what runs a model reads it"
    ):
        hf.load(written / "gptq")
