"""Time as a budget: what is decided, by a clock that the tests turn; that a run keeps to it and goes on by it."""

import math
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_images, tiny
from semclust import SemanticClusterer, budget, fitting
from semclust.budget import Pace, Schedule, make_schedule
from semclust.cli import main
from semclust.errors import DamagedFileError, InputError
from semclust.plan import FEWEST_EPOCHS, STEPS_AN_EPOCH
from semclust.report.settings_table import fit_command
from semclust.run_folder import RunFolder
from semclust.train import Training

STEPS = {"": 1.0, "over": 1.2, "over cluster": 1.5}
RENEWAL = {"; ": 0.2, "over; ": 0.25, "over; cluster": 0.6, "over cluster; ": 0.25, "over cluster; cluster": 0.6}


class Plan:
    """A run of three phases, the last with partitions, that takes no time of its own."""

    def __init__(self, n_batches: int = STEPS_AN_EPOCH):
        self.n_batches, self.notices, self.device = n_batches, [], torch.device("cpu")
        self.on_notice = self.notices.append
        self.set_epochs(50)

    def set_epochs(self, epochs: int) -> None:
        self.epochs = epochs

    def kind_of_epoch(self, epoch: int) -> tuple[str, str]:
        done = epoch / self.epochs
        learned = "" if done < 0.25 else "over" if done < 0.65 else "over cluster"
        return learned, "cluster" if learned == "over cluster" and epoch % 4 == 0 else ""


def simulate(
    minutes: float,
    slowness: Callable[[float], float],
    renewal: float = 1.0,
    plan: Plan | None = None,
    timing: float = 2.0,
) -> tuple[float, list[float]]:
    """Seconds of a run on a machine that is so many times slower, at each share of the time, than when it was
    measured, which took ``timing`` seconds; and the shares of their steps that its epochs took."""
    now = timing
    plan, costs = plan or Plan(), Schedule(0, STEPS, {kind: renewal * s for kind, s in RENEWAL.items()}, end=0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "measure", lambda training: costs)
        schedule = make_schedule(plan, minutes, lambda: now)
    pace = Pace(schedule, plan, minutes, lambda: now)
    for epoch in range(schedule.epochs):
        share = pace.share(epoch)
        now += costs.seconds([plan.kind_of_epoch(epoch)], share) * slowness(now / (60 * minutes))
    return now + costs.end * slowness(1.0), schedule.shares


@pytest.mark.parametrize("minutes", [0.5, 1, 10, 60])
def test_a_steady_machine_takes_whole_epochs_and_most_of_the_time(minutes):
    seconds, shares = simulate(minutes, lambda _: 1.0)
    assert 0.85 <= seconds / (60 * minutes) <= 1
    assert set(shares) == {1.0}


NOISE = random.Random(0)
MACHINES = {
    "slower from the middle": lambda t: 1.0 if t < 0.5 else 2.0,
    "faster from the middle": lambda t: 1.0 if t < 0.5 else 0.5,
    "slower from the start": lambda t: 1.6,
    "faster from the start": lambda t: 0.6,
    "slower for a while": lambda t: 2.0 if 0.3 < t < 0.6 else 1.0,
    "uneven": lambda t: NOISE.uniform(0.8, 1.4),
}


@pytest.mark.parametrize("minutes", [1, 10, 60])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_changes_keeps_to_the_budget(machine, minutes):
    seconds, shares = simulate(minutes, MACHINES[machine])
    assert 0.85 <= seconds / (60 * minutes) <= 1.05
    assert any(share != 1 for share in shares)


@pytest.mark.parametrize("last, back_to", [(30, 0), (20, 20), (50, 48)])
def test_a_run_that_goes_back_shares_the_time_that_is_left(last, back_to):
    """Evenly, but for the epoch that it may go on in the midst of. It went back from an epoch that had hardly begun,
    whose time tells nothing of the machine's speed."""
    now = 0.0
    plan, schedule = Plan(), Schedule(60, STEPS, RENEWAL, end=0.4)
    plan.set_epochs(60)
    pace = Pace(schedule, plan, 100 / 60, lambda: now)
    for epoch in range(last):
        now += schedule.seconds([plan.kind_of_epoch(epoch)], pace.share(epoch))
    pace.share(last)
    now += 0.01
    decided = schedule.shares[back_to]
    for epoch in range(back_to, 60):
        now += schedule.seconds([plan.kind_of_epoch(epoch)], pace.share(epoch))
    assert 85 <= now + 0.4 <= 105
    assert schedule.shares[back_to] == decided and len(schedule.shares) == 60
    again = schedule.shares[back_to + 1 :]
    assert min(again) > 0.8 * max(again)
    assert all(took == pytest.approx(expected) for took, expected in pace.times)


