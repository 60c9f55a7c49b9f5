"""Perplexity, multiple choice and exact match against a whole forward pass and NumPy."""

import dataclasses
import functools
import json
import math
import statistics

import numpy as np
import pytest

from megajax import evaluation
from megajax.core.errors import UserError
from megajax.data.tokenizer import ByteTokenizer
from megajax.serving import Engine, SamplingParams
from megajax.training.evaluate import evaluate
from tests.plain_loop import _logits, one_by_one, sharp
from tests.tiny import MODEL, on, run_config, step_of

CFG = dataclasses.replace(MODEL, vocab=259, max_positions=48)
ROW = 64  # tokens of the oracle's rows: one program
TEXTS = ["def f(x):", "a", "return 1 + é", "x" * 30]


class NoBegin(ByteTokenizer):
    begin = None


@functools.cache
def one_engine():
    return Engine(CFG, sharp(CFG), dtype="float32", prefill_chunk=8, max_batch=3)


def engine(tokenizer=ByteTokenizer):
    one_engine().tokenizer = tokenizer()
    return one_engine()


def scores(ids):
    """The oracle: the log-probabilities of tokens after the first, in float64."""
    tokens = np.zeros((1, ROW), np.int32)
    tokens[0, : len(ids)] = ids
    batch = {"tokens": tokens, "positions": np.arange(ROW, dtype=np.int32)[None]}
    logits = np.asarray(_logits(CFG)(sharp(CFG), batch), np.float64)[0, : len(ids) - 1, :259]
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p[np.arange(len(ids) - 1), np.array(ids[1:], int)]


