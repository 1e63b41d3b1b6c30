"""Read a trace of torch's profiler: host stalls, launches, and copies during computation.

The trace is a Chrome trace written by ``torch.profiler.profile.export_chrome_trace``. Times are in
microseconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = ("cuda_runtime", "cuda_driver")
"""Categories of the host's CUDA calls."""
COPY = "gpu_memcpy"
WORK = ("kernel", COPY, "gpu_memset")
"""Categories of the GPU's work."""
LABEL = "user_annotation"
"""Category of ``torch.profiler.record_function``."""
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
"""Calls that wait for the GPU, or may wait."""
PAGEABLE = "copy of pageable memory"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """An interval of work of the host or the GPU.

    Args:
        name: name of the call, kernel, copy or label.
        category: Kineto's category, such as "kernel".
        begin: start in microseconds.
        end: end in microseconds.
        stream: the GPU's stream; None on the host.
        correlation: number that links a call with the GPU's work for it.
    """

    name: str
    category: str
    begin: float
    end: float
    stream: int | None = None
    correlation: int | None = None

    @property
    def is_copy_to_host(self) -> bool:
        """Whether this is a copy from the GPU to the host."""
        return self.category == COPY and "DtoH" in self.name

    @property
    def is_copy_to_device(self) -> bool:
        """Whether this is a copy from the host to the GPU."""
        return self.category == COPY and "HtoD" in self.name


def read(path: Path) -> list[Span]:
    """Return the spans of a trace file."""
    return spans(json.loads(path.read_text()))


def spans(trace: dict[str, Any]) -> list[Span]:
    """Return the spans of a trace, sorted by start."""
    found = [
        Span(
            event["name"],
            event.get("cat", ""),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            event.get("args", {}).get("stream"),
            event.get("args", {}).get("correlation"),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and "dur" in event
    ]
    return sorted(found, key=lambda span: span.begin)


def labelled(trace: Sequence[Span], label: str) -> list[Span]:
    """Return the host's spans under a label."""
    return [span for span in trace if span.category == LABEL and span.name == label]


def called(trace: Sequence[Span], window: Interval) -> list[Span]:
    """Return the calls that began within ``window``, of all threads."""
    first, last = window
    return [span for span in trace if span.category in CALLS and first <= span.begin < last]


def done_for(trace: Sequence[Span], window: Interval) -> list[Span]:
    """Return the GPU's work for the calls within ``window``."""
    numbers = {call.correlation for call in called(trace, window)}
    return [span for span in trace if span.category in WORK and span.correlation in numbers]


def stalls(trace: Sequence[Span], window: Interval) -> Counter[str]:
    """Count the calls within ``window`` that wait for the GPU, or may, by name."""
    found = Counter(call.name for call in called(trace, window) if call.name in WAITS)
    pageable = [span for span in done_for(trace, window) if "Pageable" in span.name]
    if pageable:
        found[PAGEABLE] = len(pageable)
    return found


def launches(trace: Sequence[Span], window: Interval) -> int:
    """Count the work that the host issued within ``window``: kernels, copies and fills."""
    return len(done_for(trace, window))


def computed(trace: Sequence[Span], window: Interval) -> Interval | None:
    """Return the interval in which the GPU computed the work launched within ``window``."""
    kernels = [span for span in done_for(trace, window) if span.category == "kernel"]
    if not kernels:
        return None
    return min(span.begin for span in kernels), max(span.end for span in kernels)


def share_within(copies: Iterable[Span], windows: Sequence[Interval]) -> float | None:
    """Return the share of the copies' time that lies within disjoint windows; None: no copies."""
    total = inside = 0.0
    for copy in copies:
        total += copy.end - copy.begin
        for first, last in windows:
            inside += max(0.0, min(copy.end, last) - max(copy.begin, first))
    return inside / total if total else None
