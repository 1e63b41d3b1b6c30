"""The probe as a user starts it under mpirun, and what is left of it if it is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing.cluster_file import check
from benchmarks.lab import Lab
from tests.launch import ROOT, needs, run_ranks, start_ranks

PROBE = ("-m", "aladdin_mpi.probe")
QUICK = ("--seconds", "2", "--device", "cpu")

STRAGGLING = """
import time
from mpi4py import MPI
from torch import nn

class Slow(nn.Sequential):
    def forward(self, images):
        time.sleep(0.4 if MPI.COMM_WORLD.rank == 1 else 0.1)
        return super().forward(images)

def slow(num_classes):
    return Slow(nn.Flatten(), nn.Linear(64, num_classes))
"""


def read(path: Path) -> SimulateOptions:
    return check(path.read_text(), path.name)


@needs("openmpi")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_straggler_is_named(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STRAGGLING)
    out = tmp_path / "cluster.toml"
    words = [*PROBE, *QUICK, "--model", "own:slow", "--out", str(out)]
    done = run_ranks(ranks, words, env={"PYTHONPATH": str(tmp_path)})
    assert f"wrote {out}" in done.stdout
    found = read(out)
    assert found.workers == ranks
    assert found.compute_time >= 0.1
    if ranks == 1:
        assert "not measured, as there is one rank alone" in done.stdout
        return
    assert 2 < found.slowdown[1] < 5
    assert found.slowdown[1] == max(found.slowdown.values())
    assert "rank 1 on " in done.stdout
    assert "# rank 1 on " in out.read_text()


@needs("openmpi")
def test_a_file_that_is_there_ends_it_before_it_measures(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    out.write_text("hosts = 7\n")
    done = run_ranks(2, [*PROBE, *QUICK, "--out", str(out)], check=False)
    assert done.returncode == 2
    assert done.stderr.count("expected a new file, got one that is there") == 1
    assert "timing" not in done.stderr
    assert out.read_text() == "hosts = 7\n"


@needs("openmpi")
@pytest.mark.parametrize(
    "words", [["--modell", "mlp"], ["--model", "no-model"], ["--seconds", "0"]]
)
def test_one_error_for_all_ranks(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    done = run_ranks(2, [*PROBE, *words, "--out", str(out)], check=False)
    assert done.returncode == 2
    assert done.stderr.count("aladdin_mpi: error: ") == 1
    assert f"error: {words[0]}" in done.stderr
    assert not out.exists()


IMPATIENT = """
from aladdin_mpi import probe
probe.PATIENCE = 2.0
raise SystemExit(probe.main())
"""
HANGING = STRAGGLING.replace("0.4 if", "1000 if len(images) > 1 and")


@needs("openmpi")
def test_a_rank_that_hangs_is_named_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HANGING)
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    words = [str(tmp_path / "impatient.py"), *QUICK, "--model", "own:slow"]
    words += ["--out", str(tmp_path / "cluster.toml")]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run_ranks(3, words, env=env, check=False)
    assert done.returncode != 0
    assert "receive from rank 1, tag " in done.stderr
    assert "on host " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "cluster.toml").exists()


@needs("openmpi")
def test_one_that_is_killed_half_way_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with start_ranks(2, [*PROBE, "--seconds", "60", "--out", str(out)]) as job:
        job.wait_for("timing steps")
        job.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
@pytest.mark.long
def test_the_rates_of_links_are_found(tmp_path: Path) -> None:
    """Slow ones, so that the cores of a small machine do not hold them up."""
    rates = {2: 0.02, 3: 0.05}
    out = tmp_path / "cluster.toml"
    with Lab(hosts=4, rate_gbit=0.1) as lab:
        for host, gbit in rates.items():
            lab.limit_rate(host, gbit)
        words = [*PROBE, "--seconds", "30", "--device", "cpu", "--out", str(out)]
        done = lab.run([0, 0, 1, 2, 3], words, timeout=120)
    assert done.returncode == 0, done.stderr
    found = read(out).cluster
    assert found.worker_hosts == (0, 0, 1, 2, 3)
    assert found.bandwidth_gbit == pytest.approx(0.1, rel=0.1)
    assert found.links == pytest.approx(rates, rel=0.1)
    assert found.latency_us > 0
