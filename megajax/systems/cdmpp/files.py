"""The file of a predictor: an npz archive without pickles."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx

from megajax.core.errors import UserError
from megajax.cost.record import FEATURES, KINDS, LEAF, LEAF_FEATURES, OPCODES
from megajax.systems.cdmpp.calibration import Errors
from megajax.systems.cdmpp.dataset import card_as_json, card_of_json, load_arrays, save_arrays
from megajax.systems.cdmpp.network import Device, Network
from megajax.systems.cdmpp.physics import INPUTS, TILES, TIMES
from megajax.systems.cdmpp.ranges import Ranges
from megajax.systems.cdmpp.train import Scale

VERSION = 3
DEFAULT = pathlib.Path(__file__).with_name("default.npz")
_OWN = ("traits", "shift", "offsets")
_SCALE = ("mean", "deviation", "low", "high")


def _layout() -> list[Any]:
    """Returns the names that give each weight of the networks its meaning.

    A file that was written with other names belongs to another version of megajax.
    """
    return [VERSION, FEATURES, KINDS, OPCODES, LEAF_FEATURES, TILES, TIMES]


def save(predictor: Any, path: str | os.PathLike[str]) -> None:
    """Writes a predictor."""
    leaves = jax.tree.leaves(predictor.states)
    names = list(predictor.devices)
    arrays = {f"weight{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    arrays |= {f"scale {part}": getattr(predictor.scale, part) for part in _SCALE}
    for part in _OWN:
        arrays[f"device {part}"] = np.stack(
            [np.asarray(getattr(predictor.devices[name], part), np.float32) for name in names]
        )
    head = {
        "layout": _layout(),
        "weights": len(leaves),
        "devices": names,
        "trained": list(predictor.trained),
        "cards": [card_as_json(card, name) for name, card in predictor.cards.items()],
        "ranges": dataclasses.asdict(predictor.ranges),
        "learnt": {name: dataclasses.asdict(found) for name, found in predictor.learnt.items()},
        "errors": {k: [e.every, e.kinds.tolist()] for k, e in predictor.errors.items()},
        "facts": dict(predictor.facts),
    }
    save_arrays(path, {"head": np.array(json.dumps(head)), **arrays})


def load(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Returns the fields of a predictor. Raises: UserError if the file cannot be one."""
    if path is None and not DEFAULT.exists():
        raise UserError("this megajax ships no trained predictor: name a file, or fit one")
    path = DEFAULT if path is None else path
    arrays = load_arrays(path, "predictor")
    try:
        head = json.loads(str(arrays["head"]))
        if head["layout"] != json.loads(json.dumps(_layout())):
            raise UserError(f"{path} is of another version of megajax: fit the predictor again")
        scale = Scale(*(arrays[f"scale {part}"] for part in _SCALE))
        graph, states = _network(arrays, head)
        parts = [arrays[f"device {part}"] for part in _OWN]
        devices = {name: Device(*(p[i] for p in parts)) for i, name in enumerate(head["devices"])}
        return {
            "graph": graph,
            "states": states,
            "scale": scale,
            "ranges": Ranges(**head["ranges"]),
            "devices": devices,
            "learnt": {name: Ranges(**found) for name, found in head.get("learnt", {}).items()},
            "cards": dict(card_of_json(entry) for entry in head["cards"]),
            "errors": {k: Errors(e, np.array(kinds)) for k, (e, kinds) in head["errors"].items()},
            "trained": head["trained"],
            "facts": head["facts"],
        }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no predictor of megajax, or it is damaged: {error}") from error


def _network(arrays: dict[str, np.ndarray], head: dict[str, Any]) -> tuple[Any, Any]:
    leaves = [arrays[f"weight{i}"] for i in range(head["weights"])]
    module = nnx.eval_shape(lambda: Network(INPUTS, LEAF, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    structure = jax.tree.structure(state)
    wanted = [leaf.shape for leaf in jax.tree.leaves(state)]
    if [leaf.shape[1:] for leaf in leaves] != wanted or not all(
        np.isfinite(x).all() for x in leaves
    ):
        raise ValueError("the weights are not those of the network")
    return graph, jax.tree.unflatten(structure, leaves)
