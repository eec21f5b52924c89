"""Checkpoints are written by a thread, so that training need not wait for the disk."""

import threading

from torch import Tensor

from semclust.run_folder import RunFolder


class CheckpointWriter:
    """Writes one checkpoint at a time. A failure of the disk is told by ``settle``; anything else is raised there."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def write(self, state: dict[str, Tensor], epoch: int, seconds: float) -> None:
        """Begin to write ``state``, which must not change any more; ``seconds``: that the run took until now."""
        assert self._thread is None, "settle() first: the one before may still be written"

        def write() -> None:
            try:
                self.run.write_checkpoint(state, epoch)
                self.run.write_seconds(seconds)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=write, name="semclust-checkpoint")
        self._thread.start()

    def settle(self) -> OSError | None:
        """Wait until nothing is being written any more; what kept the last checkpoint from being written, if so."""
        if self._thread is None:
            return None
        self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        return failure
