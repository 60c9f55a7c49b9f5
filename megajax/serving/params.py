"""What a request may ask of the sampler: vLLM's names, defaults and ranges.

Source: vLLM, vllm/sampling_params.py. Values that vLLM would clip are refused. Every number has a
lower and an upper limit, which the arrays of the sampler (int32, float32) can hold. Not here: the
arithmetic of the sampler (draw.py), and what depends on a model: vocabulary, context (engine.py).
"""

import dataclasses
import numbers
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megajax.core.config import Checked, above, option
from megajax.core.errors import UserError, respell
from megajax.serving.constraint import StructuredOutputsParams

BIAS = 100  # (OpenAI's and vLLM's interface) largest absolute value of a token's bias
MOST = 16384  # (vLLM, the default of VLLM_MAX_N_SEQUENCES) continuations of a prompt
PRIORITY = 1000  # (chosen) largest absolute priority, so that waiting can make up for it
WHOLE = 2**31 - 1  # largest number that the sampler's arrays of int32 hold
ENDS = 16  # (chosen) most tokens that may end an answer with a least length
# (chosen) Largest temperature, and largest and smallest factor of a logit: products and quotients
# with logits of up to 1e7 stay finite in float32.
FACTOR = 1e30


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How the continuation of one prompt is drawn, and when it ends.

    `stop`, `stop_token_ids` and `logit_bias` are kept as a tuple of strings, a tuple of ids and a
    dict; None, vLLM's default, is the same as empty. `top_k` 0 and -1 both mean all tokens.
    `structured_outputs` is the form that the answer must have; it needs a tokenizer.
    Raises: UserError, with what was given, the rule and the nearest legal value.
    """

    max_tokens: int = option(
        16, "largest number of tokens that are drawn", "tokens", at_least=1, at_most=WHOLE
    )
    min_tokens: int = option(
        0,
        "number of tokens before which nothing but max_tokens ends the answer",
        "tokens",
        at_least=0,
        at_most=WHOLE,
    )
    temperature: float = option(1.0, "divides the logits; 0: greedy", at_least=0, at_most=FACTOR)
    top_k: int = option(0, "only the k likeliest tokens; 0 or -1: all", at_least=-1, at_most=WHOLE)
    top_p: float = option(
        1.0, "only the likeliest tokens that together have this probability", above=0, at_most=1
    )
    min_p: float = option(
        0.0, "only tokens at least this likely relative to the likeliest", at_least=0, at_most=1
    )
    seed: int | None = option(
        None,
        "random seed of this request; None: the engine's",
        at_least=-(2**63),
        at_most=2**63 - 1,
    )
    stop: Collection[str] = ()  # a str is one too
    stop_token_ids: Collection[int] = ()
    logprobs: int | None = option(
        None,
        "list this many likeliest tokens with their log-probabilities, and the drawn one",
        at_least=0,
        at_most=20,
    )
    prompt_logprobs: int | None = option(
        None,
        "the same for each token of the prompt, after those before it",
        at_least=0,
        at_most=20,
    )
    n: int = option(1, "number of continuations of the prompt", at_least=1, at_most=MOST)
    repetition_penalty: float = option(
        1.0,
        "divides positive logits of tokens seen in prompt or output; 1: off",
        at_least=1 / FACTOR,
        at_most=FACTOR,
    )
    presence_penalty: float = option(
        0.0, "subtracted from logits of tokens in the output", at_least=-2, at_most=2
    )
    frequency_penalty: float = option(
        0.0, "subtracted from logits for each time in the output", at_least=-2, at_most=2
    )
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    ignore_eos: bool = False
    priority: int = option(
        0, "requests with a larger number are served earlier", at_least=-PRIORITY, at_most=PRIORITY
    )
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self):
        """Checks every value."""
        try:
            super().__post_init__()
        except UserError as error:  # a request has no flags
            raise UserError(respell(str(error), ())) from None
        stop = self.stop
        listed = [stop] if isinstance(stop, str) else [] if stop is None else stop
        if not isinstance(listed, Collection) or not all(isinstance(s, str) for s in listed):
            raise UserError(
                f"stop={stop!r} must be a string or a list of strings; the default is ()"
            )
        if "" in listed:
            raise UserError(
                f"stop={stop!r} must hold no empty string, which would stop at once; "
                f"nearest: {[s for s in listed if s]}"
            )
        for name, value in (
            ("stop", tuple(listed)),
            ("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", _biases(self.logit_bias)),
        ):
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}; "
                f"nearest: {self.max_tokens}"
            )
        if self.min_tokens and self.structured_outputs is not None:
            raise UserError(
                f"min_tokens={self.min_tokens} and structured_outputs exclude each other: a "
                "complete form may not go on; the default is 0"
            )


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    """Returns token ids as Python's ints."""
    try:
        if isinstance(ids, str):
            raise TypeError
        tokens = tuple(_index(token) for token in (() if ids is None else ids))
    except TypeError:
        raise UserError(f"{name}={ids!r} must be a list of ids; the default is ()") from None
    if not all(0 <= token <= WHOLE for token in tokens):
        legal = [token for token in tokens if 0 <= token <= WHOLE]
        raise UserError(
            f"{name}={ids!r:.200} must hold ids from 0 to {WHOLE}; nearest: {legal!r:.200}"
        )
    return tokens


def _index(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)


def _biases(biases: Any) -> dict[int, float]:
    """Returns {token: bias}. Keys may be strings of digits, as in a JSON object."""
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise UserError(f"logit_bias={biases!r} must be a dict of token: bias; the default is {{}}")
    numbered = {}
    for token, bias in biases.items():
        try:
            number = int(token) if isinstance(token, str) else _index(token)
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number <= WHOLE:
            raise UserError(
                f"logit_bias has the key {token!r:.80}: a key must be an id from 0 to {WHOLE}"
            )
        # Compared as it is: float() refuses whole numbers of more than 308 digits.
        legal = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        value: Any = bias
        if not legal or not -BIAS <= value <= BIAS:
            known = legal and value == value
            near = f"; nearest: {BIAS if value > 0 else -BIAS}" if known else ""
            raise UserError(
                f"logit_bias[{number}]={bias!r:.80} must be a number in [-{BIAS}, {BIAS}]{near}"
            )
        numbered[number] = float(bias)
    return numbered


@dataclass(frozen=True)
class Sampling(Checked, section="sampling"):
    """The flags of scripts that draw text: how a token is chosen. Meanings are SamplingParams'."""

    temperature: float = option(0.8, "divides the logits; 0: greedy", at_least=0)
    top_k: int = option(
        0, "only the k likeliest tokens; 0 or -1: all", needs=above(0, "temperature"), at_least=-1
    )
    top_p: float = option(
        1.0,
        "only the likeliest tokens that together have this probability",
        needs=above(0, "temperature"),
        above=0,
        at_most=1,
    )
    min_p: float = option(
        0.0,
        "only tokens at least this likely relative to the likeliest",
        needs=above(0, "temperature"),
        at_least=0,
        at_most=1,
    )
    repetition_penalty: float = option(
        1.0, "divides positive logits of tokens seen before; 1: off", above=0
    )
    presence_penalty: float = option(
        0.0, "subtracted from logits of tokens already written", at_least=-2, at_most=2
    )
    frequency_penalty: float = option(
        0.0, "subtracted for each time a token was written", at_least=-2, at_most=2
    )
