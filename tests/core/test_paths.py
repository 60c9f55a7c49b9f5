from pathlib import Path

import pytest

from megajax.checkpoint import steps
from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data.tokenizer import open_tokenizer
from megajax.foreign import hf, megatron, readers
from megajax.monitor import results
from megajax.training import run_dir
from megajax.training.config import Config

NOBODY = "~nobody-of-this-name/x"


def test_a_name_becomes_a_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/x") == tmp_path / "x" and expand("a/~") == Path("a/~")


@pytest.mark.parametrize(
    "read",
    [
        expand,
        hf.load_decoder_config,
        readers.detect,
        megatron.find_step,
        steps.open_steps,
        config.read,
        open_tokenizer,
        run_dir.saved_tokenizer,
        lambda name: run_dir.run_path(Config(run_dir=name), "pretrain", "nano"),
        results.writable_folder,
    ],
)
def test_a_home_that_nobody_has_is_one_sentence(read):
    with pytest.raises(UserError, match="home directory"):
        read(NOBODY)


def test_names_that_no_file_can_have_are_one_sentence():
    with pytest.raises(UserError, match=r"^run_dir=a+: File name too long \(--run_dir\)"):
        expand("a" * 300, "run_dir")
