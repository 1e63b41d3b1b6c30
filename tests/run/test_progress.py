"""Progress line of a run: on terminals of several widths, under mpirun, and in a file."""

from __future__ import annotations

import io
import re
import sys
import time
from dataclasses import replace
from math import nan
from pathlib import Path
from unittest.mock import Mock

import pytest

from aladdin_mpi.hooks.progress import Lines, Live, Recent, in_columns, in_full
from aladdin_mpi.hooks.user_metrics import UserMetrics
from aladdin_mpi.process import console
from aladdin_mpi.process.console import Terminal, find_terminal
from aladdin_mpi.session.coordinator import State
from tests.commands import metrics, summary
from tests.launch import ROOT, environment, launcher, needs, turn
from tests.run.program_runs import HERE, program
from tests.terminal import CTRL_C, run_on_terminal

STATE = State(
    samples=4_828,
    total=17_244,
    epoch=3.36,
    workers=4,
    surviving=4,
    rate=9_410.2,
    loss=0.31234,
    figures={"test_accuracy": 0.96123, "test_loss": 0.2},
    lr=0.04,
    waiting=0.28,
    staleness=2.134,
    left=200.0,
)


# -- the line -----------------------------------------------------------------------------
def test_numbers_percentages_and_durations_are_formatted_consistently() -> None:
    assert console.throughput(9410.2) == "9,410 samples/s"
    assert console.throughput(12345.6) == "12,346 samples/s"
    assert [console.percent(x) for x in (0, 5e-6, 0.0028, 0.028, 0.28, 0.9961, 1)] == [
        *("0 %", "0 %", "0.28 %", "2.8 %", "28 %", "100 %", "100 %")
    ]
    assert [console.duration(x) for x in (45, 59.7, 200, 7500)] == [
        *("45 s", "1:00 min", "3:20 min", "2:05:00 h")
    ]
    assert [console.number(x) for x in (1437, 0.03125, 1.2e-6)] == ["1,437", "0.03125", "1.2e-06"]


def test_progress_line_in_a_file_has_every_figure() -> None:
    assert in_full(STATE) == (
        " 27 %   4,828 of 17,244 samples  9,410 samples/s  loss 0.3123  accuracy 0.9612  "
        "test loss 0.2  learning rate 0.04  waiting 28 %  staleness 2.134  epoch 3.36  "
        "4 workers  3:20 min left"
    )


def test_progress_lines_in_a_file_are_aligned() -> None:
    """The figures of an algorithm have their units."""
    stream = io.StringIO()
    lines = Lines(STATE.total, 0, stream)
    others = {"wire_bits": 8.0, "age_rounds": 0.7412, "models_sent_at": 0.5}
    for samples, rate, bits in ((576, 12_345.0, 8.0), (17_000, 902.5, 6.667), (17_244, 7.0, 4.0)):
        state = replace(STATE, samples=samples, rate=rate, others={**others, "wire_bits": bits})
        lines.draw(state)
    written = stream.getvalue().splitlines()
    assert written[0].startswith("  3 %     576 of 17,244 samples  12,345 samples/s  loss 0.3123  ")
    assert "  wire 8 bits  age 0.7412 rounds  models sent at 0.5  epoch 3.36  " in written[0]
    assert "  wire 6.667 bits  age 0.7412 rounds" in written[1]
    assert "  wire 4 bits      age 0.7412 rounds" in written[2]
    for words in ("samples  ", "loss", "waiting", "wire"):
        assert len({line.index(words) for line in written}) == 1
    assert written[2].endswith("4 workers")


def test_progress_line_is_abbreviated_in_80_columns() -> None:
    """In 200 columns it has every figure, and a bar."""
    narrow = in_columns(STATE, 80)
    assert narrow.strip() == (
        "27 % 9,410 samples/s loss 0.312 acc 0.961 lr 0.04 wait 28 % 4 workers 3:20 left"
    )
    wide = in_columns(STATE, 200)
    assert wide.count("{bar}") == 1
    assert re.sub(r" *\{bar\} *", "  ", wide) == in_full(STATE).replace(
        " 4,828 of 17,244 samples  ", ""
    )
    own = in_columns(replace(STATE, figures={"validation": 12.5, "{odd}": 1.0}), 200)
    assert "validation 12.5  {{odd}} 1 " in own


