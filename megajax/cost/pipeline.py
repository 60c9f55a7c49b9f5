"""How often the program of a pipeline-parallel step computes each kind of work, in closed form.

The kinds are F (forward), B (backward) and, if the schedule splits it off, W (gradients of the
weights). The program runs a schedule table tick by tick on all stages at once. If any stage has
work of a kind in a tick, all stages compute that kind, and the results of stages that have none are
masked. So the cost of a step is its number of ticks, also for stages that are idle in them. The
formulas are those of the tables that schedule/build.py makes; a test compares them with the tables
themselves and with their lockstep times.

Legend: S stages, M micro-batches, v chunks of layers a stage.
"""

import dataclasses
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Stash = Literal["input", "residuals"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline's schedule. One stage: no pipeline.

    stash: what is kept from F to B. 'input': the input of a chunk, so that B runs F again;
    'residuals': what rematerialisation keeps of its layers. hides: whether the weights and
    gradients of a chunk are sent while other chunks are computed.
    """

    stages: int = 1
    microbatches: int = 1
    chunks: int = 1
    schedule: Schedule = "interleaved"
    stash: Stash = "input"
    hides: bool = False

    @property
    def is_split(self) -> bool:
        """Whether W, the weights' gradient, stands apart from B."""
        return self.schedule == "zero_bubble" and self.stages > 1

    @property
    def work(self) -> int:
        """Ops of each kind that a stage has in a step."""
        return self.chunks * self.microbatches

    @property
    def ticks(self) -> dict[str, int]:
        """Ticks of a step in which the program computes each kind, F, B and (split) W.

        A stage has `work` of each; the others are the bubble, (S - 1) / (v M) of the work
        (Megatron-LM, arXiv 2104.04473 section 2.2.2). All stages compute W at once: no bubble.
        """
        found = dict.fromkeys("FB", self.work + self.stages - 1)
        return found | ({"W": self.work} if self.is_split else {})

    @property
    def kept(self) -> int:
        """Chunk inputs that the fullest stage keeps at one time."""
        if self.schedule == "gpipe":
            return self.work
        return min((self.chunks + 1) * self.stages - 1, self.work)
