"""Extension of griffe (mkdocs.yml): turns this project's docstrings into the style it can parse.

A class gets a table of its fields with what its docstring says of them, or with their help and
their default where `megajax.core.config.option` defines them.
"""

import ast
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from docs_site import described  # noqa: E402


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object has been read."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Describes the parameters of a function."""
        if func.docstring:
            names = [p.name.lstrip("*") for p in func.parameters]
            func.docstring.value = described(func.docstring.value, names)

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Describes the fields of a class and the parameters of its constructor."""
        if not isinstance(node, ast.ClassDef) or cls.docstring is None:
            return
        text, names = cls.docstring.value, []
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
                names.append(ast.unparse(item.target))
                text += self.option(cls.members[names[-1]], item.value)
        made = cls.members.get("__init__")
        parameters = [p.name for p in getattr(made, "parameters", ())]
        cls.docstring.value = described(text, parameters, names)

    def option(self, field: Any, value: ast.expr | None) -> str:
        """Returns the help of a field as a paragraph, and makes its default the field's value."""
        if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("option")):
            return ""
        field.value = field.value.arguments[0] if value.args else None
        helps = [a.value for a in value.args[1:2] if isinstance(a, ast.Constant)]
        return f"\n\n{field.name}: {str(helps[0]).rstrip('.')}." if helps else ""