def test_a_budget_that_is_too_small_names_the_smallest(monkeypatch):
    with pytest.raises(
        InputError, match=r"minutes=0\.1 is too short: 10 epochs of 36 steps.* need about 0\.(\d+) minutes"
    ) as caught:
        simulate(0.1, lambda _: 1.0)
    advised = float(str(caught.value).split("Give it ")[1].split(",")[0])
    assert "OMP_NUM_THREADS" not in str(caught.value)  # there is one thread already
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(InputError, match="OMP_NUM_THREADS=1 is faster, too"):
        simulate(0.1, lambda _: 1.0)
    assert len(simulate(advised, lambda _: 1.0)[1]) >= FEWEST_EPOCHS
    with pytest.raises(InputError):
        simulate(0.8 * advised, lambda _: 1.0)


@pytest.mark.parametrize("minutes, timing, enough", [(0.11, 2, 0.34), (0.15, 2, 0.34), (0.2, 6, 0.42)])
def test_of_many_images_a_short_budget_takes_a_part_of_each_epoch(minutes, timing, enough):
    """Ten epochs, the fewest, would take 15 seconds; of small sets, nothing less is taken."""
    plan = Plan(n_batches=20 * STEPS_AN_EPOCH)
    seconds, shares = simulate(minutes, lambda _: 1.0, plan=plan, timing=timing)
    assert 0.85 <= seconds / (60 * minutes) <= 1
    assert len(shares) == plan.epochs == FEWEST_EPOCHS and min(shares) >= 0.05 and max(shares) < 1
    assert max(shares) < 1.1 * min(shares)
    assert plan.notices == [
        f"{minutes} minutes are too few for 10 whole epochs, the fewest that make sense: each takes about "
        f"{shares[0]:.0%} of its 720 steps. About {enough} minutes would do."
    ]
    assert set(simulate(enough, lambda _: 1.0, plan=Plan(n_batches=20 * STEPS_AN_EPOCH), timing=timing)[1]) == {1.0}
    with pytest.raises(InputError, match="10 epochs of 36 steps"):
        simulate(minutes, lambda _: 1.0)
    # An epoch takes a hundredth of its steps at least, also to catch up.
    with pytest.raises(InputError, match="10 epochs of 72 steps"):
        simulate(0.05, lambda _: 1.0, plan=Plan(n_batches=200 * STEPS_AN_EPOCH))
    with pytest.raises(InputError, match="10 epochs of 36 steps"):
        simulate(0.07, lambda _: 1.0, plan=plan)


def test_that_a_short_budget_takes_parts_is_told_again_by_a_run_that_goes_on():
    plan, schedule = Plan(n_batches=720), Schedule(FEWEST_EPOCHS, STEPS, RENEWAL, end=0.4, start=2.0, shares=[0.4, 0.5])
    plan.set_epochs(FEWEST_EPOCHS)
    pace = Pace(schedule, plan, 0.15, lambda: 4.0, resumed=True)
    assert pace.share(1) == 0.5 and pace.share(2) > 0
    assert plan.notices == [
        "0.15 minutes are too few for 10 whole epochs, the fewest that make sense: each takes about 40% of its "
        "720 steps. About 0.34 minutes would do."
    ]


@pytest.mark.parametrize("seconds, device, times", [(0.1, "cpu", 2), (1.5, "cpu", 1), (1.5, "cuda", 2)])
def test_what_takes_long_is_timed_once_where_nothing_is_compiled(seconds, device, times, monkeypatch):
    timed = []
    monkeypatch.setattr(budget, "seconds_of", lambda work, device: timed.append(work()) or seconds)
    training = types.SimpleNamespace(device=torch.device(device))
    assert budget.usual_seconds(lambda: None, training) == seconds and len(timed) == times


