"""Deletes the waits of Mosaic GPU kernels, one at a time; the interpreter must object to each.

The sites are read from a kernel's source, so that a wait that is added is deleted here as well. A
site is traced once for each barrier that it waits at, or number of stores, and each chain of calls
that leads to it (loops of a kernel share their step): each of these instances is a mutant. It is
found by a race, a broken rule of a barrier, a wrong result or a deadlock, on any of the runs given.
"""

import ast
import contextlib
import dataclasses
import inspect
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

WAITS = ("barrier_wait", "wait_smem_to_gmem", "commit_smem", "wgmma_wait")
# What the interpreter says of a missing wait, and numpy or a test of a wrong result.
KILLED = re.compile(
    r"data race|observed|observe each|phase|arrivals pending|read-side operations|deadlock"
)
PATIENCE = 120  # seconds, then it is a deadlock


@dataclasses.dataclass(frozen=True)
class Site:
    """A call that waits. kernel: the outermost function around it; name: unique in its module."""

    module: ModuleType
    kernel: str
    name: str
    line: int
    column: int

    def __str__(self):
        return self.name


def sites(module: ModuleType) -> list[Site]:
    """All waits in the source of a module, in its order."""
    found, names = [], set()

    def visit(node: ast.AST, path: tuple[str, ...]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            path = (*path, node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            if isinstance(base, ast.Name) and base.id == "plgpu" and node.func.attr in WAITS:
                name = ".".join([*path, ast.unparse(node).removeprefix("plgpu.")])
                same = sum(n == name or n.startswith(f"{name} #") for n in names)
                name += f" #{same + 1}" if same else ""
                names.add(name)
                found.append(Site(module, path[0], name, node.lineno, node.col_offset))
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    visit(ast.parse(inspect.getsource(module)), ())
    return sorted(found, key=lambda site: (site.line, site.column))


def _position(frame: FrameType) -> tuple[int | None, int | None]:
    """Line and column of the call that a frame is in."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return line, column


def _chain(frame: FrameType | None, path: str) -> tuple[int | None, ...]:
    """The lines of a module that lead to a call, from the innermost one."""
    lines = []
    while frame is not None:
        if frame.f_code.co_filename == path:
            lines.append(_position(frame)[0])
        frame = frame.f_back
    return tuple(lines)


def _barrier(frame: FrameType | None, ref: object) -> str:
    """The outermost name of a barrier: that of the kernel's scratch memory."""
    root, name = getattr(ref, "ref", ref), ""
    while frame is not None and frame.f_code.co_name != "run_deleted":
        for key, value in frame.f_locals.items():
            if value is root and not key.startswith(("ref", "barrier")):
                name = key
        frame = frame.f_back
    return name


@contextlib.contextmanager
def deleted(site: Site, instance: int) -> Iterator[dict[object, str]]:
    """Inside, kernels are traced without one instance of a site; yields the instances seen."""
    seen: dict[object, str] = {}
    path = inspect.getsourcefile(site.module)

    def without(wait: Callable):
        def maybe(*args, **named):
            frame = sys._getframe(1)
            here = frame.f_code.co_filename == path
            if here and _position(frame) == (site.line, site.column):
                barrier = str(*args)
                if args and not isinstance(args[0], int):
                    barrier = _barrier(frame, args[0])
                chain = _chain(frame, str(path))
                number = list(seen).index((barrier, chain)) if (barrier, chain) in seen else None
                if number is None:
                    number = len(seen)
                    seen[barrier, chain] = f"[{number}] {barrier} lines {chain}"
                if number == instance:
                    return
            wait(*args, **named)

        return maybe

    with contextlib.ExitStack() as stack:
        for name in WAITS:
            stack.enter_context(mock.patch.object(plgpu, name, without(getattr(plgpu, name))))
        yield seen


def _run(run: Callable[[], None]) -> str | None:
    """What the interpreter or the run's own assertions say; None: nothing."""

    def give_up():
        memory = gpu_callbacks._get_shared_memory()
        memory.set_failed(RuntimeError("deadlock: nothing has ended in time"))

    timer = threading.Timer(PATIENCE, give_up)
    timer.start()
    try:
        run()
    except AssertionError:
        return "wrong result"
    except Exception as error:
        said = KILLED.search(str(error))
        if said is None:
            raise
        return said[0]
    finally:
        timer.cancel()
    return None


def survivors(site: Site, runs: Sequence[Callable[[], None]]) -> dict[int, str]:
    """The instances of a site that no run misses: number and where they are."""
    left, reached, instance, known = {}, False, 0, 1
    while instance < known:
        verdict, label = None, ""
        for run in runs:
            with deleted(site, instance) as seen:
                verdict = _run(run)
            reached |= bool(seen)
            known = max(known, len(seen))
            label = dict(enumerate(seen.values())).get(instance, label)
            if verdict:
                break
        print(f"{site} {label}: {verdict or 'survives'}")
        if not verdict:
            left[instance] = label
        instance += 1
    assert reached, f"no run traces {site}"
    return left


def check(
    site: Site,
    runs: Mapping[tuple[ModuleType, str], Sequence[Callable[[], None]]],
    unseen: Mapping[str, tuple[Sequence[int], str]],
) -> None:
    """Asserts that exactly the instances in `unseen` survive.

    runs: of each kernel. unseen: of a site's name, its instances that survive, and why.
    """
    left = survivors(site, runs[site.module, site.kernel])
    numbers, _ = unseen.get(site.name, ((), ""))
    assert sorted(left) == sorted(numbers), left


def parameters(modules: Sequence[ModuleType], quick: Collection[str] = ()) -> list[Any]:
    """The sites of modules, for `pytest.mark.parametrize`; all but those in `quick` are slow."""
    return [
        pytest.param(
            site,
            id=f"{module.__name__.split('.')[-1]}-{site.name}",
            marks=() if site.name in quick else pytest.mark.slow,
        )
        for module in modules
        for site in sites(module)
    ]
