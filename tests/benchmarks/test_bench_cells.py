"""Cells of the study's tables: running, reading, storing and checking them."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from benchmarks import agreement, published, scaling, stragglers, study
from benchmarks.cell_store import FILE, CellStore
from benchmarks.cells import Cell, Workload, row, settled_rate
from benchmarks.engines import VirtualEngine
from benchmarks.harness import run_main
from benchmarks.lab import Lab
from tests.launch import ROOT

REASON = Lab.available()
needs_lab = pytest.mark.skipif(REASON is not None, reason=REASON or "")
pytestmark = pytest.mark.timeout(280)

HALF = Workload("half", "half", 1.0, 0.5)


def cell(slowdown: float = 1.0, algorithm: str = "aladdin", iterations: int = 10) -> Cell:
    servers = 0 if algorithm in ("ar-sgd", "sgp", "ad-psgd") else 4
    return Cell(HALF, algorithm, slowdown, 8, servers, 4, 1.0, iterations)


SUMMARY = {
    "samples": 80,
    "seconds": 10.0,
    "samples_per_second": 8.0,
    "wait_fraction": 0.03,
    "gradients_coalesced": 20,
    "gradients_computed": 80,
    "gradients_dropped": 0,
    "bytes_sent_per_step": 9.4e6,
}


def metrics(*moments: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"kind": "train", "samples": s, "seconds": t} for s, t in moments]


# All samples are leased after 5 s; the last line is the end of the run.
LINES = metrics((8, 2.0), (16, 3.0), (48, 4.0), (80, 5.0), (80, 10.0))


def test_cell_row_has_whole_and_settled_throughput() -> None:
    outcome = row(cell(), SUMMARY, LINES)
    assert outcome["whole run"] == pytest.approx(8.0 * 0.5)
    assert outcome["speed-up"] == pytest.approx((80 - 16) / (5.0 - 3.0) * 0.5)
    assert outcome["coalesced"] == 0.25
    # Synchronous workers all end with the run.
    assert row(cell(algorithm="bsp"), SUMMARY, LINES)["speed-up"] == pytest.approx(8.0 * 0.5)


def test_settled_rate_tolerates_bunched_log_lines() -> None:
    at_ends = metrics((16, 3.4), (32, 4.0), (48, 5.0), (64, 6.0), (80, 6.6))
    rate = settled_rate(at_ends, 80, cell())
    by_ends = (80 - 16) / (6.6 - 3.4)
    assert abs(rate - 16) < abs(by_ends - 16)


def test_settled_rate_is_zero_with_too_few_log_lines() -> None:
    assert settled_rate([], 80, cell()) == 0.0
    assert settled_rate(metrics((80, 5.0)), 80, cell()) == 0.0
    assert settled_rate(metrics((16, 3.0), (48, 5.0)), 80, cell()) == 0.0


def test_cell_logs_a_line_at_last_sample() -> None:
    for slowdown in (1.0, 2.0, 10.0, 100.0):
        words = cell(slowdown).options(Path("run"))
        samples, every = (int(words[words.index(o) + 1]) for o in ("--samples", "--log-every"))
        assert samples % every == 0
        assert samples == pytest.approx(10 * cell(slowdown).ideal, abs=every / 2)


def test_cell_size_follows_slowest_worker_if_synchronous() -> None:
    assert cell(100.0, "bsp").samples == cell(100.0, "ssp").samples == 80
    assert cell(100.0, "asp").samples == 72
    assert study.iterations("vgg16", "bsp", 100.0, 20.0) == study.FEWEST
    # Steps remain to be counted after the three by which a worker may be ahead.
    few = study.iterations("vgg16", "ssp", 100.0, 20.0)
    assert 8 * few - cell(100.0, "ssp", few).settled_from >= 2 * 8


@pytest.mark.parametrize("algorithm", ["bsp", "ssp"])
def test_synchronous_cell_runs_at_speed_of_slow_worker(algorithm: str) -> None:
    few = study.iterations("resnet50", algorithm, 100.0, 20.0)
    figures = VirtualEngine().run(study.cell("resnet50", algorithm, 100.0, 8, 20.0))
    assert few < 10
    assert figures["speed-up"] == pytest.approx(8 / 100, rel=0.02)


def test_cell_store_resumes_after_truncated_line(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.put(cell(), {"speed-up": 7.0}, "abc")
    store.put(cell(2.0), {"speed-up": 6.0}, "abc")
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-20])
    again = CellStore(tmp_path)
    entry = again.get(cell())
    assert entry is not None and entry["figures"] == {"speed-up": 7.0}
    assert entry["commit"] == "abc" and "UTC" in entry["date"]
    assert again.get(cell(2.0)) is None
    again.put(cell(2.0), {"speed-up": 5.0}, "def")
    third = CellStore(tmp_path).get(cell(2.0))
    assert third is not None and third["figures"] == {"speed-up": 5.0}


def test_cell_store_names_damaged_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"cell": 1}\nnonsense\n{}\n')
    with pytest.raises(UserError, match=r"line 2: .*'nonsense"):
        CellStore(tmp_path)


def result(
    speed_up: float, predicted: float = 7.0, dropped: int = 0, coalesced: float = 0.0
) -> study.Result:
    about = {"wait fraction": 0.0, "dropped": dropped, "coalesced": coalesced}
    real = {"speed-up": speed_up, **about}
    virtual = {"speed-up": predicted, **about}
    about_cell = study.cell("vgg16", "aladdin", 10.0, 8, 20.0)
    return study.Result(about_cell, {"virtual": virtual, "real": real})


def test_straggler_thresholds_are_checked() -> None:
    assert not stragglers.missed([result(7.0)])
    assert "97%" in " ".join(stragglers.missed([result(6.8)]))
    assert "5.49" in " ".join(stragglers.missed([result(5.4)]))
    # A worker that coalesces what its link cannot carry keeps its pace on any network.
    assert not stragglers.missed([result(7.0, coalesced=0.2)])
    (line,) = stragglers.missed([result(7.0, coalesced=0.25)])
    assert "5.25" in line
    assert "3 gradients" in " ".join(stragglers.missed([result(7.0, dropped=3)]))


def test_agreement_threshold_is_checked() -> None:
    close, far = result(7.0, 7.3), result(7.0, 6.5)
    assert [abs(r.error or 0) for r in agreement.by_error([close, far])] == [
        pytest.approx(0.5 / 7),
        pytest.approx(0.3 / 7),
    ]
    (line,) = agreement.missed([close, far])
    assert "-7.1%" in line


def test_published_figures_agree_with_table_3() -> None:
    """Figure 5 at eight workers and figure 8b at pi 4 are cells of table 3."""
    for workload in ("resnet50", "vgg16"):
        for name in ("aladdin", "ar-sgd", "sgp"):
            alike = published.with_straggler(workload, name, 1.0)
            assert alike == published.with_workers(workload, name, 8)
        assert published.with_period(workload, 4) == published.with_workers(workload, "aladdin", 8)
    assert published.with_straggler("vgg16", "bsp", 1.0) is None


def test_study_tables_share_cells() -> None:
    args = argparse.Namespace(
        quick=False, computing=20.0, workload=["resnet50", "vgg16"], engine=None
    )
    every = agreement.cells(args)
    assert len(every) - len(set(every)) == 2 * (6 + 1)  # eight workers, also with pi 4
    assert len(set(every)) == 72 + 2 * (6 * 2 + 2)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_dry_run_prints_plan_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CellStore(tmp_path)
    words = ["--work", str(tmp_path), "--quick", "--dry-run"]
    finished = study.cell("resnet50", "ar-sgd", 10.0, 8, study.QUICK["computing"])
    store.put(finished, {}, None)
    assert stragglers.main(words) == 0
    lines = printed(capsys).splitlines()
    assert any(re.match(r" +done +ResNet-50, ar-sgd", line) for line in lines)
    assert lines[-1].endswith("minutes")
    assert len(lines) == 5


def test_quick_pass_keeps_options_of_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--dry-run", "--workload", "vgg16", "--algorithm", "asp"]
    assert stragglers.main([*words, "--slowdown", "2"]) == 0
    first, _ = printed(capsys).splitlines()
    assert re.search(r"VGG-16, asp, 8 workers\b.* 2,", first)
    assert scaling.main([*words, "--workers", "4"]) == 0
    first, _ = printed(capsys).splitlines()
    assert "VGG-16, asp, 4 workers" in first


def saved(folder: Path, name: str) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    assert (folder / f"{name}.png").stat().st_size > 1000
    return rows


def test_straggler_study_runs_in_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--engine", "virtual", "--quick", "--check", "--save", str(tmp_path)]
    assert stragglers.main(words) == 0
    rows = saved(tmp_path, "stragglers")
    assert [(r["algorithm"], r["slow-down of one"], r["published"]) for r in rows] == [
        ("aladdin", 1.0, 6.7),
        ("aladdin", 10.0, 5.95),
        ("ar-sgd", 1.0, 5.4),
        ("ar-sgd", 10.0, 0.71),
    ]
    assert rows[1]["virtual"] >= 0.97 * rows[1]["ideal"]
    assert rows[3]["virtual"] < 0.8
    assert all("real" not in r and r["dropped"] == 0 for r in rows)
    assert "8 workers on 4 hosts" in printed(capsys)


def test_scaling_study_runs_in_simulation(tmp_path: Path) -> None:
    words = ["--engine", "virtual", "--computing", "3", "--workload", "resnet50"]
    words += ["--algorithm", "aladdin", "osgp", "--workers", "2", "4", "--pi", "1", "4"]
    assert scaling.main([*words, "--save", str(tmp_path)]) == 0
    rows = saved(tmp_path, "scaling")
    assert [(r["algorithm"], r["workers"], r["pi"]) for r in rows] == [
        ("aladdin", 2, 4),
        ("aladdin", 4, 4),
        ("osgp", 2, None),
        ("osgp", 4, None),
        ("aladdin", 8, 1),
        ("aladdin", 8, 4),
    ]
    assert [r["published"] for r in rows] == [1.71, 3.57, 1.68, 3.35, 5.90, 6.70]
    assert rows[0]["virtual"] < rows[1]["virtual"] < rows[5]["virtual"]


def test_agreement_requires_both_engines(capsys: pytest.CaptureFixture[str]) -> None:
    status = run_main(lambda: agreement.main(["--engine", "virtual", "--quick"]))
    assert status == 2
    assert re.search(r"--engine: .*\bvirtual and real\b", capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1250)
@needs_lab
def test_agreement_runs_over_mpi_and_resumes(tmp_path: Path) -> None:
    """A pass in the lab is stopped after its cells; the second start runs none of them again."""
    words = ["--quick", "--computing", "0.75", "--work", str(tmp_path), "--save", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.agreement", *words]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "real 1/" in first.stderr and "real" not in second.stderr
    rows = saved(tmp_path, "agreement")
    assert {r["algorithm"] for r in rows} == {"aladdin", "ar-sgd"}
    assert all(0 < r["real"] <= 8.5 for r in rows)
