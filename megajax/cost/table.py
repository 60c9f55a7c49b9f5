"""A table of measured times as a cost model: rows by `Op.key`, from a JSON file.

    {"device": "H100", "rows": [
        {"kernel": "matmul", "shape": [4096, 4096, 4096, 1], "seconds": 2.1e-4, "sigma": 4e-6,
         "dtypes": ["bfloat16", "bfloat16", "bfloat16"]}, ...]}

`kernel`, `shape` and `dtypes` are the three members of `Op.key`; seconds and sigma (the standard
deviation) are of one execution. Another cost model, the fallback, gives the times of operations
that the table does not have, with one warning for each kernel.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import DeviceCard, Link
from megajax.cost.base import CostModel, Op
from megajax.cost.roofline import Roofline

Key = tuple[str, tuple, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Measured times of one device.

    rows: {Op.key: (seconds, standard deviation)}. fallback: the cost model for operations without a
    row, for transfers and for memory.
    """

    device: str
    rows: Mapping[Key, tuple[float, float]]
    fallback: CostModel = Roofline()
    _told: set[str] = dataclasses.field(default_factory=set, repr=False)

    @classmethod
    def load(cls, path: Path, fallback: CostModel = Roofline()) -> "Table":
        """Returns the table of a file. Raises: UserError if it cannot be read or is none."""
        try:
            table = json.loads(path.read_text())
            rows: dict[Key, tuple[float, float]] = {}
            for row in table["rows"]:
                key = str(row["kernel"]), tuple(row["shape"]), tuple(map(str, row["dtypes"]))
                seconds, sigma = float(row["seconds"]), float(row.get("sigma", 0.0))
                if not (0 < seconds < float("inf") and 0 <= sigma < float("inf")):
                    raise ValueError(
                        f"{row['kernel']} {row['shape']} takes {seconds} s, sigma {sigma} s"
                    )
                rows[key] = seconds, sigma
            return cls(str(table["device"]), rows, fallback)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror} (--cost_file)") from None
        except (KeyError, TypeError, ValueError) as error:
            said = f"member {error} is missing" if isinstance(error, KeyError) else error
            raise UserError(f"{path} is no table of times: {said} (--cost_file)") from None

    def op_time(self, op: Op, device: DeviceCard, dtype: str | None = None) -> tuple[float, float]:
        """Returns (seconds of one execution, their standard deviation).

        Raises: UserError for a device that the table was not measured on.
        """
        if device.name != self.device:
            near = did_you_mean(device.name, [self.device])
            raise UserError(
                f"the table has times of {self.device}, not of {device.name}.{near} "
                "(--cost_file, --cluster)"
            )
        op = op if dtype is None else op.cast(dtype)
        if (row := self.rows.get(op.key)) is not None:
            return row
        kernel = op.kernel.name
        if kernel not in self._told:
            self._told.add(kernel)
            warnings.warn(
                f"the table of {self.device} has no row of some {kernel} of shape "
                f"{op.kernel.shape}; such operations are estimated by "
                f"{type(self.fallback).__name__}",
                stacklevel=2,
            )
        return self.fallback.op_time(op, device)

    def transfer_time(self, nbytes: float, link: Link) -> float:
        """Returns seconds from one device to another, as the other model says."""
        return self.fallback.transfer_time(nbytes, link)

    def memory(self, trees: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Returns bytes a device by name, as the other model says."""
        return self.fallback.memory(trees)
