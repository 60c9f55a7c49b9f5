"""The protocols are exact and free of races, and each planted fault is found."""

import pytest

from tests.collective_protocol import MUTANTS, PROTOCOLS, faults

MODES = ("on_wait", "eager")
QUICK = {("gather", "eager"), ("scatter", "on_wait")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) in QUICK else pytest.mark.slow)
        for name in PROTOCOLS
        for mode in MODES
    ],
)
def test_a_protocol_is_exact_and_free_of_races(name, mode, seed):
    assert faults(name, mode, None, seed) == set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_a_planted_fault_is_found(name, mutant, mode, seed):
    assert faults(name, mode, mutant, seed)
