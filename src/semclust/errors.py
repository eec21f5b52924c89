"""What semclust raises. Every message names the value, what was expected and the next step."""


class SemclustError(Exception):
    """Any error that semclust foresees; the command line prints it without a traceback."""


class InputError(SemclustError, ValueError):
    """Data, a setting or a path that cannot be used."""


class DamagedFileError(SemclustError, ValueError):
    """A checkpoint or model folder that is not what semclust wrote."""


class TrainingError(SemclustError, RuntimeError):
    """A run that cannot go on, such as one whose loss is not finite."""


class GroupError(SemclustError, RuntimeError):
    """Another process of the same job has ended, or was never reached."""


class NotFiniteError(TrainingError):
    """Several steps in a row, or the weights after them, were not finite."""


class StoppedError(SemclustError):
    """A signal asked a fit to end. ``status`` is what the process exits with: 128 and the signal's number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def in_short(error: Exception) -> str:
    """What another library says went wrong, in a few words on one line."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())[:120]
    return text if text and isinstance(error, (OSError, ValueError)) else f"{type(error).__name__} {text}".strip()
