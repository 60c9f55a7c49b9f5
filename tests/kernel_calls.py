"""The calls by which kernels wait, signal and copy: found in their source, and changed one by one.

A call is known by its place in the source, so that each one that is added to a kernel is a mutant
of the tests at once. See MUTANTS for what is done to each.
"""

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

# Of each call, what mutants do: "dropped": nothing. "late": wait after the signals that follow.
# "next": another flag, or barrier of the same name. "rank", "page": of another rank, another page.
# "fewer": one signal less is waited for.
MUTANTS = {
    "barrier_wait": ("dropped", "next"),
    "barrier_arrive": ("dropped", "next"),
    "copy_gmem_to_smem": ("next",),
    "wait_smem_to_gmem": ("dropped", "late"),
    "commit_smem": ("dropped",),
    "commit_smem_to_gmem_group": ("dropped",),
    "wgmma_wait": ("dropped",),
    "fence": ("dropped",),
    "wait": ("dropped", "next", "fewer"),
    "signal": ("dropped", "next", "rank"),
    "peer": ("rank", "page"),
    "own": ("page",),
    "mine": ("page",),
}
BASES = ("plgpu", "peers", None)  # plgpu.barrier_wait, peers.wait, fence


@dataclasses.dataclass(frozen=True)
class Call:
    """A call in the source. name: its functions and itself. do: what a mutant does there.

    may: what a mutant could do.
    """

    path: str
    line: int
    column: int
    name: str
    may: tuple[str, ...]
    do: str = ""

    @property
    def place(self) -> tuple[str, int, int]:
        """Where it is."""
        return self.path, self.line, self.column

    def __str__(self):
        return f"{self.name}: {self.do}" if self.do else self.name


def calls(module: ModuleType) -> Iterator[Call]:
    """All calls of a module that others can see."""
    path, names = str(inspect.getsourcefile(module)), set()

    def visit(node: ast.AST, within: tuple[str, ...]) -> Iterator[Call]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            within = (*within, node.name)
        if isinstance(node, ast.Call):
            base, op = None, ""
            if isinstance(node.func, ast.Name):
                op = node.func.id
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                base, op = node.func.value.id, node.func.attr
            if base in BASES and op in MUTANTS:
                name = ".".join([*within, ast.unparse(node).removeprefix(f"{base}.")])
                same = sum(n == name or n.startswith(f"{name} #") for n in names)
                name += f" #{same + 1}" if same else ""
                names.add(name)
                yield Call(path, node.lineno, node.col_offset, name, _may(op, node))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, within)

    return visit(ast.parse(inspect.getsource(module)), ())


def _may(op: str, node: ast.Call) -> tuple[str, ...]:
    """Those of an operation's mutants that make a difference in a call."""
    paged = len(node.args) > (2 if op == "peer" else 1)
    full = not node.keywords and node.args and ast.unparse(node.args[0]) == "0"
    useless = {"page": not paged, "late": not full}
    return tuple(do for do in MUTANTS[op] if not useless.get(do, False))


def mutants(module: ModuleType) -> list[Call]:
    """Each of a module's calls, with each thing that may be done to it."""
    return [dataclasses.replace(call, do=do) for call in calls(module) for do in call.may]


class Calls:
    """Watches a run: which calls it has reached, and whether the mutant made a difference."""

    def __init__(self, gpu: Any, mutant: Call | None):
        """Has seen none."""
        self.gpu, self.mutant = gpu, mutant
        self.reached: set[tuple[str, int, int]] = set()
        self.applied = False
        self.places: dict[tuple[Any, int], tuple[str, int, int]] = {}

    def watched(self, op: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function that kernels call as `op`."""

        @functools.wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            place = self._place(sys._getframe(1))
            self.reached.add(place)
            if self.mutant is None or place != self.mutant.place:
                return real(*args, **named)
            return self._mutated(op, real, args, named)

        return call

    def _place(self, frame: FrameType) -> tuple[str, int, int]:
        key = frame.f_code, frame.f_lasti
        if key not in self.places:
            line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            self.places[key] = frame.f_code.co_filename, line or 0, column or 0
        return self.places[key]

    def _mutated(self, op: str, real: Callable[..., Any], args: Any, named: Any) -> Any:
        assert self.mutant is not None
        do, args = self.mutant.do, list(args)
        if do == "late":
            self.gpu.machine.me.late = functools.partial(real, *args)
            return None
        before = [id(a) for a in args]
        if do == "dropped":
            self.applied = True
            return None
        if op in ("wait", "signal"):
            self._flag(op, do, args)
        elif op in ("peer", "own", "mine"):
            self._page(op, do, args, named)
        else:
            self._barrier(args)
        self.applied |= before != [id(a) for a in args]
        return real(*args, **named)

    def _flag(self, op: str, do: str, args: list[Any]) -> None:
        """args: peers, flags, index, value of a wait; peers, flags, to, index of a signal."""
        me, flags = args[:2]
        if do == "next":
            at = 2 if op == "wait" else 3
            args[at] = (args[at] + 1) % (flags.shape[0] // me.copies)
        elif do == "rank":
            args[2] = (args[2] + 1) % me.ranks
        elif args[3] > 0:
            args[3] = args[3] - 1

    def _page(self, op: str, do: str, args: list[Any], named: Any) -> None:
        """args: peers, array, rank of a peer, page."""
        assert not named
        me, ref = args[:2]
        if do == "rank":
            args[2] = (args[2] + 1) % me.ranks
            return
        at, pages = (3 if op == "peer" else 2), ref.shape[0] // me.copies
        if pages > 1:
            args[at:] = [((args[at] if len(args) > at else 0) + 1) % pages]

    def _barrier(self, args: list[Any]) -> None:
        """args: a barrier, or source, target, barrier of a load."""
        at = 2 if len(args) > 1 else 0
        barrier = args[at]
        same = barrier.named
        if len(same) > 1:
            args[at] = same[(same.index(barrier) + 1) % len(same)]