def test_perplexity_is_that_of_a_whole_pass():
    nats, bits = evaluation.perplexity(engine(), TEXTS)
    total = -sum(scores([256, *text.encode()]).sum() for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert nats == pytest.approx(total / size, abs=1e-5)  # a token is a byte
    assert bits == pytest.approx(total / math.log(2) / size, abs=1e-5)


def test_without_a_begin_token_the_first_one_does_not_count():
    nats, bits = evaluation.perplexity(engine(NoBegin), [*TEXTS[2:], "é"])
    each = [scores([*text.encode()]) for text in (*TEXTS[2:], "é")]
    total, count = -sum(s.sum() for s in each), sum(map(len, each))
    assert nats == pytest.approx(total / count, abs=1e-5)
    assert bits == pytest.approx(total / math.log(2) / count, abs=1e-5)
    ids = [[*text.encode()] for text in (*TEXTS[2:], "é")]
    assert evaluation.perplexity(engine(NoBegin), ids) == (nats, bits)


@pytest.mark.parametrize("window, stride", [(16, None), (16, 5), (20, 19), (47, 3)])
def test_a_long_text_is_read_in_windows(window, stride):
    ids = np.random.default_rng(0).integers(0, 256, 50).tolist()
    (ours,) = evaluation.token_logprobs(engine(), [ids], window=window, stride=stride)
    step, before, expected = stride or window // 2, 0, []  # transformers' loop over windows
    for begin in range(0, len(ids), step):
        end = min(begin + window, len(ids))
        expected += scores(ids[begin:end])[-(end - before) :].tolist()
        before = end
        if end == len(ids):
            break
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert ours.dtype == np.float32 and len(ours) == 49


def test_choices_are_those_of_brute_force():
    random = np.random.default_rng(1)
    letters = [*"abcdefgh éß"]
    rows = []
    for _ in range(12):
        texts = ["".join(random.choice(letters, n)) for n in random.integers(1, 9, 5)]
        rows.append(
            {"prompt": texts[0] + ".", "choices": texts[1:], "answer": int(random.integers(4))}
        )
    sums = [
        [
            scores([256, *(row["prompt"] + c).encode()])[-len(c.encode()) :].sum()
            for c in row["choices"]
        ]
        for row in rows
    ]
    lengths = {
        "none": lambda c: 1,
        "characters": len,
        "bytes": lambda c: len(c.encode()),
    }
    for norm, length in lengths.items():
        right = [
            int(np.argmax([s / length(c) for s, c in zip(each, row["choices"], strict=True)]))
            == row["answer"]
            for each, row in zip(sums, rows, strict=True)
        ]
        value, error = evaluation.choices(engine(), rows, norm=norm)
        assert value == statistics.mean(right)
        assert error == pytest.approx(statistics.stdev(right) / math.sqrt(12))
        assert error == pytest.approx(math.sqrt(value * (1 - value) / 11))


def test_spaces_at_the_end_of_a_prompt_are_the_choices():
    """A BPE gives ' b' one token: the space of 'a ' must not be a token of its own."""

    class Words(NoBegin):
        def encode(self, texts, special=False, most=None):
            split = [text.replace(" b", "\x01").encode() for text in texts]
            return [np.frombuffer(each, np.uint8).astype(np.int32) for each in split]

    assert evaluation.encode_pair(Words(), "a ", "b") == ([97, 1], 1)
    assert evaluation.encode_pair(Words(), "a", " b") == ([97, 1], 1)
    assert evaluation.encode_pair(ByteTokenizer(), "", "b") == ([256, 98], 1)
    assert evaluation.encode_pair(Words(), "", "b") == ([257, 98], 1)


def test_a_pair_that_is_too_long_loses_its_beginning():
    ids = np.random.default_rng(2).integers(0, 256, 60).tolist()
    pairs = [(ids, 55), (ids[:5], 3)]
    (long, _), (short, greedy) = evaluation.loglikelihoods(engine(), pairs)
    assert long == pytest.approx(scores(ids[-47:])[-5:].sum(), abs=1e-4)
    assert short == pytest.approx(scores(ids[:5])[-2:].sum(), abs=1e-4) and not greedy
    continued = one_by_one(CFG, [7, 8, 9], 3, ROW)
    assert evaluation.loglikelihoods(engine(), [([7, 8, 9, *continued], 3)])[0][1]
    for first in (0, 5, 60):
        with pytest.raises(UserError, match=r"rows\[0\] has 60 tokens"):
            evaluation.loglikelihoods(engine(), [(ids, first)])


def test_matches_are_greedy_answers_up_to_a_stop_string():
    prompts = ["ab", "c", "dd"]
    tokens = [one_by_one(CFG, [256, *p.encode()], 5, ROW) for p in prompts]
    texts = [ByteTokenizer().decode(t) for t in tokens]
    rows = [{"prompt": p, "target": f" {t}\n"} for p, t in zip(prompts, texts, strict=True)]
    rows[1] = {"prompt": "c", "target": "other"}
    options = {"max_tokens": 5, "stop": ["no such"]}
    assert evaluation.matches(engine(), rows, **options) == (2 / 3, pytest.approx(1 / 3))
    params = SamplingParams(max_tokens=5, temperature=0, stop=texts[0][2])
    (made,) = evaluation.generate(engine(), [[256, *b"ab"]], params)
    assert made == [texts[0][: texts[0].index(texts[0][2])]]


def test_an_engine_goes_on_after_a_caller_that_stopped_early():
    params = SamplingParams(max_tokens=9, temperature=0)
    runs = evaluation.run_all(engine(), iter([[1, 2]] * 300), params)
    next(runs)
    runs.close()
    assert not engine().busy
    engine().submit([1, 2], params)
    with pytest.raises(UserError, match="have not ended"):
        evaluation.perplexity(engine(), ["ab"])
    assert len([*engine().run()]) > 0


def test_few_shot_examples_are_other_rows():
    rows = [{"prompt": f"{i}?", "choices": ["a", f"<{i}>"], "answer": 1} for i in range(6)]
    made = evaluation.few_shot(rows, 3, seed=4)
    for i, row in enumerate(made):
        *examples, last = row["prompt"].split("\n\n")
        numbers = [int(e.partition("?")[0]) for e in examples]
        assert last == f"{i}?" and len(set(numbers)) == 3 and i not in numbers
        assert examples == [f"{k}?<{k}>" for k in numbers]
    assert made == evaluation.few_shot(rows, 3, seed=4) != evaluation.few_shot(rows, 3, seed=5)
    assert evaluation.few_shot(rows, 0) == rows
    with pytest.raises(UserError, match="few_shot=6 must be from 0 to 5, .*nearest: 5"):
        evaluation.few_shot(rows, 6)
    assert evaluation.few_shot([{"prompt": "1+1", "target": "=2"}] * 2, 1)[0]["prompt"] == (
        "1+1=2\n\n1+1"
    )


GOOD = {"prompt": "p", "choices": ["a", "b"], "answer": 1}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 3 is not JSON"),
        ("[1]", "line 3 must be an object"),
        ('{"prompt": 1}', "line 3: prompt=1 must be a text"),
        ('{"prompt": "p"}', "line 3 must have choices; it has prompt"),
        (json.dumps({"prompt": "p", "target": "t"}), "line 3 must have choices; it has .*target"),
        (json.dumps({**GOOD, "target": "t"}), "line 3 must have choices"),
        (json.dumps({**GOOD, "choices": "ab"}), "line 3: choices must be a list of 2 to 256"),
        (json.dumps({**GOOD, "choices": ["a"]}), "line 3: choices must be a list of 2"),
        (json.dumps({**GOOD, "choices": ["a", ""]}), r"line 3: choices\[1\]='' must be a text"),
        (json.dumps({**GOOD, "choices": ["a", "\ud800"]}), r"choices\[1\]=.*must be a text"),
        (json.dumps({**GOOD, "answer": 2}), "line 3: answer=2 must be .* nearest: 1"),
        (json.dumps({**GOOD, "answer": True}), "line 3: answer=True must be the index"),
        (json.dumps({**GOOD, "answer": "b"}), "line 3: answer='b' must be the index"),
        ('{"prompt": "p", "prompt": "q"}', "line 3 is not JSON: the member 'prompt' comes twice"),
        ("[" * 10**5, "line 3 is not JSON: it is nested too deep"),
        (" " * (evaluation.LINE + 1), "line 3 has more than"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line, message):
    file = tmp_path / "task.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(UserError, match=message):
        evaluation.read_task(file)


def test_files_of_tasks(tmp_path):
    file = tmp_path / "task.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}")
    assert evaluation.read_task(file) == ("choices", [GOOD, GOOD])
    file.write_text("\n")
    with pytest.raises(UserError, match=r"has no rows \(--tasks\)"):
        evaluation.read_task(file)
    with pytest.raises(UserError, match="cannot read"):
        evaluation.read_task(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        evaluation.read_task(tmp_path)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: evaluation.perplexity(engine(), "ab"), "must be a list of texts"),
        (lambda: evaluation.perplexity(engine(), []), "no predicted token"),
        (lambda: evaluation.perplexity(engine(NoBegin), ["a"]), "no predicted token"),
        (lambda: evaluation.perplexity(engine(NoBegin), ["ab", ""]), r"texts\[1\] is empty"),
        (lambda: evaluation.perplexity(engine(), ["\ud800"]), "surrogate"),
        (lambda: evaluation.perplexity(engine(), [[1, 300]]), r"texts\[0\]: .*token id 300"),
        (lambda: evaluation.perplexity(engine(), ["a"], window=48), "window=48 .*nearest: 47"),
        (lambda: evaluation.perplexity(engine(), ["a"], stride=47), "stride=47 .*nearest: 46"),
        (lambda: evaluation.choices(engine(), []), "rows is empty"),
        (lambda: evaluation.choices(engine(), [GOOD, {}]), r"rows\[1\]: prompt=None"),
        (lambda: evaluation.choices(engine(), [GOOD], norm="x"), "norm='x' must be"),
        (
            lambda: evaluation.choices(engine(), [{**GOOD, "choices": ["a", "b" * 47]}]),
            r"rows\[0\]: choices\[1\] has 47 tokens .*from 1 to 46",
        ),
        (lambda: evaluation.matches(engine(), [GOOD]), r"rows\[0\] must have target"),
        (
            lambda: evaluation.perplexity(Engine(CFG, sharp(CFG), pages=3, max_batch=1), ["a"]),
            "needs an engine with a tokenizer",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_one_row_has_no_standard_error():
    value, error = evaluation.choices(engine(), [GOOD])
    assert value in (0, 1) and math.isnan(error)
    score = evaluation.Score(6.0, 3, 5)
    assert evaluation.ratio_error([score, score]) == (2.0, 0.0)
    assert math.isnan(evaluation.ratio_error([score]).error)


@pytest.mark.slow
def test_rows_of_ids_have_the_held_out_loss_of_training():
    train_step = step_of(run_config())
    params = train_step.weights(train_step.init(3))
    rows = np.random.default_rng(3).integers(0, 61, (16, 17)).astype(np.int32)
    host = {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "segments": np.ones((16, 16), np.int32),
        "positions": np.tile(np.arange(16, dtype=np.int32), (16, 1)),
    }
    figures = evaluate(train_step, params, [on(train_step, host)], None)
    ours = Engine(MODEL, params, dtype="float32", tokenizer=NoBegin(), max_batch=4, pages=20)
    nats, _ = evaluation.perplexity(ours, rows.tolist())
    assert nats == pytest.approx(figures["eval_loss"], abs=1e-5)
    assert figures["eval_tokens"] == 256
