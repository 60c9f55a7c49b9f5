"""The flags of the quantized exchange: what they resolve to, and what is refused in which words."""

import pytest

from megajax.core import config
from megajax.core.config import Parser
from megajax.core.errors import UserError
from megajax.parallel import wire
from megajax.parallel.sharding import rules
from megajax.parallel.wire import WireSpec
from megajax.training.config import Config

SIZES = {"pipe": 1, "node": 2, "data": 4, "expert": 1, "context": 1, "tensor": 1}


def made(**values):
    names = {flag: name for name, flag in config.flag_names(Config).items()}
    spelled = {k.replace("__", "."): v for k, v in values.items()}
    return config.override(Config(), {names[flag]: value for flag, value in spelled.items()})


@pytest.mark.parametrize(
    ("asked", "zero"),
    [
        ("none", "full"),
        ("fp8", "full"),
        ("zeropp", "full"),
        ("loco", "optimizer"),
        ("sdp4bit", "optimizer"),
    ],
)
def test_auto_cuts_only_the_optimizer_where_ranks_hold_copies(asked, zero):
    assert made(wire=asked).zero == zero
    assert made(wire=asked, shard__zero="full").zero == "full"


def test_masters_rest_as_under_full_and_copies_as_under_none():
    assert rules("optimizer") == rules("full") != rules("none")


def test_a_saved_configuration_without_a_wire_is_read_as_it_was():
    old = config.from_json(Config, '{"shard": {"zero": "full"}}')
    assert (old.zero, old.wire, old.exchange) == ("full", "none", WireSpec())
    new = made(wire="sdp4bit", wire__difference=False, wire__inside_group=64)
    assert config.from_json(Config, config.to_json(new)) == new
    assert config.spell(new, Config()) == [
        "--wire=sdp4bit",
        "--wire.inside_group=64",
        "--wire.difference=false",
    ]


def test_a_switch_that_may_be_left_open_is_parsed():
    parser = Parser(bool | None)
    assert [parser.parse(t) for t in ("true", "False", "none")] == [True, False, None]
    with pytest.raises(ValueError, match="true or false"):
        parser.parse("maybe")


@pytest.mark.parametrize(
    ("values", "differs"),
    [
        ({"wire": "sdp4bit"}, True),
        ({"wire": "loco"}, False),
        ({"wire": "zeropp"}, False),
        ({"wire": "loco", "wire__difference": True}, True),
        ({"wire": "sdp4bit", "wire__difference": False}, False),
        ({"wire__difference": True}, False),
    ],
)
def test_which_wires_send_differences(values, differs):
    assert wire.sends_differences(made(**values)) is differs


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wire": "sdp4bit", "shard__zero": "none"}, "shard.zero=none: --wire=sdp4bit needs"),
        ({"wire": "sdp4bit", "shard__zero": "none"}, "nearest: optimizer"),
        ({"wire": "zeropp", "shard__zero": "hybrid"}, "nearest: full, or leave the flag out"),
        ({"wire": "sdp4bit", "shard__zero": "hybrid"}, "nearest: optimizer"),
        (
            {"wire": "sdp4bit", "shard__zero": "full", "wire__difference": True},
            "(--shard.zero, --wire.difference=false)",
        ),
        ({"wire": "fp8", "wire__difference": True}, "shard.zero=full: --wire=fp8 sends differ"),
        ({"wire": "loco", "shard__zero": "full"}, "shard.zero=full: --wire=loco keeps the errors"),
        (
            {"wire": "loco", "pipeline__gradients": "sharded"},
            "pipeline.gradients=sharded: --wire=loco sends gradients once a step; nearest: local",
        ),
        (
            {"shard__zero": "optimizer", "pipeline__gradients": "sharded"},
            "--shard.zero=optimizer sends gradients once a step; nearest: local (--pipeline.gr",
        ),
    ],
)
def test_what_a_wire_cannot_have_is_refused(values, words):
    cfg = made(**values)
    with pytest.raises(UserError) as error:
        wire.check(cfg, SIZES | {"pipe": 2})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"shard__zero": "none"},
        {"shard__zero": "optimizer"},
        {"wire": "zeropp"},
        {"wire": "zeropp", "shard__zero": "optimizer"},
        {"wire": "sdp4bit"},
        {"wire": "sdp4bit", "wire__difference": False, "shard__zero": "full"},
        {"wire": "sdp4bit", "shard__zero": "full"},
        {"wire": "fp8", "pipeline__gradients": "sharded"},
    ],
)
def test_what_it_can_have_passes_on_any_number_of_ranks(values):
    made(**values).check(SIZES)
    made(**values).check(SIZES | {"node": 1, "data": 1})


