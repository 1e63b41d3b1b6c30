"""Evaluation and plots of traces by the GPU check, with generated traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.gpu_check import picture, profile, trace
from benchmarks.gpu_check.memory import GUIDE
from benchmarks.gpu_check.trace import Span

COMPUTING, COPYING = 7, 13


def label(name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin}


def call(name: str, begin: float, number: int) -> dict[str, Any]:
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": begin, "dur": 1.0}
    return {**event, "args": {"correlation": number}}


def work(
    category: str, name: str, begin: float, end: float, stream: int, number: int
) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}
    return {**event, "args": {"stream": stream, "correlation": number}}


def step() -> list[dict[str, Any]]:
    """Return a backward pass of two kernels, 20 to 60 us, and copies of 10 us in and after it."""
    return [
        label("step 0", 0.0, 50.0),
        label("backward", 10.0, 30.0),
        call("cudaLaunchKernel", 11.0, 1),
        call("cudaLaunchKernel", 12.0, 2),
        call("cudaMemcpyAsync", 13.0, 3),
        call("cudaMemcpyAsync", 31.0, 4),
        call("cudaMemcpyAsync", 32.0, 5),
        work("kernel", "gemm", 20.0, 30.0, COMPUTING, 1),
        work("kernel", "gemm", 40.0, 60.0, COMPUTING, 2),
        work("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 31.0, 41.0, COPYING, 3),
        work("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 55.0, 65.0, COPYING, 4),
        work("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 70.0, 80.0, COPYING, 5),
        {"ph": "M", "name": "process_name", "pid": 1},
    ]


def read(tmp_path: Path, *more: dict[str, Any]) -> list[Span]:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*step(), *more]}))
    return trace.read(path)


def test_trace_assigns_work_to_calls_of_a_window(tmp_path: Path) -> None:
    spans = read(tmp_path)
    (backward,) = trace.labelled(spans, "backward")
    window = backward.begin, backward.end
    assert trace.launches(spans, window) == 3
    assert trace.launches(spans, (0.0, 50.0)) == 5
    assert trace.computed(spans, window) == (20.0, 60.0)
    assert trace.computed(spans, (31.0, 50.0)) is None


def test_trace_measures_share_of_copies_during_backward(tmp_path: Path) -> None:
    spans = read(tmp_path)
    copies = [span for span in spans if span.is_copy_to_host]
    assert trace.share_within(copies, [(20.0, 60.0)]) == 0.75
    assert trace.share_within([], [(20.0, 60.0)]) is None
    assert sum(span.is_copy_to_device for span in spans) == 1


def test_trace_counts_waits_and_pageable_copies_as_stalls(tmp_path: Path) -> None:
    assert not trace.stalls(read(tmp_path), (0.0, 50.0))
    spans = read(
        tmp_path,
        call("cudaStreamSynchronize", 33.0, 6),
        call("cudaEventSynchronize", 99.0, 7),
        call("cudaMemcpyAsync", 34.0, 8),
        work("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 66.0, 67.0, COPYING, 8),
    )
    expected = {"cudaStreamSynchronize": 1, trace.PAGEABLE: 1}
    assert trace.stalls(spans, (0.0, 50.0)) == expected


def test_trace_plot_draws_spans_in_lanes_of_their_streams(tmp_path: Path) -> None:
    spans = [span for span in read(tmp_path) if span.name != "step 0" and span.category != "cuda"]
    shown = [span for span in spans if span.category in (trace.LABEL, *trace.WORK)]
    path = tmp_path / "step.png"
    picture.draw("one step", shown, (0.0, 100.0), path)
    with Image.open(path) as image:
        pixels = image.convert("RGB")
    lanes = list(picture.lanes(shown))
    assert lanes == ["host", f"stream {COPYING}", f"stream {COMPUTING}"]
    assert pixels.size == (picture.WIDTH, picture.TOP + 3 * picture.LANE + picture.BOTTOM)

    def colour(lane: int, moment: float) -> Any:
        width = picture.WIDTH - picture.LEFT - picture.RIGHT
        x = picture.LEFT + round(width * moment / 100.0)
        return pixels.getpixel((x, picture.TOP + picture.LANE * lane + picture.LANE // 2))

    assert colour(0, 20.0) == picture.COLOURS["backward"]
    assert colour(1, 36.0) == picture.COLOURS["copy to the host"]
    assert colour(1, 75.0) == picture.COLOURS["copy to the GPU"]
    assert colour(2, 51.0) == picture.COLOURS["kernel"]
    assert colour(2, 75.0) == picture.BACKGROUND


def test_guide_bounds_launches_of_every_case() -> None:
    table = profile.guide_launches(GUIDE.read_text())
    assert set(table) == {"aladdin-ahead", "aladdin-ahead fp32", "ar-sgd dgc", "others"}
    assert set(table) - {"others"} <= set(profile.CASES)
