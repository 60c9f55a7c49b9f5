"""What a Format accepts, and what it says of itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.quant import Format


def test_what_formats_say():
    assert Format(4).effective_bits == 4.25 and Format(4, 2048).effective_bits == 4.015625
    assert Format(4, 64, symmetric=False, scale_dtype="float16").effective_bits == 4.5
    assert Format("e4m3", None).effective_bits == 8
    assert (Format(4).largest, Format(4, symmetric=False).largest) == (7, 15)
    assert (Format("e4m3").largest, Format("e5m2").largest) == (448, 57344)
    assert Format(np.int64(3)) == Format(3) and Format(8, scale_dtype=jnp.bfloat16).scale_dtype == (
        "bfloat16"
    )
    assert Format(4, axis=-2).lines((5, 6, 7)) == (6, 1) and Format(4).lines((5, 6)) == (30, None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 5}, "one of 2, 3, 4, 8, 'e4m3', 'e5m2'"),
        ({"bits": "e4m33"}, "Did you mean e4m3"),
        ({"bits": True}, "one of 2, 3"),
        ({"bits": 4.0}, "one of 2, 3"),
        ({"bits": None}, "one of 2, 3"),
        ({"bits": 4, "group": 0}, "at least 1"),
        ({"bits": 4, "group": 1.5}, "an integer"),
        ({"bits": 4, "axis": "rows"}, "an integer, or None"),
        ({"bits": 4, "rounding": "nearst"}, "Did you mean nearest"),
        ({"bits": 4, "symmetric": 1}, "True or False"),
        ({"bits": "e4m3", "symmetric": False}, "a sign of its own"),
        ({"bits": 4, "scale_dtype": "float8"}, "Did you mean float32"),
        ({"bits": 4, "scale_dtype": None}, "one of 'float32'"),
    ],
)
def test_bad_formats_are_explained(options, message):
    with pytest.raises(UserError, match=message):
        Format(**options)
