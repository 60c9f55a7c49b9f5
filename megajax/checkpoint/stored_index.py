"""Where the arrays of a step lie in its files, as OCDBT's own index says. No jax."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.checkpoint.store import kvstore


def stored_values(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yields (leaf, file, begin, end) for each chunk of the arrays of a step, from OCDBT's index.

    What lies in the index itself (arrays below 1 kB) is not yielded. Raises: what tensorstore does.
    """
    import tensorstore as ts  # here: only damage and tools ask

    base: Any = ts.KvStore.open(kvstore(folder / "state")).result()
    root: Any = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    todo = [root]
    while todo:
        entries: Any = ts.ocdbt.dump(base, todo.pop()).result()["entries"]
        for entry in entries:
            if "location" in entry:
                todo.append(entry["location"])
            elif "indirect_value" in entry:
                # value:<folder>:<file>:<offset>:<length>
                _, home, file, offset, length = entry["indirect_value"].split(":")
                key = entry["key"]
                text = ast.literal_eval(key) if isinstance(key, str) else key
                leaf = text.decode().rpartition("/c")[0]
                begin = int(offset)
                yield leaf, f"state/{home}{file}", begin, begin + int(length)
