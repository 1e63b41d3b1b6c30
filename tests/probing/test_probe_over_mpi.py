"""The probe under mpirun, and its files after interruption."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing.cluster_file import check
from benchmarks.lab import Lab
from tests.launch import needs, run_ranks, start_ranks
from tests.run_program import run_program

PROBE = ("-m", "aladdin_mpi.probe")
QUICK = ("--seconds", "2", "--device", "cpu")

STRAGGLING = "tests.probing.programs.straggling"
IMPATIENT_PROBE = Path(__file__).parent / "programs" / "impatient_probe.py"


def read(path: Path) -> SimulateOptions:
    return check(path.read_text(), path.name)


@pytest.mark.long
@needs("openmpi")
@pytest.mark.parametrize("ranks", [1, 3])
def test_probe_names_straggler(ranks: int, tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    words = [*PROBE, *QUICK, "--model", f"{STRAGGLING}:slow", "--out", str(out)]
    completed = run_ranks(ranks, words)
    assert f"wrote {out}" in completed.stdout
    result = read(out)
    assert result.workers == ranks
    assert result.compute_time >= 0.1
    if ranks == 1:
        assert re.search(r"\bone rank\b", completed.stdout)
        return
    assert 2 < result.slowdown[1] < 5
    assert result.slowdown[1] == max(result.slowdown.values())
    assert "rank 1 on " in completed.stdout
    assert "# rank 1 on " in out.read_text()


@needs("openmpi")
def test_probe_rejects_existing_file_before_measuring(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    out.write_text("hosts = 7\n")
    completed = run_ranks(2, [*PROBE, *QUICK, "--out", str(out)], check=False)
    assert completed.returncode == 2
    assert len(re.findall(r"--out .*/cluster\.toml: .*--overwrite", completed.stderr)) == 1
    assert "timing" not in completed.stderr
    assert out.read_text() == "hosts = 7\n"


@needs("openmpi")
@pytest.mark.parametrize(
    "words", [["--modell", "mlp"], ["--model", "no-model"], ["--seconds", "0"]]
)
def test_probe_reports_one_error_for_all_ranks(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    completed = run_ranks(2, [*PROBE, *words, "--out", str(out)], check=False)
    assert completed.returncode == 2
    assert completed.stderr.count("aladdin_mpi: error: ") == 1
    assert f"error: {words[0]}" in completed.stderr
    assert not out.exists()


@pytest.mark.long
@needs("openmpi")
def test_probe_names_hanging_rank_and_ends(tmp_path: Path) -> None:
    words = [*QUICK, "--model", f"{STRAGGLING}:hanging", "--out", tmp_path / "cluster.toml"]
    completed = run_program(IMPATIENT_PROBE, 3, *words, check=False)
    assert completed.returncode != 0
    assert re.search(r"\breceive from rank 1\b", completed.stderr)
    assert "on host " in completed.stderr
    assert "Traceback" not in completed.stderr
    assert not (tmp_path / "cluster.toml").exists()


@needs("openmpi")
def test_killed_probe_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with start_ranks(2, [*PROBE, "--seconds", "60", "--out", str(out)]) as job:
        job.wait_for("timing steps")
        job.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
@pytest.mark.long
def test_probe_measures_link_rates(tmp_path: Path) -> None:
    """The links are slow, so the cores of a small machine are not the bottleneck."""
    rates = {2: 0.02, 3: 0.05}
    out = tmp_path / "cluster.toml"
    with Lab(hosts=4, rate_gbit=0.1) as lab:
        for host, gbit in rates.items():
            lab.limit_rate(host, gbit)
        words = [*PROBE, "--seconds", "30", "--device", "cpu", "--out", str(out)]
        completed = lab.run([0, 0, 1, 2, 3], words, timeout=120)
    assert completed.returncode == 0, completed.stderr
    result = read(out).cluster
    assert result.worker_hosts == (0, 0, 1, 2, 3)
    assert result.bandwidth_gbit == pytest.approx(0.1, rel=0.1)
    assert result.links == pytest.approx(rates, rel=0.1)
    assert result.latency_us > 0
