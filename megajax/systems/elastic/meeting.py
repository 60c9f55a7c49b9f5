"""Where the agents of other hosts find the driver, and how an operator does. No jax import."""

import json
import os
import socket
import sys
from pathlib import Path

from megajax.core.errors import UserError
from megajax.systems.elastic.wire import join_address, split_address

BACKLOG = 1024  # (chosen) connections that wait to be accepted


def listen(where: str) -> socket.socket:
    """Returns the socket that agents come to. Raises: UserError."""
    host, port = split_address(where, "--listen")
    try:
        if ":" not in host:
            return socket.create_server((host, port), backlog=BACKLOG)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise UserError(f"cannot listen on {where}: {error} (--listen)") from None


def own_address(listener: socket.socket) -> str:
    """Returns what an agent of this machine dials."""
    host, port = listener.getsockname()[:2]
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def announce(file: Path, address: str, secret: str) -> None:
    """Leaves what --evict needs, for this user only."""
    try:
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump({"address": address, "token": secret}, out)
    except OSError as error:
        print(f"no {file}: {error.strerror}; --evict will not find this driver", file=sys.stderr)


def invitation(host: str, port: int, out: Path) -> str:
    """Returns how agents of other hosts are started. host: that the driver listens on."""
    near = host.startswith("127.") or host in ("::1", "localhost")
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
    place = join_address(name, port)
    return (
        f"; on each of them: scripts/supervise.py --agent={place}, with MEGAJAX_TOKEN set to "
        f"the token in {out / 'driver.json'}"
    ) + (f"; only this machine reaches {host} (--listen)" if near else "")
