"""What an engine runs on: where the weights rest, and the programs that draw tokens with them."""

import math
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from megajax.core.mesh import MeshSpec, free_bytes
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import check_params
from megajax.parallel.overlap import Overlap
from megajax.parallel.sharding import Zero
from megajax.serving.forward import Forward
from megajax.serving.programs import Programs

# (chosen) bytes of the pages of a process on CPUs: as many as of the weights, within these bounds.
CPU_PAGES = 2**28, 2**30
GPU_SHARE = 0.9  # (vLLM's gpu_memory_utilization) of the free memory that becomes pages


class Backend(Protocol):
    """cpu: whether its devices are CPUs, which decides an engine's defaults."""

    @property
    def cpu(self) -> bool: ...  # noqa: D102

    def place(self, params: Tree) -> Any:
        """Returns the weights on the devices, as `Programs.step` takes them; of what it returned
        before, the same."""
        ...

    def outline(self, params: Tree) -> Any:
        """Returns what `place` would, as ShapeDtypeStructs with their shardings."""
        ...

    def default_pages(self, most: int, page_size: int) -> int:
        """Returns how many pages of all layers there is room for, `most` at most, at least 2."""
        ...

    def programs(
        self, *, slots: int, budget: int, pool: tuple[int, int, int], exact: bool, steps: int
    ) -> Any:
        """Returns what serving.programs.Programs is, or what does the same. Arguments: as there."""
        ...


class OneMesh:
    """All layers on one mesh."""

    def __init__(
        self,
        cfg: DecoderConfig,
        mesh: Mesh | None,
        zero: Zero | None,
        dtype: Any,
        overlap: Overlap,
        exact: bool = False,
    ):
        """mesh: None: one device. zero: None: the weights are copies in the compute type. exact:
        the programs have the loop over layers that training has. Raises: UserError when the mesh
        cannot cut the model."""
        mesh = MeshSpec(data=1).build(jax.devices()[:1]) if mesh is None else mesh
        self._forward, self._cast = Forward(cfg, mesh, zero or "none", dtype, overlap), zero is None
        self._exact = exact

    @property
    def cpu(self) -> bool:
        """Whether the mesh is of CPUs."""
        return self._forward.mesh.devices.flat[0].platform == "cpu"

    @property
    def alone(self) -> bool:
        """Whether each layer's weights rest in arrays of their own: on a GPU, if they are copies
        anyway. For a CPU a loop over layers compiles sooner."""
        return self._cast and not self._exact and not self.cpu

    def place(self, params: Tree) -> Tree:
        """See Backend. Raises: UserError for parameters of another model."""
        check_params(params, self._forward.parts, "params")
        return self._forward.place(
            params, self._cast, free_bytes(self._forward.mesh) if self.alone else 0
        )

    def outline(self, params: Tree) -> Tree:
        """See Backend. Not where layers rest alone, which depends on the memory that is free."""
        assert not self.alone
        check_params(params, self._forward.parts, "params")
        return self._forward.outline(params, self._cast)

    def default_pages(self, most: int, page_size: int) -> int:
        """Returns for how many pages the devices of all processes have room."""
        mesh = self._forward.mesh
        weights = sum(x.size for x in jax.tree.leaves(self._forward.parts.abstract))
        least, most_bytes = CPU_PAGES
        room = max(least, min(most_bytes, weights * self._forward.dtype.itemsize))
        room //= len(mesh.local_devices)
        if not self.cpu and (free := free_bytes(mesh)) < math.inf:
            room = int(GPU_SHARE * free)
        pages = min(most, room // self._forward.page_bytes(page_size))
        if mesh.is_multi_process:
            pages = int(multihost_utils.process_allgather(np.int32(pages)).min())
        return max(2, pages)

    def programs(self, **shapes: Any) -> Programs:
        """See Backend."""
        return Programs(self._forward, **shapes)
