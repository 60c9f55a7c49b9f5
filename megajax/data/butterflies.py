"""Pictures of butterflies, drawn on demand, with exact boxes: a data set that is code.

`open_butterflies` gives a data set with the interface of detection.py. Picture i is a pure function
of (profile, seed, i). The profile `easy` has ten species of distinct hues on plain backgrounds.
The profile `hard` has the traits that make the paper's photographs hard: look-alike species, a long
tail, occlusion, small insects, rich backgrounds, and two domains, photographs of pinned specimens
and photographs in the habitat. `protocol` splits a data set with these domains as the paper
does (Xie et al., "The automatic identification of butterfly species", its training sets A and B),
and `export` writes any data set as a folder.

A picture is a background and a list of sprites (sprites.py): wings, bodies, leaves. A pixel belongs
to one insect or to none, and a box is the extent of its insect's pixels.

Every random number is drawn by NumPy's generator from (profile, seed, i), and the arithmetic of
sprites.py gives the same bits on every processor, so pictures are equal on all machines. The
backgrounds of `hard` include crops of two files that matplotlib carries. Where a file is missing or
another one, drawn backgrounds take its place, and `problems` of the data set counts it.

Not here: reading folders (detection.py), augmentation (augment.py).

Legend: N boxes, H rows of pixels, W columns, C channels.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import yaml
from PIL import Image

from megajax.core import files
from megajax.core.errors import UserError, did_you_mean
from megajax.data.detection import Dataset, Example
from megajax.data.sprites import Canvas, Color, Matrix, Sprite, flat_matrix, halve

PROFILES = ("easy", "hard")
EASY_SCENES = {"easy": range(300), "easy:test": range(300, 396)}  # (chosen) pictures of each
SIZES = {"easy": (30, 64), "habitat": (12, 60), "specimen": (84, 112)}  # (chosen) pixels
SIDE = 128  # (chosen) pixels of the side of a picture
CAMERA = 3.5  # (chosen) distance of the camera in units of an insect, for the perspective
HIDDEN = 0.4  # (chosen) part of an insect that may be hidden before its box is difficult
CANVAS = 384  # (chosen) pixels of the side of a drawn background, of which pictures are crops
# The rectangles of sprites. The unit of an insect is the length of its forewing.
WING = (-0.06, -1.0, 1.05, 1.14)
BODY = (-0.32, -0.72, 0.32, 0.6)
SQUARE = (-1.0, -1.0, 1.0, 1.0)


# ---- species


@dataclasses.dataclass(frozen=True)
class Species:
    """What distinguishes a species.

    base, second: colors of the wing and of its bands. dark: margin, veins and body. light: dots of
    the margin. shape: a number of SHAPES. bands: number of bands across the wing. phase: where they
    begin, in periods. spots: (angle in degrees from the lateral axis, part of the wing's radius,
    radius in units) of each eyespot. dots: whether the margin has dots.
    """

    name: str
    base: Color
    second: Color
    dark: Color
    light: Color
    shape: int
    bands: int = 0
    phase: float = 0.0
    spots: tuple[tuple[float, float, float], ...] = ()
    dots: bool = True


# Outlines of wings: angles in degrees from the lateral axis, negative towards the head, and radii.
FORE = (
    (-52, -50, -47, -42, -36, -26, -12, 0, 9, 14, 18),
    (0.0, 0.45, 0.86, 1.0, 1.02, 0.93, 0.82, 0.77, 0.72, 0.5, 0.0),
)
HIND = (
    (-14, -8, 0, 16, 34, 52, 66, 78, 86, 90),
    (0.0, 0.5, 0.66, 0.74, 0.78, 0.76, 0.68, 0.5, 0.25, 0.0),
)
# Silhouettes: factor of the forewing, of the hindwing, degrees by which the forewing is lowered,
# tail, scallops. (chosen: six common ones)
SHAPES = (
    (1.00, 1.00, 0.0, 0.00, 0.0),  # brush-footed
    (1.02, 0.92, 4.0, 0.38, 0.02),  # swallowtail
    (1.04, 0.72, 8.0, 0.00, 0.0),  # long-winged
    (0.92, 1.12, -4.0, 0.00, 0.035),  # angled
    (0.94, 1.02, -8.0, 0.00, 0.0),  # round
    (1.08, 0.84, -2.0, 0.16, 0.03),  # hooked
)


# An eyespot from its rim to its pupil: color, part of its radius.
EYE = (((0.97, 0.93, 0.78), 1.0), ((0.06, 0.05, 0.08), 0.78), ((0.55, 0.75, 0.98), 0.34))


def _radius(outline: Sequence[Sequence[float]], angle: np.ndarray, shift: float) -> np.ndarray:
    """Returns an outline's radius at angles in degrees, as a smooth curve near its points."""
    knots, values = np.array(outline[0], np.float64) + shift, np.array(outline[1], np.float64)
    fine = np.linspace(knots[0] - 4, knots[-1] + 4, 512)
    curve = np.interp(fine, knots, values, left=0.0, right=0.0)
    smooth = sum(np.roll(curve, k) for k in range(-9, 10)) / 19
    return np.interp(angle, fine, smooth, left=0.0, right=0.0)


