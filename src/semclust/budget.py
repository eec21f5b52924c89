"""Time as a budget: how many epochs fit into the minutes that a fit may take, and how to keep to them.

Before the first epoch the parts of an epoch are timed on the run itself, which is then set back to its start, and the
number of epochs is chosen once: the run is the same as one of so many epochs. Only where even the fewest epochs would
take longer, or the machine turns out slower or faster than it was, does an epoch get fewer or more steps. What was
decided lies in the run folder, so that an interrupted run goes on by it.
"""

import bisect
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from semclust.config import is_number
from semclust.devices import own_random_numbers, seconds_of
from semclust.engine import PLAIN_STEPS, fast_kernels
from semclust.errors import DamagedFileError, InputError, plural
from semclust.plan import FEWEST_EPOCHS, STEPS_AN_EPOCH
from semclust.train import Training

MOST_EPOCHS = 1_000_000  # to plan more would take long, and they would bring nothing
TIMED_EPOCHS = 40  # of the plan whose epochs are timed: enough to have every kind of them
AIM = 0.94  # share of the budget that is planned: checkpoints and figures take a little, too
EARLY, LATE = 0.88, 0.99  # shares of the budget: while a run is to end between them, its epochs stay whole
ENOUGH_SECONDS = 0.1  # that steps are timed for
LONG = 1.0  # seconds, from which on work is timed once
LEAST_OF_AN_EPOCH, MOST_OF_AN_EPOCH = 0.01, 20.0  # times its steps, that an epoch may take to catch up or fill in
MORE = 1.1  # times the time that was found to be needed, to be on the safe side
LATEST = 0.1  # share of the epochs, by whose time the speed of the machine is judged

Kind = tuple[str, str]  # what an epoch learns, and what it parts at its end: see ``Training.kind_of_epoch``


class Planned(Protocol):
    """What a run says of its epochs, and hears of them."""

    n_batches: int  # in a whole epoch
    on_notice: Callable[[str], None]

    def kind_of_epoch(self, epoch: int) -> Kind: ...


@dataclass
class Schedule:
    """What was decided for a run, and the times that it was decided by."""

    epochs: int
    steps: dict[str, float]  # seconds of an epoch's steps, by what it learns
    renewal: dict[str, float]  # seconds of an epoch's end, by what it learns and parts
    end: float  # seconds after the last epoch
    start: float = 0.0  # seconds before the first one, most of them to take these times
    shares: list[float] = field(default_factory=list)  # of their steps that the epochs took, as far as decided

    def seconds(self, kinds: Iterable[Kind], share: float = 1.0) -> float:
        """Of epochs of these kinds that take this share of their steps. A kind that was not met when times were taken,
        as that plan had other epochs, is as slow as the slowest."""
        steps, renewal = max(self.steps.values()), max(self.renewal.values())
        return sum(
            n * (share * self.steps.get(kind[0], steps) + self.renewal.get("; ".join(kind), renewal))
            for kind, n in Counter(kinds).items()
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], source: Path) -> "Schedule":
        try:
            made = cls(**values)
            made.check()
            return made
        except (TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"{source} is damaged ({error}). Restore it from a copy, or fit anew.") from error

    def check(self) -> None:
        """Raise ValueError, or what Python raises, where it cannot be a schedule."""
        if not is_number(self.epochs, whole=True) or not 1 <= self.epochs <= MOST_EPOCHS:
            raise ValueError("epochs out of range")
        times = [*self.steps.values(), *self.renewal.values(), self.start, self.end]
        if not self.steps or not self.renewal or not all(is_number(time) and 0 <= time < 1e9 for time in times):
            raise ValueError("times out of range")
        if not isinstance(self.shares, list) or len(self.shares) > self.epochs:
            raise ValueError("shares are no list, or of too many epochs")
        if not all(is_number(share) and 0 < share <= MOST_OF_AN_EPOCH for share in self.shares):
            raise ValueError("shares out of range")


