"""megajax.LLM: what is opened, and what its methods return."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from megajax import LLM, evaluation
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.foreign import gguf, peft
from megajax.models import decoder, lora
from megajax.parallel import sharding
from megajax.serving import SamplingParams
from megajax.systems.open_model import kind_of
from megajax.training import logprobs
from tests import gguf_writer as w

SMALL = {"pages": 12, "prefill_chunk": 8, "max_batch": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("llm") / "small.gguf"
    keys = {"general.sampling.top_k": 1}
    tensors = w.llama_tensors(np.random.default_rng(0))
    path.write_bytes(w.gguf(w.llama() | w.vocabulary() | keys, tensors))
    return path


@pytest.fixture(scope="module")
def llm(file):
    return LLM(file, **SMALL)


def test_importing_megajax_loads_no_jax():
    code = "import sys, megajax; print('jax' in sys.modules, dir(megajax))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False ['LLM']"


def test_it_generates_what_its_engine_does(llm):
    texts = llm.generate(["ab", "hello"], max_tokens=5)  # the file's top_k=1 is greedy
    for prompt, text in zip(["ab", "hello"], texts, strict=True):
        llm.engine.submit(llm.encode(prompt), SamplingParams(max_tokens=5, temperature=0))
        ids = [token for output in llm.engine.run() for token in output.tokens]
        assert text == llm.tokenizer.decode(ids[:-1] if ids[-1] in llm.tokenizer.ends else ids)
    assert llm.generate("ab", max_tokens=5) == texts[:1]
    assert llm.generate("ab", max_tokens=5, n=2) == 2 * texts[:1]
    assert llm.generate([]) == []
    assert len(llm.encode(llm.generate("ab", ignore_eos=True)[0])) > 5  # as much as there is room


def test_it_chats_by_the_template_of_the_model(llm):
    messages = [{"role": "user", "content": "hi"}]
    text = llm.chat(messages, max_tokens=4, temperature=0)
    prompt = "<|begin|>hi<|end|>"  # by the template of the file
    assert text == llm.generate(prompt, max_tokens=4, temperature=0)[0]


def test_log_probabilities_are_the_trainers(llm, file):
    texts = ["some text", "x"]
    ours = llm.logprobs(texts)
    rows = [llm.encode(text) for text in texts]
    cfg, params, _ = gguf.load(file)
    for row, scores, theirs in zip(rows, ours, logprobs(cfg, params, rows), strict=True):
        assert scores.dtype == np.float32 and scores.shape == (len(row) - 1,)
        np.testing.assert_allclose(scores, theirs[1:], atol=1e-5)
    nats = -sum(float(x.sum()) for x in ours) / sum(map(len, ours))
    assert evaluation.perplexity(llm.engine, texts)[0] == pytest.approx(nats)


@pytest.mark.slow
def test_sizes_of_a_mesh_are_options(file):
    both = LLM(file, tensor=2, context=20, sampling_defaults="none", **SMALL)
    assert both.engine.context == 20 and "tensor 2" in repr(both)
    np.testing.assert_allclose(
        both.logprobs("some text")[0], LLM(file, **SMALL).logprobs("some text")[0], atol=1e-5
    )


def test_kinds_of_models(tmp_path, file):
    assert kind_of(file) == "gguf"
    for said, kind in (({"model_type": "llama"}, "hf"), ({"model": {"layers": 2}}, "run_dir")):
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert kind_of(tmp_path) == kind
    with pytest.raises(UserError, match="no GGUF file"):
        kind_of(tmp_path / "config.json")
    with pytest.raises(UserError, match="none does not exist: give a folder"):
        kind_of(tmp_path / "none")
    with pytest.raises(UserError, match=r"no config.json.*nearest: .*small\.gguf"):
        kind_of(file.parent)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda llm, file: LLM(file, page=3), "page is no option .* Did you mean pages"),
        (lambda llm, file: LLM(file, tensor=16), "has 16 devices, and there are 8"),
        (lambda llm, file: LLM(file, max_batch=0), "max_batch=0 must be at least 1"),
        (lambda llm, file: LLM(file, emulate=9), "emulate=9 must be set before"),
        (lambda llm, file: LLM(file, sampling_defaults=1), "must be 'model' or 'none'"),
        (lambda llm, file: llm.generate("a", max_token=3), "max_token is no .* max_tokens"),
        (lambda llm, file: llm.generate([1, 2]), "prompts must be a text or a list"),
        (lambda llm, file: llm.generate("a" * 999), r"prompts\[0\]: .*nearest"),
        (lambda llm, file: llm.generate("a", temperature=-1), "temperature=-1"),
        (lambda llm, file: llm.chat([]), "at least one message"),
        (lambda llm, file: llm.chat([{"role": "user"}]), r"messages\[0\] must have"),
        (lambda llm, file: llm.chat([{"role": "user", "content": "a"}], n=2), "n=2 must be 1"),
        (lambda llm, file: llm.logprobs(["a", ""]), r"texts\[1\] must have at least one token"),
    ],
)
def test_what_cannot_be_is_refused(llm, file, call, message):
    with pytest.raises(UserError, match=message):
        call(llm, file)


def test_a_model_without_a_chat_template_is_named(file):
    llm = LLM(file, tokenizer="bytes", **SMALL)
    assert llm.encode("a") == [256, 97]
    with pytest.raises(UserError, match=r"small\.gguf has no chat template"):
        llm.chat([{"role": "user", "content": "a"}])


def test_an_adapter_answers_as_its_merged_model(file, tmp_path):
    from tests.models.test_lora import disturbed

    opened = gguf.GgufModel(file)
    mesh = MeshSpec(data=1).build(jax.devices()[:1])
    params, parts = opened.params(sharding.layout(mesh)), decoder.parts(opened.cfg)
    cfg = lora.LoraConfig(rank=2, modules=("q", "mlp"))
    adapted = disturbed(lora.adapt(params, parts.axes, cfg, jax.random.key(0))[0])
    peft.save(adapted, cfg, tmp_path / "peft")
    llm = LLM(file, adapter=tmp_path / "peft", **SMALL)
    (scores,) = llm.logprobs(["hello hello"])
    row = llm.encode("hello hello")
    (merged,) = logprobs(opened.cfg, lora.merge(adapted), [row])
    (base,) = logprobs(opened.cfg, params, [row])
    np.testing.assert_allclose(scores, merged[1:], atol=1e-4)
    assert np.abs(merged[1:] - base[1:]).max() > 1e-2