def test_measuring_leaves_the_run_as_it_was():
    training = fitting.start(make_images(), tiny(epochs=20, minutes=1))
    before = {name: tensor.clone() for name, tensor in training.state().items()}
    random_before = torch.get_rng_state()
    measured = budget.measure(training)
    assert training.epoch == 0 and torch.equal(torch.get_rng_state(), random_before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.state().items())
    # Each is another step, to be recorded.
    phases = {"", "over nearest", "nearest", "cluster under nearest", "cluster under itself"}
    assert set(measured.steps) == phases and min(measured.steps.values()) > 0
    kinds = {training.kind_of_epoch(epoch) for epoch in range(20)}
    assert set(measured.renewal) == {"; ".join(kind) for kind in kinds} and len(kinds) == 8


@pytest.mark.parametrize("share", [0.3, 1.0, 2.5])
def test_an_epoch_of_more_or_fewer_steps(share):
    training = fitting.start(make_images(), tiny())
    met = []
    step = training._step

    def counted(x, index, rate):
        met.append(index)
        return step(x, index, rate)

    training._step = counted
    row, _ = training.run_epoch(share=share)
    assert len(met) == max(1, round(share * 3)) and math.isfinite(row["loss"])
    if share >= 1:
        assert len(torch.cat(met).unique()) == 48


@pytest.mark.parametrize("n, taken", [(None, 3), (2, 2)])
def test_steps_that_are_tried_leave_the_epoch_where_it_was(n, taken):
    """Also within an epoch: its rest and its losses are as they were."""
    training = fitting.start(make_images(), tiny())
    training.step, training.losses = 1, torch.full((3, 3), 7.0)
    met = []
    step = training._step
    training._step = lambda *args: met.append(args) or step(*args)
    training.try_steps(n)
    assert len(met) == taken and training.step == 1 and (training.losses == 7).all()


