"""Shows the counters of this host, or of one group of processes, to a Prometheus server.

    uv run scripts/agent_metrics.py --host=0.0.0.0 --port=9101
    uv run scripts/agent_metrics.py --port=9102 --pid=4711        # a process group
    uv run scripts/agent_metrics.py --port=9103 --cgroup=jobs/7   # a control group

For hosts where neither node_exporter nor dcgm-exporter runs; the names are theirs. GPUs are read
through NVML where there is a driver. The counters are at http://HOST:PORT/metrics, for everybody
who reaches the port. SIGTERM and Ctrl-C end it with exit code 0; 2: a flag cannot be.
"""

import megajax.core.interrupted  # noqa: F401

import argparse
import signal
import sys
import threading
from pathlib import Path

from megajax.core.errors import UserError
from megajax.monitor import exporter


def main(arguments: list[str]) -> int:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all of this host")
    add("--port", type=int, default=9101, help="port to listen at; 0: any free port")
    add("--pid", type=int, help="show only the process group of this process")
    add("--cgroup", help="show only this control group, as a path below /sys/fs/cgroup")
    add(
        "--folder",
        type=Path,
        default=Path("/"),
        help="folder on the disk whose free space is shown",
    )
    flags = parser.parse_args(arguments)
    try:
        if flags.pid is not None and flags.cgroup is not None:
            raise UserError("give --pid or --cgroup, and not both")
        if flags.pid is not None:
            shown = exporter.Group(flags.pid)
        elif flags.cgroup is not None:
            shown = exporter.Cgroup(flags.cgroup)
        else:
            shown = exporter.Host(folder=flags.folder)
        server = exporter.Server(flags.host, flags.port, shown.rows)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"serving http://{server.address}/metrics", flush=True)
    with server:
        server.serve_forever(poll_interval=0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
