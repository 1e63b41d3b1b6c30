"""Draw one training step of a profile as a timeline: the host's phases and the GPU's streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from benchmarks.gpu_check.trace import LABEL, Interval, Span

WIDTH, LEFT, RIGHT, TOP, LANE, BOTTOM = 1400, 150, 20, 60, 34, 40
"""Size in pixels of the figure, its margins, and a lane."""
BACKGROUND, INK, GRID = (255, 255, 255), (40, 40, 40), (225, 225, 225)
HOST = "host"
COLOURS = {
    "forward": (160, 200, 240),
    "backward": (90, 150, 220),
    "run.step": (190, 170, 220),
    "kernel": (70, 160, 90),
    "copy to the host": (230, 120, 40),
    "copy to the GPU": (200, 50, 80),
    "copy or fill on the GPU": (170, 170, 170),
}
"""Colours by kind of span, in the order of the legend."""
TICKS = 10


def kind(span: Span) -> str:
    """Return the key of ``span`` in ``COLOURS``."""
    if span.category == LABEL:
        return span.name
    if span.category == "kernel":
        return "kernel"
    if span.is_copy_to_host:
        return "copy to the host"
    if span.is_copy_to_device:
        return "copy to the GPU"
    return "copy or fill on the GPU"


def lanes(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Return the spans by lane: the host's phases, then the streams, the busiest first."""
    found: dict[str, list[Span]] = {HOST: [span for span in spans if span.category == LABEL]}
    streams: dict[int, list[Span]] = {}
    for span in spans:
        if span.stream is not None:
            streams.setdefault(span.stream, []).append(span)
    for stream in sorted(streams, key=lambda each: -len(streams[each])):
        found[f"stream {stream}"] = streams[stream]
    return found


def draw(title: str, spans: Sequence[Span], window: Interval, path: Path) -> None:
    """Write the timeline of ``window`` as a PNG file.

    Args:
        title: printed above.
        spans: labels of the host that are in ``COLOURS``, and work of the GPU.
        window: first and last microsecond.
        path: path of the file.
    """
    rows = lanes(spans)
    height = TOP + LANE * len(rows) + BOTTOM
    image = Image.new("RGB", (WIDTH, height), BACKGROUND)
    canvas = ImageDraw.Draw(image)
    canvas.text((LEFT, 8), title, INK)
    _draw_legend(canvas)
    _draw_axis(canvas, window, height)
    for number, (name, lane) in enumerate(rows.items()):
        top = TOP + LANE * number
        canvas.text((10, top + LANE // 3), name, INK)
        for span in lane:
            left, right = (_pixel(moment, window) for moment in (span.begin, span.end))
            if right >= LEFT and left <= WIDTH - RIGHT:
                corners = (max(left, LEFT), top + 5), (min(right, WIDTH - RIGHT), top + LANE - 5)
                canvas.rectangle(corners, COLOURS[kind(span)])
    image.save(path)


def _pixel(moment: float, window: Interval) -> int:
    first, last = window
    return LEFT + round((WIDTH - LEFT - RIGHT) * (moment - first) / (last - first))


def _draw_legend(canvas: ImageDraw.ImageDraw) -> None:
    left = LEFT
    for name, colour in COLOURS.items():
        canvas.rectangle(((left, 32), (left + 12, 44)), colour)
        canvas.text((left + 18, 32), name, INK)
        left += 40 + 7 * len(name)


def _draw_axis(canvas: ImageDraw.ImageDraw, window: Interval, height: int) -> None:
    first, last = window
    for tick in range(TICKS + 1):
        moment = first + (last - first) * tick / TICKS
        x = _pixel(moment, window)
        canvas.line(((x, TOP), (x, height - BOTTOM)), GRID)
        canvas.text((x - 12, height - BOTTOM + 8), f"{(moment - first) / 1e3:.1f} ms", INK)
