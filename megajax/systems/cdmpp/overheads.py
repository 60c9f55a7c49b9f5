"""The overheads of a call: its time beyond the times of the instructions that it launches.

A call of a compiled program first looks up its argument arrays. Between two launched instructions,
and between two iterations of a loop, the runtime of a CPU does work that the profiler attributes to
neither. These times are fitted on programs that were timed both as a whole and instruction by
instruction. The host of a GPU launches instructions before the device is ready to run them, so
there the overheads are hidden and are not added.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from megajax.core.errors import UserError
from megajax.cost.hlo import Module
from megajax.cost.program import records


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one call of a program contains, in numbers that its overheads depend on.

    arrays: arguments and results. launches: launched instructions. turns: iterations of all loops.
    """

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
    """The fitted overheads in seconds.

    call_s: once a call. array_s, launch_s, turn_s: for each array, launched instruction and
    iteration of a loop (see Counts).
    """

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
        """Returns the non-negative overheads with the least squared relative errors.

        Args: found: counts of each program. computed: seconds of all its instructions. walls:
          seconds of its call.
        Raises: UserError without a program.
        """
        if not len(found):
            raise UserError("overheads are fitted on programs that were timed; there is none")
        total = np.asarray(walls, float)
        table = np.array([(1, one.arrays, one.launches, one.turns) for one in found], float)
        rest = np.maximum(total - np.asarray(computed, float), 0)
        fitted, _ = nnls(table / total[:, None], rest / total)
        return cls(*fitted.tolist())
