"""The central moment discrepancy against NumPy's moments."""

import numpy as np

from megajax.systems.cdmpp import network


def test_the_discrepancy_is_that_of_the_moments():
    rng = np.random.default_rng(0)
    one, other = rng.uniform(-1, 1, (400, 3)), rng.uniform(-0.5, 1, (300, 3))
    want = np.linalg.norm(one.mean(0) - other.mean(0)) / 2
    for k in (2, 3, 4, 5):
        apart = np.mean((one - one.mean(0)) ** k, 0) - np.mean((other - other.mean(0)) ** k, 0)
        want += np.linalg.norm(apart) / 2**k
    discrepancy = network.discrepancy(one.astype(np.float32), other.astype(np.float32))
    np.testing.assert_allclose(discrepancy, want, rtol=1e-4)
    assert network.discrepancy(one.astype(np.float32), one.astype(np.float32)) < 1e-6
