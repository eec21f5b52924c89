"""SIGINT and SIGTERM while a fit runs: they are noted, so that it can end where nothing is lost."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from semclust.distributed import ALONE, Group
from semclust.errors import StoppedError

SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it, and cannot bring it back where a second Ctrl-C ends the process


class _Terminated(BaseException):
    """No Exception, as KeyboardInterrupt is none: where compiling fails, for one, those are taken for its failures."""


@contextlib.contextmanager
def ended_by_sigterm(message: str) -> Iterator[None]:
    """While there is nothing yet that would be lost: SIGTERM raises StoppedError with the message, as Ctrl-C raises
    KeyboardInterrupt. In other threads than the main one, and where it is ignored, all stays as it is."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Terminated:
        raise StoppedError(message, 128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class StopSignals:
    """Inside ``with StopSignals() as signals``, the first signal is kept in ``signals.received``; a SIGINT after it
    ends the process at once. In other threads than the main one, and for signals that are ignored, all stays as it is.

    Of several processes the first tells so, and no second SIGINT ends one: torchrun passes on what the terminal has
    sent to all, and itself kills what does not end in half a minute.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self.group = group
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        # SIGINT at last: a SIGTERM that comes in between still sets it, see _note.
        for number, handler in reversed(self._before.items()):
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = self.received or signal.Signals(number)  # torchrun sends SIGTERM after the terminal's SIGINT
        told = f"\n{self.received.name}: ending after this step, with a checkpoint."
        if not self.group.alone and (again or not self.group.first):
            return
        if self.group.alone and signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            told += " Ctrl-C ends at once, without."
        told += "\n"
        # Not by print: the signal may have come in the middle of one.
        os.write(2, (told + (SHOW_CURSOR if sys.stderr.isatty() else "")).encode())
