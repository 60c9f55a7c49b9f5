"""Public names of the packages: listed once, loaded on first use."""

import importlib
from pathlib import Path

import pytest

import megajax

ROOT = Path(megajax.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_are_no_submodules(package):
    module = importlib.import_module(f"megajax.{package}")
    assert dir(module) == module.__all__
    for name in module.__all__:
        # An import of a submodule of that name would put the module in the place of the object.
        assert not (ROOT / package / f"{name}.py").exists(), name
        assert getattr(module, name).__module__.startswith(f"megajax.{package}."), name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"megajax\.checkpoint.*CheckpointManger"):
        _ = importlib.import_module("megajax.checkpoint").CheckpointManger
    with pytest.raises(ImportError):
        from megajax.checkpoint import CheckpointManger  # noqa: F401
