"""Random numbers that are a function of (seed, stream, place), whatever was drawn before.

Philox is a block cipher of a counter (Salmon et al., SC'11). The key is (seed, stream); three of
the four words of the counter are the place, for example the number of a minute. The fourth counts
the draws of one place, so that two places never share a number.
"""

import numpy as np

_WORD = 2**64 - 1

# Streams. A metric's own streams are METRIC + its number in specs.METRICS.
LAYOUT, OFFSETS, EVENTS, SHARED, SCRAPES, CASES = range(1, 7)
METRIC = 1 << 20
KNOTS = 12  # (chosen) of a group: with 5 s between them, a minute


def generator(seed: int, stream: int, *place: int) -> np.random.Generator:
    """Returns the generator of one place.

    Args: seed: any integer of at most 64 bits. stream: one of this module's. place: up to three
        integers; negative ones are legal.
    """
    words = [0, *(p & _WORD for p in place)]
    counter = np.array(words + [0] * (4 - len(words)), np.uint64)
    key = np.array([seed & _WORD, stream], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def knots(seed: int, stream: int, first: int, count: int, machines: int) -> np.ndarray:
    """Returns standard normal values, float32 (count, machines): row k belongs to knot first + k.

    Noise with a correlation time of `s` seconds is drawn at every s-th second and interpolated, so
    that it needs no past. Knots are drawn in groups of KNOTS.
    """
    rows = []
    for group in range(first // KNOTS, (first + count - 1) // KNOTS + 1):
        low, high = max(first - group * KNOTS, 0), min(first + count - group * KNOTS, KNOTS)
        drawn = generator(seed, stream, group).standard_normal((high, machines), np.float32)
        rows.append(drawn[low:])
    return np.concatenate(rows)


def interpolated(seed: int, stream: int, spacing: int, second: int, seconds: int, machines: int):
    """Returns correlated noise of unit variance at its knots, float32 (machines, seconds).

    Args: spacing: seconds between knots. second: the first second. seconds: how many.
    """
    first, last = second // spacing, (second + seconds - 1) // spacing + 1
    values = knots(seed, stream, first, last - first + 1, machines).T
    position = np.arange(second, second + seconds)
    left = position // spacing - first
    weight = ((position % spacing) / spacing).astype(np.float32)
    return values[:, left] * (1 - weight) + values[:, left + 1] * weight
