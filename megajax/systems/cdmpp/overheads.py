"""What a call of a program takes beside the operations that it launches.

A call looks its arrays up, and between two launched instructions, and between two turns of a loop,
a CPU's runtime does work that the profiler gives to neither. How long is fitted on programs that
were timed both ways, an instruction at a time and as a whole. A GPU's host launches ahead of the
device, so there these seconds are hidden and nothing of this is added.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from megajax.core.errors import UserError
from megajax.cost.hlo_module import Module
from megajax.cost.program import records


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of one call. arrays: arguments and results. launches: instructions. turns: of all loops."""

    arrays: int
    launches: float
    turns: float


def counts(text: str) -> Counts:
    """Returns the counts of a compiled module (`compiled.as_text()`)."""
    module = Module(text)
    entry = module.instructions(module.entry).values()
    given = sum(one.opcode == "parameter" for one in entry)
    made = sum(len(one.arrays) for one in entry if one.is_root)
    launched = sum(record.executions for record in records(text))
    return Counts(given + made, launched, _turns(module, module.entry))


def _turns(module: Module, name: str) -> float:
    total = 0.0
    for one in module.instructions(name).values():
        if loop := module.loop(one):
            total += (loop[1] or 1) * (1 + _turns(module, loop[0]))
        elif one.opcode in ("call", "async-start", "conditional"):
            total += max((_turns(module, name) for name in (*one.called, *one.branches)), default=0)
    return total


@dataclasses.dataclass(frozen=True)
class Overheads:
    """Seconds of a call, and more for each array, launch and turn of a loop."""

    call_s: float = 0.0
    array_s: float = 0.0
    launch_s: float = 0.0
    turn_s: float = 0.0

    def of(self, found: Counts) -> float:
        """Returns the seconds of one call."""
        return (
            self.call_s
            + self.array_s * found.arrays
            + self.launch_s * found.launches
            + self.turn_s * found.turns
        )

    @classmethod
    def fit(
        cls, found: Sequence[Counts], computed: Sequence[float], walls: Sequence[float]
    ) -> "Overheads":
        """Returns the overheads that explain calls best, by squares of relative errors; none is
        negative.

        Args: computed: seconds of all instructions of each program. walls: seconds of its call.
        Raises: UserError without a program.
        """
        if not len(found):
            raise UserError("overheads are fitted on programs that were timed; there is none")
        total = np.asarray(walls, float)
        table = np.array([(1, one.arrays, one.launches, one.turns) for one in found], float)
        rest = np.maximum(total - np.asarray(computed, float), 0)
        fitted, _ = nnls(table / total[:, None], rest / total)
        return cls(*fitted.tolist())