def _edges(shape: int, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the radii of the forewing and of the hindwing at angles in degrees."""
    fore, hind, lower, tail, scallop = SHAPES[shape]
    fore_edge = fore * _radius(FORE, angle, lower)
    hind_edge = hind * _radius(HIND, angle, 0.0)
    hind_edge = hind_edge * (1 + scallop * np.cos(np.radians(angle) * 28))
    hind_edge = hind_edge + tail * np.exp(-(((angle - 64) / 5.0) ** 2)) * (hind_edge > 0.1)
    return fore_edge, hind_edge


def _ramp(value: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns a smooth step: 0 below `low`, 1 above `high`."""
    t = np.clip((value - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def _mix(rgb: np.ndarray, color: Color, part: np.ndarray) -> np.ndarray:
    return rgb + (np.asarray(color) - rgb) * part[..., None]


def _wing_color(species: Species, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the right pair of wings, seen from above: RGB and alpha."""
    x = np.abs(x)
    radius, angle = np.hypot(x, y), np.degrees(np.arctan2(y, x))
    fore_edge, hind_edge = _edges(species.shape, angle)
    fore = radius < fore_edge
    edge = np.where(fore, fore_edge, hind_edge)
    alpha = (fore | (radius < hind_edge)).astype(np.float64)
    part = radius / np.maximum(edge, 1e-3)  # 0 at the body, 1 at the margin
    rgb = np.broadcast_to(np.asarray(species.base), (*x.shape, 3))
    rgb = _mix(rgb, species.dark, 0.45 * (1 - _ramp(part, 0.0, 0.42)))
    if species.bands:
        # Bands lie between a fifth of the radius and the margin, and cover half of it.
        phase = (part - 0.2) / 0.66 * species.bands + species.phase
        wave = np.cos(2 * np.pi * phase)
        inside = _ramp(part, 0.14, 0.2) * (1 - _ramp(part, 0.86, 0.9))
        rgb = _mix(rgb, species.second, _ramp(wave, -0.25, 0.25) * inside)
    else:
        rgb = _mix(rgb, species.second, 0.85 * _ramp(part, 0.5, 0.85) * ~fore)
    spacing = 13.0
    off = np.radians(np.abs((angle + 500) % spacing - spacing / 2))
    vein = np.exp(-((off * radius / 0.008) ** 2)) * (part > 0.3)
    rgb = _mix(rgb, species.dark, 0.55 * vein)
    margin = (1 - part) * edge
    rgb = _mix(rgb, species.dark, 1 - _ramp(margin, 0.07, 0.1))
    if species.dots:
        between = np.radians(np.abs(angle % spacing - spacing / 2)) * radius
        rgb = _mix(rgb, species.light, 1 - _ramp(np.hypot(between, margin - 0.045), 0.016, 0.03))
    for at, place, size in species.spots:
        edges = _edges(species.shape, np.array([float(at)]))
        reach = float(edges[0][0] or edges[1][0]) * place
        distance = np.hypot(
            x - reach * math.cos(math.radians(at)), y - reach * math.sin(math.radians(at))
        )
        for color, r in EYE:
            rgb = _mix(rgb, color, 1 - _ramp(distance, size * r - 0.015, size * r + 0.015))
    return np.clip(rgb, 0, 1), alpha


def _body_color(species: Species, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns head, thorax, abdomen and feelers: RGB and alpha."""
    width = 0.075 * np.sqrt(np.clip(1 - ((y + 0.08) / 0.2) ** 2, 0, 1))
    width = np.maximum(width, 0.05 * np.sqrt(np.clip(1 - ((y - 0.22) / 0.34) ** 2, 0, 1)))
    width = np.maximum(width, 0.05 * np.sqrt(np.clip(1 - ((y + 0.29) / 0.06) ** 2, 0, 1)))
    body = np.abs(x) < width
    reach = np.clip((-y - 0.3) / 0.36, 0, 1)
    line = np.abs(np.abs(x) - 0.02 - 0.24 * reach**1.5) < 0.011
    feelers = line & (y < -0.3) & (y > -0.66)
    feelers |= np.hypot(np.abs(x) - 0.26, y + 0.655) < 0.026
    shade = 1 - 0.6 * (np.abs(x) / np.maximum(width, 1e-3)).clip(0, 1)
    rings = 0.85 + 0.15 * np.cos(y * 70)
    fur = np.asarray(species.dark) * 0.6 + np.asarray(species.base) * 0.25 + 0.05
    rgb = np.where(body[..., None], fur * (shade * rings)[..., None] * 1.4, 0.07)
    return np.clip(rgb, 0, 1), (body | feelers).astype(np.float64)


@functools.lru_cache(maxsize=128)
def _insect_sprites(species: Species) -> tuple[Sprite, Sprite, np.ndarray]:
    """Returns the sprites of the wings of one side and of the body, and points of the outline (N,
    2) of the wings in units."""
    wing = Sprite.paint(WING, functools.partial(_wing_color, species))
    body = Sprite.paint(BODY, functools.partial(_body_color, species))
    angle = np.linspace(-60, 90, 61)
    radius = np.maximum(*_edges(species.shape, angle))
    x, y = radius * np.cos(np.radians(angle)), radius * np.sin(np.radians(angle))
    return wing, body, np.rint(np.stack([x, y], -1) * 4096) / 4096


# The palettes of the look-alike triples: name, base, second, dark, light, shape. The first ten are
# seen in the habitat. (chosen: colors of well-known families, far from each other)
PALETTES: tuple[tuple[str, Color, Color, Color, Color, int], ...] = (
    ("amber", (0.95, 0.52, 0.08), (0.99, 0.84, 0.42), (0.10, 0.06, 0.05), (1.0, 1.0, 0.95), 0),
    ("lemon", (0.98, 0.90, 0.35), (0.16, 0.14, 0.12), (0.07, 0.06, 0.06), (0.98, 0.92, 0.5), 1),
    ("azure", (0.12, 0.42, 0.92), (0.55, 0.86, 0.99), (0.04, 0.05, 0.14), (0.9, 0.97, 1.0), 4),
    ("chalk", (0.96, 0.96, 0.92), (0.62, 0.66, 0.60), (0.25, 0.25, 0.27), (0.96, 0.96, 0.92), 0),
    ("umber", (0.47, 0.30, 0.16), (0.85, 0.62, 0.30), (0.16, 0.09, 0.05), (0.93, 0.86, 0.7), 4),
    ("ruby", (0.80, 0.10, 0.12), (0.98, 0.78, 0.72), (0.08, 0.03, 0.04), (1.0, 0.95, 0.9), 2),
    ("jade", (0.05, 0.55, 0.34), (0.75, 0.93, 0.35), (0.03, 0.09, 0.06), (0.9, 1.0, 0.7), 1),
    ("plum", (0.42, 0.16, 0.58), (0.93, 0.68, 0.95), (0.10, 0.04, 0.13), (0.96, 0.9, 1.0), 3),
    ("raven", (0.13, 0.12, 0.16), (0.97, 0.96, 0.90), (0.03, 0.03, 0.04), (0.97, 0.96, 0.9), 5),
    ("rose", (0.96, 0.58, 0.62), (0.50, 0.12, 0.30), (0.22, 0.06, 0.13), (1.0, 0.93, 0.9), 5),
    ("copper", (0.80, 0.35, 0.16), (0.30, 0.12, 0.10), (0.14, 0.07, 0.06), (0.98, 0.8, 0.5), 4),
    ("teal", (0.05, 0.48, 0.55), (0.99, 0.62, 0.22), (0.02, 0.09, 0.12), (0.8, 0.98, 0.98), 0),
    ("straw", (0.90, 0.80, 0.55), (0.58, 0.32, 0.16), (0.30, 0.20, 0.12), (1.0, 0.97, 0.85), 3),
    ("slate", (0.42, 0.47, 0.56), (0.86, 0.90, 0.95), (0.12, 0.13, 0.17), (0.95, 0.95, 0.95), 2),
    ("lime", (0.62, 0.85, 0.20), (0.10, 0.34, 0.16), (0.06, 0.13, 0.06), (0.98, 1.0, 0.8), 2),
    ("night", (0.10, 0.13, 0.36), (0.98, 0.85, 0.30), (0.03, 0.03, 0.10), (0.98, 0.9, 0.6), 1),
    ("coral", (0.99, 0.45, 0.34), (0.99, 0.93, 0.85), (0.20, 0.07, 0.08), (1.0, 0.97, 0.93), 4),
    ("mauve", (0.66, 0.55, 0.82), (0.30, 0.20, 0.48), (0.16, 0.10, 0.22), (0.97, 0.95, 1.0), 0),
    ("olive", (0.45, 0.47, 0.20), (0.93, 0.88, 0.50), (0.14, 0.15, 0.06), (0.97, 0.96, 0.8), 5),
    ("scarlet", (0.95, 0.22, 0.05), (0.08, 0.06, 0.08), (0.06, 0.03, 0.03), (1.0, 1.0, 0.9), 3),
)
# What distinguishes the members of a triple: eyespots in triples of even number, else bands.
SPOTS = (
    ("plain", ()),
    ("one-eyed", ((-28.0, 0.64, 0.21),)),
    ("two-eyed", ((-28.0, 0.64, 0.21), (40.0, 0.56, 0.21))),
)
BANDS = (("one-banded", 1, 0.5), ("two-banded", 2, 0.75), ("four-banded", 4, 0.75))
# The easy species differ in everything: name, base, second, shape, bands, spots of SPOTS.
EASY = (
    ("red", (0.93, 0.10, 0.10), (0.40, 0.05, 0.10), 0, 2, 0),
    ("orange", (0.99, 0.55, 0.05), (0.20, 0.08, 0.05), 2, 3, 0),
    ("yellow", (0.99, 0.92, 0.15), (0.15, 0.13, 0.10), 1, 4, 0),
    ("lime", (0.60, 0.95, 0.15), (0.05, 0.35, 0.10), 3, 0, 1),
    ("mint", (0.10, 0.90, 0.60), (0.95, 0.99, 0.85), 4, 2, 0),
    ("cyan", (0.10, 0.85, 0.98), (0.05, 0.20, 0.45), 1, 0, 2),
    ("blue", (0.12, 0.25, 0.98), (0.75, 0.85, 0.99), 4, 1, 0),
    ("violet", (0.52, 0.12, 0.93), (0.95, 0.75, 0.20), 5, 3, 0),
    ("magenta", (0.98, 0.15, 0.80), (0.99, 0.85, 0.95), 2, 0, 1),
    ("white", (0.98, 0.98, 0.97), (0.10, 0.10, 0.12), 0, 1, 2),
)


@functools.cache
def _species(profile: str) -> tuple[Species, ...]:
    """Returns the species of a profile."""
    if profile == "easy":
        dark, light = (0.07, 0.06, 0.07), (0.97, 0.97, 0.92)
        return tuple(
            Species(name, base, second, dark, light, shape, bands, 0.5, SPOTS[spots][1])
            for name, base, second, shape, bands, spots in EASY
        )
    species = []
    for number, (name, base, second, dark, light, shape) in enumerate(PALETTES):
        common = (base, second, dark, light, shape)
        if number % 2:
            members = [Species(f"{name}-{w}", *common, n, p) for w, n, p in BANDS]
        else:
            members = [Species(f"{name}-{w}", *common, spots=s) for w, s in SPOTS]
        species += members
    return tuple(species)


# ---- backgrounds


# Files that matplotlib carries: SHA-256 of the pixels or heights that a picture takes from them.
PHOTOGRAPHS = {
    "grace_hopper.jpg": "f7f982de68dd296af67ee51b2a95a2e5658f7bf064c6536520b66bae8d01fc34",
    "jacksboro_fault_dem.npz": "0c7e9f894eb7c8d444ca4475e64249e060d96c90ab63fdf439a0381c590ed502",
}
LEAVES = 4  # kinds of PLANTS that are leaves and grass; the others are flowers
PLANTS = 7


def _plant_color(kind: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a leaf (kinds 0 to 2), a blade of grass (3) or a flower (4 to 6): RGB and alpha. A
    leaf lies along y. Its colors are grey and get their hue from the gain."""
    if kind < LEAVES:
        bend, fat, veins = ((0.0, 0.52, 7), (0.10, 0.3, 9), (-0.06, 0.72, 5), (0.16, 0.09, 0))[kind]
        x = x - bend * (y * y - 0.3)
        length = np.clip(1 - y * y, 0, 1)
        width = fat * length * (1 + 0.35 * y) * 0.95
        alpha = (np.abs(x) < width).astype(np.float64)
        light = 0.72 + 0.16 * np.tanh(8 * x) + 0.1 * y
        if veins:
            side = np.cos(2 * np.pi * veins * (y + 0.8 * np.abs(x)))
            light = light - 0.1 * _ramp(side, 0.8, 1.0) + 0.06 * _ramp(-side, 0.0, 1.0)
        light = light + 0.22 * np.exp(-((x / 0.018) ** 2))
        return np.clip(light, 0, 1)[..., None] * np.ones(3), alpha
    petals, low, core = ((5, 0.55, 0.2), (13, 0.62, 0.26), (8, 0.35, 0.14))[kind - LEAVES]
    radius, angle = np.hypot(x, y), np.arctan2(y, x)
    wave = np.abs(np.cos(angle * petals / 2))
    edge = 0.96 * (low + (1 - low) * np.sqrt(wave))
    light = 0.62 + 0.3 * radius + 0.12 * wave
    rgb = np.clip(light, 0, 1)[..., None] * np.ones(3)
    rgb = _mix(rgb, (0.9, 0.72, 0.15), 1 - _ramp(radius, core - 0.05, core))
    return rgb, (radius < edge).astype(np.float64)


@functools.lru_cache(maxsize=PLANTS)
def _plant_sprite(kind: int) -> Sprite:
    return Sprite.paint(SQUARE, functools.partial(_plant_color, kind))


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    """Returns a number between two."""
    return low + (high - low) * float(rng.random())


def _color(rng: np.random.Generator, low: Color, high: Color) -> Color:
    """Returns a color between two, with brightness and hue drawn apart."""
    t = float(rng.random())
    mixed = [(1 - t) * a + t * c for a, c in zip(low, high, strict=True)]
    r, g, b = (part + _between(rng, -0.05, 0.05) for part in mixed)
    return r, g, b


def _clouds(rng: np.random.Generator, octaves: Sequence[int], side: int) -> np.ndarray:
    """Returns smooth noise between 0 and 1: float32 (side, side) in steps of a 255th."""
    total = np.zeros((side, side))
    for cells in octaves:
        lattice = rng.random((cells + 2, cells + 2))
        at = np.arange(side) * (cells / side)
        k = at.astype(np.int64)
        t = at - k
        t = t * t * (3 - 2 * t)
        rows = lattice[k] + (lattice[k + 1] - lattice[k]) * t[:, None]
        columns = rows[:, k] + (rows[:, k + 1] - rows[:, k]) * t
        total += (columns - 0.5) / math.sqrt(cells)
    total -= total.min()
    return (np.rint(255 * total / total.max()) / 255).astype(np.float32)


def _plant(canvas: Canvas, rng: np.random.Generator, kind: int, color: Color, size: float) -> None:
    """Paints a plant of a size in pixels anywhere in a canvas."""
    side = canvas.owner_HW.shape[0]
    x, y, angle = (_between(rng, 0, n) for n in (side, side, 2 * math.pi))
    if kind == LEAVES - 1:
        angle = _between(rng, -0.6, 0.6)
    matrix = flat_matrix(x, y, angle, size / 2, size / 2 * _between(rng, 0.6, 1.1))
    canvas.paint(_plant_sprite(kind), matrix, color)


# Scenes of plants: the ground's two colors, then each layer's number of plants, their kinds, their
# sizes in pixels, and two colors between which each plant's color lies.
SCENERY = (
    (
        (0.05, 0.09, 0.04),
        (0.16, 0.25, 0.08),
        (
            (150, (0, 2), (40, 90), (0.10, 0.24, 0.05), (0.28, 0.52, 0.14)),
            (70, (0, 1, 2), (40, 80), (0.25, 0.48, 0.12), (0.55, 0.78, 0.25)),
        ),
    ),
    (
        (0.10, 0.13, 0.05),
        (0.30, 0.34, 0.13),
        (
            (260, (3,), (70, 150), (0.14, 0.28, 0.06), (0.45, 0.62, 0.20)),
            (130, (3,), (60, 130), (0.40, 0.55, 0.20), (0.78, 0.82, 0.42)),
        ),
    ),
    (
        (0.07, 0.12, 0.05),
        (0.20, 0.28, 0.10),
        (
            (120, (3, 1), (50, 110), (0.15, 0.30, 0.08), (0.42, 0.60, 0.22)),
            (55, (4, 5), (22, 50), (0.80, 0.55, 0.70), (0.98, 0.95, 0.95)),
            (25, (4, 6), (20, 44), (0.55, 0.30, 0.75), (0.95, 0.75, 0.20)),
        ),
    ),
    (
        (0.12, 0.08, 0.05),
        (0.33, 0.24, 0.14),
        (
            (170, (0, 1, 2), (36, 84), (0.28, 0.16, 0.07), (0.60, 0.40, 0.20)),
            (50, (0, 2), (36, 70), (0.50, 0.28, 0.10), (0.80, 0.58, 0.30)),
        ),
    ),
    (
        (0.30, 0.29, 0.26),
        (0.62, 0.60, 0.55),
        (
            (24, (0, 1), (30, 60), (0.20, 0.28, 0.10), (0.48, 0.55, 0.26)),
            (20, (3,), (50, 100), (0.40, 0.45, 0.22), (0.72, 0.70, 0.45)),
        ),
    ),
    ((0.10, 0.20, 0.10), (0.62, 0.78, 0.52), ()),
)
# Two colors between which lie those of other leaves, and of other flowers.
GREENS = ((0.1, 0.22, 0.05), (0.6, 0.74, 0.3))
PETALS = ((0.6, 0.4, 0.7), (1.0, 0.9, 0.8))
OCTAVES = ((6, 12, 24, 48, 96), (12, 24, 48), (3, 6, 12, 24, 48, 96), (24, 48, 96, 192))  # of noise
# The two colors in which the map of heights is seen as soil, and as moss.
SOILS = (
    ((0.16, 0.11, 0.08), (0.78, 0.68, 0.55)),
    ((0.07, 0.13, 0.06), (0.58, 0.66, 0.34)),
)


@dataclasses.dataclass(frozen=True)
class Grounds:
    """What backgrounds are cut from.

    clouds: smooth noise, float32 (CANVAS, CANVAS), 0 to 1. grain: int8 (CANVAS, CANVAS, 3), noise
    of a camera. scenes: uint8 (H, W, 3), sides of 2 SIDE or more. problems: files that are missing
    or are others than in PHOTOGRAPHS.
    """

    clouds: tuple[np.ndarray, ...]
    grain: np.ndarray
    scenes: tuple[np.ndarray, ...] = ()
    problems: tuple[str, ...] = ()


def _photographs() -> dict[str, np.ndarray]:
    """Returns those files of PHOTOGRAPHS that are here, as pixels or heights."""
    spec = importlib.util.find_spec("matplotlib")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    arrays = {}
    for name, digest in PHOTOGRAPHS.items():
        for root in roots:
            path = Path(root) / "mpl-data" / "sample_data" / name
            try:
                if path.suffix == ".npz":
                    array = files.read_arrays(path, "map of heights")["elevation"].astype("<i2")
                else:
                    with Image.open(path) as opened:
                        array = np.asarray(opened.convert("RGB"))
            except (OSError, UserError, KeyError):
                continue
            if hashlib.sha256(np.ascontiguousarray(array)).hexdigest() == digest:
                arrays[name] = array
    return arrays


@functools.cache
def _grounds(rich: bool) -> Grounds:
    """Returns what backgrounds are cut from; without scenes if not `rich`."""
    rng = np.random.default_rng([7, 51])
    clouds = tuple(_clouds(rng, octaves, CANVAS) for octaves in OCTAVES)
    grain = rng.integers(-4, 5, (2, CANVAS, CANVAS, 3), np.int8).sum(0, dtype=np.int8)
    if not rich:
        return Grounds(clouds, grain)
    scenes = []
    for k, (dark, light, layers) in enumerate(SCENERY):
        canvas = Canvas(_blend(clouds[k % len(clouds)], dark, light), CANVAS)
        for number, kinds, (small, large), low, high in layers:
            for j in range(number):  # later plants lie higher and in more light
                kind = kinds[int(rng.integers(len(kinds)))]
                color = _color(rng, low, high)
                shade = 0.55 + 0.45 * j / number
                dim = (color[0] * shade, color[1] * shade, color[2] * shade)
                _plant(canvas, rng, kind, dim, _between(rng, small, large))
        assert canvas.rgb_HWC is not None
        scenes.append(np.rint(np.clip(canvas.rgb_HWC, 0, 255)).astype(np.uint8))
    arrays = _photographs()
    if "grace_hopper.jpg" in arrays:
        scenes.append(arrays["grace_hopper.jpg"][330:])  # cloth; above it is a face
    if "jacksboro_fault_dem.npz" in arrays:
        height = arrays["jacksboro_fault_dem.npz"].astype(np.float32)
        slope = 2 * height[1:, 1:] - height[1:, :-1] - height[:-1, 1:]
        light = np.clip(np.float32(0.5) + np.float32(0.009) * slope, 0, 1)
        for dark, bright in SOILS:
            scenes.append(np.rint(_blend(light, dark, bright)).astype(np.uint8))
    problems = tuple(name for name in PHOTOGRAPHS if name not in arrays)
    return Grounds(clouds, grain, tuple(scenes), problems)


def _blend(part: np.ndarray, dark: Color, light: Color) -> np.ndarray:
    """Returns colors between two: float32 (H, W, 3), 0 to 255."""
    a, b = (np.asarray(c, np.float32) * np.float32(255) for c in (dark, light))
    return a + (b - a) * part[..., None]


def _crop(rng: np.random.Generator, array: np.ndarray, side: int) -> np.ndarray:
    """Returns a square crop, turned or mirrored."""
    y, x = (int(rng.integers(n - side + 1)) for n in array.shape[:2])
    array = array[y : y + side, x : x + side]
    flips = int(rng.integers(8))
    array = array.swapaxes(0, 1) if flips & 1 else array
    return array[:: -1 if flips & 2 else 1, :: -1 if flips & 4 else 1]


def _background(rng: np.random.Generator, profile: str, domain: str) -> np.ndarray:
    """Returns a background: float32 (SIDE, SIDE, 3), 0 to 255."""
    grounds = _grounds(profile == "hard")
    cloud = grounds.clouds[int(rng.integers(len(grounds.clouds)))]
    if domain == "specimen":
        tone = _between(rng, 0.84, 0.97)
        paper = (tone, tone - _between(rng, 0, 0.05), tone - _between(rng, 0.02, 0.12))
        shade = (paper[0] - 0.05, paper[1] - 0.05, paper[2] - 0.05)
        return _blend(_crop(rng, cloud, SIDE), shade, paper)
    if profile == "easy":
        color = _color(rng, (0.14, 0.22, 0.10), (0.50, 0.45, 0.36))
        light = (color[0] + 0.2, color[1] + 0.2, color[2] + 0.16)
        return _blend(_crop(rng, cloud, SIDE), color, light)
    scene = grounds.scenes[int(rng.integers(len(grounds.scenes)))]
    zoom, blur = int(rng.integers(1, 3)), int(rng.integers(3))
    rgb = _crop(rng, scene, zoom * SIDE).astype(np.float32)
    rgb = halve(rgb) if zoom == 2 else rgb
    for _ in range(blur):  # out of focus
        rgb = np.pad(rgb, ((1, 1), (1, 1), (0, 0)), mode="edge")
        rgb = rgb[:-2] + rgb[1:-1] + rgb[2:]
        rgb = (rgb[:, :-2] + rgb[:, 1:-1] + rgb[:, 2:]) * np.float32(1 / 9)
    contrast = np.float32(_between(rng, 0.6, 1.0))
    gain = np.array([_between(rng, 0.88, 1.12) for _ in range(3)], np.float32) * contrast
    return rgb * gain + np.float32(_between(rng, 0, 60)) * (1 - contrast)


# ---- scenes


Layer = tuple[Sprite, Matrix, Color, int]  # and the owner of its pixels


def _pose(
    rng: np.random.Generator, species: Species, size: float, domain: str, taken: list[tuple]
) -> list[Layer]:
    """Returns an insect in a random pose: its wings, far one first, and its body.

    size: pixels of the larger side of its box. taken: centers and sizes of the insects that are
    there, to which this one is added.
    """
    specimen = domain == "specimen"
    most_open, most_tilt = (0.1, 0.06) if specimen else (0.65, 0.38)
    heading = _between(rng, -0.06, 0.06) if specimen else _between(rng, -math.pi, math.pi)
    opening = _between(rng, 0, most_open)
    roll, pitch = (_between(rng, -most_tilt, most_tilt) for _ in range(2))
    ch, sh, cr, sr, cp, sp = (f(a) for a in (heading, roll, pitch) for f in (math.cos, math.sin))

    def rotate(x: float, y: float, z: float) -> tuple[float, float, float]:
        x, z = cr * x + sr * z, -sr * x + cr * z
        y, z = cp * y - sp * z, sp * y + cp * z
        return ch * x - sh * y, sh * x + ch * y, z

    axes = [rotate(s * math.cos(opening), 0, math.sin(opening)) for s in (-1, 1)]
    axes.append(rotate(1, 0, 0))
    back = rotate(0, 1, 0)
    # The extent at one pixel a unit, around the origin.
    wing, body, outline = _insect_sprites(species)
    points = []
    for axis in axes[:2]:
        depth = 1 - (outline[:, 0] * axis[2] + outline[:, 1] * back[2]) / CAMERA
        points += [(outline[:, 0] * axis[k] + outline[:, 1] * back[k]) / depth for k in (0, 1)]
    xs, ys = np.concatenate(points[0::2]), np.concatenate(points[1::2])
    x0, x1, y0, y1 = (float(f()) for f in (xs.min, xs.max, ys.min, ys.max))
    scale = size / max(x1 - x0, y1 - y0)
    half = (scale * (x1 - x0) / 2, scale * (y1 - y0) / 2)
    # Of several places the one that is farthest from the other insects.
    places = []
    for _ in range(1 if not taken else 12):
        place = [_between(rng, h + 1, SIDE - h - 1) for h in half]
        if specimen:
            place = [SIDE / 2 + _between(rng, -3, 3) for _ in half]
        x, y = place
        gaps = [math.hypot(x - a, y - b) - 0.42 * (size + s) for a, b, s in taken]
        places.append((min(gaps, default=0.0), place))
    _, place = max(places)
    taken.append((*place, size))
    cx, cy = place[0] - scale * (x0 + x1) / 2, place[1] - scale * (y0 + y1) / 2
    light = _between(rng, 0.85, 1.1) if specimen else _between(rng, 0.7, 1.12)
    tint = [light * _between(rng, 0.93, 1.07) for _ in range(3)]
    layers = []
    for axis in (*sorted(axes[:2], key=lambda a: a[2]), axes[2]):
        # A wing that turns away from the light, from the upper left, is darker.
        facing = 1.0 if specimen else 1 - 0.22 * abs(axis[2]) - 0.1 * axis[0] * axis[2]
        depths = (-axis[2] / CAMERA, -back[2] / CAMERA, 1.0)
        matrix = (
            (scale * axis[0] + cx * depths[0], scale * back[0] + cx * depths[1], cx),
            (scale * axis[1] + cy * depths[0], scale * back[1] + cy * depths[1], cy),
            depths,
        )
        gain = (tint[0] * facing, tint[1] * facing, tint[2] * facing)
        layers.append((body if axis is axes[2] else wing, matrix, gain, len(taken)))
    return layers


def _cover(rng: np.random.Generator, x: float, y: float, size: float) -> Layer:
    """Returns a leaf or a blade of grass in front of an insect."""
    kind = int(rng.integers(LEAVES))
    angle, length = _between(rng, 0, 2 * math.pi), size * _between(rng, 0.4, 0.65)
    away = size * _between(rng, 0.36, 0.6)
    if kind == LEAVES - 1:  # a blade crosses the insect
        away, length = size * _between(rng, 0.05, 0.3), size * _between(rng, 0.8, 1.3)
    direction = _between(rng, 0, 2 * math.pi)
    x, y = x + away * math.cos(direction), y + away * math.sin(direction)
    color = _color(rng, *GREENS)
    return _plant_sprite(kind), flat_matrix(x, y, angle, length, length), color, -1


@functools.lru_cache(maxsize=64)
def _plan(profile: str, seed: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the domain and the species of the insects of every picture of a profile."""
    rng = np.random.default_rng([PROFILES.index(profile), seed])
    species = len(_species(profile))
    if profile == "easy":
        counts = [1 + int(rng.integers(3)) for _ in range(EASY_SCENES["easy:test"].stop)]
        return tuple(
            ("habitat", tuple(int(rng.integers(species)) for _ in range(n))) for n in counts
        )
    # Places in pictures, 40 for the most frequent species and 2 for the least; the members of a
    # triple are a frequent, a middling and a rare species.
    order = rng.permutation(10)
    places = []
    for k in range(30):
        rank = 10 * ((k + k // 3) % 3) + int(order[k // 3])
        places += [k] * round(40 * 20 ** (-rank / 29))
    places = [places[int(j)] for j in rng.permutation(len(places))]
    pictures: list[list[int]] = []
    for k in places:  # a sixth of the places join the picture before, if it shows another species
        if pictures and len(pictures[-1]) == 1 and k not in pictures[-1] and rng.random() < 0.16:
            pictures[-1].append(k)
        else:
            pictures.append([k])
    pictures += [[k] for k in range(30, 34)]  # species with a single picture in the habitat
    plan = []
    for j in rng.permutation(len(pictures)):
        insects: list[int] = []
        for k in pictures[int(j)]:
            chance = float(rng.random())  # one to three of a species
            insects += [k] * (1 + int(chance < 0.45) + int(chance < 0.15))
        plan.append(("habitat", tuple(insects)))
    specimens = [k for k in range(species) for _ in range(3 + (k * 7) % 5 // 2)]
    plan += [("specimen", (specimens[int(j)],)) for j in rng.permutation(len(specimens))]
    return tuple(plan)


def _layers(profile: str, seed: int, index: int) -> list[Layer]:
    """Returns the insects of a picture, then what covers them."""
    domain, numbers = _plan(profile, seed)[index]
    rng = np.random.default_rng([PROFILES.index(profile), seed, index, 0])
    species = _species(profile)
    small, large = SIZES[domain if profile == "hard" else profile]
    taken: list[tuple[float, float, float]] = []
    layers = []
    for k in numbers:
        size = _between(rng, small, large)
        layers += _pose(rng, species[k], size, domain, taken)
    if profile == "hard" and domain == "habitat":
        for place in [place for place in taken if rng.random() < 0.45]:
            cover = _cover(rng, *place)
            (_, c, x), (_, s, y), _ = cover[1]  # c, s: the vector from its center to its tip
            others = [other for other in taken if other is not place]
            # A cover hides a part of one insect; it could hide all of a smaller one.
            if all(math.hypot(x - a, y - b) > math.hypot(c, s) + 0.3 * n for a, b, n in others):
                layers.append(cover)
    return layers


def _render(profile: str, seed: int, index: int, without: int | None) -> np.ndarray:
    """Returns a picture; without: the insect that is left out."""
    domain, _ = _plan(profile, seed)[index]
    rng = np.random.default_rng([PROFILES.index(profile), seed, index, 1])
    canvas = Canvas(_background(rng, profile, domain), SIDE)
    rich = profile == "hard" and domain == "habitat"
    for _ in range(int(rng.integers(4)) if rich else 0):
        kind = int(rng.integers(PLANTS))
        leaf = kind < LEAVES
        color = _color(rng, *(GREENS if leaf else PETALS))
        _plant(canvas, rng, kind, color, _between(rng, 16, 72 if leaf else 32))
    for sprite, matrix, gain, owner in _layers(profile, seed, index):
        if without is None or owner != without + 1:
            canvas.paint(sprite, matrix, gain, owner)
    rgb = canvas.rgb_HWC
    assert rgb is not None
    if rich:
        rgb *= np.array([_between(rng, 0.85, 1.12) for _ in range(3)], np.float32)
        x = np.arange(SIDE, dtype=np.float32) * np.float32(1 / SIDE) - np.float32(0.5)
        slope, rise, light = (
            np.float32(_between(rng, *ends)) for ends in ((-0.5, 0.5), (-0.5, 0.5), (0.85, 1.3))
        )
        rgb *= (slope * x + rise * x[:, None] + light)[..., None]
    rgb += _crop(rng, _grounds(profile == "hard").grain, SIDE)
    return np.rint(np.clip(rgb, 0, 255)).astype(np.uint8)


# ---- the data set


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Picture(Example):
    """A drawn picture, number `index` of a profile and a seed."""

    profile: str
    seed: int
    index: int

    def image(self, without: int | None = None) -> np.ndarray:
        """Draws the picture. without: the number of a box whose insect is left out."""
        return _render(self.profile, self.seed, self.index, without)


@functools.lru_cache(maxsize=8192)
def _picture(profile: str, seed: int, index: int) -> Picture:
    """Returns a picture with its boxes, for which only the owners of pixels are painted."""
    domain, labels = _plan(profile, seed)[index]
    canvas = Canvas(None, SIDE)
    painted: dict[int, np.ndarray] = {}  # an insect's pixels before later ones hide some of them
    for sprite, matrix, gain, owner in _layers(profile, seed, index):
        canvas.paint(sprite, matrix, gain, owner)
        painted[owner] = canvas.owner_HW == owner
    boxes, difficult = np.zeros((len(labels), 4), np.float32), np.zeros(len(labels), bool)
    for k in range(len(labels)):
        visible = canvas.owner_HW == k + 1
        difficult[k] = visible.sum() < (1 - HIDDEN) * painted[k + 1].sum()
        shown = visible if visible.any() else painted[k + 1]
        rows, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
        boxes[k] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return Picture(
        path=f"butterflies/{profile}/{seed}/{domain}/{index:05}.png",
        boxes=boxes,
        labels=np.array(labels, np.int32),
        difficult=difficult,
        size=(SIDE, SIDE),
        domain=domain,
        profile=profile,
        seed=seed,
        index=index,
    )


@dataclasses.dataclass(frozen=True)
class Pictures(Sequence[Example]):
    """The pictures of a profile; each gets its boxes when it is asked for."""

    profile: str
    seed: int
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [_picture(self.profile, self.seed, i) for i in self.indices[at]]
        return _picture(self.profile, self.seed, self.indices[at])


def open_butterflies(name: str, seed: int = 0) -> Dataset:
    """Returns a data set of drawn butterflies.

    easy, easy:test: 300 scenes for training and 96 others for tests; one to three butterflies of
    ten species of distinct hues. hard: about 350 pictures in the habitat, of 34 species, and 228 of
    specimens, of 60 species that form look-alike triples; 30 species are in 2 to 40 pictures of the
    habitat, 4 in a single one.

    Raises: UserError for another name, or a negative seed.
    """
    names = (*EASY_SCENES, "hard")
    if name not in names:
        raise UserError(
            f"data.source=butterflies:{name} must be butterflies: and one of {', '.join(names)}."
            f"{did_you_mean(name, names)} (--data.source)"
        )
    if seed < 0:
        raise UserError(f"seed={seed} of butterflies:{name} must be 0 or more; nearest: 0")
    profile = name.partition(":")[0]
    indices = EASY_SCENES.get(name) or range(len(_plan(profile, seed)))
    missing = _grounds(True).problems if profile == "hard" else ()
    problem = "{} of matplotlib is missing or is another file; no background shows it"
    problems = {problem.format(file): 1 for file in missing}
    classes = tuple(species.name for species in _species(profile))
    return Dataset(classes, Pictures(profile, seed, indices), problems)


def protocol(
    dataset: Dataset, name: str, seed: int = 0
) -> tuple[list[Example], list[Example], tuple[str, ...]]:
    """Splits a data set of two domains as the paper does.

    Species in a single picture of the habitat are left out of both sides, with these pictures. Of
    the pictures in the habitat, half are for tests, about half of each species'. The others are
    for training, together with all specimens (A), or with those of the same species (B).

    Args: name: A or B. seed: draws the halves; A and B have the same.
    Returns: examples for training, examples for tests, and the classes that their labels number.
    Raises: UserError for another name, and for a data set without specimens or without species in
      several pictures of the habitat.
    """
    if name not in ("A", "B"):
        raise UserError(
            f"protocol={name!r} must be A (all specimens) or B (specimens of the species in the"
            " habitat) (--protocol)"
        )
    examples = list(dataset.examples)
    specimens = [e for e in examples if e.domain == "specimen"]
    if not specimens:
        raise UserError(
            f"protocol {name} needs pictures of specimens, and none of the {len(examples)} pictures"
            " of this data set is one (--protocol)"
        )
    habitat, left = [], [e for e in examples if e.domain != "specimen"]
    counts: Counter[int] = Counter()
    while len(left) != len(habitat):  # leaving out a picture may leave another species with one
        habitat = left
        counts = Counter(k for e in habitat for k in set(e.labels.tolist()))
        left = [e for e in habitat if all(counts[k] > 1 for k in e.labels.tolist())]
    if not counts:
        raise UserError(
            f"protocol {name} needs a species in two pictures of the habitat or more; this data set"
            " has none (--protocol)"
        )
    # The rarest species first: each of its pictures goes to the side that has fewer of them.
    order = np.random.default_rng(seed).permutation(len(habitat)).tolist()
    side_of: dict[int, int] = {}
    totals: list[Counter[int]] = [Counter(), Counter()]  # of training, of tests; -1: all pictures
    for k in (*sorted(counts, key=lambda k: (counts[k], k)), -1):
        for j in order:
            labels = {*habitat[j].labels.tolist(), -1}
            if k in labels and j not in side_of:
                side = min((0, 1), key=lambda s: (totals[s][k], totals[s][-1]))
                side_of[j] = side
                totals[side].update(labels)
    if name == "B":
        specimens = [e for e in specimens if all(k in counts for k in e.labels.tolist())]
    numbers = sorted(counts.keys() | {k for e in specimens for k in e.labels.tolist()})
    places = np.full(len(dataset.classes), -1, np.int32)
    places[numbers] = np.arange(len(numbers))
    halves = [[habitat[j] for j in range(len(habitat)) if side_of[j] == s] for s in (0, 1)]
    train, test = (
        [dataclasses.replace(e, labels=places[e.labels]) for e in part]
        for part in (halves[0] + specimens, halves[1])
    )
    return train, test, tuple(dataset.classes[k] for k in numbers)


def export(dataset: Dataset, folder: str | Path, format: str) -> Path:
    """Writes a data set as a folder that open_detection reads.

    Labels of YOLO do not say which boxes are difficult, no format says a picture's domain, and VOC
    has no list of classes. Pictures of VOC are JPEG, so their pixels differ a little; those of COCO
    and YOLO are PNG.

    Args: folder: must not exist, or be an empty folder. format: coco, voc or yolo.
    Returns: the folder. Raises: UserError for another format, or when it cannot be written.
    """
    writers = {"coco": _write_coco, "voc": _write_voc, "yolo": _write_yolo}
    if format not in writers:
        raise UserError(
            f"format={format!r} must be one of {', '.join(writers)}.{did_you_mean(format, writers)}"
        )
    target = files.expand(folder)
    with files.new_folder(target) as new:
        writers[format](dataset, new)
    return target


def _save(folder: Path, examples: Sequence[Example], suffix: str) -> Iterator[tuple[str, Example]]:
    """Writes pictures, and gives each with the name of its file."""
    folder.mkdir()
    for number, example in enumerate(examples):
        name = f"{number:06}{suffix}"
        Image.fromarray(example.image()).save(folder / name, quality=95, subsampling=0)
        yield name, example


def _write_coco(dataset: Dataset, folder: Path) -> None:
    images, annotations = [], []
    for name, example in _save(folder / "images", dataset.examples, ".png"):
        height, width = example.size
        images.append({"id": len(images) + 1, "file_name": name, "width": width, "height": height})
        for box, label, crowd in zip(
            example.boxes.tolist(), example.labels.tolist(), example.difficult.tolist(), strict=True
        ):
            x0, y0, x1, y1 = box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": len(images),
                    "category_id": label + 1,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": (x1 - x0) * (y1 - y0),
                    "iscrowd": int(crowd),
                }
            )
    categories = [{"id": k + 1, "name": name} for k, name in enumerate(dataset.classes)]
    parts = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances.json").write_text(files.json_text(parts))


def _write_voc(dataset: Dataset, folder: Path) -> None:
    (folder / "Annotations").mkdir()
    for name, example in _save(folder / "JPEGImages", dataset.examples, ".jpg"):
        root = ElementTree.Element("annotation")
        ElementTree.SubElement(root, "filename").text = name
        size = ElementTree.SubElement(root, "size")
        for field, value in zip(("height", "width", "depth"), (*example.size, 3), strict=True):
            ElementTree.SubElement(size, field).text = str(value)
        boxes = np.rint(example.boxes).astype(int) + (1, 1, 0, 0)  # counted from 1, inclusive
        for box, label, difficult in zip(boxes, example.labels, example.difficult, strict=True):
            entry = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(entry, "name").text = dataset.classes[label]
            ElementTree.SubElement(entry, "difficult").text = str(int(difficult))
            corners = ElementTree.SubElement(entry, "bndbox")
            for field, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True):
                ElementTree.SubElement(corners, field).text = str(value)
        ElementTree.indent(root)
        path = folder / "Annotations" / f"{Path(name).stem}.xml"
        ElementTree.ElementTree(root).write(path, encoding="utf-8")


def _write_yolo(dataset: Dataset, folder: Path) -> None:
    (folder / "labels").mkdir()
    for name, example in _save(folder / "images", dataset.examples, ".png"):
        height, width = example.size
        lines = []
        for (x0, y0, x1, y1), label in zip(
            example.boxes.tolist(), example.labels.tolist(), strict=True
        ):
            place = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height)
            extent = ((x1 - x0) / width, (y1 - y0) / height)
            lines.append(" ".join([str(label), *(f"{v:.9g}" for v in (*place, *extent))]) + "\n")
        (folder / "labels" / f"{Path(name).stem}.txt").write_text("".join(lines))
    listed = {"path": ".", "train": "images", "val": "images", "names": list(dataset.classes)}
    (folder / "data.yaml").write_text(yaml.safe_dump(listed, sort_keys=False, allow_unicode=True))
