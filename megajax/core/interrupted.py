"""What signals do to a script from its first line on: Ctrl-C, SIGUSR1 and SIGUSR2.

Ctrl-C while a script still imports its dependencies gives one line in place of a traceback. From
`config.run` on, scripts handle Ctrl-C themselves. The process still ends by SIGINT, which shells
show as code 130. SIGUSR1 writes the Python stacks of all threads to standard error, and the process
goes on; under supervision a trainer writes them beside its progress record instead
(monitor/heartbeat.py). SIGUSR2 does nothing. By default both would end the process, and people send
them to look. Every script imports this module before all others (ruff's section `first`). Importing
it sets sys.excepthook and signal handlers, so no library module may import it. If the command line
asks for help, packages that take seconds to import are not imported (core/placeholders.py).
"""

import faulthandler
import signal
import sys
import threading
from types import TracebackType


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _show
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # a program that we start has none
if threading.current_thread() is threading.main_thread():
    signal.signal(
        signal.SIGUSR2, lambda *_: None
    )  # ignored, a shell that we start could not trap it


def _answer_help_soon() -> None:
    if not any(word.startswith(("-h", "--h", "-?")) for word in sys.argv[1:]):
        return  # other command lines import nothing here
    # Not at the top: Ctrl-C while these are imported is one line too.
    from megajax.core import placeholders, script

    if script.asked(sys.argv) is not None:
        placeholders.install()


_answer_help_soon()
