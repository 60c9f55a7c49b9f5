"""What the hosts of a run showed, as a long CSV of sources/files.py, to fit a detector on.

No jax import.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path

from megajax.core.errors import UserError
from megajax.monitor.records import Record
from megajax.monitor.slow_rank import METRICS

MOST_BYTES = 2**30  # (chosen) of rows, before they are compressed; a disk has room for more


class RecordFile:
    """Writes the metrics of hosts; a disk that takes no more ends it and nothing else."""

    def __init__(self, path: Path):
        """Replaces a file. path: ends with .csv.gz. Raises: UserError when it cannot be written."""
        if not path.name.endswith(".csv.gz"):
            raise UserError(
                f"minder.record={path} must end with .csv.gz; nearest: {path}.csv.gz "
                "(--minder.record)"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = gzip.open(path, "wt", compresslevel=1)
        except OSError as error:
            raise UserError(f"minder.record={path}: {error.strerror} (--minder.record)") from None
        self._bytes = self._file.write("timestamp,machine,metric,value\n")

    def write(self, records: Sequence[Record]) -> None:
        """Adds the records that are metrics of machines."""
        rows = []
        for r in records:
            if r.name in METRICS and isinstance(r.value, int | float):
                labels = [f'{n}=""{v}""' for n, v in (("rank", r.rank), ("device", r.device))
                          if v is not None]  # fmt: skip
                name = f'"{r.name}{{{",".join(labels)}}}"' if labels else r.name
                host = r.host.replace('"', '""')
                rows.append(f'{r.time:.3f},"{host}",{name},{float(r.value)!r}\n')
        if rows and self._bytes < MOST_BYTES:
            try:
                self._bytes += self._file.write("".join(rows))
            except OSError:
                self._bytes = MOST_BYTES

    def close(self) -> None:
        """Writes what is left."""
        try:
            self._file.close()
        except OSError:
            return
