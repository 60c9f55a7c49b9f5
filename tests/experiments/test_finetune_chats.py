"""Decoders learn chats as a person would have them: made sets, stopped runs, a trained model."""

import json
import os
import re
import signal

import jax
import pytest

from megajax.core.errors import UserError
from megajax.data import quiz
from megajax.data.chat import chat_template, rows
from megajax.data.chats import ChatDataConfig, conversation
from megajax.data.documents import is_held_out
from megajax.data.tokenizer import open_tokenizer
from megajax.training.chats import (
    TEMPLATES,
    ChatsConfig,
    open_chat,
    write_template,
)
from megajax.training.finetune import load_run
from megajax.training.run_dir import saved_tokenizer
from tests import forks
from tests.data.test_chat_rows import folder_of
from tests.experiments.test_pretrain import last_step, wait_for
from tests.experiments.test_pretrain import rows as metrics

SCRIPT = "experiments/finetune.py"
FORM = re.compile(r"ANSWER: \S+")


def held_out(holdout=0.1):
    """The chats of the made set that are held out, up to the first answer."""
    chats = [conversation({"messages": quiz.messages(k)}, "") for k in range(quiz.SIZE)]
    chats = [c for c in chats if is_held_out(c.asked, holdout)]
    return [c.messages[: [m["role"] for m in c.messages].index("assistant")] for c in chats]


def answers(run_dir, prompts, most=16):
    """What the model of a run answers, greedily."""
    from megajax.core.mesh import MeshSpec
    from megajax.data.chat import Chat
    from megajax.serving import SamplingParams
    from megajax.systems.open_model import open_model

    opened = open_model(run_dir=str(run_dir))
    mesh = MeshSpec().build(jax.devices()[:1])
    sizes = {"pages": 64, "page_size": 16, "max_batch": 4, "dtype": "float32"}
    engine, _, _ = opened.engine(mesh, lambda: opened.load_to_serve(mesh), outlined=False, **sizes)
    made = Chat(opened.chat, opened.tokenizer)
    ids = [made.encode(p) for p in prompts]
    asked = SamplingParams(temperature=0, max_tokens=most)
    order = [engine.submit(i, asked) for i in ids]
    drawn = {request: [] for request in order}
    for output in engine.run():
        drawn[output.request_id] += output.tokens
    return [opened.tokenizer.decode(drawn[request]) for request in order]


def share(run_dir, prompts):
    """The fraction of the answers that have the taught form, and the answers."""
    said = answers(run_dir, prompts)
    return sum(bool(FORM.fullmatch(text.strip())) for text in said) / len(said), said


