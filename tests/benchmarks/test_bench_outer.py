"""Benchmark of slow links: its cells, the tuning of rules, and the bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.advice import learning
from aladdin_mpi.options.run import SimulateOptions, read_request
from benchmarks import outer, outer_advice
from benchmarks.outer_cells import PARAMETERS, Cell, Run, carry_out, taught, time_to
from benchmarks.outer_rules import (
    RATES,
    Rule,
    parent,
    rules,
    score,
    target,
    tune,
    without_slowest,
)
from benchmarks.programs import outer_tasks

EQUAL, SLOW = Cell(), Cell(speeds="slow 10")


def figures(loss: float, seconds: float = 200.0, **others: Any) -> dict[str, Any]:
    """Return figures of a run whose loss falls linearly from 4."""
    curve = [
        {"samples": k, "seconds": k * seconds / 10, "test_loss": 4 + (loss - 4) * k / 10}
        for k in range(1, 11)
    ]
    known = {"loss": loss, "curve": curve, "seconds": seconds, "waiting": 0.0, "sent": 0.02}
    return {**known, "received": 0.02, "took": 1.0, **others}


def test_time_to_loss_lies_between_evaluations() -> None:
    curve: list[dict[str, Any]] = figures(2.0, 100.0)["curve"]
    assert time_to(curve, 2.5) == pytest.approx(75.0)
    assert time_to(curve, 3.9) == 10.0
    assert time_to(curve, 1.9) is None
    diverged: list[dict[str, Any]] = [
        {"seconds": 1.0, "test_loss": None},
        {"seconds": 2.0, "test_loss": 2.0},
    ]
    assert time_to(diverged, 2.5) == 2.0


def options(run: Run) -> SimulateOptions:
    words = run.command(Path("run"), Path("cifar10"))
    typed = words[words.index("--algorithm") : words.index("--")]
    return read_request(SimulateOptions, typed, "test", "", follows=False).options


@pytest.mark.parametrize("name", rules())
def test_rules_make_valid_options(name: str) -> None:
    rule = rules()[name]
    for axis in rule.all_axes("gpt"):
        for index in range(len(axis.choices)):
            point = {**rule.first("gpt"), axis.name: index}
            assert options(rule.run(EQUAL, point, 0)).algorithm == rule.algorithm


def test_link_carries_its_share_of_a_gradient_per_step() -> None:
    cluster = options(rules()["ar-sgd"].run(replace(EQUAL, link=10), {"peak": 0}, 0)).cluster
    assert cluster.bandwidth_gbit * 1e9 / 8 == pytest.approx(4 * PARAMETERS["gpt"] / 10, rel=1e-4)
    assert {cluster.host_of(rank, 8) for rank in range(8)} == set(range(1, 9))
    assert cluster.placed(1).host_of(0, 9) == 0
    assert cluster.link_gbit(0) > 1000 * cluster.link_gbit(1)


def test_pauses_are_those_of_workers_and_depend_on_seed_only() -> None:
    cell = Cell(speeds="pauses")
    pauses = [tuple(map(float, each.split(":"))) for each in cell.pauses(3, servers=1)]
    assert {rank for rank, _, _ in pauses} == set(range(1, 9))
    assert cell.pauses(3, 1) == cell.pauses(3, 1) != cell.pauses(4, 1)
    paused = sum(length for _, _, length in pauses) / (8 * 10 * cell.steps)
    assert 0.15 < paused < 0.32  # 30 of 130 steps
    assert EQUAL.pauses(3, 1) == []


def test_speeds_slow_workers_down() -> None:
    assert SLOW.slowdowns() == [10, *[1] * 7]
    assert Cell(workers=4, speeds="three").slowdowns() == [1, 2, 3, 1]


@pytest.mark.long
def test_parameters_are_those_of_the_models() -> None:
    task = outer_tasks.text()
    assert sum(each.numel() for each in task.model().parameters()) == PARAMETERS["gpt"]
    assert len(task.data) * 64 >= 1000 * 16 * 4 * 64  # no window is read twice


def test_schedule_rises_and_falls() -> None:
    rate = outer_tasks.schedule(1000)
    assert rate(25) == pytest.approx(0.5)
    assert rate(50) == pytest.approx(1)
    assert rate(1000) == pytest.approx(outer_tasks.FLOOR)


def best_at(rate: float, steps: int) -> Callable[[Run], Mapping[str, Any]]:
    """Return figures that are best with a rate and a number of steps."""

    def of(run: Run) -> Mapping[str, Any]:
        own = int(dict(run.options).get("--diloco-steps", steps))
        return figures(2.0 + math.log(run.peak / rate) ** 2 + math.log(own / steps) ** 2)

    return of


def test_tuning_finds_best_setting_of_each_axis() -> None:
    rule = rules(("fp32",))["diloco"]
    run = rule.run(EQUAL, tune(rule, EQUAL, "loss", best_at(1.2e-2, 32)), 0)
    assert run.peak == 1.2e-2
    assert dict(run.options)["--diloco-steps"] == "32"


def test_tuning_searches_axes_again_until_nothing_is_better() -> None:
    """The best number of steps is found only once the rate, which is searched later, is right."""

    def of(run: Run) -> Mapping[str, Any]:
        own = int(dict(run.options)["--diloco-steps"])
        wanted = 16 if run.peak == 1.6e-2 else 4
        return figures(2.0 + math.log(run.peak / 1.6e-2) ** 2 + 1e-3 * abs(own - wanted))

    rule = rules(("int4",))["diloco"]
    run = rule.run(EQUAL, tune(rule, EQUAL, "loss", of), 0)
    assert (run.peak, dict(run.options)["--diloco-steps"]) == (1.6e-2, "16")


def test_tuning_also_begins_with_published_setting() -> None:
    """A search from averaging every 4 steps would end there."""

    def of(run: Run) -> Mapping[str, Any]:
        given = dict(run.options)
        is_published = given["--diloco-outer-momentum"] == "0.9" and int(given["--diloco-steps"])
        return figures(
            1.0 if is_published == 32 else 2.0 if given["--diloco-steps"] == "4" else 3.0
        )

    rule = rules(("int4",))["diloco"]
    run = rule.run(EQUAL, tune(rule, EQUAL, "loss", of), 0)
    assert dict(run.options)["--diloco-steps"] == "32"


def test_tuning_of_longer_run_keeps_setting_and_tunes_rate_again() -> None:
    rule = rules(("fp32",))["diloco"]
    long = Cell(steps=1000)
    seen: set[tuple[Cell, str]] = set()

    def of(run: Run) -> Mapping[str, Any]:
        seen.add((run.cell, dict(run.options)["--diloco-steps"]))
        return best_at(4e-3 if run.cell == EQUAL else 2e-3, 16)(run)

    assert rule.run(long, tune(rule, long, "loss", of), 0).peak == 2e-3
    assert {steps for cell, steps in seen if cell == long} == {"16"}


@pytest.mark.parametrize("part", outer.PARTS)
def test_every_cell_has_a_first_cell_and_a_target(part: str) -> None:
    for cell in outer.PARTS[part]:
        assert target(cell) < 4
        above: Cell | None = cell
        while above is not None and (origin := parent(above)) is not None:
            above = origin[0]
        assert above == Cell(cell.task)


def test_settings_that_miss_the_target_are_ordered_by_the_losses_they_reach() -> None:
    closer, faster = figures(2.54, 400.0), figures(2.58, 100.0)
    assert score("time", EQUAL, figures(2.49, 800.0)) < score("time", EQUAL, closer)
    assert score("time", EQUAL, closer) < score("time", EQUAL, faster)
    assert score("time", EQUAL, faster) < score("time", EQUAL, figures(2.57, 200.0))


def test_cell_without_its_slow_worker_has_the_same_samples() -> None:
    fewer = without_slowest(SLOW)
    assert fewer is not None
    assert (fewer.workers, fewer.speeds) == (7, "equal")
    assert SLOW.samples <= fewer.samples < SLOW.samples + 7 * 4
    assert without_slowest(EQUAL) is None


def test_bytes_beyond_the_link_lose_against_any_loss() -> None:
    fits, exceeds = figures(3.0, sent=0.021), figures(2.0, sent=0.03)
    assert score("loss", EQUAL, fits) < score("loss", EQUAL, exceeds)
    assert score("time", EQUAL, fits) > score("time", EQUAL, exceeds)


def result(cell: Cell, name: str, found: dict[str, Any]) -> outer.Result:
    run = Run(cell, "diloco", (), 1e-3, 0)
    return outer.Result(cell, name, ("time", "loss"), run, [found])


@pytest.mark.parametrize(
    ("cell", "ours", "missed"),
    [
        (EQUAL, figures(2.0, 200), []),
        (EQUAL, figures(2.0, 210), ["2.7", "2.6", "2.55", "2.5, expected at most 150"]),
        (SLOW, figures(2.0, 130), []),
        (SLOW, figures(2.0, 140), ["2.7", "2.6", "2.55", "2.5, expected at most 100"]),
        (EQUAL, figures(2.0, 200, waiting=0.02), ["workers wait 2.0%"]),
        (EQUAL, figures(2.03, 190), ["(streaming diloco)", "(diloco)"]),
        (
            EQUAL,
            figures(3.0, 200),
            [*["None steps"] * 4, "(streaming diloco)", "(diloco)"],
        ),
    ],
)
def test_bars(cell: Cell, ours: dict[str, Any], missed: list[str]) -> None:
    results = [result(cell, "aladdin-local", ours)]
    results += [result(cell, name, figures(2.0, 200)) for name in ("diloco", "streaming diloco")]
    found = outer.missed(results)
    assert len(found) == len(missed)
    assert all(text in line for text, line in zip(missed, found, strict=True))


def test_finished_runs_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Run] = []

    def stub(run: Run, data: Path | None, timed: bool = False) -> dict[str, Any]:
        started.append(run)
        assert timed == (run.cell == SLOW)  # the gradients are those of equal workers
        return figures(4.0, 400.0) if timed else dict(best_at(4e-3, 8)(run))

    monkeypatch.setattr(outer, "carry_out", stub)
    monkeypatch.setattr(outer, "PARTS", {"speeds": [EQUAL, SLOW]})
    words = ["--out", str(tmp_path), "--parts", "speeds", "--rules", "ar-sgd", "diloco"]
    words += ["--wires", "fp32"]
    assert outer.main([*words, "--save", str(tmp_path / "saved")]) == 0
    assert len(started) == len(set(started)) > 10
    assert {"outer.md", "outer.png"} <= {path.name for path in (tmp_path / "saved").iterdir()}
    started.clear()
    assert outer.main(words) == 0
    assert not started
    printed = capsys.readouterr().out
    assert "diloco-steps 8, wire fp32, diloco-outer-lr 1, diloco-outer-momentum 0" in printed


@pytest.mark.long
def test_run_is_simulated() -> None:
    run = Rule("", "aladdin-ahead").run(Cell(workers=2, speeds="pauses", steps=4), {"peak": 3}, 0)
    found = carry_out(run, None)
    assert run.peak == RATES["gpt"][3]
    assert found["loss"] < 4.6
    assert found["curve"][-1]["samples"] == 32
    assert found["seconds"] > 4
    assert 0 < found["sent"] < 0.5
    assert 0 < found["received"] < 0.5


@pytest.mark.long
def test_run_with_gradients_of_zero_takes_the_time_of_a_real_one() -> None:
    options = (("--diloco-steps", "2"), ("--wire", "int4"))
    run = Run(Cell(workers=2, speeds="slow 10", steps=6), "diloco", options, 3e-3, 0)
    assert run.teacher == replace(run, cell=Cell(workers=2, steps=6))
    found, teacher = carry_out(run, None), carry_out(run.teacher, None)
    timed = taught(teacher, carry_out(run, None, timed=True))
    for figures in (found, timed):
        del figures["took"]
    assert timed.pop("received") == pytest.approx(found.pop("received"), rel=1e-3)
    assert timed == found


# -- sample efficiency for the adviser ---------------------------------------------------------


def test_adviser_has_sample_efficiency_of_every_setting() -> None:
    expected = {(each.key, each.number) for each in outer_advice.settings(outer_advice.STEPS)}
    table = learning.slow_links()
    assert {(key, number) for key, rows in table.items() for number in rows} == expected


def test_efficiency_compares_samples_and_uses_the_better_peak() -> None:
    def runs(run: Run) -> dict[str, Any]:
        rate = 1.0 if run.algorithm == "ar-sgd" else 0.5 if run.peak < outer_advice.PEAK else 0.25
        losses = [(samples, 3 - rate * samples / 100) for samples in range(0, 101, 10)]
        curve = [{"samples": float(s), "test_loss": loss} for s, loss in losses]
        return {"curve": curve, "loss": losses[-1][1]}

    by_key = {(each.key, each.number): each for each in outer_advice.settings(100)}
    row, losses = outer_advice.efficiency(by_key["aladdin-local", 50], 2, runs)
    assert (row.share, row.low, row.high, row.seeds) == (0.5, 0.5, 0.5, 2)
    assert losses == [2.5, 2.5]
    row, _ = outer_advice.efficiency(by_key["diloco", 8], 1, runs)  # has one peak rate
    assert row.share == 0.25
