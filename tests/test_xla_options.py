import os

from tests.xla_options import OPTIONS, with_options


def test_given_options_win_and_ours_are_added_once():
    assert with_options("") == " ".join(OPTIONS)
    isa = "--xla_cpu_max_isa=SSE4_2"
    assert with_options(f" {isa} ") == " ".join([isa, *OPTIONS])
    level = "--xla_backend_optimization_level=3"
    assert with_options(level) == " ".join([level, *OPTIONS[1:]])
    assert with_options(with_options(isa)) == with_options(isa)  # pytest's workers inherit it


def test_this_process_has_them():
    assert os.environ["XLA_FLAGS"] == with_options(os.environ["XLA_FLAGS"])
