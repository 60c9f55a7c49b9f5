"""A command line that cannot be read ends a script with one sentence and exit code 2."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from absl import flags

from megajax.core import config, script
from megajax.training.config import Config
from megajax.training.finetune import FinetuneConfig

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def known(monkeypatch):
    values = flags.FlagValues()
    flags.DEFINE_integer("train.steps", 1, "of the run", flag_values=values)
    flags.DEFINE_integer("prune.steps", 1, "of a stage", flag_values=values)
    flags.DEFINE_integer("train.fast.steps", 1, "of a phase", flag_values=values)
    flags.DEFINE_integer("best", 3, "how many", lower_bound=1, flag_values=values)
    flags.DEFINE_float("minutes", 1.0, "how long", flag_values=values)
    flags.DEFINE_string("out", "", "where", flag_values=values)
    flags.DEFINE_boolean("search", False, "or not", flag_values=values)
    monkeypatch.setattr(flags, "FLAGS", values)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model_name_or_path", "Did you mean --init_from?"),
        ("bf16", "Say --train.dtype=bfloat16"),
        ("num_train_epochs", "no epochs: .* --train.global_batch, and its steps are --train.steps"),
        ("per_device_train_batch_size", "--train.global_batch is the rows of a step on all devic"),
        ("per-device-train-batch-size", "--train.global_batch is the rows of a step on all devic"),
        ("lora_r", "There is no LoRA: all parameters are trained"),
        ("learning_rate", "Did you mean --optim.lr?"),
        ("output_dir", "Did you mean --run_dir?"),
        ("max_steps", "Did you mean --.*train.steps?"),
        ("warmup_ratio", "--optim.warmup is a number of steps, no ratio"),
        ("gradient_accumulation_steps", "Did you mean --train.accumulate?"),
        ("fp16", "Nothing is trained in float16; the type of computation is --train.dtype"),
        ("seed", "Did you mean --train.seed?"),
        ("weight_decay", "Did you mean --optim.weight_decay?"),
        ("logging_steps", "Say --log.every"),
        ("save_steps", "Say --checkpoint.every"),
        ("eval_steps", "Say --eval.every"),
        ("dataset_name", "Nothing is downloaded or sent: --data.source"),
        ("max_seq_length", "Say --train.seq_len"),
        ("deepspeed", "--shard.zero says what is cut"),
        ("fsdp", "--shard.zero says what is cut"),
        ("optim", "Say --optim.name"),
        ("lr_scheduler_type", "Did you mean --optim.schedule?"),
        ("resume_from_checkpoint", "A run goes on by itself where its --run_dir"),
    ],
)
def test_names_of_other_trainers_are_answered_with_ours(monkeypatch, name, words):
    """With the flags of experiments/finetune.py."""
    values = flags.FlagValues()
    for flag in {*config.flag_names(FinetuneConfig).values(), "preset", "config"}:
        flags.DEFINE_string(flag, None, "", flag_values=values)
    monkeypatch.setattr(flags, "FLAGS", values)
    assert re.search(words, script.suggest(name))


def test_every_answer_names_flags_that_pretraining_has():
    answers = " ".join(script.ANSWERS.values())
    named = set(re.findall(r"--([a-z_]+(?:\.[a-z_]+)*)", answers))
    assert named - {"mesh"} <= set(config.flag_names(Config).values())
    every = [name for names in (*script.ANSWERS, *script.OTHER_NAMES) for name in names]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--trian.steps=3", "there is no flag --trian.steps. Did you mean --train.steps?"),
        (
            "--steps=3",
            "there is no flag --steps. Did you mean --prune.steps or --train.fast.steps",
        ),
        ("--fast.steps=3", "there is no flag --fast.steps. Did you mean --train.fast.steps?"),
        ("--output_dir=x", "there is no flag --output_dir. Did you mean --out?"),
        ("--seach", "there is no flag --seach. Did you mean --search?"),
        ("--flagfile=/nowhere", "Unable to open flagfile: "),
        ("--foo=1", "there is no flag --foo; --help lists them"),
        ("--unlike_any", "there is no flag --unlike_any; --help lists them"),
        ("--best", "Missing value for --best"),
        ("--best=0", "--best=0: 0 is not a positive integer"),
        ("--best=x", "--best=x: must be an integer"),
        ("--minutes=x", "--minutes=x: must be a number"),
        ("--search=maybe", "--search=maybe: must be true or false"),
    ],
)
def test_what_cannot_be_read(known, capsys, word, sentence):
    with pytest.raises(SystemExit) as end:
        script.parse(["script.py", word])
    shown = capsys.readouterr()
    assert end.value.code == 2 and shown.out == ""
    assert shown.err.startswith(f"error: {sentence}") and shown.err.count("\n") == 1


def test_signals_that_people_send_to_look_end_no_script():
    code = """if True:
        import megajax.core.interrupted, os, signal
        def look():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
        look()
        print("goes on")
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout == "goes on\n", done
    assert "in look" in done.stderr


def test_words_are_left():
    assert script.parse(["script.py", "a", "--best=4", "b"]) == ["script.py", "a", "b"]


def busy():
    """Returns an array that is computed for a while yet."""
    x = jnp.ones((700, 700))
    y = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(y @ x), x))(x)
    assert not y.is_ready()
    return y


def test_what_is_computed_is_waited_for_before_a_script_ends():
    y = busy()
    script.settle(1)
    assert y.is_ready()


def test_a_script_does_not_wait_for_ever_for_what_is_computed(monkeypatch):
    ended = []
    monkeypatch.setattr(script, "SETTLE_S", 0.0)
    monkeypatch.setattr(script.os, "_exit", ended.append)
    y = busy()
    script.settle(130)
    assert ended == [130] and y.block_until_ready().shape == (700, 700)


def test_no_backend_is_started_to_see_whether_it_computes():
    code = (
        "import jax; from jax._src import xla_bridge; from megajax.core import script;"
        "script.settle(1); assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
