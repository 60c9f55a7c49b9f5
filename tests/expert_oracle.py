"""A mixture's products as a loop over tokens and choices, in float64; and shapes of routings."""

import numpy as np


def answers(x, w, v, experts, weights):
    """Of every token the weighted sum over its experts of (x w) v."""
    y = np.zeros((len(x), v.shape[2]))
    for t, chosen in enumerate(experts):
        for a, expert in enumerate(chosen):
            if 0 <= expert < len(w):
                y[t] += weights[t, a] * (x[t].astype(float) @ w[expert] @ v[expert])
    return y


def order(experts, ranks, each, rank):
    """The choices (rank, token, place) behind the rows of a rank's experts, one after the other."""
    by_rank = experts.reshape(ranks, -1, experts.shape[1])
    return [
        (source % ranks, token, place)
        for expert in range(rank * each, (rank + 1) * each)
        for source in range(rank, rank + ranks)
        for token, chosen in enumerate(by_rank[source % ranks])
        for place, choice in enumerate(chosen)
        if choice == expert
    ]


def cut(experts, each, parts):
    """Choices of experts that lie on `parts` ranks one after the other, each a part: one by one."""
    choices = np.full((len(experts), experts.shape[1] * parts), -1)
    for (t, a), expert in np.ndenumerate(experts):
        for part in range(parts if expert >= 0 else 0):
            rank = expert // each * parts + part
            choices[t, a * parts + part] = rank * each + expert % each
    return choices


def routings(ranks, tokens, choices, experts, random):
    """Named choices (ranks * tokens, choices) of experts; experts: of all ranks."""
    shape = ranks * tokens, choices
    each = experts // ranks
    spread = random.integers(0, experts, shape)
    one_rank = random.integers(0, each, shape) + (ranks - 1) * each
    empty_rank = np.where(spread < each, each, spread)
    silent = spread.copy()
    silent[:tokens] = -1
    halves = cut(random.integers(-1, experts // 2, (len(spread), choices // 2)), each, 2)
    return {
        "spread": spread,
        "some nowhere": np.where(random.random(shape) < 0.3, -1, spread),
        "one hot expert": np.full(shape, experts - 1),
        "one rank": one_rank,
        "an empty rank": empty_rank,
        "a silent rank": silent,
        "none": np.full(shape, -1),
        "the same twice": np.repeat(spread[:, :1], choices, axis=1),
        "cut in two": np.pad(halves, ((0, 0), (0, choices % 2)), constant_values=-1),
    }
