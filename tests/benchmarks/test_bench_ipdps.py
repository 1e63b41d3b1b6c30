"""Simulation of the IPDPS 2021 study: some of its cells, and the calculations of its table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import resnet50 as torchvision_resnet50

from aladdin_mpi.errors import UserError
from benchmarks import ipdps, ipdps_reasons
from benchmarks.ipdps_paper import FIGURE_2, FIGURE_4, NETWORKS
from benchmarks.ipdps_run import Run, rate, resnet50, speed_up


@pytest.mark.long
def test_ipdps_runs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["--network", "vgg16", "--gbit", "56", "--figure", "2", "--workers", "8"]
    words = [*cells, "--algorithm", "ar-sgd", "ad-psgd", "--rounds", "3"]
    words += ["--done", str(tmp_path / "done.jsonl")]
    assert ipdps.main([*words, "--save", str(tmp_path)]) == 0
    saved: dict[str, Any] = json.loads((tmp_path / "ipdps.json").read_text())
    rows = saved["rows"]
    assert [(row["algorithm"], row["published"]) for row in rows] == [
        ("ar-sgd", 3.4),
        ("ad-psgd", 5.33),
    ]
    for row in rows:
        # Fewer assumptions make a run faster, but never faster than its workers.
        assert row["hosts"] <= 1.02 * row["links"] <= 8.3
        assert row["ratio, links"] == pytest.approx(row["links"] / row["published"])
    assert rows[1]["third"] < 0.7 * rows[1]["hosts"], "0.55 s longer than 0.66 s"
    assert (tmp_path / "ipdps-figure-2.png").stat().st_size > 5000
    assert not (tmp_path / "ipdps-figure-4.png").exists()
    first = capsys.readouterr()
    assert first.err.count(" ...\n") == 5
    ipdps.main(words)
    again = capsys.readouterr()
    assert " ...\n" not in again.err, "all runs are looked up"
    assert again.out.splitlines()[4:6] == first.out.splitlines()[4:6]


@pytest.mark.long
def test_single_server_is_limited_by_memory_bandwidth() -> None:
    """Each gradient of VGG-16 moves seven times its bytes, and each message takes 1 ms."""
    run = Run("vgg16", 56, "asp", 24, "none", cluster=ipdps.HOSTS)
    megabytes = 4 * 138.36
    messages = 2 * -(-megabytes // NETWORKS["vgg16"].bucket_mb)
    seconds = 7 * megabytes / 10_000 + messages / 1000
    assert speed_up(run) == pytest.approx(0.66 / seconds, rel=0.03)


def test_ipdps_resnet50_has_its_parameters_in_54_layers() -> None:
    with torch.device("meta"):
        mine, whole = resnet50(1000), torchvision_resnet50(num_classes=1000)
    layers = list(mine.children())
    assert len(layers) == NETWORKS["resnet50"].layers
    sizes = [sum(p.numel() for p in model.parameters()) for model in (mine, whole)]
    assert sizes[0] == sizes[1]
    # A convolution and its batch norm.
    assert [tuple(p.shape) for p in layers[0].parameters()] == [(64, 3, 7, 7), (64,), (64,)]


def test_ipdps_run_sets_servers_and_hosts() -> None:
    def at(workers: int, **changes: Any) -> tuple[int, int]:
        run = Run("vgg16", 10, "bsp", workers, **changes)
        return run.servers, run.hosts

    assert at(4, per_vm=4) == (4, 1)
    assert at(2, per_vm=4) == (2, 1), "no more than workers"
    assert at(8, per_vm=2) == (4, 2)
    assert at(24, per_vm=1) == (6, 3)
    assert at(24, per_vm=4) == (16, 3), "VGG-16 has 16 layers"
    assert at(24, per_vm=4, stage="none") == (1, 3)


def test_different_ipdps_runs_have_different_keys() -> None:
    run = Run("vgg16", 10, "bsp", 8)
    others = [
        Run("vgg16", 10, "bsp", 8, extra=0.1),
        Run("vgg16", 10, "bsp", 8, coalesce=True),
        Run("vgg16", 10, "bsp", 8, cluster={"memory_gbyte": 1.0}),
        Run("vgg16", 10, "bsp", 8, bucket_mb=1.0),
        Run("vgg16", 10, "bsp", 8, rounds=3),
    ]
    assert len({run.key, *(other.key for other in others)}) == 6


def test_ipdps_rate_is_measured_between_two_lines() -> None:
    moments = {10: 5.0, 20: 6.0, 30: 7.0, 40: 8.0, 50: 8.5}
    lines = [{"samples": samples, "seconds": at} for samples, at in moments.items()]
    # The end of the run writes another line with the same number of samples.
    lines.append({"samples": 50, "seconds": 20.0})
    assert rate(lines, whole=10, first=1, last=4) == pytest.approx(10.0)
    assert rate(lines, whole=10, first=4, last=5) == pytest.approx(20.0)


def test_figures_2_and_4_of_study_are_consistent() -> None:
    """24 workers with sharding and wait-free backpropagation; one value differs by 16 %."""
    for panel, bars in FIGURE_4.items():
        for algorithm, values in bars.items():
            assert values[2] == pytest.approx(FIGURE_2[panel][algorithm][24], rel=0.16)


def test_ipdps_rejects_fewer_than_three_rounds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--rounds: .*\b3\b.*\b2\b"):
        ipdps.main(["--rounds", "2", "--done", str(tmp_path / "done.jsonl")])


def row(**changes: Any) -> dict[str, Any]:
    result = {"network": "resnet50", "algorithm": "asp", "workers": 24, "stage": "wait-free"}
    return {**result, "Gbit/s": 10, "published": 10.0, "third": None, "with": None, **changes}


def test_ipdps_reasons_explain_deviations_beyond_a_quarter() -> None:
    assert ipdps_reasons.reason(row(links=12.4, hosts=20.0)) == ""
    assert ipdps_reasons.reason(row(links=7.6, hosts=20.0)) == ""
    assert ipdps_reasons.reason(row(links=12.6, hosts=11.0)).startswith("A")
    third = row(links=20.0, hosts=20.0, third=9.0) | {"with": "DF"}
    assert ipdps_reasons.reason(third) == "A, D, F"
    ring = row(algorithm="ar-sgd", network="vgg16", links=20.0, hosts=2.0, published=5.8)
    # 7 of 8 workers send 2 x 23/24 of 553.4 MB in their machine, in 2.07 s plus 0.44 s before.
    assert "24 Gbit/s" in ipdps_reasons.reason(ring)
    assert ipdps_reasons.explained(third) == 9.0
    other = row(links=9.6, hosts=9.5, published=7.47)
    assert re.match(r"A; .*figure 2\b.*\b8\.67\b", ipdps_reasons.reason(other))
    assert ipdps_reasons.explained(row(links=12.0, hosts=10.0)) == 12.0
    assert ipdps_reasons.explained(row(links=20.0, hosts=15.0)) == 15.0
    # The explanations by ring traffic and by partial sums do not apply to every value.
    assert ipdps_reasons.reason({**ring, "published": 500.0}) == ""
    parts = row(algorithm="bsp", network="vgg16", stage="none", links=5.6, hosts=3.15)
    assert "six groups" in ipdps_reasons.reason({**parts, "published": 1.74})
    assert ipdps_reasons.reason({**parts, "published": 0.5}) == ""
    near = {**row(links=12.0, hosts=14.0, third=20.0), "explained": 12.0}
    far = {**row(links=20.0, hosts=11.0), "explained": 11.0}
    text = ipdps_reasons.summary([near, far])
    assert re.search(r"\b2 bars 1\b.*\b1 with A, 1 with all\b.*\b2 with\b.*\b0 ", text, re.DOTALL)
    lost = row(links=20.0, hosts=20.0, reason="")
    (line,) = ipdps_reasons.unexplained([lost, row(links=10.0, hosts=10.0, reason="")])
    assert line.startswith("resnet50, asp, 24 workers, wait-free at 10 Gbit/s: 20.00 ")
