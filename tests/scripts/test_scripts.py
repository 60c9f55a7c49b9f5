"""The scripts as a person calls them."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from megajax.core import config
from megajax.core.mesh import count_gpus
from megajax.training.config import Config
from tests import forks, gguf_writer

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "hf_llama.npz"


def call(script, *args):
    return forks.run(f"scripts/{script}", *args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with a tokenizer that fits its vocabulary."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("hf") / "theirs"
    folder.mkdir()
    golden = np.load(GOLDEN)
    (folder / "config.json").write_text(str(golden["config"]))
    tensors = {k[7:]: golden[k] for k in golden.files if k.startswith("tensor:")}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    words = {word: k for k, word in enumerate(["<unk>", "<eos>", "some", "text"])}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return folder


def test_import_then_export_is_the_same_model(folder, tmp_path):
    done = call("hf.py", "import", folder, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "49,392 parameters" in done.stdout
    cfg = config.load_json(Config, tmp_path / "run" / "config.json")
    assert (cfg.optim.name, cfg.optim.lr) == ("adamw", 2e-5)  # it goes on as fine-tuning
    assert cfg.model.layers == 2 and cfg.data.tokenizer.endswith("tokenizer.json")
    done = call("hf.py", "export", tmp_path / "run", tmp_path / "back", "--emulate=2")
    assert done.returncode == 0, done.stderr
    a, b = (
        safetensors.numpy.load_file(f / "model.safetensors") for f in (folder, tmp_path / "back")
    )
    assert set(a) == set(b) and all((a[k] == b[k]).all() for k in a)
    assert (tmp_path / "back" / "tokenizer.json").exists()
    again = call("hf.py", "import", folder, tmp_path / "run")
    assert again.returncode == 2 and "already holds a run" in again.stderr


def test_weights_without_a_tokenizer_are_not_imported_as_bytes(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    done = call("hf.py", "import", tmp_path / "bare", tmp_path / "run")
    assert done.returncode == 2 and "has no tokenizer" in done.stderr
    assert "--tokenizer=bytes" in done.stderr and not (tmp_path / "run").exists()
    done = call("hf.py", "import", tmp_path / "bare", tmp_path / "run", "--tokenizer=bytes")
    assert done.returncode == 0, done.stderr
    cfg = config.load_json(Config, tmp_path / "run" / "config.json")
    assert cfg.data.tokenizer == "bytes"


def test_a_gguf_file_and_the_run_that_is_made_of_it_say_the_same(tmp_path):
    file = tmp_path / "small.gguf"
    tensors = gguf_writer.llama_tensors(np.random.default_rng(0))
    file.write_bytes(gguf_writer.gguf(gguf_writer.llama() | gguf_writer.vocabulary(), tensors))
    done = call("hf.py", "import", file, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    cfg = config.load_json(Config, tmp_path / "run" / "config.json")
    assert cfg.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    ask = "--prompt=hello", "--new_tokens=9", "--sampling.temperature=0"
    said = [
        call("generate.py", source, *ask)
        for source in (f"--gguf={file}", f"--run_dir={tmp_path}/run")
    ]
    assert said[0].returncode == said[1].returncode == 0, said[0].stderr + said[1].stderr
    texts = [x.stdout.split("---")[1] for x in said]
    assert texts[0] == texts[1] and texts[0].startswith("\nhello") and len(texts[0]) > 10


def test_generate_from_a_folder(folder):
    done = call(
        "generate.py",
        f"--hf={folder}",
        "--tokenizer=bytes",
        "--prompt=AB",
        "--new_tokens=5",
        "--samples=2",
        "--emulate=2",
        "--mesh.tensor=2",
    )
    # 101 ids only: the begin id of the byte tokenizer is not one of them.
    assert done.returncode == 2 and "vocabulary" in done.stderr, done.stdout + done.stderr


def test_sampling_defaults_of_a_model_are_checked_at_the_start(tmp_path):
    file, bad = tmp_path / "small.gguf", {"general.sampling.top_p": 1.5}
    meta = gguf_writer.llama() | gguf_writer.vocabulary() | bad
    file.write_bytes(gguf_writer.gguf(meta, gguf_writer.llama_tensors(np.random.default_rng(0))))
    for script, *more in (("generate.py",), ("serve.py", "--port=0")):
        done = call(script, f"--gguf={file}", *more)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "small.gguf: general.sampling.top_p=1.5 must be in (0, 1]" in done.stderr
        assert "--sampling_defaults=none" in done.stderr


@pytest.mark.slow
def test_a_model_that_recommends_to_be_greedy(tmp_path):
    """Two samples are one text then, unless a flag gives the temperature or ignores the model."""
    file, greedy = tmp_path / "small.gguf", {"general.sampling.temp": 0.0}
    meta = gguf_writer.llama() | gguf_writer.vocabulary() | greedy
    file.write_bytes(gguf_writer.gguf(meta, gguf_writer.llama_tensors(np.random.default_rng(0))))
    ask = f"--gguf={file}", "--prompt=hello", "--new_tokens=9", "--samples=2"
    for flags, are_equal in (
        ((), True),
        (("--sampling.temperature=0.8",), False),
        (("--sampling_defaults=none",), False),
    ):
        done = call("generate.py", *ask, *flags)
        assert done.returncode == 0, done.stderr
        _, one, other = done.stdout.split("---")
        assert (one.strip() == other.strip()) == are_equal
        said = "small.gguf: temperature=0 (--sampling_defaults=none" in done.stdout
        assert said == ("--sampling_defaults=none" not in flags)


@pytest.mark.slow
def test_a_pruned_run_samples_from_tiles(tmp_path):
    """Dense with zeros on one device, and as packed tiles on two tensor ranks: the same text."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words to learn, again and again. " * 200)
    done = forks.run(
        "experiments/pretrain.py",
        f"--data.source={tmp_path}/text",
        f"--run_dir={tmp_path}/run",
        f"--cache_dir={tmp_path}/cache",
        "--model.layers=2",
        "--train.steps=6",
        "--train.global_batch=8",
        "--train.seq_len=32",
        "--eval.batches=1",
        "--eval.every=0",
        "--eval.sample_tokens=0",
        "--prune.sparsity=0.5",
        "--prune.pattern=tw1d",
        "--prune.tile=16",
        "--prune.chunk=8",
        "--prune.stages=1",
        "--prune.steps=2",
    )
    assert done.returncode == 0, done.stderr
    ask = f"--run_dir={tmp_path}/run", "--prompt=some", "--new_tokens=8", "--sampling.temperature=0"
    dense = call("generate.py", *ask)
    tiles = call("generate.py", *ask, "--tiles", "--mesh.tensor=2", "--emulate=2")
    assert tiles.returncode == 0, tiles.stderr
    assert "pruned matrices as tiles, which hold" in tiles.stdout
    assert tiles.stdout.split("---")[1] == dense.stdout.split("---")[1]


