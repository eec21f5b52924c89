"""What a fit of many images by many GPUs would cost: the tables of docs/scaling.md, reckoned from measured figures.

python benchmarks/reckoning.py prints them. Measured is what LOG.md says of one H200 (`paper`, ResNet-34, images of
32 x 32 x 3); assumed is what the wires carry.
"""

from collections.abc import Callable, Iterable

# Measured, seconds an image
STEP = 1.092 / 60_000  # recorded and compiled
PLAIN_STEP = 10 / 60_000  # neither
FEATURES = 0.160 / 60_000
LABELS = 0.055 / 60_000  # the rest of a label refresh, on the first rank
DECODING = 1 / 860  # of a core, photos of 500 x 375
HASHING = 3072 / 0.4e9

# Counted
WEIGHTS, NORMS, CHANNELS = 21_607_247, 36, 8_512
DIMENSION, CLUSTERS, TASKS, PIXELS = 128, 10, 2, 3 * 32 * 32
POOLED, DEFAULT_WEIGHTS, DEFAULT_TASKS = 512, 11_497_664, 3  # of the default settings: ResNet-18
NAME = 93  # bytes of a name such as train/n01440764/n01440764_10026.JPEG in Python

# Assumed: bytes a second into a GPU, and seconds that a small exchange takes
WITHIN, ACROSS, MACHINE = 300e9, 50e9, 8  # within a machine of 8 GPUs (NVLink), and across (400 Gbit/s for each GPU)
LATENCY_WITHIN, LATENCY_ACROSS = 20e-6, 50e-6
BATCH = 256  # images a GPU: what was measured

IMAGES = (1_000_000, 100_000_000, 1_000_000_000)
GPUS = (1, 2, 4, 8, 16, 32, 64)


def wire(gpus: int) -> float:
    return WITHIN if gpus <= MACHINE else ACROSS


def latency(gpus: int) -> float:
    return LATENCY_WITHIN if gpus <= MACHINE else LATENCY_ACROSS


def gradient_bytes(gpus: int) -> float:
    """Into each GPU in a ring: the gradient is summed on the way round, then handed round."""
    return 2 * (gpus - 1) / gpus * 4 * WEIGHTS


def norm_bytes(gpus: int) -> float:
    """Synchronised: number, mean and variance of all others for query and key, and two sums for the gradient."""
    return (gpus - 1) * 2 * 4 * (NORMS + 2 * CHANNELS) + 2 * (gpus - 1) / gpus * 4 * 2 * CHANNELS


def shuffle_bytes(gpus: int) -> float:
    """Local: the views of all others, and their keys on the way back."""
    return (gpus - 1) * BATCH * 4 * (PIXELS + DIMENSION)


def key_bytes(gpus: int) -> float:
    return (gpus - 1) * BATCH * 4 * DIMENSION


def exchange_seconds(gpus: int, local: bool) -> float:
    """Of one step, where nothing overlaps."""
    if gpus == 1:
        return 0.0
    norms = shuffle_bytes(gpus) if local else norm_bytes(gpus)
    exchanges = 5 if local else 2 + 3 * NORMS
    return (gradient_bytes(gpus) + norms + key_bytes(gpus)) / wire(gpus) + exchanges * latency(gpus)


def epoch_seconds(images: int, gpus: int, step: float) -> float:
    """Of the steps, with local batch norm."""
    return images / gpus * (step + exchange_seconds(gpus, local=True) / BATCH)


def refresh_seconds(images: int, gpus: int) -> float:
    gathered = images * (1 - 1 / gpus) * 4 * DIMENSION / wire(gpus)
    labels = images * 12 * TASKS / wire(gpus) if gpus > 1 else 0.0
    return images / gpus * FEATURES + gathered + images * LABELS + labels


def paper_gpu_bytes(images: int, gpus: int, first: bool) -> float:
    """Of a rank during a label refresh: labels and swaps, order, features of its part. The first also has those of all,
    which are its part where it is alone, and p."""
    an_image = 4 * DIMENSION / gpus
    if first:
        an_image = (an_image if gpus > 1 else 0.0) + 4 * DIMENSION + 4 * CLUSTERS
    return 16 * WEIGHTS + images * (12 * TASKS + 8 + an_image)


def default_gpu_bytes(images: int, gpus: int, first: bool) -> float:
    """The same with the default settings, which cluster the pooled features h: those are gathered, too, and the first
    rank has them once more with unit length."""
    features = 4 * (POOLED + DIMENSION)
    an_image = features / gpus
    if first:
        an_image = (an_image if gpus > 1 else 0.0) + features + 4 * POOLED + 4 * CLUSTERS
    return 16 * DEFAULT_WEIGHTS + images * (12 * DEFAULT_TASKS + 8 + an_image)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def memory_table(gpu_bytes: Callable[[int, int, bool], float], several: Iterable[int]) -> list[str]:
    """Of the first GPU and of the others, by their number and that of the images."""

    def cell(images: int, gpus: int) -> str:
        others = in_bytes(gpu_bytes(images, gpus, False)) if gpus > 1 else "-"
        return f"{in_bytes(gpu_bytes(images, gpus, True))} / {others}"

    header = ["GPUs", *(f"{images:,}: first / others" for images in IMAGES)]
    return table(header, ([str(gpus), *(cell(images, gpus) for images in IMAGES)] for gpus in several))


def in_bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def in_time(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def tables() -> dict[str, list[str]]:
    """By name, the lines of each."""
    several = GPUS[1:]
    return {
        "wire": table(
            ["GPUs", "gradient", "norms, synchronised", "shuffle, local", "keys", "time, synchronised", "time, local"],
            (
                [
                    str(gpus),
                    *(in_bytes(of(gpus)) for of in (gradient_bytes, norm_bytes, shuffle_bytes, key_bytes)),
                    *(in_time(exchange_seconds(gpus, local)) for local in (False, True)),
                ]
                for gpus in several
            ),
        ),
        "epoch": table(
            ["GPUs", *(f"{images:,}: steps now / if recorded" for images in IMAGES)],
            (
                [str(gpus)]
                + [
                    f"{in_time(epoch_seconds(images, gpus, STEP if gpus == 1 else PLAIN_STEP))} / "
                    f"{in_time(epoch_seconds(images, gpus, STEP))}"
                    for images in IMAGES
                ]
                for gpus in GPUS
            ),
        ),
        "refresh": table(
            ["GPUs", *(f"{images:,}" for images in IMAGES)],
            ([str(gpus), *(in_time(refresh_seconds(images, gpus)) for images in IMAGES)] for gpus in GPUS),
        ),
        "memory": memory_table(paper_gpu_bytes, GPUS),
        "memory, default": memory_table(default_gpu_bytes, (1, 8, 64)),
        "host": table(
            ["", *(f"{images:,}" for images in IMAGES)],
            [
                ["pixels, once a machine", *(in_bytes(images * PIXELS) for images in IMAGES)],
                ["names, in every process", *(in_bytes(images * NAME) for images in IMAGES)],
                [
                    "embeddings and probabilities, first process",
                    *(in_bytes(images * 4 * (DIMENSION + CLUSTERS)) for images in IMAGES),
                ],
                ["fingerprint of the pixels, once a machine", *(in_time(images * HASHING) for images in IMAGES)],
                ["decoding 500 x 375 photos on 64 cores", *(in_time(images * DECODING / 64) for images in IMAGES)],
                ["assigning on one GPU, once decoded", *(in_time(images * FEATURES) for images in IMAGES)],
            ],
        ),
    }


if __name__ == "__main__":
    for name, lines in tables().items():
        print(f"{name}\n" + "\n".join(lines) + "\n")
