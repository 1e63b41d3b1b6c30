"""``aladdin_mpi.slurm init`` writes the batch scripts to a user's folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aladdin_mpi import slurm
from tests.launch import ROOT


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_slurm_init_writes_and_lists_all_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main(["init"]) == 0
    assert contents(Path("slurm")) == contents(ROOT / "slurm")
    *lines, next_command = capsys.readouterr().out.splitlines()
    assert {f"wrote slurm/{name}" for name in contents(ROOT / "slurm")} < set(lines)
    assert next_command.strip().startswith("sbatch slurm/train.sbatch ")
    assert slurm.main(["init"]) == 0
    assert "wrote" not in capsys.readouterr().out


def test_slurm_init_prints_command_for_other_folder(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert slurm.main(["init", "my jobs"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].strip()
    assert command.startswith(f"ALADDIN_SLURM='{here}/my jobs' sbatch 'my jobs/train.sbatch' ")


def test_slurm_init_overwrites_only_with_force(capsys: pytest.CaptureFixture[str]) -> None:
    own = {"train.sbatch": b"mine", "sites/ours.sh": b"ours"}
    for name, content in own.items():
        Path("slurm", name).parent.mkdir(parents=True, exist_ok=True)
        Path("slurm", name).write_bytes(content)
    assert slurm.main(["init"]) == 2
    assert re.search(r"slurm/train\.sbatch\b.*--force\b", capsys.readouterr().err)
    assert contents(Path("slurm")) == own, "nothing is written where something is refused"
    assert slurm.main(["init", "--force"]) == 0
    shipped = contents(ROOT / "slurm")
    assert contents(Path("slurm")) == shipped | {"sites/ours.sh": b"ours"}


def test_slurm_init_names_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert slurm.main(["init", "file/slurm"]) == 2
    assert "file/slurm: " in capsys.readouterr().err
