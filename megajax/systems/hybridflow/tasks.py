"""Verifiable tasks: prompts made from a number, and what scores an answer exactly.

A task makes row i of its stream from (seed, i) alone, so a run can go on anywhere. Which prompts
are held out is decided by their content: a prompt is never in both parts, whatever its number. All
prompts and answers are written with the characters of one small alphabet, except those of `python`,
whose answers are programs and whose tests run in the sandbox.

    copy:N, sort:N    the digits again; the digits in ascending order
    arithmetic        sums, differences and products of two numbers
    countdown         an expression over given numbers, each used at most once, that gives a target
    python            a function's body, judged by unit tests

Rewards have verl's signature. Exactness alone gives a new model nothing to learn from, so copy,
sort and arithmetic give the fraction of right characters, and report `exact` beside it.
"""

import ast
import dataclasses
import hashlib
import operator
import re
import secrets
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.systems.hybridflow import sandbox

ALPHABET = "0123456789+-*/()=, "  # of prompts and answers but python's
LONGEST = 64  # (chosen) digits of copy and sort
PARTIAL = 0.1  # (as TinyZero's countdown reward) of a well-formed expression that is wrong
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RlTask:
    """make(random) -> (prompt, ground truth). reward: verl's signature. is_text: whether prompts
    and answers need more than ALPHABET."""

    name: str
    make: Callable[[np.random.Generator], tuple[str, Any]]
    reward: Callable[..., Mapping[str, float]]
    is_text: bool = False

    def row(
        self,
        seed: int,
        i: int,
        held_out: bool,
        fraction: float,
        takes: Callable[[str], bool] = lambda prompt: True,
    ) -> Row:
        """Returns row i of the training stream, or of the held-out one, in verl's form.

        fraction: of the prompts that are held out. takes: whether a prompt may be in the stream.
        Rows are drawn until one belongs to the part, so a fraction of 0 has no held-out rows and
        one of 1 no training rows: both are refused.
        """
        assert 0 < fraction < 1
        for draw in range(10_000):
            random = np.random.default_rng([seed, int(held_out), i, draw])
            prompt, truth = self.make(random)
            if is_held_out(prompt, fraction) == held_out and takes(prompt):
                return {
                    "data_source": self.name,
                    "prompts": prompt,
                    "ground_truth": truth,
                    "extra_info": {"index": i, "prompt": prompt},
                    "uid": f"{self.name}-{'held-out' if held_out else 'train'}-{i}",
                }
        raise UserError(
            f"task {self.name} has no {'held-out' if held_out else 'training'} prompt among "
            "10,000 that --rl.max_prompt has room for; make the task longer, or change these (--rl."
            "holdout, --rl.max_prompt)"
        )


def is_held_out(prompt: str, fraction: float) -> bool:
    """Tells by its content whether a prompt is held out."""
    key = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(key, "big") < fraction * 2**64


def open_task(name: str) -> RlTask:
    """Returns a task by its name. Raises: UserError for one that is not, with the nearest."""
    kind, _, size = name.partition(":")
    if kind in ("copy", "sort"):
        digits = int(size) if size.isdecimal() else 3 if not size else 0
        if not 1 <= digits <= LONGEST:
            raise UserError(f"task={name}: {kind}:N needs N from 1 to {LONGEST} (--task)")
        return RlTask(f"{kind}:{digits}", _digits(digits, kind == "sort"), score_characters)
    if name in _TASKS:
        return _TASKS[name]
    names = ["copy:3", "sort:3", *_TASKS]
    raise UserError(
        f"task={name} must be one of {', '.join(names)}, or a .jsonl or .parquet file."
        f"{did_you_mean(name, names)} (--task)"
    )


# ---- copy, sort, arithmetic


def _digits(count: int, is_sorted: bool) -> Callable[[np.random.Generator], tuple[str, str]]:
    def make(random: np.random.Generator) -> tuple[str, str]:
        digits = [str(d) for d in random.integers(0, 10, count)]
        return "".join(digits) + "=", "".join(sorted(digits) if is_sorted else digits)

    return make


def score_characters(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """Returns the fraction of the characters, and of the end behind them, that are right.

    An answer of n characters has n + 1 places: one more or fewer characters is one mistake more.
    """
    right = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False))
    right += len(solution_str) == len(ground_truth)
    exact = float(solution_str == ground_truth)
    return {"score": right / (len(ground_truth) + 1), "exact": exact}


def _arithmetic(random: np.random.Generator) -> tuple[str, str]:
    a, b = (int(x) for x in random.integers(0, 100, 2))
    sign = "+-*"[int(random.integers(0, 3))]
    function = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign]
    return f"{a}{sign}{b}=", str(function(a, b))


