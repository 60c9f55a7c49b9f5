"""The options of --detector=minder, for training runs and scripts/supervise.py. No jax import."""

from dataclasses import dataclass
from typing import Any

from megajax.core import files
from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.core.files import expand


@dataclass(frozen=True)
class MinderConfig(Checked, section="minder"):
    """Options of --detector=minder, which names the machine that stops or slows a job."""

    model: str | None = option(
        None,
        "file of a fitted detector of metrics (experiments/minder.py train); none: only "
        "progress and step times are judged",
    )
    continuity_s: float = option(
        240.0, "how long a machine must differ before it is named", "s", at_least=10, at_most=900
    )
    clear_s: float = option(
        600.0,
        "how long a named machine must be like the others before it can be named again",
        "s",
        above=0,
    )
    strict: float = option(1.0, "factor on the limits of the model; above 1: fewer alerts", above=0)
    hang_s: float = option(
        10.0, "how long all others must wait for a rank before it is named", "s", at_least=1
    )
    evictions_per_day: int = option(2, "most hosts that are evicted in a day", at_least=0)
    record: str | None = option(
        None, "file (.csv.gz) to which the hosts' metrics are written, to fit a detector on"
    )
    pulse_every: int = option(
        10, "steps between two timings of a fixed product on each device; 0: none", at_least=0
    )
    user: str | None = option(None, "user name at the metrics server (--prometheus)")
    password_file: str | None = option(None, "file whose first line is that user's password")
    token_file: str | None = option(None, "file whose first line is a bearer token for the server")
    ca_file: str | None = option(
        None, "PEM file of the authority that signed the server's certificate"
    )

    def server(self, url: str | None) -> dict[str, Any] | None:
        """Returns the arguments of sources.prometheus, None without a server."""
        if url is None:
            return None
        return {
            "url": url,
            "user": self.user,
            "ca_file": self.ca_file,
            "password": first_line(self.password_file, "minder.password_file"),
            "token": first_line(self.token_file, "minder.token_file"),
        }

    def check(self, url: str | None) -> None:
        """Raises: UserError for options that do not fit together, before anything starts."""
        if url is not None and self.model is None:
            raise UserError(
                "prometheus: a server's metrics need a fitted detector to judge them; make one: "
                "experiments/minder.py train --prometheus=URL (--minder.model)"
            )
        if self.model is not None and not expand(self.model, "minder.model").is_file():
            raise UserError(f"minder.model={self.model} is no file (--minder.model)")
        self.server(url)


def first_line(path: str | None, flag: str) -> str | None:
    """Returns the first line of a file. Raises: UserError without its content."""
    if path is None:
        return None
    try:
        lines = files.read_bytes(expand(path, flag), 2**16).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{flag}={path} cannot be read: {why} (--{flag})") from None
    if not lines or not lines[0]:
        raise UserError(f"{flag}={path} is empty (--{flag})")
    return lines[0]