@pytest.mark.parametrize("named", ["chatml", "plain"])
def test_built_in_templates_can_be_learnt_and_are_written_beside_the_tokenizer(tmp_path, named):
    """What a server of the run reads: the template, and where to stop."""
    folder = folder_of(tmp_path, "zephyr")  # ends with </s>
    tokenizer = open_tokenizer(str(folder))
    made = open_chat(ChatsConfig(chat_template=named), tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    learnt = rows(messages, tokenizer, made)
    end = {"chatml": "<|im_end|>", "plain": "</s>"}[named]
    text = tokenizer.decode(learnt["tokens"][learnt["mask"]], special=True)
    assert text == {"chatml": "b<|im_end|>", "plain": " b</s>"}[named]
    for _ in range(2):
        write_template(folder, made, tokenizer)
    again = open_tokenizer(str(folder))
    assert chat_template(folder, again).source == TEMPLATES[named]
    assert again.id_of(end) in again.ends


def test_templates_that_cannot_be_learnt_are_refused_with_the_way_to_mend(tmp_path):
    folder = folder_of(tmp_path, "chatml")
    tokenizer = open_tokenizer(str(folder))
    with pytest.raises(UserError, match="no chat template, as base models .*=chatml, .*=plain"):
        open_chat(ChatsConfig(data=ChatDataConfig(tokenizer=str(folder))), tokenizer)
    for source, words in (
        ("{{ messages[0].content }}", "cannot be learnt from: .*no control token"),
        ("{% for %}", "cannot be compiled"),
        ("{{ raise_exception('no') }}", "refuses a message of a user: no"),
    ):
        (tmp_path / "t.jinja").write_text(source)
        with pytest.raises(UserError, match=words) as error:
            open_chat(ChatsConfig(chat_template=str(tmp_path / "t.jinja")), tokenizer)
        assert str(error.value).endswith("(--chat_template)")
    with pytest.raises(UserError, match="cannot read .*none.jinja"):
        open_chat(ChatsConfig(chat_template=str(tmp_path / "none.jinja")), tokenizer)


SMALL = (
    "--preset=chat --model.layers=1 --model.width=32 --model.heads=2 --model.kv_heads=2 "
    "--model.head_width=16 --model.mlp=64 --train.steps=12 --train.global_batch=8 --eval.every=4 "
    "--eval.batches=1 --checkpoint.every=5 --log.every=1 --emulate=2"
).split()


def words(home, folder, *flags):
    return [*SMALL, f"--cache_dir={home}/cache", f"--run_dir={home}/{folder}", *flags]


@pytest.mark.slow
@pytest.mark.process
def test_a_stopped_run_goes_on_bit_for_bit_and_reports_each_source(tmp_path):
    chats = [{"messages": quiz.messages(k)} for k in range(1000, 1080)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    flags = [f"--data.source=quiz:0.5,{tmp_path}/a.jsonl:0.5", "--eval.sample_tokens=4"]
    straight = forks.run(SCRIPT, *words(tmp_path, "straight", *flags))
    assert straight.returncode == 0, straight.stderr
    assert "tokens are learnt" in straight.stdout
    process = forks.start(SCRIPT, *words(tmp_path, "stopped", *flags))
    wait_for(process, lambda: last_step(tmp_path / "stopped") >= 6)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 128 + signal.SIGINT
    again = forks.run(SCRIPT, *words(tmp_path, "stopped", *flags))
    assert again.returncode == 0, again.stderr
    one, two = (metrics(tmp_path / name, "eval_loss")[12] for name in ("straight", "stopped"))
    assert one["eval_loss"] == two["eval_loss"]
    assert {"eval_loss/quiz", "eval_loss/a.jsonl"} <= one.keys()
    run = load_run(tmp_path / "stopped")
    assert isinstance(run, ChatsConfig) and run.chat_template == "plain"
    tokenizer = saved_tokenizer(tmp_path / "stopped")
    assert chat_template(tmp_path / "stopped", tokenizer).source == TEMPLATES["plain"]
    shown = forks.run(SCRIPT, *words(tmp_path, "shown", *flags, "--show_masks"))
    assert shown.returncode == 0 and "assistant:[ ANSWER: " in shown.stdout
    other = forks.run(SCRIPT, *words(tmp_path, "other", "--model.head=mlm"))
    assert other.returncode == 2 and "--model.head is not for this kind of run" in other.stderr


@pytest.mark.slow
def test_a_trained_model_learns_the_form_of_answers(tmp_path, smollm2):
    """SmolLM2-135M, of the group `models`: most of the held-out questions are answered so."""
    flags = [f"--init_from={smollm2}", f"--run_dir={tmp_path}/run", f"--cache_dir={tmp_path}/cache"]
    flags += (
        "--train.dtype=float32 --train.seq_len=128 --train.global_batch=4 --train.steps=20 "
        "--train.remat=none --optim.lr=2e-4 --optim.warmup=3 --eval.every=0 --eval.batches=8 "
        "--eval.sample_tokens=0 --checkpoint.every=0"
    ).split()
    optimised = {name: word for name, word in os.environ.items() if name != "XLA_FLAGS"}
    done = forks.run(SCRIPT, *flags, env=optimised)
    assert done.returncode == 0, done.stderr
    measured = metrics(tmp_path / "run", "eval_loss")
    assert measured[20]["eval_loss"] < 0.1 * measured[0]["eval_loss"]
    right, said = share(tmp_path / "run", held_out())
    assert right >= 0.9, said
