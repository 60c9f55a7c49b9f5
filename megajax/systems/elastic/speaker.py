"""What the driver prints, through a thread: a terminal that is stopped must not stop the driver.

Output that nobody takes, because of a full disk, a closed pipe or a paused terminal, is dropped.
"""

import contextlib
import queue
import threading
from typing import TextIO

from megajax.monitor.records import Lossy

TEXTS = 1000  # (chosen) that wait to be printed; a text is at most what a log grows in a period
LAST_S = 2.0  # (chosen) for the last of them at the end


class Speaker:
    """Prints texts in order."""

    def __init__(self) -> None:
        """Prints nothing yet."""
        self._texts: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(TEXTS)
        self._dropped = 0
        self._thread = threading.Thread(target=self._print, name="speaker", daemon=True)
        self._thread.start()

    def say(self, stream: TextIO, text: str) -> None:
        """Prints a text as it is, soon. Never waits."""
        with contextlib.suppress(queue.Full):
            if self._dropped:
                self._texts.put_nowait((stream, f"[{self._dropped} texts were not printed]\n"))
                self._dropped = 0
            self._texts.put_nowait((stream, text))
            return
        self._dropped += 1

    def close(self) -> None:
        """Waits a little for what is still to be printed."""
        with contextlib.suppress(queue.Full):
            self._texts.put(None, timeout=LAST_S)
            self._thread.join(LAST_S)

    def _print(self) -> None:
        while (next_ := self._texts.get()) is not None:
            stream = Lossy(next_[0])
            with contextlib.suppress(ValueError):  # it is closed
                stream.write(next_[1])
                stream.flush()
