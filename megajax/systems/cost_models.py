"""The cost model that a flag names: what planners ask for times."""

from typing import Literal

from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.cost.base import CostModel
from megajax.cost.roofline import Roofline
from megajax.cost.table import Table

Name = Literal["roofline", "table"]


def load(name: Name, path: str | None) -> CostModel:
    """Returns the model. path: of a table its JSON file.

    Raises: UserError where the file is missing, unreadable or not asked for.
    """
    if name == "roofline":
        if path is not None:
            raise UserError(f"cost_file={path} needs --cost=table (--cost_file, --cost)")
        return Roofline()
    if path is None:
        raise UserError("cost=table needs a file of measured times (--cost_file, --cost)")
    return Table.load(expand(path, "cost_file"))
