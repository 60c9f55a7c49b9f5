"""The protocols are exact and free of races, and each planted fault is found."""

import numpy as np
import pytest

from tests.collective_protocol import MUTANTS
from tests.expert_oracle import routings
from tests.expert_protocol import PROTOCOLS, A, E, R, T, faults

MODES = ("on_wait", "eager")
QUICK = {("dispatch", "eager"), ("combine", "on_wait")}


def experts_of(routing, seed):
    return routings(R, T, A, R * E, np.random.default_rng(seed))[routing].astype(np.int32)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in QUICK else pytest.mark.slow)
        for name in PROTOCOLS
        for mode in MODES
    ],
)
def test_a_protocol_is_exact_and_free_of_races(name, mode, seed):
    assert faults(name, mode, None, experts_of("some nowhere", seed), seed) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "routing", ["one hot expert", "an empty rank", "a silent rank", "none", "cut in two"]
)
@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_of_uneven_routings(name, routing, seed):
    assert faults(name, "eager", None, experts_of(routing, seed), seed) == set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_a_planted_fault_is_found(name, mutant, mode, seed):
    assert faults(name, mode, mutant, experts_of("spread", seed), seed)
