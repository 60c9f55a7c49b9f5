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
Instance = tuple[str, tuple[int | None, ...]]  # barrier or number, lines that lead to the site


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


def sites(module: ModuleType, base: str = "plgpu", waits: Sequence[str] = WAITS) -> list[Site]:
    """All waits in the source of a module, in its order: calls of base.wait."""
    listed, names = [], set()

    def visit(node: ast.AST, path: tuple[str, ...]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            path = (*path, node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == base and node.func.attr in waits:
                name = ".".join([*path, ast.unparse(node).removeprefix(f"{base}.")])
                same = sum(n == name or n.startswith(f"{name} #") for n in names)
                name += f" #{same + 1}" if same else ""
                names.add(name)
                listed.append(Site(module, path[0], name, node.lineno, node.col_offset))
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    visit(ast.parse(inspect.getsource(module)), ())
    return sorted(listed, key=lambda site: (site.line, site.column))


def _position(frame: FrameType) -> tuple[int | None, int | None]:
    """Line and column of the call that a frame is in."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return line, column


def _chain(frame: FrameType | None, site: Site, path: str) -> tuple[int | None, ...]:
    """The lines of a kernel that lead to a call, from the innermost one."""
    lines = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename == path and code.co_qualname.split(".")[0] == site.kernel:
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
def deleted(site: Site, instance: Instance | None, seen: list[Instance]) -> Iterator[None]:
    """Inside, kernels are traced without one instance of a site; all are added to `seen`."""
    path = str(inspect.getsourcefile(site.module))

    def without(wait: Callable):
        def maybe(*args, **named):
            frame = sys._getframe(1)
            in_source = frame.f_code.co_filename == path
            if in_source and _position(frame) == (site.line, site.column):
                number = args and isinstance(args[0], int)
                at = str(args[0]) if number else _barrier(frame, args[0]) if args else ""
                call = at, _chain(frame, site, path)
                if call not in seen:
                    seen.append(call)
                if call == instance:
                    return
            wait(*args, **named)

        return maybe

    with contextlib.ExitStack() as stack:
        for name in WAITS:
            stack.enter_context(mock.patch.object(plgpu, name, without(getattr(plgpu, name))))
        yield


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


def survivors(site: Site, runs: Sequence[Callable[[], None]]) -> dict[int, Instance]:
    """The instances of a site that no run misses, by their number."""
    verdicts: dict[Instance, str | None] = {}
    for run in runs:
        traced: list[Instance] = []
        with deleted(site, None, traced):
            assert _run(run) is None, "a run fails with all of its waits"
        for instance in traced:
            if not verdicts.get(instance):
                with deleted(site, instance, []):
                    verdicts[instance] = _run(run)
                print(f"{site} {instance}: {verdicts[instance] or 'survives'}")
    assert verdicts, f"no run traces {site}"
    return {n: wait for n, (wait, verdict) in enumerate(verdicts.items()) if not verdict}


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
