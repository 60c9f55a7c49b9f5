"""Weights for networks of torchvision that two programs can make alike, without a file of them.

tests/golden/make_detection.py fills torchvision's modules with them, and tests fill a state dict
with the same names and shapes. Plain NumPy.
"""

import math
import zlib

import numpy as np

SEED = 2  # (chosen: scores of two classes, no class with all of the boxes)
GAINS = {"inner_blocks": 0.1, "rpn.head.cls_logits": 2, "rpn.head.bbox_pred": 0.2, "cls_score": 0.5}


def images(count: int, height: int, width: int) -> np.ndarray:
    """Returns images of squares of 16 pixels with noise, float32 0..1, (count, H, W, 3)."""
    rng = np.random.default_rng([SEED, count, height, width])
    squares = rng.random((count, -(-height // 16), -(-width // 16), 3))
    squares = squares.repeat(16, 1).repeat(16, 2)[:, :height, :width]
    return (0.7 * squares + 0.3 * rng.random(squares.shape)).astype(np.float32)


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the tensor of a state dict, drawn from a generator of its name.

    Maps keep a size of about 1: kernels as arXiv 1502.01852 has them, the last norm of each
    residual branch small. GAINS are such that scores and boxes differ and none is at a limit.
    """
    rng, last = np.random.default_rng([SEED, zlib.crc32(name.encode())]), name.rsplit(".", 1)[-1]
    if last == "num_batches_tracked":
        return np.array(7)
    if last == "running_var":
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if last in ("bias", "running_mean"):
        return rng.normal(0, 0.1, shape).astype(np.float32)
    if len(shape) == 1:
        small = 0.3 if ".bn3." in name or (".bn2." in name and ".conv3." not in name) else 1.0
        return rng.uniform(0.5 * small, 1.5 * small, shape).astype(np.float32)
    gains = [gain for part, gain in GAINS.items() if part in name]
    std = math.prod(gains) * math.sqrt(2 / math.prod(shape[1:]))
    return rng.normal(0, std, shape).astype(np.float32)