class Pace:
    """Keeps a run to its budget, from epoch to epoch."""

    def __init__(
        self, schedule: Schedule, plan: Planned, minutes: float, seconds: Callable[[], float], resumed: bool = False
    ):
        """``seconds``: that the run has taken so far, also before an interruption."""
        # The plan itself is not kept: it is a whole training, which is to be gone before it is made anew.
        self.kinds = [plan.kind_of_epoch(epoch) for epoch in range(schedule.epochs)]
        self.n_batches, self.on_notice = plan.n_batches, plan.on_notice
        self.schedule, self.budget, self.seconds = schedule, 60 * minutes, seconds
        self.latest: tuple[float, float] | None = None  # when the latest epoch began, and how long it was to take
        self.latest_epoch = -1
        self.times: list[tuple[float, float]] = []  # that each epoch took, and that it was expected to take
        self.unlike_others = resumed  # the first epoch after an interruption compiles and records again

    def share(self, epoch: int) -> float:
        """Of the steps of a whole epoch that the next one, ``epoch``, takes. To be asked before each, once."""
        now, first = self.seconds(), self.latest_epoch < 0
        if epoch <= self.latest_epoch:  # the run went back, after steps that were not finite
            del self.schedule.shares[epoch + 1 :]  # there is less time left than when they were decided
            self.latest, self.unlike_others = None, True
        self.latest_epoch = epoch
        if self.latest is not None and not self.unlike_others:
            self.times.append((now - self.latest[0], self.latest[1]))
        self.unlike_others = self.unlike_others and self.latest is None
        decided = self.schedule.shares
        decided += [1.0] * (epoch - len(decided))  # of epochs that are done, and whose share was lost: it plays no part
        if epoch == len(decided):
            decided.append(self._choose(epoch, now))
        if first and self.schedule.epochs == FEWEST_EPOCHS and decided[0] < 1:
            enough = MORE * (self.schedule.start + self.schedule.seconds(self.kinds) + self.schedule.end) / AIM / 60
            self.on_notice(
                f"{self.budget / 60:g} minutes are too few for {FEWEST_EPOCHS} whole epochs, the fewest that make "
                f"sense: each takes about {decided[0]:.0%} of its {plural(self.n_batches, 'step')}. "
                f"About {rounded_up(enough):g} minutes would do."
            )
        share = decided[epoch]  # of an epoch that is repeated after an interruption: as it was
        self.latest = now, self.schedule.seconds([self.kinds[epoch]], share)
        return share

    def _choose(self, epoch: int, now: float) -> float:
        kinds, slowness = self.kinds[epoch:], self._slowness()
        whole = slowness * (self.schedule.seconds(kinds) + self.schedule.end)
        steady = set(self.schedule.shares[-1:]) <= {1.0}  # once an epoch was not whole, all follow the clock closely
        if steady and EARLY * self.budget <= now + whole <= LATE * self.budget:
            return 1.0
        fixed = slowness * (self.schedule.seconds(kinds, share=0.0) + self.schedule.end)
        left = AIM * self.budget - now - fixed
        return min(MOST_OF_AN_EPOCH, max(LEAST_OF_AN_EPOCH, left / max(1e-9, whole - fixed)))

    def _slowness(self) -> float:
        """Times that the latest epochs took the time they were expected to take; 1 while there are too few to tell."""
        enough = max(1, round(LATEST * self.schedule.epochs))
        latest = self.times[-enough:]
        if len(latest) < enough:
            return 1.0
        took, expected = map(sum, zip(*latest, strict=True))
        return max(1e-3, took / expected)


