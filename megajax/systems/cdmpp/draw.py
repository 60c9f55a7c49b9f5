"""Draws the random sizes and the random input arrays of the programs that are timed (families.py).

The scale of a `Draw` is a factor on the number of elements: 1 for programs that suit a CPU, more
for programs that suit a GPU.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# (chosen) Random values that are drawn for one array, which takes 0.1 s; a larger array repeats
# them. At scale 1 no array is larger.
DRAWN = 2**23
# (chosen) The largest number of elements of an array: 1 GiB of float32, so that the arrays of a
# batch of programs fit into a GPU.
LARGEST = 2**28
POWERS = 1 / 3  # (chosen) share of the sizes that are a power of two


class TooLarge(Exception):
    """A program would have an array of more than LARGEST elements."""


class Draw:
    """Draws sizes and arrays.

    scale: factor on the elements and rows of what it draws. dtype: in which the program computes.
    """

    def __init__(self, rng: np.random.Generator, scale: float, dtype: Any = jnp.float32):
        """Takes the random numbers from rng."""
        self.rng, self.scale, self.dtype = rng, scale, dtype

    def size(self, low: float, high: float, multiple: int = 1) -> int:
        """Returns a multiple of `multiple` between two bounds, log-uniformly distributed.

        The bounds grow with the scale: high with its square root, and low, for scales above 1, with
        its fourth root. A share of the sizes (POWERS) is the power of two that is nearest to such a
        number, which may lie a little outside the bounds: the sizes of real models often are powers
        of two, and strides of them are slow in caches.
        """
        low = low * max(self.scale, 1.0) ** 0.25
        top = max(high * self.scale**0.5, low)
        drawn = np.exp(self.rng.uniform(np.log(low), np.log(top)))
        if self.rng.uniform() < POWERS:
            drawn = 2.0 ** round(np.log2(drawn))
        return max(round(drawn / multiple), 1) * multiple

    def pick(self, *options: Any) -> Any:
        """Returns one of the options."""
        return options[self.rng.integers(len(options))]

    def count(self, *options: int) -> int:
        """Returns one of the options, doubled for each factor of 16 of the scale."""
        return self.pick(*options) * 2 ** max(int(math.log2(self.scale) / 4), 0)

    def limit(self, *shape: int) -> None:
        """Checks an array that a program makes. Raises: TooLarge."""
        if math.prod(shape) > LARGEST:
            raise TooLarge(f"{shape}")

    def _normal(self, shape: Sequence[int]) -> np.ndarray:
        """Returns normal float32; those of a large array repeat. Raises: TooLarge."""
        self.limit(*shape)
        if math.prod(shape) <= DRAWN:
            return self.rng.standard_normal(shape, np.float32)
        return np.resize(self.rng.standard_normal(DRAWN, np.float32), shape)

    def floats(self, *shape: int) -> jax.Array:
        """Returns normal floats. Raises: TooLarge."""
        return jnp.asarray(self._normal(shape), self.dtype)

    def below(self, bound: int, *shape: int) -> jax.Array:
        """Returns int32 from 0 to bound - 1."""
        return jnp.asarray(self.rng.integers(0, bound, shape), jnp.int32)

    def like(self, abstract: Any) -> Any:
        """Returns arrays of these shapes: small positive floats, integers of 0.

        Raises: TooLarge.
        """

        def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.zeros(leaf.shape, leaf.dtype)
            drawn = np.abs(self._normal(leaf.shape)) * 0.02
            return jnp.asarray(drawn, leaf.dtype)

        return jax.tree.map(filled, abstract)
