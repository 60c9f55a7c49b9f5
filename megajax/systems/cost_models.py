"""The cost model that a flag names: what planners ask for times."""

from typing import Literal

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.hardware import DeviceCard
from megajax.cost.base import CostModel
from megajax.cost.roofline import Roofline
from megajax.cost.table import Table

Name = Literal["roofline", "learned", "table"]


def load(name: Name, path: str | None) -> CostModel:
    """Returns the model. path: of a learned one what `Predictor.save` wrote; None: the one that
    ships with megajax. Of a table its JSON file.

    Raises: UserError where the file is missing, damaged or not asked for.
    """
    if name == "roofline":
        if path is not None:
            raise UserError(
                f"cost_file={path} needs --cost=learned or --cost=table (--cost_file, --cost)"
            )
        return Roofline()
    file = None if path is None else expand(path, "cost_file")
    if name == "table":
        if file is None:
            raise UserError("cost=table needs a file of measured times (--cost_file, --cost)")
        return Table.load(file)
    from megajax.systems.cdmpp.backend import Learned  # a plan by the roofline needs no network
    from megajax.systems.cdmpp.predictor import Predictor

    return Learned(Predictor.load(file))


def source(model: CostModel, name: Name, path: str | None, card: DeviceCard, others: str) -> str:
    """Returns where a plan's times come from, as text. path: as in `load`. others: of the times
    that the model does not know."""
    if name == "roofline":
        return others
    file = path or "the predictor that ships with megajax"
    text = f"operations from {file}, the others and transfers from {others}"
    if name == "table":
        return text
    from megajax.systems.cdmpp.backend import Learned  # as above

    assert isinstance(model, Learned)
    if model.unknown(card):
        return others
    return f"{text}. {model.basis(card).rstrip('.')}"


def unknown(model: CostModel, card: DeviceCard) -> str:
    """Returns a sentence if a learned model has no rows of compiled programs of a GPU; else ''."""
    if isinstance(model, (Roofline, Table)):
        return ""
    from megajax.systems.cdmpp.backend import Learned  # as above

    assert isinstance(model, Learned)
    return model.unknown(card)
