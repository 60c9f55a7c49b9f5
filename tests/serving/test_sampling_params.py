"""What a request may ask of the sampler: defaults, ranges, and messages."""

import dataclasses
import pickle
import re

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.serving import SamplingParams

# vLLM's class, vllm/sampling_params.py; its None for a list is our empty tuple or dict.
DEFAULTS = {
    "max_tokens": 16,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "logprobs": None,
    "prompt_logprobs": None,
    "n": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "ignore_eos": False,
    "priority": 0,
    "structured_outputs": None,
}


def test_names_order_and_defaults():
    made = dataclasses.asdict(SamplingParams())
    assert made == DEFAULTS and list(made) == list(DEFAULTS)


@pytest.mark.parametrize(
    "members",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1e-6},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"seed": np.int64(3)},
        {"logprobs": 0},
        {"logprobs": 20},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {5: -100, 6: 100}},
        {"n": 64, "temperature": 0},
        {"priority": -1000},
    ],
)
def test_the_ends_of_a_range_are_legal(members):
    params = SamplingParams(**members)
    assert all(getattr(params, name) == value for name, value in members.items())


@pytest.mark.parametrize(
    "members, message",
    [
        ({"max_tokens": 0}, "max_tokens=0 must be in [1, 2147483647]; nearest: 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be of type int"),
        ({"max_tokens": True}, "max_tokens=True must be of type int; nearest: 1"),
        ({"temperature": -0.1}, "temperature=-0.1 must be in [0, 1e+30]; nearest: 0"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        (
            {"temperature": float("nan")},
            "temperature=nan must be a finite number, in [0, 1e+30]; the default is 1.0",
        ),
        ({"min_tokens": 17}, "min_tokens=17 must be at most max_tokens=16; nearest: 16"),
        ({"top_k": -2}, "top_k=-2 must be in [-1, 2147483647]; nearest: -1"),
        ({"top_p": 0}, "top_p=0 must be in (0, 1]; the default is 1.0"),
        ({"top_p": 1.1}, "top_p=1.1 must be in (0, 1]; nearest: 1"),
        ({"min_p": -1}, "min_p=-1 must be in [0, 1]; nearest: 0"),
        ({"seed": "x"}, "seed='x' must be of type int"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be in"),
        ({"logprobs": 21}, "logprobs=21 must be in [0, 20]; nearest: 20"),
        ({"logprobs": -1}, "logprobs=-1 must be in [0, 20]; nearest: 0"),
        ({"n": 0}, "n=0 must be in [1, 16384]; nearest: 1"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty=0 must be in [1e-30, 1e+30]; nearest: 1e-30",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 must be in [-2, 2]; nearest: 2"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3 must be in [-2, 2]; nearest: -2"),
        ({"priority": 2000}, "priority=2000 must be in [-1000, 1000]; nearest: 1000"),
        ({"stop": [1]}, "stop=[1] must be a string or a list of strings; the default is ()"),
        ({"stop": 1}, "stop=1 must be a string or a list of strings; the default is ()"),
        (
            {"stop": ["a", ""]},
            "stop=['a', ''] must hold no empty string, which would stop at once; nearest: ['a']",
        ),
        ({"stop_token_ids": 3}, "stop_token_ids=3 must be a list of ids; the default is ()"),
        ({"stop_token_ids": "3"}, "stop_token_ids='3' must be a list of ids; the default is ()"),
        (
            {"stop_token_ids": [3, -1]},
            "stop_token_ids=[3, -1] must hold ids from 0 to 2147483647; nearest: [3]",
        ),
        (
            {"logit_bias": {7: 101}},
            "logit_bias[7]=101 must be a number in [-100, 100]; nearest: 100",
        ),
        ({"logit_bias": {7: "x"}}, "logit_bias[7]='x' must be a number in [-100, 100]"),
        ({"logit_bias": {7: float("nan")}}, "logit_bias[7]=nan must be a number in [-100, 100]"),
        (
            {"logit_bias": {"a": 1}},
            "logit_bias has the key 'a': a key must be an id from 0 to 2147483647",
        ),
        ({"logit_bias": [7]}, "logit_bias=[7] must be a dict of token: bias; the default is {}"),
    ],
)
def test_what_is_refused_and_how(members, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}") as refused:
        SamplingParams(**members)
    assert "--" not in str(refused.value), "a request has no flags"


def test_every_number_has_limits_that_the_samplers_arrays_hold():
    """int32 and float32; a seed is made into words, whatever its size."""
    for field in dataclasses.fields(SamplingParams):
        limits = field.metadata.get("limits")
        if limits is None or field.name == "seed":
            continue
        low = limits.above if limits.at_least is None else limits.at_least
        for value in (low, limits.at_most):
            assert value is not None, f"{field.name} has no limit"
            stored = np.float32(value) if "float" in str(field.type) else np.int32(value)
            assert np.isfinite(stored) and (stored != 0) == (value != 0), field.name


@pytest.mark.parametrize("digits", ["9" * 400, "-" + "9" * 400, "9" * 4000])
def test_numbers_of_hundreds_of_digits_are_refused_by_name(digits):
    number = int(digits)
    for field in dataclasses.fields(SamplingParams):
        if "limits" in field.metadata:
            with pytest.raises(UserError, match=f"^{field.name}="):
                SamplingParams(**{field.name: number})
    for members, name in (
        ({"logit_bias": {7: number}}, "logit_bias"),
        ({"logit_bias": {digits: 1}}, "logit_bias"),
        ({"stop_token_ids": [number]}, "stop_token_ids"),
    ):
        with pytest.raises(UserError, match=f"^{name}") as refused:
            SamplingParams(**members)
        assert len(str(refused.value)) < 600


def test_lists_are_kept_as_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[np.int32(3), 4], logit_bias={"5": 1})
    assert params.stop == ("END",) and params.stop_token_ids == (3, 4)
    assert params.logit_bias == {5: 1.0}
    assert [type(token) for token in params.stop_token_ids] == [int, int]


def test_none_is_empty_as_in_vllm():
    none: dict = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**none) == SamplingParams()


def test_params_do_not_change():
    biases = {5: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[6] = 2.0
    assert params.logit_bias == {5: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # pyrefly: ignore
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1}))
    assert pickle.loads(pickle.dumps(params)) == params
