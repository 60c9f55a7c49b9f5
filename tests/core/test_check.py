import dataclasses

import pytest

from megajax.core import config
from megajax.core.check import check
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel.sharding import rules
from megajax.training.config import Config

NANO = dataclasses.replace(Config(), model=DecoderConfig())


def run(changes, devices=8):
    cfg = config.override(NANO, changes)
    check(cfg, cfg.mesh.sizes(devices), rules(cfg.zero))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mesh.tensor": 4},
        {"mesh.tensor": 4, "model.kv_heads": 2},
        {"mesh.tensor": 4, "model.kv_heads": 1},
        {"mesh.node": 2, "mesh.data": 2, "mesh.tensor": 2},
        {"mesh.context": 2, "mesh.tensor": 2},
        {"mesh.expert": 2},
        {"mesh.expert": 8, "model.moe.experts": 8, "model.mlp": 7},
        {"train.accumulate": 2, "train.loss_chunks": 4},
        {"mesh.context": 2, "mesh.tensor": 2, "context.kind": "ulysses", "model.kv_heads": 2},
        {"mesh.context": 2, "train.seq_len": 126, "context.order": "plain"},
        {"mesh.context": 2, "context.kind": "gather", "train.attention": "cudnn"},
        {"mesh.context": 2, "context.kind": "ulysses", "train.attention": "varlen"},
    ],
)
def test_legal_combinations(changes):
    run(changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh.tensor": 8}, ["model.heads=4", "mesh.tensor 8", "nearest: 8", "--mesh.tensor"]),
        (
            {"mesh.tensor": 4, "model.heads": 12, "model.kv_heads": 6},
            [
                "model.kv_heads=6",
                "divisible by mesh.tensor 4, or divide it",
                "nearest: 4, 12",
                "mesh.tensor (nearest: 3, 6)",
                "--model.kv_heads, --mesh.tensor",
            ],
        ),
        ({"model.width": 100}, ["model.width=100", "nearest: 96, 104", "--shard.zero"]),
        ({"train.global_batch": 30}, ["train.global_batch=30", "= 8", "nearest: 24, 32"]),
        ({"train.accumulate": 3}, ["train.accumulate 3 = 24", "nearest: 24, 48"]),
        ({"train.seq_len": 130, "mesh.tensor": 4}, ["train.seq_len=130", "nearest: 128, 132"]),
        ({"train.loss_chunks": 3}, ["train.loss_chunks = 3", "nearest: 126, 129"]),
        ({"model.max_positions": 64}, ["train.seq_len=128", "at most 64"]),
        (
            {"mesh.context": 4, "mesh.tensor": 2, "context.kind": "ulysses"},
            ["model.heads=4", "x mesh.context 4 = 8", "nearest: 8", "nearest: 2", "--context.kind"],
        ),
        (
            {"mesh.context": 2, "train.seq_len": 126},
            ["train.seq_len=126", "2 x mesh.context = 4", "nearest: 124, 128", "--context.order"],
        ),
        (
            {"mesh.context": 2, "train.attention": "varlen"},
            ["train.attention=varlen", "of a ring", "--context.kind"],
        ),
        (
            {"mesh.context": 2, "context.kind": "gather", "train.attention": "varlen"},
            ["train.attention=varlen", "ulysses", "--train.attention"],
        ),
        (
            {"mesh.context": 2, "train.attention": "cudnn"},
            ["train.attention=cudnn", "ulysses, gather", "--context.kind"],
        ),
        (
            {"model.moe.experts": 6, "mesh.expert": 4},
            ["moe.experts=6", "mesh.expert 4", "nearest: 4, 8", "nearest: 3, 6", "--moe.experts"],
        ),
        ({"model.moe.experts": 4, "model.moe.width": 5, "mesh.tensor": 2}, ["moe.width=5", "4, 6"]),
    ],
)
def test_illegal_combinations_name_flag_and_nearest_value(changes, words):
    with pytest.raises(UserError) as error:
        run(changes)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_replicated_weight_need_not_divide():
    run({"model.width": 100, "shard.zero": "none", "mesh.tensor": 2})


def test_mesh_is_refused_before_anything_else():
    with pytest.raises(UserError, match="does not divide"):
        MeshSpec(tensor=3).sizes(8)