# ---- countdown


def _countdown(random: np.random.Generator) -> tuple[str, dict[str, Any]]:
    numbers = [int(x) for x in random.integers(1, 100, int(random.integers(3, 5)))]
    # The target is what some expression over the numbers gives, so that there is an answer.
    value = numbers[0]
    for number in numbers[1:]:
        choices = [value + number, abs(value - number)]
        if value * number < 1000:
            choices.append(value * number)
        value = int(choices[int(random.integers(0, len(choices)))])
    return f"{','.join(map(str, numbers))} {value}=", {"numbers": numbers, "target": value}


def score_countdown(
    data_source: str, solution_str: str, ground_truth: Mapping[str, Any], extra_info: Any = None
) -> dict[str, float]:
    """Returns 1 for an expression of the target from the numbers, each used at most once; 0.1 for
    another expression of these numbers; else 0."""
    try:
        value, used = _evaluate(solution_str)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return {"score": 0.0, "exact": 0.0}
    numbers = list(ground_truth["numbers"])
    for number in used:
        if number not in numbers:
            return {"score": 0.0, "exact": 0.0}
        numbers.remove(number)
    exact = float(value == ground_truth["target"])
    return {"score": exact or PARTIAL, "exact": exact}


def _evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Returns (value, numbers used) of an expression of + - * / and parentheses.

    Nothing is executed: the text is parsed, and only these nodes are evaluated. Raises: ValueError
    and SyntaxError for anything else.
    """
    if not re.fullmatch("[-+*/() 0-9]{1,256}", text.strip()):  # Python warns of some others
        raise ValueError("not an expression of numbers, or longer than any answer")
    functions: dict[type, Callable] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in functions:
            return functions[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 10**6:
            used.append(node.value)
            return Fraction(node.value)
        raise ValueError("not an expression of numbers")

    return value(ast.parse(text.strip(), mode="eval").body), used


# ---- python: a function, judged by unit tests

# (prompt, value of f({a})): the answer is the function's body; tests call `f`.
_PROGRAMS = (
    ("def f(x):\n    # the square of x\n", "{a}*{a}"),
    ("def f(x):\n    # x plus {k}\n", "{a}+{k}"),
    ("def f(x):\n    # {k} times x\n", "{a}*{k}"),
    ("def f(x):\n    # the larger of x and {k}\n", "max({a},{k})"),
    ("def f(x):\n    # the remainder of x divided by {k}\n", "{a}%{k}"),
    ("def f(x):\n    # x and {k} as a list\n", "[{a},{k}]"),
)


def _python(random: np.random.Generator) -> tuple[str, str]:
    text, truth = _PROGRAMS[int(random.integers(0, len(_PROGRAMS)))]
    k = int(random.integers(2, 1000))
    cases = [int(a) for a in random.integers(0, 1000, 4)]
    tests = "\n".join(f"assert f({a}) == {truth.format(a=a, k=k)}" for a in cases)
    return text.format(k=k), tests


# Runs an answer and its tests in one process of the sandbox. What only the tests' end writes shows
# that they were reached: an answer that ends the process ends it without.
_JUDGE = """\
import os, sys
def judge(program):
    secret, _, tests = sys.stdin.read().partition("\\n")
    names = {{"__name__": "__main__"}}
    exec(compile(program, "answer.py", "exec"), names)
    exec(compile(tests, "tests.py", "exec"), names)
    sys.stdout.flush()
    os.write(1, secret.encode())
judge({program!r})
"""


def score_python(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Returns 1 if the program passes its tests in the sandbox, else 0.

    A program that ends the process before its tests have run (sys.exit, os._exit) has not passed.
    Tests compare what the program returns, so an object that claims to equal everything passes.
    ground_truth: the tests. extra_info: `prompt`, what stands before the answer; `seconds`.
    """
    extra, secret = extra_info or {}, secrets.token_hex(16)
    program = _JUDGE.format(program=f"{extra.get('prompt', '')}{solution_str}\n")
    seconds = float(extra.get("seconds", 2.0))
    result = sandbox.run(program, stdin=f"{secret}\n{ground_truth}\n", seconds=seconds)
    passed = float(result.status == "ok" and result.stdout.endswith(secret))
    return {
        "score": passed,
        "exact": passed,
        "timeouts": float(result.status == "timeout"),
    }


_TASKS = {
    "arithmetic": RlTask("arithmetic", _arithmetic, score_characters),
    "countdown": RlTask("countdown", _countdown, score_countdown),
    "python": RlTask("python", _python, score_python, is_text=True),
}
