"""Placeholders for packages that take seconds to import, while a script answers --help.

What --help prints are names, types and defaults of flags, and none of them depends on an array.
core/interrupted.py calls `install` when the command line asks for help, before anything else is
imported. From then on jax and the other packages of HEAVY are modules whose members can be called,
subclassed, subscripted and used as decorators, which is all that our modules do with them at
import. A member has no value: to show it, to order it, to compute with it or to branch on it is
an error. After an error the process starts again with the real packages, so that help is late
then and never wrong; `python -X real_imports SCRIPT --help` uses them at once. No jax import.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from abc import ABCMeta
from types import ModuleType, TracebackType
from typing import Any

HEAVY = (
    "chex",
    "etils",
    "flax",
    "grain",
    "jax",
    "jaxlib",
    "matplotlib",
    "optax",
    "orbax",
    "PIL",
    "rich",
    "scipy",
    "tensorstore",
)
OPTION = "real_imports"  # of python -X


class _Kind(ABCMeta):
    """The type of a placeholder, which is a class itself because real classes may inherit it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _member(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_has_no_value" not in vars(cls):
            return super().__call__(*args, **kwargs)  # a real class that inherits a placeholder
        # A decorator leaves a class what it is: its fields may be those of a configuration.
        return args[0] if args and isinstance(args[0], type) else cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__

    def __bool__(cls) -> bool:
        if "_has_no_value" in vars(cls):
            raise TypeError(f"the placeholder {cls.__name__} has no value")
        return True

    def __repr__(cls) -> str:
        if "_has_no_value" in vars(cls):
            raise TypeError(f"the placeholder {cls.__name__} has no value to show")
        return super().__repr__()


@functools.cache
def _member(name: str) -> Any:
    """Returns the one placeholder of this name, whatever it is a member of."""
    inherit = classmethod(lambda *_, **__: None)
    return _Kind(name, (), {"_has_no_value": True, "__init_subclass__": inherit})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _member(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of HEAVY, and every module in them, as placeholders."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in HEAVY:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: a placeholder has no code."""


def install() -> None:
    """Replaces the packages of HEAVY in this process, unless one of them is already imported."""
    if OPTION in sys._xoptions or any(name in sys.modules for name in HEAVY):
        return
    sys.meta_path.insert(0, _Finder())
    after = sys.excepthook

    def again(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            os.execv(sys.executable, [sys.executable, "-X", OPTION, *sys.orig_argv[1:]])
        after(kind, error, trace)

    sys.excepthook = again
