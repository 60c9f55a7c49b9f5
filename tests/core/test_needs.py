"""Flags that have no effect say so, and name what they need."""

import pytest

from megajax.core import config
from megajax.systems.hybridflow import config as hybridflow
from megajax.training import detection, finetune, vision
from megajax.training.config import Config
from megajax.training.presets import PRESETS

FLAGS = config.flag_names(Config)


def idle(settings, verb=None):
    names = {flag: name for name, flag in FLAGS.items()}
    settings = {names[flag]: value for flag, value in settings.items()}
    return list(config.idle(config.override(Config(), settings), settings, FLAGS, verb))


# flag -> (a value, the switch that the sentence names, what turns it on)
IDLE = {
    "moe.top_k": (3, "--moe.experts", {"moe.experts": 8}),
    "moe.scale": (2.0, "--moe.experts", {"moe.experts": 8}),
    "moe.capacity_factor": (2.0, "--moe.mode", {"moe.experts": 8, "moe.mode": "capacity"}),
    "moe.top_groups": (1, "--moe.groups", {"moe.experts": 8, "moe.groups": 2}),
    "context.kind": ("ring", "--mesh.context", {"mesh.context": 2}),
    "pipeline.schedule": ("interleaved", "--mesh.pipe", {"mesh.pipe": 2}),
    "prune.pattern": ("ew", "--prune.sparsity", {"prune.sparsity": 0.5}),
    "prune.delta": (0.1, "--prune.pattern", {"prune.sparsity": 0.5, "prune.pattern": "tew"}),
    "optim.decay": (0.3, "--optim.schedule", {"optim.schedule": "wsd"}),
    "model.rope.theta": (5e5, "--model.position", None),
    "model.rope.high_freq_factor": (3.0, "--model.rope.factor", {"model.rope.factor": 8.0}),
    "eval.temperature": (0.5, "--eval.sample_tokens", None),
    "overlap": ("fused", "--mesh.tensor, --mesh.expert", {"mesh.expert": 2}),
    "emulate_without_gpu": (4, "--emulate", None),
    "wire.start_step": (10, "--wire", {"wire": "sdp4bit"}),
}
OFF = {
    "moe.capacity_factor": {"moe.experts": 8},
    "moe.top_groups": {"moe.experts": 8},
    "prune.delta": {"prune.sparsity": 0.5},
    "model.rope.theta": {"model.position": "learned"},
    "eval.temperature": {"eval.sample_tokens": 0},
    "emulate_without_gpu": {"emulate": 8},
}


@pytest.mark.parametrize("flag", IDLE)
def test_a_flag_without_effect_names_its_switch(flag):
    value, switch, on = IDLE[flag]
    (sentence,) = idle({flag: value} | OFF.get(flag, {}))
    assert sentence.startswith(f"{flag}={value} has no effect: it needs ")
    assert sentence.endswith(f"({switch})")
    assert idle({flag: value} | (on or {})) == []


def test_the_switch_itself_and_harmless_values_are_silent():
    assert idle({"moe.experts": 0, "prune.sparsity": 0.0, "overlap": "auto", "mesh.pipe": 1}) == []
    assert (
        idle({"model.mlp": 64}) == []
        and "--moe.experts" in idle({"model.mlp": 9, "moe.experts": 2})[0]
    )


def test_presets_and_files_are_silent():
    for make in PRESETS.values():
        assert list(config.idle(make(), {}, FLAGS)) == []
    saved = config.from_json(Config, '{"context": {"kind": "gather"}, "moe": {"top_k": 4}}')
    assert saved.model.moe.top_k == 4 and list(config.idle(saved, {}, FLAGS)) == []


@pytest.mark.parametrize(
    "preset", [PRESETS["nano"], finetune.nano, vision.nano, detection.tiny, hybridflow.tiny]
)
def test_what_a_flag_needs_is_a_member_of_the_configuration(preset):
    """Each flag alone, at its default: what there is to say of it can be said."""
    cfg = preset()
    flags = config.flag_names(type(cfg))
    for name, _, _ in config.leaves(type(cfg)):
        assert len([*config.idle(cfg, {name: config.get(cfg, name)}, flags)]) <= 1
