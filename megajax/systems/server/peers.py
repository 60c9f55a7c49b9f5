"""Several processes, one engine: they make the same calls in the same order.

Process 0 has the HTTP server. Before each step it writes what it is about to ask the engine into
the key-value store of jax.distributed, under the number of the step; the others read it and do the
same. An engine decides by what it is asked alone, so all processes start the same programs. A step
is a computation of all of them: when step i has been read, every process has read what came before
it, so older entries are deleted.
"""

import json
from typing import Any

from megajax.core import mesh
from megajax.serving import Engine, SamplingParams, StructuredOutputsParams

FOLDER = "megajax/serve"
KEPT = 8  # (chosen) entries behind the newest that are not deleted yet
WAIT_MS = 10_000  # (chosen) of one call; nobody may ask for hours


class Peers:
    """What process 0 tells."""

    def __init__(self):
        """Nothing has been told."""
        self._store, self._number = mesh.job_store(), 0

    def tell(self, commands: list[tuple[str, Any, SamplingParams | None]] | None) -> None:
        """Tells the commands before the next step; None: there is none any more."""
        self._store.key_value_set(f"{FOLDER}/{self._number}", encode(commands))
        if self._number >= KEPT:
            self._store.key_value_delete(f"{FOLDER}/{self._number - KEPT}")
        self._number += 1


def follow(engine: Engine) -> None:
    """Does in this process what process 0 tells, until it says that it ends."""
    store, number = mesh.job_store(), 0
    while (commands := decode(_wait(store, f"{FOLDER}/{number}"))) is not None:
        for verb, what, params in commands:
            if verb == "cancel":
                engine.cancel(what)
            else:
                try:
                    engine.submit(what, params)  # type: ignore[arg-type]
                except Exception:
                    pass  # process 0 has the same, and answers it
        if engine.busy:
            engine.step()
        number += 1


def _wait(store: Any, key: str) -> str:
    while True:
        try:
            return store.blocking_key_value_get(key, WAIT_MS)
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def encode(commands: list[tuple[str, Any, SamplingParams | None]] | None) -> str:
    """Returns commands as JSON."""
    if commands is None:
        return "null"
    return json.dumps([(verb, what, _plain(params)) for verb, what, params in commands])


def _plain(params: SamplingParams | None) -> dict[str, Any] | None:
    if params is None:
        return None
    found = {k: getattr(params, k) for k in params.__dataclass_fields__}
    form = params.structured_outputs
    if form is not None:
        found["structured_outputs"] = {k: getattr(form, k) for k in form.__dataclass_fields__}
    return found


def decode(text: str) -> list[tuple[str, Any, SamplingParams | None]] | None:
    """Returns what `encode` was given."""
    found = json.loads(text)
    return None if found is None else [(v, what, _params(given)) for v, what, given in found]


def _params(given: dict[str, Any] | None) -> SamplingParams | None:
    if given is None:
        return None
    if given["structured_outputs"] is not None:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)
