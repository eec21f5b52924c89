"""How fast training runs on this machine, beside a plain training script in the same run.

The images are random bytes: the time of a step does not depend on what they show.
"""

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from semclust import __version__
from semclust.augment import choose_augmentation
from semclust.budget import measure
from semclust.config import Settings
from semclust.devices import choose_device, seconds_of, synchronise
from semclust.engine import fast_kernels
from semclust.errors import InputError, plural
from semclust.loader import Resident, Streamed
from semclust.plan import decided
from semclust.train import Training

BASELINE_WORKERS = 8  # what most training scripts of this field start
BASELINE_STEPS, BASELINE_WARM_UP = 30, 5
FEWEST_STEPS = 3  # an epoch, so that a time between two of them can be taken


def measure_speed(
    settings: Settings,
    n_images: int,
    size: int,
    channels: int = 3,
    epochs: int = 4,
    beside: bool = True,
    started: float | None = None,
    tell: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Train for some epochs on random images, and report speed, use of the device and memory.

    beside: also run the same steps with the images streamed and a plain training script, and reckon a whole run.
    started: of ``time.perf_counter``, where the time to the first step counts from.
    """
    started = time.perf_counter() if started is None else started
    device = choose_device(settings.device)
    batch = settings.batch_size or 32
    if n_images < FEWEST_STEPS * batch or size < 4 or epochs < 1:
        raise InputError(
            f"{plural(n_images, 'image')} of {size} px, {plural(epochs, 'epoch')}: expected at least "
            f"{FEWEST_STEPS * batch} images ({FEWEST_STEPS} batches), 4 px and 1 epoch."
        )
    pixels = np.random.default_rng(0).integers(0, 256, (n_images, size, size, channels), dtype=np.uint8)
    if settings.augment == "auto":  # these show nothing that it could be decided by
        settings = replace(settings, augment="strokes" if channels == 1 else "natural")
    settings = decided(settings, pixels, device)
    augmentation = choose_augmentation(settings.augment, settings.crop_size)
    # The phase that learns the clusters. The others are timed with the whole run, below.
    asked, settings = settings, replace(settings, self_label_from=1.0)
    training = Training(pixels, settings, augmentation, device, tell)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    first_step: list[float] = []

    def on_step(n: int) -> None:
        if not first_step:
            synchronise(device)
            first_step.append(time.perf_counter() - started)
            tell(f"first step after {first_step[0]:.1f} s")

    begins = [task.plan.begins for task in training.learner.tasks.values() if task.plan.begins < settings.n_epochs]
    training.epoch = 1 + max(begins, default=0)
    if settings.learns_pairs:  # which a run would have found by then
        training.learner.neighbours.random_(n_images)
    refresh: list[float] = []
    timed_refresh(training, refresh, device)
    whole = []
    for number in range(1 + epochs):
        whole.append(seconds_of(lambda: training.run_epoch(on_step), device))
        refresh += [0.0] * (number + 1 - len(refresh))  # where nothing learns from labels
        kind = "warm-up" if number == 0 else f"epoch {number}"
        tell(f"{kind}: {whole[-1]:.3f} s, {refresh[-1]:.3f} s of it for the labels")
    seconds, label_seconds = float(np.mean(whole[1:])), float(np.mean(refresh[1:]))

    flop = flop_a_view(training)
    # Forwards, backwards (two products for each of forward's) and the twin; once more to renew the labels.
    passes = (2 if settings.symmetric else 1) * (3 + (settings.contrast != "instance-memory")) + 1
    work = n_images * passes * flop / seconds / 1e12
    result: dict[str, Any] = {
        "semclust": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "engine": str(training.engine),
        "images": n_images,
        "image_shape": [size, size, channels],
        "augment": settings.augment if isinstance(settings.augment, str) else "own",
        "view_size": list(training.learner.encoder.view_size),
        "clusters": settings.n_clusters,
        "keys": training.learner.instance_memory.keys.shape[1],
        "batch": training.batch_size,
        "backbone": getattr(training.learner.encoder.backbone, "name", "own"),
        "epochs_timed": epochs,
        "seconds_per_epoch": seconds,
        "seconds_per_epoch_spread": [min(whole[1:]), max(whole[1:])],
        "seconds_per_label_refresh": label_seconds,
        "images_per_second": n_images / seconds,
        "time_to_first_step": first_step[0],
        "gmac_per_view": flop / 2e9,
        "tflops": work,
        "precision": training.settings.precision,
        "peak_tflops": (peak := peak_tflops(device, training.settings.precision)),
        "share_of_peak": work / peak,
        "peak_memory_gib": peak_memory(device),
    }
    if not beside:
        return result
    step_seconds = seconds_of_steps(training, device)
    if device.type == "cuda":
        other = Streamed if isinstance(training.images, Resident) else Resident
        took = {
            type(training.images): step_seconds,
            other: seconds_of_steps(training, device, other(pixels, device)),
        }
        result["streamed_share"] = took[Resident] / took[Streamed]
        tell(f"streamed from the host's memory: {result['streamed_share']:.0%} of the resident speed")
    result["whole_run"] = whole_run(Training(pixels, asked, augmentation, device, tell))
    plain, ours = plain_speed(settings, pixels[:20_000], device), n_images / step_seconds
    return result | {
        "baseline_images_per_second": plain,
        "step_images_per_second": ours,
        "times_the_baseline": ours / plain,
    }


def whole_run(training: Training) -> dict[str, Any]:
    """What a fit from the first epoch to the last would take, reckoned as a budget of time is from a few steps of each
    phase: epochs, minutes, and seconds an epoch by what it learns (without a partition at its end). What is compiled
    for the first time comes on top."""
    epochs = range(training.settings.n_epochs)
    schedule = measure(training)
    kinds = [training.kind_of_epoch(epoch) for epoch in epochs]
    learned = [training.phase_of(epoch).learns for epoch in epochs]
    by_phase: dict[str, list[float]] = {}
    for words, kind in zip(learned, kinds, strict=True):
        by_phase.setdefault(words, []).append(schedule.seconds([kind]))
    return {
        "epochs": len(epochs),
        "minutes": (schedule.seconds(kinds) + schedule.end) / 60,
        "seconds_per_epoch": {words: float(np.median(seconds)) for words, seconds in by_phase.items()},
    }


def in_words(figures: dict[str, Any]) -> list[str]:
    """The figures as lines for a terminal."""
    H, W, c = figures["image_shape"]
    low, high = figures["seconds_per_epoch_spread"]
    spread = f" ({low:.3f} to {high:.3f})" if figures["epochs_timed"] > 1 else ""
    memory = "unknown" if figures["peak_memory_gib"] is None else f"{figures['peak_memory_gib']:.2f} GiB"
    lines = [
        f"{figures['images']:,} images of {H} x {W} x {c}, {figures['backbone']}, {figures['clusters']} clusters, "
        f"batches of {figures['batch']}; {figures['device']}, {plural(figures['threads'], 'thread')}, "
        f"{figures['engine']}",
        f"{figures['images_per_second']:,.0f} images/s; {figures['seconds_per_epoch']:.3f} s an epoch{spread}, "
        f"{figures['seconds_per_label_refresh']:.3f} s of it to renew the labels",
        f"{figures['tflops']:.4g} TFLOP/s, {figures['share_of_peak']:.0%} of the {figures['peak_tflops']:.4g} "
        "of a large matrix product",
        f"peak memory {memory}; first step after {figures['time_to_first_step']:.1f} s",
    ]
    if "times_the_baseline" in figures:
        run = figures["whole_run"]
        phases = ", ".join(f"{learns} {seconds:.3g} s" for learns, seconds in run["seconds_per_epoch"].items())
        lines.append(
            f"a whole run of {plural(run['epochs'], 'epoch')}: about {run['minutes']:.3g} minutes without compiling "
            f"(an epoch that learns {phases})"
        )
        lines.append(
            f"{figures['times_the_baseline']:.1f} times a plain script of DataLoader workers and Pillow "
            f"({figures['step_images_per_second']:,.0f} against {figures['baseline_images_per_second']:,.0f} images/s "
            "in the steps alone)"
        )
    return lines


def timed_refresh(training: Training, seconds: list[float], device: torch.device) -> None:
    """Let the renewal of the labels, with the features it needs, note its seconds."""
    features, renew = training.features, training._renew_labels

    def timed_features(*args: Any) -> Any:
        synchronise(device)
        seconds.append(-time.perf_counter())
        return features(*args)

    def timed_renewal(*args: Any) -> Any:
        result = renew(*args)
        synchronise(device)
        seconds[-1] += time.perf_counter()
        return result

    training.features, training._renew_labels = timed_features, timed_renewal  # type: ignore


def seconds_of_steps(training: Training, device: torch.device, images: Resident | Streamed | None = None) -> float:
    """Of one epoch's steps, with the images where they are or from elsewhere."""
    training.images, kept = images or training.images, training.images
    try:
        with fast_kernels(device):
            return seconds_of(training.try_steps, device)
    finally:
        training.images = kept


def flop_a_view(training: Training) -> int:
    """Floating-point operations of one view, or of a whole image at its size, through the encoder."""
    encoder = training.learner.encoder.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.zeros(1, training.image_shape[2], *encoder.view_size, device=training.device))
    return counter.get_total_flops()


