"""Vision-language models: positions, packed images, meshes, frozen parts."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.models import decoder, vit, vlm, vlm_names
from megajax.parallel import sharding
from tests.vision_rows import IMAGE, MODEL, batch, row, sample

TOWER = "tower", "projector"


def walked(tokens, grids):
    """Qwen2-VL's positions, one token after the other."""
    out, following, left = [], 0, [list(np.ndindex(*grid)) for grid in grids]
    base, extent = None, 0
    for token in tokens:
        if token != IMAGE:
            out.append((following,) * 3)
            following += 1
            continue
        if base is None:
            base, extent = following, max(grids[len(grids) - len(left)])
        row, column = left[0].pop(0)
        out.append((base, base + row, base + column))
        if not left[0]:
            left.pop(0)
            base, following = None, base + extent
    return np.array(out, np.int32).reshape(-1, 3).T


@pytest.mark.parametrize("seed", range(8))
def test_positions_are_those_of_a_walk_over_the_tokens(seed):
    random = np.random.default_rng(seed)
    tokens, grids = [], []
    for _ in range(seed):
        tokens += [1] * random.integers(0, 5)
        grids.append(tuple(map(int, random.integers(1, 6, 2))))
        tokens += [IMAGE] * (grids[-1][0] * grids[-1][1])
    tokens += [2] * random.integers(0, 5)
    positions_3S = vlm.positions(np.array(tokens, np.int32), grids, IMAGE)
    assert positions_3S.dtype == np.int32 and positions_3S.shape == (3, len(tokens))
    np.testing.assert_array_equal(positions_3S, walked(tokens, grids))


def test_positions_of_an_example():
    """Figure 3 of arXiv 2409.12191: text goes on after the larger side of the image."""
    positions_3S = vlm.positions([1, 1, *[IMAGE] * 6, 1], [(2, 3)], IMAGE)
    np.testing.assert_array_equal(positions_3S[0], [0, 1, 2, 2, 2, 2, 2, 2, 5])
    np.testing.assert_array_equal(positions_3S[1], [0, 1, 2, 2, 2, 3, 3, 3, 5])
    np.testing.assert_array_equal(positions_3S[2], [0, 1, 2, 3, 4, 2, 3, 4, 5])


@pytest.mark.parametrize(
    "tokens, grids, said",
    [
        ([1, IMAGE], [], "1 tokens are 60 .*0 images have 0"),
        ([1], [(1, 1)], "0 tokens are 60 .*1 images have 1"),
        ([IMAGE, 1, IMAGE], [(1, 2)], "image 0 has 1 x 2 .*follow each other"),
        ([IMAGE], [(1, 1), (0, 3)], "image 1 has 0 x 3"),
    ],
)
def test_tokens_and_images_that_do_not_fit_are_refused(tokens, grids, said):
    with pytest.raises(UserError, match=said):
        vlm.positions(tokens, grids, IMAGE)


@pytest.mark.parametrize("name", vlm.PRESETS)
def test_presets_are_those_of_their_sources(name):
    cfg = vlm.PRESETS[name]()
    # Of the tower with its projector, and of the decoder. Qwen2-VL: 675M, 1.5B and 7.6B (arXiv
    # 2409.12191, table 1). Optimus': 12 x layers x width^2, and what is around the blocks.
    billions = {
        "qwen2_vl_2b": (0.665, 1.54),
        "qwen2_vl_7b": (0.675, 7.6),
        "vit_3b_gpt_11b": (3.17, 9.22),
        "vit_5b_gpt_175b": (5.74, 174.6),
        "vit_11b_llama_70b": (10.07, 70.6),
        "vit_22b_llama_70b": (22.56, 70.6),
        "vit_11b_gpt_175b": (10.14, 174.6),
        "vit_22b_gpt_175b": (22.66, 174.6),
    }.get(name)
    load = cfg.workload(2, 1024)
    (tower,) = load.towers
    assert tower.rows == 2 and tower.seq_len == 4 * 512
    if billions:
        counted = tower.params / 1e9, (load.params - tower.params) / 1e9
        np.testing.assert_allclose(counted, billions, rtol=0.01)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(image_token=512), "model.image_token=512 must be below model.vocab=512"),
        (dict(mrope="1,2"), "model.mrope=1,2 must be three numbers with the sum 16.*4,6,6"),
        (dict(mrope="a,b,c"), "model.mrope=a,b,c must be three numbers"),
        (dict(mrope="8,8,8"), "model.mrope=8,8,8"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, said):
    with pytest.raises(UserError, match=said):
        vlm.VlmConfig(**change)


