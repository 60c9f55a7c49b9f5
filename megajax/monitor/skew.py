"""How far apart the hosts of a job launch the same step (MegaScale section 6.3).

Skew that grows was MegaScale's slow decay of MFU: hosts that come late make all others wait in the
first collective. Every host puts the moment of its launch into the job's key-value store, which
costs no device time and no wait for others; the first host reads a step's moments once that step is
done, when all of them must be there. The hosts' clocks must be synchronised: their difference is
part of the figure.
"""

import time
from typing import Any

import jax

from megajax.core import mesh

FOLDER = "megajax/launch"


class LaunchSkew:
    """Call `launch` before a step's dispatch and `finish` when it is done."""

    def __init__(self, store: Any = None, host: int = 0):
        """store: of the job; None: alone, and nothing is measured. host: number of this process."""
        self._store, self._host = store, host

    @classmethod
    def of_job(cls) -> "LaunchSkew":
        """Returns the one of this process."""
        return cls(mesh.job_store(), jax.process_index())

    def launch(self, step: int) -> None:
        """Notes this host's moment."""
        if self._store is not None:
            # A training that ended by an error may have left its moment of this step there.
            key, moment = f"{FOLDER}/{step}/{self._host}", repr(time.time())
            self._store.key_value_set(key, moment, allow_overwrite=True)

    def finish(self, step: int) -> dict[str, float]:
        """Returns {'launch_skew_s': last host's moment - first host's}, on the first host of a job.

        The moments of the step are then forgotten.
        """
        if self._store is None or self._host != 0:
            return {}
        moments = [float(v) for _, v in self._store.key_value_dir_get(f"{FOLDER}/{step}/")]
        self._store.key_value_delete(f"{FOLDER}/{step}/")
        return {"launch_skew_s": max(moments) - min(moments)} if moments else {}
