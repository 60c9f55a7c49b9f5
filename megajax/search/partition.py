"""A row of costs cut into neighbouring parts whose largest sum is as small as it can be.

Stages of a pipeline are such parts, of layers (Optimus, arXiv 2408.03505, section 5, the balanced
baseline; linear partition by dynamic programming).
"""

import itertools
import math
from collections.abc import Sequence

from megajax.core.errors import UserError


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Returns how many neighbours each part has, none empty, the largest sum as small as possible.

    Of several such cuts, the one whose parts are as long as they can be from the left on. Costs:
    numbers of at least 0, seconds or FLOPs. Time: len(costs)^2 x parts.
    Raises: UserError for a cost that is negative or not finite, or fewer costs than parts.
    """
    if parts < 1 or len(costs) < parts:
        raise UserError(
            f"{len(costs)} costs cannot be cut into {parts} parts of at least one; "
            f"parts must be from 1 to {len(costs)}"
        )
    if wrong := [cost for cost in costs if not 0 <= cost < math.inf]:
        raise UserError(f"a cost is {wrong[0]}; costs must be finite and at least 0")
    sums = [0, *itertools.accumulate(costs)]
    n = len(costs)
    # least[k]: {first of the remaining costs: the smallest largest sum of k parts}
    least = [{n: 0.0}]
    for k in range(1, parts + 1):
        before = least[-1]
        least.append(
            {
                start: min(
                    max(sums[end] - sums[start], before[end])
                    for end in range(start + 1, n + 1)
                    if end in before
                )
                for start in range(n - k + 1)
                if any(end in before for end in range(start + 1, n + 1))
            }
        )
    sizes, start, limit = [], 0, least[parts][0]
    for k in range(parts, 0, -1):
        end = max(
            end
            for end in range(start + 1, n + 1)
            if end in least[k - 1]
            and sums[end] - sums[start] <= limit
            and least[k - 1][end] <= limit
        )
        sizes.append(end - start)
        start = end
    return sizes