def make_schedule(training: Training, minutes: float, seconds: Callable[[], float]) -> Schedule:
    """Time the run's epochs and plan it, still at its start, for as many as fit; or for the fewest, with as many of
    their steps as fit, which are still as many as those of a small set."""
    training.set_epochs(TIMED_EPOCHS)
    schedule = measure(training)
    schedule.start = seconds()
    left = AIM * 60 * minutes - schedule.start - schedule.end

    def takes(epochs: int, share: float = 1.0) -> float:
        training.set_epochs(epochs)
        return schedule.seconds(map(training.kind_of_epoch, range(epochs)), share)

    fewest_steps = min(training.n_batches, max(STEPS_AN_EPOCH, math.ceil(LEAST_OF_AN_EPOCH * training.n_batches)))
    least = takes(FEWEST_EPOCHS, fewest_steps / training.n_batches)
    if least > left:
        smallest = (least - left) / AIM / 60 + minutes
        raise InputError(
            f"minutes={minutes:g} is too short: {FEWEST_EPOCHS} epochs of {plural(fewest_steps, 'step')}, the fewest "
            f"that make sense, need about {rounded_up(smallest):g} minutes here. Give it "
            f"{rounded_up(MORE * smallest):g}, or a GPU, a smaller image_size or fewer images{fewer_threads(training)}."
        )
    too_many = 2 * FEWEST_EPOCHS
    while too_many <= MOST_EPOCHS and takes(too_many) <= left:
        too_many = min(2 * too_many, MOST_EPOCHS + 1)
    epochs = bisect.bisect_right(range(too_many), left, lo=FEWEST_EPOCHS + 1, key=takes) - 1
    training.set_epochs(epochs)
    schedule.epochs = epochs
    return schedule


def measure(training: Training) -> Schedule:
    """Seconds of the parts of an epoch. The run is as it was, afterwards; only what was compiled remains."""
    start = {name: tensor.clone() for name, tensor in training.state().items()}
    kinds = dict(reversed([(training.kind_of_epoch(epoch), epoch) for epoch in range(training.settings.n_epochs)]))
    steps: dict[str, float] = {}
    renewal: dict[str, float] = {}
    to_features: dict[tuple[int, int], float] = {}  # by the size of the images
    features: tuple[Any, ...] = ()  # of any epoch: to renew the labels by others takes as long

    def take_features() -> None:
        nonlocal features
        features = training.features()

    with own_random_numbers(training.settings.random_state, 0, training.device), fast_kernels(training.device):
        for kind, epoch in sorted(kinds.items(), key=lambda item: item[1]):
            learned, training.epoch = kind[0], epoch
            if learned not in steps:
                steps[learned] = seconds_of_steps(training)
            size = training.size_for(epoch)
            if size not in to_features:
                to_features[size] = usual_seconds(take_features, training)
            if training.renews_labels(epoch + 1):
                scored = training.scores_clusters(epoch + 1)
                to_score = usual_seconds(training._features_of_views, training) if scored else 0.0
                training.epoch = epoch + 1
                to_renew = usual_seconds(functools.partial(training._renew_labels, *features), training)
                renewal["; ".join(kind)] = to_features[size] + to_score + to_renew
                if training.starts_self_labels(epoch + 1):
                    renewal["; ".join(kind)] += usual_seconds(training._start_self_labels, training)
            else:
                renewal["; ".join(kind)] = usual_seconds(training.features_of_some, training)
    training.load_state(start, 0, Path("the start of the run"))
    # The last pass over the images is in full precision.
    return Schedule(0, steps, renewal, end=2 * to_features[size])


def seconds_of_steps(training: Training) -> float:
    """Of the steps of a whole epoch, judged by a few of them."""
    whole = training.n_batches
    timed = min(whole, PLAIN_STEPS + 1)
    training.try_steps(timed)  # records, where steps are recorded
    while True:
        seconds = usual_seconds(functools.partial(training.try_steps, timed), training)
        if timed == whole or seconds >= ENOUGH_SECONDS:
            return seconds * whole / timed
        timed = min(whole, 4 * timed)


def usual_seconds(work: Callable[[], Any], training: Training) -> float:
    """The lesser of two times: the first may compile, and other programs hold a machine up now and then. What takes
    long is timed once on a CPU, which compiles nothing, as it would use up the time that is there to learn."""
    seconds = seconds_of(work, training.device)
    if seconds >= LONG and training.device.type == "cpu":
        return seconds
    return min(seconds, seconds_of(work, training.device))


def fewer_threads(training: Training) -> str:
    """As an advice: threads that wait for each other are slower than one."""
    if training.device.type != "cpu" or torch.get_num_threads() == 1:
        return ""
    return "; where other programs keep the CPU busy, OMP_NUM_THREADS=1 is faster, too"


def rounded_up(minutes: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(max(minutes, 1e-3))) - 1)
    return round(math.ceil(minutes / unit) * unit, 6)
