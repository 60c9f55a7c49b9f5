"""Public names of a package that load their module on first use.

A package lists its public names in its __init__.py. Importing the package loads none of their
modules: `import megajax.checkpoint` in a process without devices does not import jax, and `import
pallas_kernels` loads no kernel (PEP 562: a module's own __getattr__ and __dir__).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def public(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns (__getattr__, __dir__, __all__) for a package's __init__.py.

    Args: package: its __name__. names: submodule -> the public names that it defines. No public
        name may be the name of a submodule, since an import of that submodule would replace it.
    """
    modules = {name: module for module, listed in names.items() for name in listed}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: sorted(modules), sorted(modules)
