"""Servers on a Ray cluster: Ray Serve spreads requests over replicas, one a host.

uv run --extra serve --extra ray-serve scripts/serve_ray.py --replicas=4 --gpus=8 \\
    --hf=FOLDER --mesh.tensor=8 --host=0.0.0.0

Takes the flags of scripts/serve.py, and those of the cluster. The model's folder must lie in the
same place on every host. A replica is one process with the same application as scripts/serve.py;
Ray's proxies listen on --host and --port of every host with a replica. Ctrl-C or SIGTERM here ends
the replicas, whose running requests end first. A model that needs more than one host does not run
here: docs/serving.md.
"""

import megajax.core.interrupted  # noqa: F401

import asyncio
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.core import config
from megajax.core.config import option
from megajax.core.errors import UserError
from megajax.systems.server.options import Config as ServerConfig


@dataclass(frozen=True)
class Config(ServerConfig):
    """What to serve, to whom, and on how many hosts."""

    replicas: int = option(1, "number of hosts, each with one replica", at_least=1)
    gpus: float = option(8.0, "GPUs of a replica; 0: it runs on a CPU", at_least=0)
    cpus: float = option(8.0, "CPU cores of a replica", above=0)
    address: str | None = option(None, "address of the Ray cluster, or auto; none: start one here")


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


class Replica:
    """The application in a replica. Its engine's thread starts with the first request, on the event
    loop that runs it."""

    def __init__(self, cfg: Config):
        """Loads the model. Raises: UserError."""
        from megajax.systems.server import launch

        self._worker, self._server = launch.open_server(cfg)
        self._started = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "http" and not self._started:
            self._started = True
            self._worker.start()
            self._ending = asyncio.create_task(self._end_with_engine())
        await self._server.app(scope, receive, send)

    async def _end_with_engine(self) -> None:
        """Ray starts a replica anew whose process has ended."""
        await self._worker.failed.wait()
        await asyncio.sleep(1)  # running requests are told
        os._exit(75)


def deploy(serve: Any, cfg: Config) -> Any:
    """Returns what Ray Serve runs. serve: the module."""

    def build() -> Any:
        from megajax.core import mesh

        mesh.start(cfg.emulate)
        return Replica(cfg)

    made = serve.deployment(
        serve.ingress(build)(),
        name="megajax",
        num_replicas=cfg.replicas,
        max_ongoing_requests=10_000,  # the server itself says when too many wait
        ray_actor_options={"num_gpus": cfg.gpus, "num_cpus": cfg.cpus},
        graceful_shutdown_timeout_s=cfg.stop_timeout_s,
        **({"max_replicas_per_node": 1} if cfg.replicas > 1 else {}),
    )
    return made.bind()


def main() -> int:
    """Runs the replicas until a signal."""
    cfg, _ = config.from_flags(PRESETS)
    try:
        import ray  # type: ignore[import-not-found]
        from ray import serve  # type: ignore[import-not-found]
    except ImportError as error:
        raise UserError(f"{error}: uv sync --extra serve --extra ray-serve") from None
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}}
    ray.init(address=cfg.address, runtime_env=env)
    serve.start(http_options={"host": cfg.host, "port": cfg.port})
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        serve.run(deploy(serve, cfg), route_prefix="/")
        print(f"serving on http://{cfg.host}:{cfg.port}/v1 (Ctrl-C stops)", flush=True)
        ended.wait()
        serve.delete("default")  # lets requests end; shutdown alone waits 30 s and then kills
    except RuntimeError as error:
        raise UserError(f"no replica started, see Ray's logs: {error}") from None
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    config.run(main)
