"""Vision-language models: positions, packed images, meshes, frozen parts."""

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.models import vlm

IMAGE = 7


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
        ([1, IMAGE], [], "1 tokens are 7 .*0 images have 0"),
        ([1], [(1, 1)], "0 tokens are 7 .*1 images have 1"),
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