def peak_tflops(device: torch.device, precision: str, n: int = 8192) -> float:
    """The fastest product of two matrices in this ``precision``."""
    n = n if device.type == "cuda" else n // 4
    a = torch.randn(n, n, device=device, dtype=getattr(torch, precision))
    b = torch.randn_like(a)
    repeats = 20 if device.type == "cuda" else 3
    for _ in range(3):
        a @ b
    return 2 * n**3 * repeats / seconds_of(lambda: [a @ b for _ in range(repeats)], device) / 1e12


def peak_memory(device: torch.device) -> float | None:
    """In GiB: of the GPU, or of the process where there is none; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# ---- the plain script ---------------------------------------------------------------------------------


def plain_speed(settings: Settings, pixels: np.ndarray, device: torch.device) -> float:
    """Images a second of the usual training loop: Pillow views in the workers of a DataLoader, float32, eager."""
    plain = Settings(**{**vars(settings), "compile": False, "precision": "float32"})
    training = Training(pixels, plain, choose_augmentation("none"), device)
    training.learner.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    training.optimiser = torch.optim.SGD(
        training.trained, lr=torch.tensor(0.01), momentum=0.9, weight_decay=settings.weight_decay, foreach=False
    )
    training.engine.records = False
    training.engine.second_stream = None
    training.epoch = max(0, settings.n_epochs - 1)
    training._begin_steps()
    workers = min(BASELINE_WORKERS, os.cpu_count() or 1)
    phase = training.phase
    n = training.batch_size
    n_steps = min(BASELINE_STEPS + BASELINE_WARM_UP, math.ceil(len(pixels) / n))
    loader = DataLoader(PillowViews(pixels), n, shuffle=True, drop_last=True, num_workers=workers)
    times = []
    for step, (first, second, index) in enumerate(loader):
        if step == n_steps:
            break
        views = torch.cat([first, second]).to(device)
        training._learn_from(phase, views, index.to(device))
        synchronise(device)
        times.append(time.perf_counter())
    warm = min(BASELINE_WARM_UP, len(times) - 2)
    return n * (len(times) - 1 - warm) / (times[-1] - times[warm])


class PillowViews(Dataset):
    """Two random views of each image, made one image at a time."""

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, int]:
        return self._view(i), self._view(i), i

    def _view(self, i: int) -> Tensor:
        pixels = self.pixels[i]
        image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
        u = torch.rand(11).tolist()
        W, H = image.size
        area, aspect = 0.2 + 0.8 * u[0], math.exp((u[1] - 0.5) * math.log(16 / 9))
        w, h = min(W, W * math.sqrt(area * aspect)), min(H, H * math.sqrt(area / aspect))
        left, top = u[2] * (W - w), u[3] * (H - h)
        image = image.resize((W, H), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
        if u[4] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if u[5] < 0.8:
            for enhance, strength in zip(
                (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), u[6:9], strict=True
            ):
                image = enhance(image).enhance(0.6 + 0.8 * strength)
            if image.mode == "RGB":
                hue, saturation, value = image.convert("HSV").split()
                turn = round((u[9] - 0.5) * 51)
                hue = hue.point([(level + turn) % 256 for level in range(256)])
                image = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
        if u[10] < 0.2:
            image = image.convert("L").convert(image.mode)
        array = np.asarray(image, dtype=np.float32).reshape(pixels.shape) / 255
        return torch.from_numpy(array).permute(2, 0, 1)