def test_generate_needs_one_source():
    done = call("generate.py")
    assert done.returncode == 2 and "give one of --run_dir, --hf and --gguf" in done.stderr


def test_hf_wants_a_verb(tmp_path):
    done = call("hf.py", "exprt", tmp_path, tmp_path)
    assert done.returncode == 2 and "Did you mean export?" in done.stderr
    done = call("hf.py", "export", tmp_path)
    assert done.returncode == 2 and "3 words are needed" in done.stderr


def test_tokenize_writes_what_training_reads(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"file number {i} " * 20)
    out = tmp_path / "tokens" / "web"
    flags = (f"--data.source={text}", f"--out={out}")
    done = call("tokenize.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "40 documents" in done.stdout
    stats = json.loads(pathlib.Path(f"{out}.json").read_text())
    assert stats["tokens"] == sum(f.stat().st_size + 2 for f in text.iterdir())
    again = call("tokenize.py", *flags)
    assert again.returncode == 2 and "exists" in again.stderr


def test_ctrl_c_during_imports_is_one_line(tmp_path):
    """At the first import that takes long: as the signal would, it raises."""
    (tmp_path / "jax.py").write_text("raise KeyboardInterrupt\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, ROOT / "experiments" / "pretrain.py"]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "stopped\n")


def test_documents_quote_the_committed_results():
    done = call("tables.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(count_gpus() > 0, reason="with a GPU it would run for minutes")
def test_gpu_check_without_a_gpu_says_so():
    done = call("gpu_check.py", "train")
    assert done.returncode == 1 and "jax finds no GPU" in done.stderr
    done = call("gpu_check.py", "trian")
    assert done.returncode == 1 and "is not a word of a part; Did you mean train?" in done.stderr
