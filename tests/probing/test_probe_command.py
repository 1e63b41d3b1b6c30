"""The command as a user runs it, without MPI; and its file, which is whole or not there."""

from __future__ import annotations

import os
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


def test_a_described_cluster_is_simulated_as_it_is(tmp_path: Path) -> None:
    done = probe(tmp_path, "--describe", TEXT)
    assert done.returncode == 0, done.stderr
    assert "3 hosts with 2 workers each, 6 in all" in done.stdout
    assert "host 0 (workers 0 to 1): 2 times slower" in done.stdout
    assert "wrote cluster.toml" in done.stdout
    words = ["--algorithm", "bsp", "--compute", "timed", "--model", "size:1", "--steps", 5]
    simulate(tmp_path / "run", *words, "--cluster", tmp_path / "cluster.toml")
    found = summary(tmp_path / "run")
    assert found["workers"] == 6
    assert found["seconds"] > 5 * 2 * 0.05  # the slow host sets the pace


def test_a_file_that_is_there_is_left_alone_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("hosts = 7\n")
    done = probe(tmp_path, "--nodes", 2)
    assert done.returncode == 2
    assert done.stderr == (
        "aladdin_mpi: error: --out cluster.toml: expected a new file, got one that is there; name "
        "another, or add --overwrite\n"
    )
    assert (tmp_path / "cluster.toml").read_text() == "hosts = 7\n"
    assert probe(tmp_path, "--nodes", 2, "--overwrite").returncode == 0
    assert "hosts = 2 " in (tmp_path / "cluster.toml").read_text()
    assert os.listdir(tmp_path) == ["cluster.toml"]


@pytest.mark.parametrize(
    ("out", "expected"),
    [("no/cluster.toml", "expected a folder that is there, got"), (".", "expected a file, got a")],
)
def test_where_nothing_can_be_written(out: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        check_free(tmp_path / out, overwrite=True)


def test_two_at_once_both_keep_what_they_have(tmp_path: Path) -> None:
    texts = [f"# file {number}\nhosts = {number + 1}\n" for number in range(8)]
    path = tmp_path / "cluster.toml"
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda text: write(path, text, overwrite=False), texts))
    assert len(set(names)) == 8
    assert [name.read_text() for name in names] == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name.name for name in names)


KILLED = """
import os, signal, sys
from pathlib import Path
from aladdin_mpi.process import files
files.os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
from aladdin_mpi.probing.cluster_file import write
write(Path("cluster.toml"), "hosts = 2", overwrite=bool(int(sys.argv[1])))
"""


@pytest.mark.parametrize("overwrite", [0, 1])
def test_one_that_is_killed_as_it_writes_leaves_no_half_file(
    overwrite: int, tmp_path: Path
) -> None:
    if overwrite:
        (tmp_path / "cluster.toml").write_text("hosts = 7\n")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(overwrite)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    files = {path.name: path.read_text() for path in tmp_path.glob("*.toml")}
    visible = {name: text for name, text in files.items() if not name.startswith(".")}
    assert visible == ({"cluster.toml": "hosts = 7\n"} if overwrite else {})


def test_a_full_disk_prints_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster_file, "write_new", full)
    with pytest.raises(UserError, match="No space left on device") as caught:
        write(tmp_path / "cluster.toml", "hosts = 2", overwrite=False)
    assert "hosts = 2" in str(caught.value)
