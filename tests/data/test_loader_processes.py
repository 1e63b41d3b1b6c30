"""Start methods of loader processes with MPI, as used in a user's script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Completed
from tests.run_program import run_program

PROGRAMS = Path(__file__).parent / "programs"
GUARDED, UNGUARDED = PROGRAMS / "loader_processes.py", PROGRAMS / "unguarded.py"


def run(tmp_path: Path, program: Path, method: str, collate: str, **how: Any) -> Completed:
    words = (tmp_path / "run", method, collate)
    return run_program(program, 2, *words, timeout=100, is_warm=False, **how)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("auto", "ForkServerProcess"),
        pytest.param("spawn", "SpawnProcess", marks=pytest.mark.long),
        pytest.param("fork", "ForkProcess", marks=pytest.mark.long),
    ],
)
def test_loader_processes_start_with_requested_method(
    tmp_path: Path, method: str, kind: str
) -> None:
    completed = run(tmp_path, GUARDED, method, "function")
    assert f"started by {kind}" in completed.stdout
    assert "loader" not in completed.stderr


@pytest.mark.parametrize(
    ("program", "collate", "why"),
    [
        (UNGUARDED, "function", r"unguarded\.py.*__main__"),
        pytest.param(GUARDED, "lambda", "<lambda>", marks=pytest.mark.long),
    ],
)
def test_auto_start_method_falls_back_to_fork_and_warns_once(
    tmp_path: Path, program: Path, collate: str, why: str
) -> None:
    completed = run(tmp_path, program, "auto", collate)
    assert "started by ForkProcess" in completed.stdout
    assert (
        len(re.findall(r"aladdin_mpi: warning: loader processes .*" + why, completed.stderr)) == 1
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "collate", "cause"),
    [
        pytest.param(UNGUARDED, "function", r"unguarded\.py.*__main__", marks=pytest.mark.long),
        (GUARDED, "lambda", "collate_fn.*<lambda>"),
    ],
)
def test_forkserver_start_method_rejects_incompatible_program(
    tmp_path: Path, program: Path, collate: str, cause: str
) -> None:
    completed = run(tmp_path, program, "forkserver", collate, check=False)
    assert completed.returncode != 0
    assert re.search(rf"loader_start_method forkserver .*{cause}", completed.stderr)
