"""GPU check: its report, and the command on the delayed-copy test device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from aladdin_mpi.errors import SUSPENDED_STATUS
from benchmarks.gpu_check import memory, rows
from benchmarks.gpu_check.parts import PARTS, Job, Part
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.rows import FAIL, PASS, SKIP, Row
from benchmarks.gpu_check.runner import Runner
from tests.late import build
from tests.launch import ROOT, needs, run_ranks

OBSTACLE = build.obstacle()
needs_test_device = pytest.mark.skipif(OBSTACLE is not None, reason=f"no test device: {OBSTACLE}")


def test_gpu_check_row_round_trips_through_text(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("memory", "bsp", PASS, "device 3.0", "a | b")
    rows.print_row(row)
    assert rows.parse(capsys.readouterr().out) == row
    assert rows.parse("other output\n") is None


def test_gpu_check_report_is_complete_after_each_row(tmp_path: Path) -> None:
    report = Report(tmp_path, "python -m benchmarks.gpu_check", {"gpus": "none"})
    report.add(Row("memory", "bsp", PASS))
    assert not report.failed
    report.add(Row("memory", "asp", FAIL, "device 9.0", "guide: 3.0 | 2.1"))
    assert report.failed and report.summary() == "1 FAIL, 1 PASS"
    assert [
        row["status"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]
    ] == [
        PASS,
        FAIL,
    ]
    assert (
        "| FAIL | memory | asp | device 9.0 | guide: 3.0 \\| 2.1 |"
        in (tmp_path / "report.md").read_text()
    )


def test_guide_table_contains_every_row_of_the_guide() -> None:
    table = memory.guide_table(memory.GUIDE.read_text())
    assert len(table) == 31
    assert table["bsp", "--node-sums"] == (3.0, 4.1)
    assert table["ssp", ""] == (3.0, 2.1)
    assert table["ar-sgd", "bf16"] == (3.0, 1.1)
    assert table["aladdin-ahead", "int8"] == (5.2, 4.9)
    assert table["asp", "int8"] == (5.1, 1.4)


def test_memory_tolerance_is_five_percent_or_half_a_digit() -> None:
    assert memory.agrees("bsp", 3.14, 3.0) and not memory.agrees("bsp", 3.16, 3.0)
    assert not memory.agrees("bsp", 2.84, 3.0)
    assert memory.agrees("aladdin-ahead", 8.0, 10.0)
    assert not memory.agrees("aladdin-ahead", 10.6, 10.0)


@needs("openmpi")
@pytest.mark.parametrize(
    ("seconds", "problem"), [(60.0, "status 1"), (0.01, "not finished after 0.0")]
)
def test_gpu_check_reports_failed_program_as_row(
    tmp_path: Path, seconds: float, problem: str
) -> None:
    result: list[Row] = []
    part = Part("broken", seconds, (Job(1, "no_such_program"),))
    with (tmp_path / "log.txt").open("w") as log:
        Runner("gpu", tmp_path, tmp_path, log, result.append).run(part, seconds)
    assert [row.status for row in result] == [FAIL]
    assert problem in result[0].note


def test_gpu_check_expects_suspended_status_of_stopped_run() -> None:
    stopped, resumed = (job for part in PARTS for job in part.jobs if "bsp" in job.arguments)
    assert (stopped.arguments, stopped.status) == (("bsp", "stop"), SUSPENDED_STATUS)
    assert (resumed.arguments, resumed.status) == (("bsp", "resume"), 0)


@pytest.mark.long
@needs_test_device
@needs("openmpi")
def test_gpu_check_programs_end_with_command(tmp_path: Path) -> None:
    command = [str(ROOT / "tools" / "gpu-check.sh"), "--device", "test", "--only", "equality"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        while not process.stdout.readline().startswith("PASS"):  # the programs run
            assert process.poll() is None
        running = children(process.pid)
        assert running
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.stdout.close()
    assert not [pid for pid in running if Path(f"/proc/{pid}").exists()]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.long
@needs("openmpi")
def test_gpu_check_of_models_divided_by_fsdp_passes_on_the_cpu(tmp_path: Path) -> None:
    code = (
        f"from benchmarks.gpu_check import islands; islands.check_divided({str(tmp_path)!r}, 'cpu')"
    )
    completed = run_ranks(4, ["-c", code], timeout=120)
    found = [row for row in map(rows.parse, completed.stdout.splitlines()) if row is not None]
    assert [(row.name, row.status) for row in found] == [
        (f"ar-sgd, FSDP in islands of 2, {name}, 4 ranks", PASS) for name in ("fp32", "bf16")
    ]


@pytest.mark.long
@needs_test_device
@needs("openmpi")
@pytest.mark.parametrize(
    ("parts", "least"),
    [
        (["equality"], 60),
        (["memory", "recovery"], 24),
        (["settings", "profile", "speed"], 60),
    ],
    ids=["results", "memory", "behaviour"],
)
def test_gpu_check_passes_on_test_device(tmp_path: Path, parts: list[str], least: int) -> None:
    command = [str(ROOT / "tools" / "gpu-check.sh"), "--device", "test", "--out", str(tmp_path)]
    completed = subprocess.run(
        [*command, "--limit", "280", "--only", *parts],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=295,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    result = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert len(result) >= least and {row["part"] for row in result} == set(parts)
    skipped = [row for row in result if row["status"] == SKIP]
    assert all("needs" in row["note"] for row in skipped)
    assert {row["status"] for row in result if row not in skipped} == {PASS}


@pytest.mark.long
def test_gpu_check_without_gpu_names_device_option(tmp_path: Path) -> None:
    command = [str(ROOT / "tools" / "gpu-check.sh"), "--out", str(tmp_path / "out")]
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert completed.returncode == 2
    assert "error: --device gpu: " in completed.stderr
    assert not (tmp_path / "out").exists()