@pytest.mark.parametrize("figures", [{}, {"test_accuracy": 0.5}, {"a_rather_long_name" * 3: 1e-9}])
def test_progress_line_fits_any_width_without_cut_words(figures: dict[str, float]) -> None:
    state = replace(STATE, figures=figures, surviving=3, rate=1_234_567.0, left=360_000.0)
    words = set(f"{in_full(state)} {in_columns(state, 1000)}".split())
    words |= {"acc", "lr", "wait", "stale", "3/4", "0.312", "2.13", "1e-09", "100:00:00"}
    for columns in range(5, 260):
        text = in_columns(state, columns)
        assert set(text.replace("{bar}", " ").split()) <= words
        if "{bar}" in text:
            assert len(text) - len("{bar}") <= columns - 10
        else:
            assert len(text) == columns
        assert text.startswith(" 27 %")
    assert "3/4 workers" in in_columns(state, 80)


def test_rate_and_loss_cover_recent_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(x) for x in range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    recent = Recent(total=1000, seconds=0.0)
    assert recent.mark(0.0) == (None, None)
    assert recent.mark(1e-6) == (None, None), "batches are distributed, and there is no step yet"
    recent.add(8.0, 10)
    assert recent.mark(1.0) == (10.0, 8.0)
    for step in range(1, 5):
        recent.add(1.0 / step, 20)
        marked = recent.mark(1.0 + step)
    assert marked == (20.0, 0.25)


def test_rate_is_that_of_whole_steps_of_all_workers() -> None:
    """In a simulation, equal workers complete a step at the same time."""
    recent = Recent(total=320, seconds=0.0, step=40)
    for step in range(1, 9):
        for worker in range(4):
            recent.add(1.0, 10)
            rate, _ = recent.mark(step + 1e-9 * worker)
            assert step == 1 or rate == pytest.approx(40.0, rel=0.3)


def test_rate_is_known_without_a_loss() -> None:
    """Timed computing has no loss."""
    recent = Recent(total=1000, seconds=0.0)
    for step in range(1, 100):
        recent.add(nan, 10)
        assert recent.mark(float(step)) == (10.0, None)
    recent.add(nan, 30)
    assert recent.mark(100.0)[0] == pytest.approx(30.0, rel=0.5), "of late"


def test_printing_clears_the_progress_line_and_closing_keeps_it() -> None:
    stream = io.StringIO()
    live = Live(STATE, Terminal(stream, None))
    console.show(live)
    console.say("a warning", stream)
    assert stream.getvalue().endswith("\r" + " " * 80 + "\ra warning\n")
    live.draw(replace(STATE, samples=17_244))
    console.close()
    assert re.search(r"\r100 %[^\r\n]{75}\n$", stream.getvalue())
    console.say("the end", stream)
    assert stream.getvalue().endswith("\nthe end\n")


def test_figures_logged_after_training_are_not_sent_as_messages() -> None:
    """After training, no rank waits for messages, so these figures are gathered."""
    transport = Mock(rank=1)
    figures = UserMetrics(transport)
    figures.send({"validation": 1.0}, is_late=False)
    figures.send({"validation": 2.0}, is_late=True)
    assert transport.isend.call_count == 1
    assert figures.late == [{"validation": 2.0}]


# -- terminal of a rank -------------------------------------------------------------------
REDIRECTED = ("{0}", "{0} > out", "{0} 2> out", "{0} > out 2>&1", "{0} 2>&1 | cat > out", "{1}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mpi", [pytest.param(each, marks=needs(each)) for each in ("openmpi", "mpich")]
)
def test_rank_finds_the_terminal_of_its_launcher(tmp_path: Path, mpi: str) -> None:
    """Only if its output is shown there."""
    start = f"{launcher(mpi)} -n 2"
    ask = f"{sys.executable} {program('find_terminal')}"
    plain, piped = f"{start} {ask}", f"{start} sh -c '{ask} 2>&1 | cat'"
    script = "\n".join(line.format(plain, piped) for line in REDIRECTED)
    with turn():
        run_on_terminal(["sh", "-ec", script], 123, environment(mpi, HERE), tmp_path)
    assert (tmp_path / "found").read_text().split() == ["123", *["None"] * 5]


