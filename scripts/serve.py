"""Serves a model over HTTP, with the interface of OpenAI's completions and chats.

uv run --extra serve scripts/serve.py                                # the newest nano run
uv run --extra serve scripts/serve.py --run_dir=RUN --port=8000
uv run --extra serve scripts/serve.py --hf=FOLDER --mesh.tensor=2 --api_key_file=KEYS
curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "import "}'

docs/serving.md has the endpoints, what a request may ask, and several hosts.
"""

import megajax.core.interrupted  # noqa: F401

from megajax.core import config
from megajax.core.errors import UserError
from megajax.systems.server.options import Config

PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def main() -> int:
    """Serves until a signal."""
    cfg, _ = config.from_flags(PRESETS)
    try:
        from megajax.systems.server import launch
    except ImportError as error:
        raise UserError(f"{error}: the server needs its packages: uv sync --extra serve") from None
    return launch.run(cfg)


if __name__ == "__main__":
    config.run(main)
