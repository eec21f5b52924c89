"""SIGINT and SIGTERM while a fit runs: they are noted, so that it can end where nothing is lost."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it, and cannot bring it back where a second Ctrl-C ends the process


class StopSignals:
    """Inside ``with StopSignals() as signals``, the first signal is kept in ``signals.received``; a SIGINT after it
    ends the process at once. In other threads than the main one, and for signals that are ignored, all stays as it is.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        told = f"\n{self.received.name}: ending after this step, with a checkpoint. Ctrl-C ends at once, without.\n"
        # Not by print: the signal may have come in the middle of one.
        os.write(2, (told + (SHOW_CURSOR if sys.stderr.isatty() else "")).encode())
