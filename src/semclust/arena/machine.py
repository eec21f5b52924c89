"""What a run was measured on, and how much memory it took."""

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from semclust import __version__
from semclust.errors import plural
from semclust.speed import peak_memory

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # on Linux


def about_machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "semclust": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The name of the CPU and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {plural(cores, 'core')}"


def forget_peak(device: torch.device) -> None:
    """Let the peak of the memory begin anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then it is the peak of the process so far
        CLEAR.write_text("5")


def peak_gib(device: torch.device) -> float | None:
    """Peak memory since ``forget_peak``: of the GPU, or of the process where there is none."""
    if device.type != "cuda" and STATUS.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) / 2**20
    return peak_memory(device)
