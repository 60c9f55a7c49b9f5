"""Ctrl-C while a script still imports its dependencies: one line in place of a traceback.

Every script imports this module before all others (ruff's section `first`). From `config.run` on,
scripts handle Ctrl-C themselves. The process still ends by SIGINT, which shells show as code 130.
Importing this sets sys.excepthook, so no library module may import it.
"""

import sys
from types import TracebackType


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _show
