"""The stages of a placement in separate processes, on the hosts of a Ray cluster.

A stage is an actor. A call names the result of the previous stage, and Ray delivers it when it is
ready, so calls follow each other through the stages as in one process. The residual stream is
copied to the memory of its host, and Ray's object store carries it to the next stage.
"""

from collections.abc import Sequence
from typing import Any

from megajax.core.errors import UserError
from megajax.systems.llm_pq.runtime import Runtime
from megajax.systems.llm_pq.stages import Guard, NoAnswerError, Place, Stage


class _Host:
    """A stage in the process of an actor."""

    def __init__(self, ranks: int, cfg: Any, place: Place, weights: Any, dtype: str):
        """ranks: devices of the process that the stage has."""
        import jax

        devices = jax.devices()[:ranks]
        if len(devices) < ranks:
            raise UserError(f"{place} has {len(devices)} devices in its process, not {ranks}")
        given = cfg, place, weights, devices if ranks > 1 else devices[0], dtype
        self._guard = Guard(lambda: Stage(*given))

    def call(self, method: str, *given: Any) -> Any:
        """Calls a method of the stage; arrays come as NumPy's."""
        import jax

        return jax.device_get(self._guard.call(method, *given))


class RayStage:
    """A stage that is an actor: what LocalStage is for a thread."""

    def __init__(self, options: dict[str, Any], *given: Any):
        """options: of the actor. given: as of _Host."""
        self._ray = _ray()
        self._actor = self._ray.remote(_Host).options(**options).remote(*given)
        self.failed = False  # then it is to be replaced

    def send(self, method: str, *given: Any) -> Any:
        """Calls a method of the stage after what was sent before; returns its result to come."""
        return self._actor.call.remote(method, *given)

    def wait(self, result: Any, timeout_s: float | None = None) -> Any:
        """Returns a result that `send` promised. Raises: what the stage did; NoAnswerError where it
        is not there within `timeout_s` (None: waits for ever)."""
        if timeout_s is not None:  # `get` raises what the stage did, which may be a TimeoutError
            ready, _ = self._ray.wait([result], timeout=timeout_s)
            if not ready:
                raise NoAnswerError
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:  # its text is a traceback
            raise (error.cause if isinstance(error.cause, Exception) else error) from error

    def close(self) -> None:
        """Ends the actor's process."""
        self._ray.kill(self._actor)


class RayRuntime(Runtime):
    """A Runtime whose stages are actors. `ray.init` comes first; extra `ray`.

    devices: for each device of the placement the options of its actor, as Ray has them:
    {"num_gpus": 1, "resources": {"t4": 1}} takes a GPU of a host that was started with this
    resource. The GPUs of an actor are tensor ranks; without any it runs on its host's CPU. The
    processes import megajax, so it is installed on every host. `wrap` is not for them.
    """

    def _start(self, place: Place) -> RayStage:
        options = self._devices[place.device]
        weights = self._weights[place.stage]
        ranks = self._ranks(options)
        return RayStage(dict(options), ranks, self.cfg, place, weights, self._dtype)

    @staticmethod
    def _ranks(device: Any) -> int:
        return max(1, int(device.get("num_gpus", 0)))


def cluster_devices() -> Sequence[dict[str, Any]]:
    """Returns the options of an actor for each GPU of a Ray cluster, in the order of its nodes."""
    found = []
    for node in _ray().nodes():
        if node["Alive"]:
            here = {f"node:{node['NodeManagerAddress']}": 0.001}
            gpus = int(node["Resources"].get("GPU", 0))
            found += [{"num_gpus": 1, "resources": dict(here)} for _ in range(gpus)]
    return found


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("stages on several hosts need Ray: uv sync --extra ray") from None
    return ray
