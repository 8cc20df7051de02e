"""The clock, the memory and the records of the benchmarks for one GPU.

Every number is printed and written as it is measured, so that a case that is ended early has lost
nothing.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu.lease import Results
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[2]
WARM_UPS, ROUNDS = 2, 5
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"


def output_of(*command: str) -> str:
    """Return the output of a program, "" if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    return done.stdout.strip()


def clocks() -> str:
    """Return the GPU's clocks, temperature and power as nvidia-smi names them, "" without one."""
    return output_of("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader")


def commit(given: str = "") -> str:
    """Return the commit, with + after it if files differ from it.

    given: the commit, for a copy of the sources without their history.
    """
    found = output_of("git", "rev-parse", "HEAD")
    if not found:
        return given or "unknown"
    if output_of("git", "status", "--porcelain", "--untracked-files=no"):
        found += "+"
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Return the versions and the device that numbers depend on. Does not touch the device."""
    found = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        query = "--query-gpu=name,memory.total,driver_version"
        found["device"] = output_of("nvidia-smi", query, "--format=csv,noheader")
        found["cuda"] = torch.version.cuda
    return found


@dataclass
class Profile:
    """What one call did on the device."""

    launches: int
    busy: float  # seconds of the device in kernels
    wall: float  # seconds of the clock, without the profiler
    longest: list[str]  # its kernels with the most time, each with its share of `busy`


@dataclass
class Measured:
    """Seconds of each round, and the most memory of one."""

    seconds: list[float]
    peak: int  # bytes beyond those that were allocated before; 0 on a CPU

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """One case: its device, its time and where its results go.

    tiny: run the same code at toy shapes. limit: seconds that it has. errors: results that are one.
    skipped: what found no time.
    """

    def __init__(
        self, name: str, device: torch.device, results: Results, *, tiny: bool, limit: float = 540.0
    ) -> None:
        self.name, self.device, self.results = name, device, results
        self.tiny, self.limit, self.errors, self.skipped = tiny, limit, 0, 0
        self.begun = time.monotonic()

    def size(self, real: Any, tiny: Any) -> Any:
        """Return the real shape, or the toy one of a tiny run."""
        if self.tiny:
            return tiny
        return real

    @property
    def seconds_left(self) -> float:
        return self.limit - (time.monotonic() - self.begun)

    def record(self, name: str, **values: Any) -> None:
        """Print and write one result."""
        self.errors += "error" in values
        words = "  ".join(f"{key} {_short(value)}" for key, value in values.items())
        print(f"{self.name}{self.size('', ' (toy shapes)')}: {name}: {words}", flush=True)
        self.results.add(case=self.name, name=name, **values)

    @contextmanager
    def case(self, name: str):
        """Record an error of the block as its result, so that what follows still runs.

        The device's memory is given back after the block, but for what the caller still holds.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            reason = str(error).splitlines() or [""]
            self.record(name, error=f"{type(error).__name__}: {reason[0][:300]}")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def has_time(self, name: str, seconds: float) -> bool:
        """Return whether something of so many seconds fits, and record it if it does not."""
        if self.tiny or self.seconds_left > seconds:
            return True
        self.skipped += 1
        self.record(name, skipped=f"{self.seconds_left:.0f} s left, it may take {seconds:.0f} s")
        return False

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(
        self, run: Callable[[], object], *, share: float = 60.0, warm_ups: int = WARM_UPS
    ) -> Measured:
        """Time `run`: warm-ups, then five rounds, or as many as fit into `share` seconds."""
        end = time.monotonic() + share
        for _ in range(self.size(warm_ups, min(warm_ups, 1))):
            run()
        self.synchronize()
        before = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        seconds: list[float] = []
        while len(seconds) < self.size(ROUNDS, 1):
            start = time.perf_counter()
            run()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
            if time.monotonic() + seconds[-1] > end:
                break
        peak = 0
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - before
        return Measured(seconds, peak)

    def compare(
        self, runs: dict[str, Callable[[], object]], *, share: float = 60.0
    ) -> dict[str, Measured]:
        """Time several calls in turn, round by round, so that a drift of the clocks meets all."""
        end = time.monotonic() + share
        for run in list(runs.values()) * self.size(WARM_UPS, 1):
            run()
        found = {name: Measured([], 0) for name in runs}
        while len(next(iter(found.values())).seconds) < self.size(ROUNDS, 1):
            begun = time.monotonic()
            for name, run in runs.items():
                once = self.measure(run, share=0.0, warm_ups=0)
                found[name].seconds += once.seconds
                found[name].peak = max(found[name].peak, once.peak)
            if 2 * time.monotonic() - begun > end:
                break
        return found

    def waits(self, run: Callable[[], object]) -> int:
        """Return how often the host waits for the device in one call of `run`."""
        if self.device.type != "cuda":
            run()
            return 0
        run()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(each.message) for each in caught)

    def profile(self, run: Callable[[], object], most: int = 12) -> Profile:
        """Profile one call of `run`, whose kernels are loaded already."""
        wall = self.measure(run, share=1.0, warm_ups=1).median
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            run()
            self.synchronize()
        launches, kernels = 0, []
        for event in profiler.key_averages():
            if "LaunchKernel" in event.key or "GraphLaunch" in event.key:
                launches += event.count
            if event.device_type != DeviceType.CPU:
                kernels.append((event.self_device_time_total / 1e6, event.count, event.key))
        busy = sum(seconds for seconds, _, _ in kernels)
        longest = [
            f"{seconds / busy:.1%} {count}x {name[:90]}"
            for seconds, count, name in sorted(kernels, reverse=True)[:most]
        ]
        return Profile(launches, busy, wall, longest)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(_short(each) for each in value) + "]"
    return str(value)
