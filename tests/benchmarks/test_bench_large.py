"""benchmarks.large: small curves end to end, and the calculation of knees and predictions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS
from benchmarks import large
from benchmarks.harness import run_main
from benchmarks.scale import cases, plots
from benchmarks.scale.cases import USUAL_LINK, WORKERS, Case, Phase, all_algorithms, curve, study
from benchmarks.scale.measure import Diary, figures, run
from benchmarks.scale.prediction import Knee, efficiency, knee, load, predicted_knee
from benchmarks.scale.table import Found, limit, row, words

pytestmark = pytest.mark.timeout(280)


def simulated(algorithm: str, workers: int, gbit: float, servers: int = 0) -> dict[str, Any]:
    return run(Case(algorithm, "resnet50", workers, servers, gbit))


# -- end to end -------------------------------------------------------------------------
@pytest.mark.long
def test_large_study_runs_saves_and_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    points = tmp_path / "points.jsonl"
    options = ["--quick", "--algorithm", "asp", "--workers", "8", "16", "--link", "100"]
    options += ["--points", str(points), "--save", str(tmp_path)]
    assert large.main(options) == 0
    said = capfd.readouterr()
    assert said.err.count("of ideal") == 3, said.err
    saved = json.loads((tmp_path / "large.json").read_text())
    assert [entry["servers"] for entry in saved["rows"]] == [16, 1]
    assert all(0 < entry["their speed-up"] <= 16.5 for entry in saved["rows"])
    assert "never the bottleneck" in saved["notes"]
    for picture in (plots.ALGORITHMS, plots.SERVERS):
        assert (tmp_path / "large" / picture).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "large" / plots.LINKS).exists(), "there is but one link"

    kept = points.read_text()
    points.write_text("".join(kept.splitlines(keepends=True)[:-1]))
    assert large.main(options) == 0
    assert capfd.readouterr().err.count("of ideal") == 1, "only what was missing is run"
    assert points.read_text() == kept, "virtual time gives the same again"


def test_large_study_rejects_damaged_points_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = tmp_path / "points.jsonl"
    points.write_text('{"case": 1\n')
    assert run_main(lambda: large.main(["--quick", "--points", str(points)])) == 2
    assert re.search(r"--points: .*\bJSON\b.*\bline 1\b", capsys.readouterr().err)
    assert run_main(lambda: large.main(["--workers", "8", "12"])) == 2
    assert re.search(r"--workers: .*\bmultiples of 8\b.*\b12\b", capsys.readouterr().err)


def test_store_ignores_points_of_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points, case = tmp_path / "points.jsonl", Case("asp", "vgg16", 8, 1, 10.0)
    large.Store(points).put(case, {"speed_up": 7.0})
    with points.open("a") as file:
        file.write('{"case": {"algo')  # killed while writing
    assert large.Store(points).get(case) == {"speed_up": 7.0}
    assert points.read_text().count("\n") == 1 and "algo\n" not in points.read_text()
    monkeypatch.setattr(cases, "JITTER", 0.01)
    assert large.Store(points).get(case) is None


def test_kept_only_requires_finished_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--kept-only", "--points", str(tmp_path / "none.jsonl")]
    assert run_main(lambda: large.main(options)) == 2
    assert re.search(r"--points: .*none\.jsonl", capsys.readouterr().err)


# -- single points ----------------------------------------------------------------------
def test_asp_is_limited_by_server_links() -> None:
    """24 gradients of 94 MB per step and one server at 10 Gbit/s: the link is the bottleneck."""
    result = simulated("asp", 32, 10.0, servers=1)
    # The 8 workers on the server's host do not use its link, and are as fast as alone.
    expected = 8 + 1.25e9 / 94e6 * 0.447
    assert result["speed_up"] == pytest.approx(expected, rel=0.05)
    bound = efficiency(curve("asp", "resnet50", 10.0, 1), 32, overlapped=True)
    assert bound == pytest.approx(expected / 32)
    assert result["busy"] > 0.95
    assert "a server's host" in result["busiest_link"]
    assert result["wait_fraction"] > 0.3


def test_aladdin_coalesces_gradients_instead_of_waiting() -> None:
    result = simulated("aladdin", 32, 10.0, servers=1)
    assert result["speed_up"] == pytest.approx(32, rel=0.02)
    assert result["wait_fraction"] == pytest.approx(0.0, abs=1e-6)
    assert result["sent_mb"] < 0.6 * 94


def test_fast_network_causes_no_slowdown() -> None:
    result = simulated("gosgd", 16, 200.0)
    assert result["speed_up"] == pytest.approx(16, rel=0.02)
    assert result["busy"] < 0.3


def test_figures_use_rates_of_the_window() -> None:
    case = Case("asp", "resnet50", 2, 1, 10.0)
    steps = case.phase.steps
    times = [10.0 if step < 3 else 20.0 + step for step in range(steps)]
    moments = [(times[step], 100 * step, 0.25 * step) for step in range(steps)]
    links = {"out": [0], "in": [0], "local": [0]}
    busy = {"out": [625_000_000], "in": [0], "local": [0]}
    carried = [(23.0 + step, busy if step == 7 else links) for step in range(-3, steps - 3)]
    carried[3], carried[7] = (23.0, links), (27.0, busy)
    result = figures(case, Diary({1: moments, 2: moments[:6]}, carried))
    assert result["speed_up"] == pytest.approx(2 * 0.447)
    assert result["wait_fraction"] == pytest.approx(0.25)
    assert result["sent_mb"] == pytest.approx(100e-6)
    # 625 MB in 4 s over 1.25 GB/s.
    assert result["busy"] == pytest.approx(0.125)
    assert result["busiest_link"] == "out of a server's host"


# -- knees and predictions ----------------------------------------------------------------
def test_knee_lies_between_points() -> None:
    assert knee([(8, 1.0), (16, 0.9), (32, 0.7), (64, 0.9)]).workers == pytest.approx(16 * 2**0.5)
    assert knee([(8, 1.0), (16, 0.8)]) == Knee(16, 1)
    assert knee([(8, 0.7), (16, 0.6)]) == Knee(8, -1)
    assert [str(Knee(8, way)) for way in (-1, 0, 1)] == ["< 8", "8", "> 8"]


def test_predictions_equal_bytes_over_link_rate() -> None:
    line = curve("asp", "resnet50", 10.0, 4)
    result = load(line, 64)
    assert result is not None
    # A server's host: a quarter of the gradients of 56 workers; models of three servers for its 8.
    assert result.into == pytest.approx(56 / 4 + 8 * 3 / 4)
    step = result.into * 94e6 / 1.25e9
    assert efficiency(line, 64, overlapped=True) == pytest.approx(0.447 / step)
    assert efficiency(line, 8, overlapped=False) == 1.0
    early, late = predicted_knee(line, overlapped=False), predicted_knee(line, overlapped=True)
    assert early is not None and late is not None
    assert early.workers < late.workers < 64


def test_predicted_knee_moves_with_servers_and_link_rate() -> None:
    def at(gbit: float, servers: int) -> float:
        result = predicted_knee(curve("aladdin", "vgg16", gbit, servers), overlapped=True)
        assert result is not None
        return result.workers

    assert at(100.0, 1) < at(100.0, 4) < at(100.0, 16)
    assert at(10.0, 4) < at(25.0, 4) < at(200.0, 4)


def found_of(algorithm: str, speed_ups: dict[int, float], busy: float) -> Found:
    line = curve(algorithm, "vgg16", USUAL_LINK, 16)
    figures = {"sent_mb": 552.0, "busiest_link": "into a host", "busy": busy, "wait_fraction": 0.1}
    return Found(line, [(n, {"speed_up": value, **figures}) for n, value in speed_ups.items()])


def test_large_study_row_names_bottleneck() -> None:
    speeds = {8: 8.0, 16: 16.0, 32: 16.0}
    assert limit(found_of("asp", speeds, busy=0.95)) == "link is full"
    assert limit(found_of("asp", speeds, busy=0.5)) == "waits, links not full"
    assert limit(found_of("asp", {8: 8.0, 16: 16.0}, busy=0.95)) == "none up to here"
    assert row(found_of("asp", speeds, busy=0.95))["seen at, workers"] == 32


def test_aladdin_knee_counts_gradients_sent_alone() -> None:
    result = found_of("aladdin", {8: 8.0, 16: 16.0}, busy=1.0)
    assert result.knee == Knee(16, 1)
    halved = [(n, {**point, "sent_mb": point["sent_mb"] / 2}) for n, point in result.points]
    assert Found(result.curve, halved).knee == Knee(8, -1)


def test_text_reports_moved_knee() -> None:
    lines = [curve("asp", "vgg16", USUAL_LINK, servers) for servers in (4, 16)]
    points = [found_of("asp", {8: 8.0, 16: last, 32: 8.0}, 1.0).points for last in (9.6, 16.0)]
    said = words([Found(line, each) for line, each in zip(lines, points, strict=True)])
    assert any("4 servers" in line and "16 servers" in line for line in said)


# -- the study ------------------------------------------------------------------------------
def test_study_has_every_algorithm_once() -> None:
    curves = study(["resnet50", "vgg16"], WORKERS, all_algorithms())
    assert len(set(curves)) == len(curves)
    assert set(ALGORITHMS) < set(all_algorithms())
    assert {line.algorithm for line in curves} == set(all_algorithms())
    assert max(curves[0].workers) == 1024


def test_case_places_eight_workers_and_at_most_one_server_per_host(tmp_path: Path) -> None:
    for algorithm, servers in (("asp", 16), ("ar-sgd", 0)):
        case = next(iter(curve(algorithm, "vgg16", 10.0, servers, [64]).cases))
        assert case.workers == 64
        cluster = case.options(tmp_path).cluster
        size = case.workers + case.servers
        hosts = [cluster.host_of(rank, size) for rank in range(size)]
        assert sorted(hosts[case.servers :]) == [host for host in range(8) for _ in range(8)]
        assert len(set(hosts[: case.servers])) == case.servers


def test_case_times_option_multiplies_steps() -> None:
    once = Case("aladdin", "vgg16", 8, 1, 10.0)
    assert once.phase == Phase(4, 8)
    assert Case("aladdin", "vgg16", 8, 1, 10.0, times=2).phase == Phase(8, 16)
    assert Case("sgp", "vgg16", 1024, 0, 10.0).phase.window == 10
