import pytest

from megajax.core.errors import divisors, nearest_divisors, respell

BENCH = ["rounds", "mesh.tensor", "run.train.steps", "run.model.kv_heads", "run.mesh.tensor"]
GENERATE = ["hf", "run_dir", "tokenizer", "prompt", "new_tokens", "mesh.tensor", "emulate"]
PRETRAIN = ["train.steps", "eval.prompt", "run_dir", "data.tokenizer", "mesh.tensor", "optim.lr"]


@pytest.mark.parametrize(
    ("flags", "message", "shown"),
    [
        (BENCH, "train.steps=0 must be at least 1 (--train.steps)",
         "run.train.steps=0 must be at least 1 (--run.train.steps)"),
        (BENCH, "mesh: tensor 3 does not divide (--mesh.tensor, --emulate)",
         "mesh: tensor 3 does not divide (--mesh.tensor)"),
        (GENERATE, "data.tokenizer=x is neither bytes nor a file (--data.tokenizer)",
         "tokenizer=x is neither bytes nor a file (--tokenizer)"),
        (GENERATE, "the vocabulary is model.vocab=9 (--model.vocab, --data.tokenizer)",
         "the vocabulary is model.vocab=9 (--tokenizer)"),
        (GENERATE, "cannot read x (--init_from)", "cannot read x"),
        (GENERATE, "bpe:N (--data.tokenizer=bpe:8192)", "bpe:N (--tokenizer=bpe:8192)"),
        (PRETRAIN, "give a prompt (--prompt)", "give a prompt (--eval.prompt)"),
        (PRETRAIN, "Lower --optim.lr, or --extra aot", "Lower --optim.lr, or --extra aot"),
        (PRETRAIN, "no flag at all (really)", "no flag at all (really)"),
    ],
)  # fmt: skip
def test_a_message_names_the_flags_of_the_script_that_shows_it(flags, message, shown):
    assert respell(message, flags) == shown


def test_divisors_of_large_numbers_take_no_time():
    """A config.json with a width of 2^31 - 1 took minutes. The fuzzer found it."""
    for n in range(200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert nearest_divisors(2**31 - 1, 4) == "nearest: 1, 2147483647"
    assert nearest_divisors(12, 5) == "nearest: 4, 6" and nearest_divisors(9, 2) == "nearest: 1, 3"
