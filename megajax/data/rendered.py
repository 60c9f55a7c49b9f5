"""Endless questions about drawn images, with exact answers.

Four kinds, in equal parts: read a word of three or four letters, read a number of two to four
digits, count the shapes of one form among those of two forms, and name the highest or the lowest of
four bars. The letters are of one font at one size; place, colours and noise vary. A drawing follows
from (seed, i) by integers alone, so it has the same bits on every machine.

Questions are held out by what their drawing shows: a word, a number, an arrangement of shapes or
heights of bars that is held out is never drawn for training, in no colour, at no place, and
whatever is asked of it.

Legend: H rows and W columns of pixels.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from megajax.data.pack import mix

# (the 5 x 7 font of character displays) five columns of a character, the top row in the lowest bit
FONT = {
    word[0]: word[1:]
    for word in """
    A7E1111117E B7F49494936 C3E41414122 D7F4141221C E7F49494941 F7F09090901 G3E4149497A
    H7F0808087F I00417F4100 J2040413F01 K7F08142241 L7F40404040 M7F020C027F N7F0408107F
    O3E4141413E P7F09090906 Q3E4151215E R7F09192946 S4649494931 T01017F0101 U3F4040403F
    V1F2040201F W3F4038403F X6314081463 Y0708700807 Z6151494543 03E5149453E 100427F4000
    24261514946 32141454B31 41814127F10 52745454539 63C4A494930 70171090503 83649494936
    9064949291E