# A level's payload of 4096 numbers, from the papers' own tables: bits and the group of a scale.
def payload_bytes(bits, group):
    return 4096 * bits // 8 + (4 * 4096 // group if group else 0)


@pytest.mark.parametrize(
    ("values", "levels", "hadamard", "rounding"),
    [
        ({}, [(32, 0), (32, 0), (32, 0)], 0, "nearest"),
        ({"wire__weights": "int8"}, [(32, 0), (32, 0), (32, 0)], 0, "nearest"),
        ({"wire": "sdp4bit"}, [(4, 2048), (8, 128), (4, 128)], 32, "stochastic"),
        (
            {"wire": "sdp4bit", "shard__zero": "full"},
            [(8, 2048), (8, 128), (4, 128)], 32, "stochastic",
        ),
        ({"wire": "zeropp"}, [(8, 2048), (4, 128), (4, 128)], 0, "nearest"),
        ({"wire": "loco"}, [(16, 0), (4, 128), (4, 128)], 0, "nearest"),
        ({"wire": "fp8"}, [(8, 128), (8, 128), (8, 128)], 0, "nearest"),
        (
            {"wire": "sdp4bit", "wire__weights": "bf16", "wire__hadamard": False},
            [(16, 0), (8, 128), (4, 128)], 0, "stochastic",
        ),
        (
            {"wire": "sdp4bit", "wire__gradients": "int4", "wire__rounding": "nearest"},
            [(4, 2048), (4, 128), (4, 128)], 32, "nearest",
        ),
        ({"wire": "fp8", "wire__rounding": "stochastic"}, [(8, 128)] * 3, 0, "stochastic"),
        (
            {"wire": "zeropp", "wire__gradients": "float32", "wire__weight_group": 256,
             "wire__hadamard": True},
            [(8, 256), (32, 0), (32, 0)], 32, "nearest",
        ),
        (
            {"wire": "sdp4bit", "wire__inside_group": 64, "wire__between_group": 32},
            [(4, 2048), (8, 64), (4, 32)], 32, "stochastic",
        ),
    ],
)  # fmt: skip
def test_the_codec_of_flags(values, levels, hadamard, rounding):
    chosen = wire.codec(made(**values))
    sent = [level.wire_bytes(4096) for level in (chosen.weights, chosen.inside, chosen.between)]
    assert sent == [payload_bytes(*level) for level in levels]
    assert chosen.hadamard == hadamard and chosen.inside.rounding == rounding
    assert not chosen.weights.stochastic
    assert chosen.inside.stochastic is chosen.between.stochastic is (rounding == "stochastic")
    assert (chosen.feedback is not None) is (values.get("wire") == "loco")


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"wire": "loco", "wire__weight_group": 64}, "(--wire.weight_group, --wire.weights)"),
        (
            {"wire": "sdp4bit", "wire__gradients": "bf16", "wire__between_group": 64},
            "(--wire.between_group, --wire.gradients)",
        ),
    ],
)
def test_what_has_no_scales_has_no_groups(values, flags):
    with pytest.raises(UserError, match="bfloat16 has no groups; leave it out") as error:
        made(**values).check(SIZES)
    assert str(error.value).endswith(flags)


@pytest.mark.parametrize("name", ["weight_group", "inside_group", "between_group"])
def test_a_group_may_not_split_a_block_of_the_transform(name):
    with pytest.raises(UserError) as error:
        WireSpec(**{name: 100})
    rule = f"wire.{name}=100 must be a multiple of 32; nearest: 96, 128 (--wire.{name})"
    assert str(error.value) == rule
    assert getattr(WireSpec(**{name: 96}), name) == 96


def test_the_line_at_the_start_says_what_travels():
    cfg = made(wire="sdp4bit", wire__start_step=10)
    assert wire.line(cfg, ["norm.scale"], SIZES) == (
        "wire: sdp4bit; differences of weights 4 bits by 2048, gradients inside a node (4) 8 bits "
        "by 128, gradients between nodes (2) 4 bits by 128; rounded stochastic, transformed by 32; "
        "gradients in float32 before step 10; not quantized: norm.scale"
    )
    one = SIZES | {"node": 1}
    assert "between" not in wire.line(cfg, [], one) and "expert" not in wire.line(cfg, [], one)
    said = wire.line(made(wire="loco", wire__gradients="fp8"), [f"x{i}" for i in range(14)], SIZES)
    assert said.startswith("wire: loco; weights bfloat16, gradients inside a node (4) e4m3 by 128")
    assert said.endswith("x11 and 2 more")
    alone = wire.line(cfg, [], SIZES | {"node": 1, "data": 1})
    assert alone == "wire: sdp4bit; one data-parallel rank, nothing travels"