def test_all_patches_of_a_row_are_counted():
    """1.6 images of the largest size: products of all patches, attention inside of each image."""
    cfg = vlm.PRESETS["qwen2_vl_2b"]()
    (tower,) = cfg.workload(1, 4096, patches=8192).towers
    D, F, wide = 1280, 5120, 4 * 1280
    layer = 2 * 8192 * (4 * D * D + 2 * D * F) + 4 * D * (5120**2 + 3072**2)
    projector = 2 * 2048 * (wide * wide + wide * 1536)
    assert tower.flops == 32 * layer + projector + 2 * 8192 * 2 * 588 * D
    (one,) = cfg.workload(2, 4096, patches=5120).towers
    assert tower.params == one.params


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean=.*0.5.* only .0.48145466"),
        ({"image_std": [0.26862954]}, "image_std"),
        ({"patch_size": 16}, "patch_size=16 is not supported, only 14"),
        ({"merge_size": 1}, "merge_size=1 is not supported, only 2"),
        ({"do_resize": False}, "do_resize=False is not supported, only True"),
        ({"resample": "cubic"}, "resample='cubic' is not supported, only 3"),
        (
            {
                "image_std": list(vit.STD),
                "do_normalize": True,
                "rescale_factor": 0.00392156862745098,
            },
            None,
        ),
    ],
)
def test_other_image_processors_are_refused(changes, said):
    cfg = vlm.PRESETS["qwen2_vl_2b"]()
    made = vlm_names.to_hf_config(cfg, "bfloat16")
    processor = vlm_names.files(cfg)[vlm_names.PROCESSOR]
    if said is None:
        assert vlm_names.from_hf_config(made, processor | changes).tower == cfg.tower
        return
    with pytest.raises(UserError, match=f"preprocessor_config.json: {said}"):
        vlm_names.from_hf_config(made, processor | changes)


def test_images_have_three_colours():
    made = vlm_names.to_hf_config(vlm.PRESETS["qwen2_vl_2b"](), "bfloat16")
    made["vision_config"]["in_channels"] = 1
    for build in (lambda: vit.VitConfig(channels=4), lambda: vlm_names.from_hf_config(made)):
        with pytest.raises(UserError, match="channels"):
            build()


PARTS = functools.cache(lambda: vlm.parts(MODEL))


@functools.cache
def params():
    """Parameters far from their initial values, so that nothing is nearly zero."""
    fresh = PARTS().init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(fresh)
    random = np.random.default_rng(0)
    moved = [x + 0.1 * random.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, moved)


@functools.cache
def compiled():
    return jax.jit(PARTS().logits)


def logits(*rows):
    return np.asarray(compiled()(params(), batch(rows)))


def test_rows_of_text_are_those_of_a_decoder_to_the_bit():
    """With empty places for patches, and without the members of images."""
    random = np.random.default_rng(0)
    host = batch([row([sample(random, text=9), sample(random, text=12)], 32, 64)] * 2)
    plain = decoder.parts(MODEL.decoder)
    text = {n: x for n, x in host.items() if n in ("tokens", "positions", "segments")}
    expected = jax.jit(plain.logits)({k: params()[k] for k in plain.abstract}, text)
    np.testing.assert_array_equal(compiled()(params(), host), expected)
    np.testing.assert_array_equal(jax.jit(PARTS().logits)(params(), text), expected)
    fresh = PARTS().init(jax.random.key(3))
    for name, tree in plain.init(jax.random.key(3)).items():
        jax.tree.map(np.testing.assert_array_equal, fresh[name], tree)