""".split()
}
CONSONANTS, VOWELS = "BCDFGHJKLMNPQRSTVWXZ", "AEIOUY"
SIDE = 28  # pixels of a cell: of a merged patch of the towers that ours follow
SCALE = 3  # pixels of a dot of the font
FORMS = ("circles", "crosses")
BARS = 4
DRAWS = 2**14  # (chosen: 160 times as many as a side with a hundredth of all contents needs)


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """kind: word, number, count or bars. image: (H, W, 3) uint8. content: what the drawing shows,
    without colours, noise and jitter; it decides whether the question is held out."""

    kind: str
    image: np.ndarray
    question: str
    answer: str
    content: str


def is_held_out(content: str, fraction: float) -> bool:
    """Tells by its content whether a question is held out."""
    return mix("held out", content) < int(fraction * 2**64)


def question(seed: int, i: int, holdout: float = 0.0, held_out: bool = False) -> Question:
    """Returns question i of a seed, of the kind i mod 4.

    holdout: fraction of contents that are held out; held_out: whether the question has one of
    these, or of the others. Raises: ValueError for a side without contents, or with so few that
    none is drawn.
    """
    if held_out and holdout <= 0 or not held_out and holdout >= 1:
        raise ValueError(f"holdout={holdout} leaves this side without questions (--data.holdout)")
    kind = KINDS[i % len(KINDS)]
    # NumPy promises that the stream of PCG64 and what RandomState makes of it never change.
    rng = np.random.RandomState(np.random.PCG64(mix(seed, i, "question")))
    for _ in range(DRAWS):
        shown, asked = kind.content(rng)
        text = f"{kind.name} {shown}"
        if is_held_out(text, holdout) == held_out:
            image, answer = kind.draw(rng, shown, asked)
            return Question(kind.name, image, f"{asked}?", answer, text)
    raise ValueError(f"holdout={holdout} leaves this side hardly a {kind.name} (--data.holdout)")


# ---- drawing


@functools.cache
def _glyph(character: str) -> np.ndarray:
    """Returns a character: bool (7 SCALE, 5 SCALE)."""
    columns = np.frombuffer(bytes.fromhex(FONT[character]), np.uint8)
    dots = (columns >> np.arange(7)[:, None] & 1).astype(bool)
    return np.kron(dots, np.ones((SCALE, SCALE), bool))


def _ground(rng: np.random.RandomState, height: int, width: int) -> np.ndarray:
    """Returns a light ground: int16 (H, W, 3)."""
    color = rng.randint(190, 256, 3)
    return np.broadcast_to(color, (height, width, 3)).astype(np.int16)


def _ink(rng: np.random.RandomState) -> np.ndarray:
    """Returns a dark colour."""
    return rng.randint(0, 110, 3)


def _finished(rng: np.random.RandomState, image: np.ndarray) -> np.ndarray:
    noise = np.frombuffer(rng.bytes(image.size), np.uint8).reshape(image.shape) >> 4
    return np.clip(image + noise - 8, 0, 255).astype(np.uint8)


def _text(rng: np.random.RandomState, text: str) -> np.ndarray:
    """Returns a line of text in an image of 28 x 112 pixels, a character in each cell."""
    image, ink = _ground(rng, SIDE, 4 * SIDE), _ink(rng)
    x, y = rng.randint(3, 10), rng.randint(1, 7)
    for number, character in enumerate(text):
        dots = _glyph(character)
        left = x + number * SIDE
        image[y : y + dots.shape[0], left : left + dots.shape[1]][dots] = ink
    return _finished(rng, image)


def _word(rng: np.random.RandomState) -> tuple[str, str]:
    letters = [CONSONANTS, VOWELS, CONSONANTS, VOWELS][: 3 + rng.randint(2)]
    return "".join(part[rng.randint(len(part))] for part in letters), "word"


def _number(rng: np.random.RandomState) -> tuple[str, str]:
    digits = 2 + rng.randint(3)
    return str(rng.randint(10 ** (digits - 1), 10**digits)), "number"


def _draw_text(rng: np.random.RandomState, shown: str, asked: str) -> tuple[np.ndarray, str]:
    return _text(rng, shown), shown


def _shapes(rng: np.random.RandomState) -> tuple[str, str]:
    """Returns what six cells hold (0 nothing, 1 a circle, 2 a cross), and which is counted."""
    first = 1 + rng.randint(4)
    cells = np.zeros(6, int)
    cells[:first] = 1
    cells[first : first + rng.randint(4)] = 2
    if rng.randint(2):
        cells = np.array([0, 2, 1])[cells]
    asked = 1 if (cells == 1).any() and (rng.randint(2) or not (cells == 2).any()) else 2
    return "".join(map(str, rng.permutation(cells))), FORMS[asked - 1]


def _draw_shapes(rng: np.random.RandomState, cells: str, asked: str) -> tuple[np.ndarray, str]:
    image = _ground(rng, 2 * SIDE, 3 * SIDE)
    y, x = np.ogrid[: 2 * SIDE, : 3 * SIDE]
    for number, form in enumerate(cells):
        row, column = divmod(number, 3)
        radius = rng.randint(6, 11)
        down, right = (SIDE * at + SIDE // 2 + rng.randint(-2, 3) for at in (row, column))
        color = _ink(rng)
        if form == "1":
            image[(y - down) ** 2 + (x - right) ** 2 <= radius**2] = color
        elif form == "2":
            near, far = (pair(abs(y - down), abs(x - right)) for pair in (np.minimum, np.maximum))
            image[(near <= radius // 4) & (far < radius)] = color
    return _finished(rng, image), str(cells.count(str(FORMS.index(asked) + 1)))


def _bars(rng: np.random.RandomState) -> tuple[str, str]:
    """Returns four different heights of 1 to 12, and which is asked for."""
    heights = 1 + rng.permutation(12)[:BARS]
    return " ".join(map(str, heights)), ("lowest", "highest")[rng.randint(2)]


def _draw_bars(rng: np.random.RandomState, shown: str, asked: str) -> tuple[np.ndarray, str]:
    heights = [int(n) for n in shown.split()]
    image = _ground(rng, 2 * SIDE, 2 * SIDE)
    bottom = 2 * SIDE - rng.randint(1, 4)
    for number, height in enumerate(heights):
        left = 2 + number * 14 + rng.randint(0, 3)
        image[bottom - 4 * height : bottom, left : left + 8] = _ink(rng)
    best = max(heights) if asked == "highest" else min(heights)
    return _finished(rng, image), str(heights.index(best) + 1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """content(rng): what is shown, and what is asked of it. draw(rng, shown, asked): image,
    answer."""

    name: str
    content: Callable[[np.random.RandomState], tuple[str, str]]
    draw: Callable[[np.random.RandomState, str, str], tuple[np.ndarray, str]]


KINDS = (
    Kind("word", _word, _draw_text),
    Kind("number", _number, _draw_text),
    Kind("count", _shapes, _draw_shapes),
    Kind("bars", _bars, _draw_bars),
)
