"""Public names of the packages: listed once, loaded on first use."""

import importlib
from pathlib import Path

import pytest

import megajax

ROOT = Path(megajax.__file__).parent.parent
PACKAGES = [
    "pallas_kernels",
    *sorted(f"megajax.{p.parent.name}" for p in ROOT.glob("megajax/*/__init__.py")),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_are_no_submodules(package):
    module = importlib.import_module(package)
    assert dir(module) == module.__all__
    for name in module.__all__:
        # An import of a submodule of that name would put the module in the place of the object.
        folder = ROOT.joinpath(*package.split("."))
        assert not (folder / f"{name}.py").exists() and not (folder / name).exists(), name
        assert getattr(module, name).__module__.startswith(f"{package}."), name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"megajax\.checkpoint.*CheckpointManger"):
        _ = importlib.import_module("megajax.checkpoint").CheckpointManger
    with pytest.raises(ImportError):
        from megajax.checkpoint import CheckpointManger  # noqa: F401
