"""The probe command without MPI; its cluster file is complete or absent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.probing import cluster_file
from aladdin_mpi.probing.cluster_file import check_free, write
from tests import warm
from tests.commands import simulate, summary
from tests.launch import ROOT

TEXT = "3 nodes x 2 GPUs, 1 Gbit/s, step 50 ms, one node 2x slower, node 2 at 0.5 Gbit/s"


def probe(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "aladdin_mpi.probe", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_probe_writes_file_of_described_cluster(tmp_path: Path) -> None:
    completed = probe(tmp_path, "--describe", TEXT)
    assert completed.returncode == 0, completed.stderr
    assert re.search(r"\b3 hosts\b.*\b2 workers\b.*\b6\b", completed.stdout)
    assert re.search(r"\bhost 0 \(workers 0 to 1\): .*\b2\b", completed.stdout)
    assert "wrote cluster.toml" in completed.stdout
    words = ["--algorithm", "bsp", "--compute", "timed", "--model", "size:1", "--steps", 5]
    simulate(tmp_path / "run", *words, "--cluster", tmp_path / "cluster.toml")
    run_summary = summary(tmp_path / "run")
    assert run_summary["workers"] == 6
    assert run_summary["seconds"] > 5 * 2 * 0.05  # the slow host is the bottleneck


def test_probe_overwrites_file_only_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("hosts = 7\n")
    completed = probe(tmp_path, "--nodes", 2)
    assert completed.returncode == 2
    assert re.fullmatch(
        r"aladdin_mpi: error: --out cluster\.toml: .*--overwrite\n", completed.stderr
    )
    assert (tmp_path / "cluster.toml").read_text() == "hosts = 7\n"
    assert probe(tmp_path, "--nodes", 2, "--overwrite").returncode == 0
    assert "hosts = 2 " in (tmp_path / "cluster.toml").read_text()
    assert os.listdir(tmp_path) == ["cluster.toml"]


@pytest.mark.parametrize(
    ("out", "cause"), [("no/cluster.toml", "'.*/no'"), (".", r"\bfile\b.*\bfolder\b")]
)
def test_check_free_rejects_missing_folder_and_directory(
    out: str, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"--out {tmp_path / out}: .*{cause}"):
        check_free(tmp_path / out, overwrite=True)


def test_concurrent_writes_keep_both_cluster_files(tmp_path: Path) -> None:
    texts = [f"# file {number}\nhosts = {number + 1}\n" for number in range(8)]
    path = tmp_path / "cluster.toml"
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda text: write(path, text, overwrite=False), texts))
    assert len(set(names)) == 8
    assert [name.read_text() for name in names] == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name.name for name in names)


KILLED_AT_WRITE = Path(__file__).parent / "programs" / "killed_at_write.py"


@pytest.mark.parametrize("overwrite", [0, 1])
def test_killed_write_leaves_no_partial_cluster_file(overwrite: int, tmp_path: Path) -> None:
    if overwrite:
        (tmp_path / "cluster.toml").write_text("hosts = 7\n")
    completed = subprocess.run(
        [sys.executable, str(KILLED_AT_WRITE), str(overwrite)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert completed.returncode == -signal.SIGKILL
    files = {path.name: path.read_text() for path in tmp_path.glob("*.toml")}
    visible = {name: text for name, text in files.items() if not name.startswith(".")}
    assert visible == ({"cluster.toml": "hosts = 7\n"} if overwrite else {})


def test_full_disk_error_has_measured_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster_file, "write_new", full)
    with pytest.raises(UserError, match=r"--out .*No space left on device") as caught:
        write(tmp_path / "cluster.toml", "hosts = 2", overwrite=False)
    assert "hosts = 2" in str(caught.value)