def test_packed_samples_equal_one_by_one():
    random = np.random.default_rng(1)
    samples = [
        sample(random, (2, 3), text=2),
        sample(random, text=3),
        sample(random, (1, 1), (3, 1)),
        sample(random, (1, 2), text=1),
    ]
    packed = logits(row(samples, 48, 64), row(samples[::-1], 48, 64))
    starts = np.cumsum([0, *(len(s.tokens) for s in samples)])
    for i, one in enumerate(samples):
        alone = logits(row([one], 48, 64), row([one], 48, 64))[0, : len(one.tokens)]
        np.testing.assert_allclose(packed[0, starts[i] : starts[i + 1]], alone, atol=1e-5)
        stop = starts[-1] - starts[i]
        np.testing.assert_allclose(packed[1, stop - len(alone) : stop], alone, atol=1e-5)
    assert np.isfinite(packed).all()


def test_an_image_reaches_what_follows_it_in_its_sample_and_nothing_else():
    random = np.random.default_rng(2)
    samples = [sample(random, (1, 2), (2, 1)), sample(random, (2, 2)), sample(random, text=3)]
    before = logits(row(samples, 48, 64), row(samples[::-1], 48, 64))
    changed = copy.deepcopy(samples)
    changed[0].pixels[1] = 255 - changed[0].pixels[1]  # the second image of the first sample
    after = logits(row(changed, 48, 64), row(changed[::-1], 48, 64))
    first = np.flatnonzero(samples[0].tokens == IMAGE)[2]
    end = len(samples[0].tokens)
    np.testing.assert_array_equal(after[0, :first], before[0, :first])
    assert abs(after[0, first:end] - before[0, first:end]).max(-1).min() > 1e-4
    np.testing.assert_array_equal(after[0, end:], before[0, end:])
    total = sum(len(s.tokens) for s in samples)
    np.testing.assert_array_equal(after[1, : total - end], before[1, : total - end])
    exchanged = copy.deepcopy(samples)
    exchanged[0].pixels.reverse()
    swapped = logits(row(exchanged, 48, 64), row(samples, 48, 64))
    assert abs(swapped[0, first:end] - before[0, first:end]).max(-1).min() > 1e-4


def test_padding_has_finite_values_and_no_gradient():
    """Pixels of padding change nothing, and a row without images gives the tower no gradient."""
    random = np.random.default_rng(3)
    full = row([sample(random, (2, 2), text=4)], 32, 64)
    text = row([sample(random, text=9)], 32, 64)
    noisy = full | {"patches": np.where(full["images"][:, None] < 0, 255, full["patches"])}
    noisy["patch_places"] = np.where(full["images"][:, None] < 0, 7, full["patch_places"])
    np.testing.assert_array_equal(logits(full, text), logits(noisy, text))
    grad = jax.jit(jax.grad(lambda p, b: PARTS().loss(p, b).cross_entropy))
    for leaf in jax.tree.leaves({k: grad(params(), batch([text, text]))[k] for k in TOWER}):
        assert not np.asarray(leaf).any()
    for name, leaf in named_leaves(grad(params(), batch([full, noisy]))):
        assert np.isfinite(leaf).all() and np.asarray(leaf).any(), name


def test_what_a_mesh_cannot_do_is_refused_with_the_flag():
    many = MeshSpec(context=2, data=1).build(jax.devices()[:2])
    with pytest.raises(UserError, match="mesh.context=2.*--mesh.context"):
        vlm.parts(MODEL, sharding.layout(many, model=MODEL))
    for tower, said in (
        (dict(heads=2), "tower.heads=2 must be divisible by mesh.tensor 4 = 4"),
        (dict(mlp=42), "tower.mlp=42 must be divisible by mesh.tensor 4 = 4"),
    ):
        cfg = dataclasses.replace(MODEL, tower=dataclasses.replace(MODEL.tower, **tower))
        with pytest.raises(UserError, match=said):
            sharding.layout(MeshSpec(tensor=4, data=1).build(jax.devices()[:4]), model=cfg)
    with pytest.raises(UserError, match="data.patches=12 must be divisible by .* = 8.*nearest: 8"):
        vlm.check_patches(MODEL, 12, 2)
