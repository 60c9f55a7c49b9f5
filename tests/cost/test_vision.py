"""Convolutions, patches, pooling and towers in workloads: against XLA's counts and by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.axes import MESH_AXES
from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost import memory
from megajax.cost.base import Op, Workload, train_flops_per_token
from megajax.cost.estimate import estimate
from megajax.cost.kernels import Convolution, Matmul, PatchEmbedding, Pooling, RoiAlign
from megajax.cost.roofline import Roofline
from megajax.cost.step import Pipeline, StepShape
from megajax.models import vlm
from megajax.models.decoder_config import PRESETS


def counted(function, *shapes):
    """What XLA counts in a compiled program."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("window", "stride", "groups"), [((3, 3), 1, 1), ((5, 3), 2, 1), ((3, 3), 1, 4)]
)
def test_a_convolution_has_the_flops_that_xla_counts(window, stride, groups):
    rows, columns = window
    x, w = (
        (2, 16 * stride + rows - stride, 12 * stride + columns - stride, 8),
        (*window, 8 // groups, 20),
    )

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    kernel = Convolution(2, 16, 12, 8, 20, window, stride, groups)
    assert jax.eval_shape(convolve, jnp.zeros(x), jnp.zeros(w)).shape == (2, 16, 12, 20)
    assert counted(convolve, x, w) == pytest.approx(kernel.flops, rel=1e-6)
    assert kernel.params == np.prod(w) and kernel.sizes[2] == 2 * 16 * 12 * 20


def test_patches_are_a_convolution_that_steps_over_its_window():
    patches = PatchEmbedding(tokens=2 * 8 * 6, patch=14, channels=3, width=64)
    same = Convolution(2, 8, 6, 3, 64, (14, 14), 14)
    assert (patches.flops, patches.params, patches.sizes) == (same.flops, same.params, same.sizes)


def test_pooling_and_regions_by_hand():
    pooling = Pooling(images=2, height=4, width=4, channels=8, window=3, stride=2)
    assert pooling.sizes == (2 * 8 * 8 * 8, 2 * 4 * 4 * 8) and pooling.flops == 9 * 256
    # 10 regions, 7 x 7 places, 4 samples of 4 products and 4 sums each.
    assert RoiAlign(10, 7, 16, 2).flops == 10 * 49 * 16 * 4 * 8


def network(images):
    """A kernel of 3 x 3, a pooling and a classifier."""
    ops = (
        Op("convolution", Convolution(images, 32, 32, 3, 16), dtypes=("float32",)),
        Op("pooling", Pooling(images, 16, 16, 16, 2, 2), dtypes=("float32",)),
        Op("head", Matmul(images, 16, 10), dtypes=("float32",)),
    )
    return Workload(ops, images, 1, 1, 0)


def step(load, **sizes):
    return StepShape(load, dict.fromkeys(MESH_AXES, 1) | sizes, ("data",), remat="none")


def test_a_network_of_convolutions_has_a_step():
    """Its parameters, its FLOPs an image, what its backward pass keeps, and its time."""
    load = network(8)
    assert load.params == 432 + 160
    image = 2 * 432 * 1024 + 4 * 16 * 256 + 2 * 160
    assert train_flops_per_token(load, "megatron") == 3 * image
    one, four = step(load), step(load, data=4)
    assert memory.terms(one)["parameters"] == 4 * 592 == 4 * memory.terms(four)["parameters"]
    outputs = 4 * 8 * (1024 * 16 + 256 * 16)  # results of kernel and pooling, float32
    assert memory.terms(one)["activations"] + memory.terms(one)["stash"] == pytest.approx(outputs)
    assert four.forward.flops == one.forward.flops / 4
    both = step(load, tensor=2).forward  # the ranks repeat the convolutions, and share the head
    assert both.flops == one.forward.flops - 8 * 160
    seconds = [Roofline().op_time(op, CARDS["H100"])[0] for op in one.workload.ops]
    assert len(seconds) == 3 and min(seconds) > 0


def test_a_tower_counts_beside_its_decoder():
    """Its work and its parameters; a pipeline repeats it on every stage."""
    decoder = PRESETS["nano"]().workload(8, 128)
    tower = dataclasses.replace(network(8).cast("bfloat16"), phase="train")
    both = dataclasses.replace(decoder, towers=(tower,))
    assert both.flops == decoder.flops + tower.flops
    assert both.params == decoder.params + 592 and both.dtype == decoder.dtype
    plain = step(both).forward
    wide, alone = (
        dataclasses.replace(step(load, pipe=2), pipeline=Pipeline(2, 2)).forward
        for load in (both, decoder)
    )
    assert plain.attention == step(decoder).forward.attention
    assert plain.flops == step(decoder).forward.flops + tower.flops
    # All of it on each stage, but for the head, which the stages share.
    assert wide.flops - alone.flops == tower.flops - 8 * 320 / 2
    assert both.cast("float32").towers[0].dtype == "float32"


def test_the_memory_of_a_tower_by_hand():
    """Its state beside the decoder's, and for each place of a patch what its layers keep. A
    pipeline keeps all of it on every stage, and the activations of one micro-batch only."""
    cfg = vlm.PRESETS["nano"]()
    tower, rows, seq_len = cfg.tower, 8, 64

    def terms(patches, pipeline=Pipeline(), **sizes):
        load = cfg.workload(rows, seq_len, "bfloat16", patches=patches)
        shape = StepShape(load, dict.fromkeys(MESH_AXES, 1) | sizes, ("data",), pipeline=pipeline)
        return memory.terms(shape)

    plain, few, more = terms(0), terms(256), terms(512)
    params = sum(x.size for k in ("tower", "projector") for x in leaves(k, cfg) if x.ndim > 1)
    assert few["parameters"] - plain["parameters"] == pytest.approx(4 * params, rel=0.02)
    assert few["optimizer"] - plain["optimizer"] == pytest.approx(8 * params, rel=0.02)
    # In bfloat16: of a layer its input, the result of attention and the heads; pixels of two
    # frames; four arrays around the projector.
    patch = 2 * (3 * tower.width * tower.layers + 2 * tower.patch_values + 4 * tower.width)
    added = (more["stash"] - few["stash"]) / (rows * 256)
    assert patch == pytest.approx(added, rel=0.02)
    assert more["batch"] - few["batch"] == rows * 256 * (tower.patch_values + 12)
    assert more["logits"] == plain["logits"]
    piped = terms(512, Pipeline(2, 4), pipe=2)
    alone = terms(0, Pipeline(2, 4), pipe=2)
    assert piped["stash"] == alone["stash"]
    assert piped["parameters"] - alone["parameters"] == few["parameters"] - plain["parameters"]
    assert piped["activations"] >= 512 * rows / 4 * patch > alone["activations"]


def test_a_frozen_tower_has_a_forward_pass_and_its_parameters():
    """No optimizer, no gradient, no backward pass; a projector that trains still has them."""
    cfg = vlm.PRESETS["nano"]()
    none, tower, both = (
        step(cfg.workload(8, 64, "bfloat16", patches=256, frozen=frozen))
        for frozen in ((), ("tower",), ("tower", "projector"))
    )
    plain = step(cfg.workload(8, 64, "bfloat16", patches=0))
    sizes = {
        name: sum(x.size for x in leaves(name, cfg) if x.ndim > 1)
        for name in ("tower", "projector")
    }
    none_, tower_, both_, plain_ = map(memory.terms, (none, tower, both, plain))
    for term, arrays in {"optimizer": 2, "gradients": 1}.items():
        assert both_[term] == plain_[term]
        added = tower_[term] - plain_[term]
        assert added == pytest.approx(4 * arrays * sizes["projector"], rel=0.02)
    assert tower_["parameters"] == none_["parameters"]
    assert both_["stash"] == plain_["stash"]
    # Of the projector: what it reads, its norm, and inner values before and after the activation.
    patch = tower_["stash"] - plain_["stash"]
    assert patch == 2 * 8 * 256 * 4 * cfg.tower.width < none_["stash"] - plain_["stash"]
    once = sum(op.count * op.flops for op in both.forward.ops if op.part == "frozen")
    spent = [case.workload.flops for case in (none, both, plain)]
    assert spent[1] - spent[2] == once and spent[0] - spent[1] >= 2 * once
    per_token = [train_flops_per_token(case.load, "megatron") for case in (none, tower, both)]
    ops = none.load.towers[0].all_ops
    forward, projected = (sum(op.count * op.flops for op in part) for part in (ops, ops[-4:]))
    assert per_token[0] - per_token[1] == pytest.approx(2 * (forward - projected) / (8 * 64))
    assert per_token[0] - per_token[2] == pytest.approx(2 * forward / (8 * 64))
    seconds = [
        estimate(case, parse_cluster("h100:1x1"), ()).step_s for case in (none, tower, both, plain)
    ]
    assert seconds == sorted(seconds, reverse=True)


def leaves(member, cfg):
    """Of the parameters, a layer's matrices as one array each, vectors as vectors."""
    shapes = vlm.parts(cfg).abstract[member]
    if "blocks" in shapes:
        shapes = shapes | {"blocks": jax.tree.map(_unstacked, shapes["blocks"])}
    return jax.tree.leaves(shapes)


def _unstacked(x):
    """Vectors of a stack count as vectors: the cost model has neither norms nor biases."""
    return jax.ShapeDtypeStruct((x.size,), x.dtype) if x.ndim < 3 else x
