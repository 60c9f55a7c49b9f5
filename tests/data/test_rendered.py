"""Drawn questions: exact answers, contents that are held out, the same bits on every machine."""

import hashlib

import numpy as np
import pytest

from megajax.data.rendered import FONT, is_held_out, question


def test_bits_are_the_same_everywhere():
    digest = hashlib.sha256()
    for i in range(40):
        q = question(3, i, 0.1)
        digest.update(f"{q.kind} {q.question} {q.answer}".encode() + q.image.tobytes())
    assert digest.hexdigest()[:16] == "dd18a53c9a6fac2e"


def test_sides_share_no_content_and_a_seed_repeats():
    sides = [{question(0, i, 0.2, held).content for i in range(300)} for held in (False, True)]
    assert sides[0].isdisjoint(sides[1])
    assert all(is_held_out(c, 0.2) for c in sides[1])
    a, b = question(0, 7, 0.2), question(0, 7, 0.2)
    assert (a.image == b.image).all() and a.answer == b.answer
    assert any((question(1, i).image != question(0, i).image).any() for i in range(4))
    with pytest.raises(ValueError, match="without questions"):
        question(0, 0, 0.0, held_out=True)
    for holdout, held in ((1e-9, True), (1 - 1e-9, False)):
        with pytest.raises(ValueError, match="hardly a word"):
            question(0, 0, holdout, held)


def cells(image: np.ndarray) -> str:
    """What the six cells of a drawing of shapes hold: 1 a circle, 2 a cross, 0 nothing."""
    ink, forms = dark(image), ""
    for row in range(2):
        for column in range(3):
            cell = ink[28 * row : 28 * row + 28, 28 * column : 28 * column + 28]
            box = cell.any(0).sum() * cell.any(1).sum()
            forms += "1" if cell.sum() > 0.6 * box else "2" if box else "0"
    return forms


def test_an_arrangement_is_on_one_side_whatever_is_asked():
    sides = [
        {cells(question(0, i, 0.5, held).image) for i in range(2, 600, 4)} for held in (False, True)
    ]
    assert len(sides[0]) > 50 and sides[0].isdisjoint(sides[1])


def dark(image: np.ndarray) -> np.ndarray:
    """The ink: what is darker than any ground with its noise."""
    return image.max(-1) < 150


def test_answers_are_what_the_images_show():
    for i in range(400):
        q = question(5, i)
        ink = dark(q.image)
        if q.kind in ("word", "number"):
            assert q.image.shape == (28, 112, 3)
            rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
            for cell, character in enumerate(q.answer):  # each as the font has it, enlarged
                data = bytes.fromhex(FONT[character])
                dots = np.array([[byte >> y & 1 for byte in data] for y in range(7)], bool)
                true = dots.repeat(3, 0).repeat(3, 1)
                shown = [
                    ink[top : top + 21, left : left + 15]
                    for top in range(1, 7)
                    for left in range(3 + 28 * cell, 10 + 28 * cell)
                ]
                assert any(s.shape == true.shape and (s == true).all() for s in shown)
            assert rows[-1] < 28 and columns[-1] < 28 * len(q.answer)
        elif q.kind == "bars":
            heights = [ink[:, 2 + 14 * k : 12 + 14 * k].any(1).sum() for k in range(4)]
            best = max(heights) if q.question == "highest?" else min(heights)
            assert int(q.answer) == heights.index(best) + 1 and len(set(heights)) == 4
        else:
            count = 0
            for row in range(2):
                for column in range(3):
                    cell = ink[28 * row : 28 * row + 28, 28 * column : 28 * column + 28]
                    size = cell.any(0).sum()
                    if size:  # a circle fills about pi / 4 of its box, a cross less than half
                        is_circle = cell.sum() > 0.6 * cell.any(0).sum() * cell.any(1).sum()
                        count += is_circle == (q.question == "circles?")
            assert str(count) == q.answer