# ---- whole fits, by a clock that only an epoch moves ---------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the tests set. An epoch takes 1, and 3 from the 8th on."""
    now = types.SimpleNamespace(seconds=0.0, stop_after=None, slow_from=8)
    run_epoch = Training.run_epoch

    def timed(self, on_step, share):
        result = run_epoch(self, on_step, share)
        now.seconds += (0.8 * share + 0.2) * (1 if self.epoch < now.slow_from else 3)
        if self.epoch == now.stop_after:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Training, "run_epoch", timed)
    monkeypatch.setattr(fitting, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(budget, "measure", lambda training: Schedule(0, {"": 0.8}, {"; ": 0.2}, 0.0))
    return now


def test_a_fit_ends_in_time_with_its_rate_decayed(clock, tmp_path):
    run = RunFolder.create(tmp_path, "whole")
    told: list[float] = []
    watcher = fitting.Watcher()
    watcher.timing = told.append  # type: ignore[method-assign]
    fitted = fitting.fit(make_images(), tiny(minutes=0.5), watcher, run=run)
    assert told == [0.5]
    assert 0.85 * 30 <= fitted.seconds <= 1.05 * 30
    schedule, _ = run.read_schedule()
    assert len(fitted.history) == len(schedule["shares"]) == schedule["epochs"] == 28
    assert min(schedule["shares"]) < 1 and schedule["shares"][:8] == [1.0] * 8
    assert fitted.predictor.settings.epochs == 28
    rates = [row["learning_rate"] for row in fitted.history]
    assert rates[-1] < 0.03 * max(rates)


def test_on_a_steady_machine_it_is_a_run_of_so_many_epochs(clock, tmp_path):
    clock.slow_from = math.inf
    run, whole = RunFolder.create(tmp_path, "minutes"), RunFolder.create(tmp_path, "epochs")
    fitting.fit(make_images(), tiny(minutes=0.25), run=run)
    fitting.fit(make_images(), tiny(epochs=run.read_schedule()[0]["epochs"]), run=whole)
    for name in ("metrics.csv", "last.ckpt"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()


@pytest.mark.parametrize("stop_after", [3, 12])
def test_an_interrupted_run_goes_on_by_what_was_decided(clock, tmp_path, stop_after):
    images, settings = make_images(), tiny(minutes=0.5)
    whole, other = RunFolder.create(tmp_path, "whole"), RunFolder.create(tmp_path, "other")
    fitting.fit(images, settings, run=whole)
    clock.seconds, clock.stop_after = 0.0, stop_after
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(images, settings, run=other)
    clock.stop_after = None
    fitting.fit(images, settings, run=other)
    schedule = other.read_schedule()[0]
    assert schedule["epochs"] == 28
    assert schedule["shares"][:stop_after] == whole.read_schedule()[0]["shares"][:stop_after]
    rows, same = (run.metrics.read_bytes().splitlines()[: 1 + stop_after] for run in (other, whole))
    assert rows == same  # also of the epoch that was repeated
    assert len(other.read_metrics()) == 28


def test_a_lost_or_damaged_schedule_is_told(clock, tmp_path):
    run = RunFolder.create(tmp_path, "run")
    fitting.fit(make_images(), tiny(minutes=0.5), run=run)
    run.schedule.write_text('{"epochs": 28}')
    with pytest.raises(DamagedFileError, match=r"schedule\.json is damaged"):
        fitting.fit(make_images(), tiny(minutes=0.5), run=run)
    run.schedule.unlink()
    with pytest.raises(DamagedFileError, match=r"schedule\.json is missing"):
        fitting.fit(make_images(), tiny(minutes=0.5), run=run)


def whole_schedule(**changes: Any) -> dict[str, Any]:
    whole = {"epochs": 12, "steps": {"a": 0.1}, "renewal": {"a; ": 0.2}, "end": 0.1, "shares": [1.0, 0.5]}
    return whole | changes


@pytest.mark.parametrize(
    "changes",
    [
        dict(epochs=0),
        dict(epochs=1.5),
        dict(epochs=True),
        dict(epochs=10**12),
        dict(epochs=1),
        dict(steps={}),
        dict(steps=[0.1]),
        dict(steps={"a": "x"}),
        dict(renewal={"a": -1.0}),
        dict(renewal={"a": math.nan}),
        dict(end=None),
        dict(end=10**400),
        dict(end=1e300),
        dict(shares={}),
        dict(shares=[0.0]),
        dict(shares=[math.inf]),
        dict(shares=[1.0] * 13),
        dict(more=1),
    ],
    ids=str,
)
def test_a_schedule_that_cannot_be_one_is_refused(changes):
    assert Schedule.from_json(whole_schedule(), Path("x")).epochs == 12
    with pytest.raises(DamagedFileError, match="x is damaged"):
        Schedule.from_json(whole_schedule(**changes), Path("x"))


def test_a_schedule_that_lost_the_shares_of_epochs_that_are_done_goes_on():
    schedule = Schedule.from_json(whole_schedule(), Path("x"))
    pace = Pace(schedule, Plan(), minutes=1.0, seconds=lambda: 0.0, resumed=True)
    assert pace.share(5) > 0 and len(schedule.shares) == 6


def test_even_of_endless_time_only_so_many_epochs_are_planned(monkeypatch):
    monkeypatch.setattr(budget, "MOST_EPOCHS", 100)
    monkeypatch.setattr(budget, "measure", lambda training: Schedule(0, STEPS, RENEWAL, end=0.4))
    plan = Plan()
    assert make_schedule(plan, 1e6, lambda: 0.0).epochs == plan.epochs == 100


def test_the_estimator_has_the_budget_too(clock):
    model = SemanticClusterer(**vars(tiny(minutes=0.5))).fit(make_images().pixels)
    assert len(model.history_) == 28 and model.predictor_.settings.epochs == 28


# ---- on the command line -------------------------------------------------------------------------------


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Calls `semclust fit` on a few images; returns the exit status."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", make_images().pixels)
    small = "--image-size 8 --width 2 --backbone resnet10 --projection-dim 8 --batch-size 24 --device cpu --no-report"

    def call(*words: str) -> int:
        try:
            main(["fit", *words, *([] if "--resume" in words else ["x.npy", "-k", "4", *small.split()])])
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    return call


def test_a_run_folder_tells_the_epochs_that_the_minutes_gave(clock, fit, capsys):
    assert fit("--minutes", "0.25") == 0
    run = RunFolder.open(Path("runs/x"))
    config = run.read_config()
    n = len(run.read_metrics())
    assert config["settings"]["epochs"] == n >= 10 and config["settings"]["minutes"] == 0.25
    assert f"--epochs {n}" in fit_command(config) and "--minutes" not in fit_command(config)
    capsys.readouterr()
    assert fit("--resume", "runs/x") == 0
    assert f"this run is done, after {n} epochs" in capsys.readouterr().out


def test_a_budget_that_is_refused_leaves_no_run_folder(clock, fit, capsys):
    assert fit("--minutes", "0.1") == 1
    assert "minutes=0.1 is too short" in capsys.readouterr().err
    assert os.listdir() == ["x.npy"]
    os.mkdir("runs")  # the user's own stays
    assert fit("--minutes", "0.1") == 1
    assert os.listdir("runs") == []