def test_find_terminal_returns_none_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w") as file:
        assert find_terminal(file) is None
    assert find_terminal(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "90")
    assert Terminal(io.StringIO(), None).columns == 90
    monkeypatch.setenv("COLUMNS", "wide")
    assert Terminal(io.StringIO(), None).columns == 80


# -- complete runs ------------------------------------------------------------------------
@pytest.mark.long
@needs("openmpi")
def test_custom_loop_shows_live_progress_under_mpirun_in_80_columns(tmp_path: Path) -> None:
    command = [str(launcher("openmpi")), "-n", "2", sys.executable, program("slow_loop")]
    with turn():
        seen = run_on_terminal(command, 80, environment("openmpi", HERE), tmp_path)
    assert seen.status == 0, seen.text
    redraws = seen.redrawn(80)
    shape = r" *\d+ % [\d,.]+ samples/s loss [\d.]+ validation 10[012] .*1 worker( 0:0\d left)? *"
    logged = [each for each in redraws if "validation" in each]
    assert logged and all(re.fullmatch(shape, each) for each in logged), logged
    # It is live: it was redrawn before and after the lines that the loop prints, which are intact.
    first = seen.text.index("epoch 0 is over")
    assert re.search(r"\r +\d+ % [\d,.]+ samples/s", seen.text[:first])
    assert re.search(r"\r +\d+ % [\d,.]+ samples/s", seen.text[first:])
    assert len(re.findall(r"epoch \d is over\r*\n", seen.text)) == 3
    assert "rank 1  " in seen.text.partition("%")[0]
    # Figures logged after the last step are in the table, the summary and the metrics.
    assert re.search(r"\n *validation +102\r*\n", seen.text)
    assert summary(tmp_path / "run")["own"] == {"validation": 102.0}
    assert metrics(tmp_path / "run", "own")[-1]["validation"] == 102.0


@pytest.mark.long
def test_simulation_shows_progress_in_200_columns_until_ctrl_c(tmp_path: Path) -> None:
    """A worker's failure is reported and shown; afterwards the terminal is restored."""
    command = [sys.executable, "-m", "aladdin_mpi.simulate", "--epochs", "500", "--workers", "4"]
    command += ["--eval-every", "0.5", "--failures", "2=4", "--run-dir", str(tmp_path / "run")]

    def type_when(text: str) -> bytes | None:
        return CTRL_C if "3 of 4 workers surviving" in text and "accuracy" in text else None

    with turn():
        seen = run_on_terminal(command, 200, environment("openmpi", {}), ROOT, 100, type_when)
    assert seen.lines[0] == "aladdin_mpi: starting the simulation"
    last = re.split(r" {2,}", seen.redrawn(200)[-1].strip())
    shape = (
        r"\d+ %( [#\d]+)?",
        r"[\d,.]+ samples/s",
        *(rf"{name} [\d.e-]+" for name in ("loss", "accuracy", "test loss", "learning rate")),
        r"waiting [\d.]+ %",
        r"staleness [\d.e-]+",
        r"wire [\d.]+ bits",
        *(rf"{name} [\d.e-]+" for name in ("pi", "epoch")),
        "3 of 4 workers surviving",
        r"[\d:]+ (s|min|h) left",
    )
    assert len(last) == len(shape), last
    assert all(map(re.fullmatch, shape, last)), last
    failures = [line for line in seen.lines if "rank 2 (host " in line]
    assert len(failures) == 1
    assert failures[0].startswith("aladdin_mpi: rank 2 (host ")
    # The line is kept, and the final messages follow it.
    line = r"surviving {2}[^\r\n]* left *\r*\n.*aladdin_mpi: stopped by "
    assert re.search(line, seen.text, re.S)
    assert seen.status == 130
    assert "Traceback" not in seen.text
