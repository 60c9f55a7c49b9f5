"""The deviceless gate: every shipped kernel configuration, compiled for an H100 that is not there.

A kernel folder's configs.py names its configurations (`CONFIGS`), says what to compile (`program`:
a function, its abstract arguments, the tile) and which files make it (`sources`). Compiling all
takes an hour, so rows carry two hashes: one of their sources, which is made in no time and changes
with every line of them, and one of the traced program, which says whether a change concerns this
configuration. Only what has another program need be compiled again.
"""

import ast
import functools
import hashlib
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import jax

from pallas_kernels import aot, bench

FOLDERS = {folder: bench.module_of(folder, "configs") for folder in bench.FOLDERS}
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.ClassDef)


def names() -> list[str]:
    """Returns '<folder> <configuration>' of all configurations that are shipped."""
    return [f"{folder} {name}" for folder, module in FOLDERS.items() for name in module.CONFIGS]


def compile_config(name: str) -> list[dict[str, Any]]:
    """Returns one row for each kernel of a configuration: its tile and what ptxas says of it."""
    folder, _, config = name.partition(" ")
    function, args, tile = FOLDERS[folder].program(config)
    hashes = {"source": source_hash(name), "program": program_hash(name)}
    about = {"config": name, **hashes, "tile": tile}
    return [about | vars(kernel) for kernel in aot.report(function, *args)]


def program_hash(name: str) -> str:
    """Returns a hash of a configuration's traced program, kernels included, and of jax's version.

    Instructions that are written as MLIR (inline_mgpu) are not in a traced program: files that have
    some are a part of the hash.
    """
    folder, _, config = name.partition(" ")
    function, args, _ = FOLDERS[folder].program(config)
    inline = [f for f in FOLDERS[folder].sources(config) if "inline_mgpu" in f.read_text()]
    text = str(jax.make_jaxpr(function)(*args))
    text = re.sub(r"(?<=id=)\d+|0x[0-9a-f]+", "", text)  # places in memory
    return hashlib.sha256(f"{hash_of(inline)} {text}".encode()).hexdigest()[:16]


def source_hash(name: str) -> str:
    """Returns a hash of the code of a configuration, without comments, and of jax's version."""
    folder, _, config = name.partition(" ")
    return hash_of(FOLDERS[folder].sources(config))


def hash_of(files: Iterable[pathlib.Path]) -> str:
    """Returns a hash of the syntax trees of files, and of jax's version."""
    digest = hashlib.sha256(jax.__version__.encode())
    for file in files:
        digest.update(_code(file.read_text()))
    return digest.hexdigest()[:16]


@functools.cache
def _code(text: str) -> bytes:
    """A file's syntax tree without docstrings; most configurations share a few files."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.dump(tree).encode()


def faults(row: dict[str, Any]) -> list[str]:
    """Returns the faults of a row; no configuration may be shipped with one."""
    reasons = []
    if row["spilled_bytes"]:
        reasons.append(f"spills {row['spilled_bytes']} bytes")
    if row["serialized"]:
        reasons.append("ptxas makes wgmma instructions wait: for each other, or where no wait was")
    return [f"{row['config']} ({row['name']}): {fault}" for fault in reasons]
