"""A benchmark's record: facts about the machine, and result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from benchmarks.machine import describe_machine, machine
from benchmarks.results import table, write_result


def test_machine_facts_are_described() -> None:
    facts = machine()
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert isinstance(facts["cores"], int)
    assert facts["cores"] >= 1
    assert facts["mpi4py"]
    assert any(name in str(facts["mpi"]) for name in ("Open MPI", "MPICH", "Intel"))
    lines = describe_machine(facts).splitlines()
    assert [line.split()[0] for line in lines] == list(facts)


def test_result_is_written_as_json_and_markdown(tmp_path: Path) -> None:
    rows = [
        {"algorithm": "aladdin", "samples_per_second": 1234.5678, "loss": float("nan")},
        {"algorithm": "bsp", "samples_per_second": 98765.4, "workers": 8},
    ]
    facts = {"cpu": "a CPU", "gpus": None, "date": "2026-01-02 03:04 UTC"}
    command = [sys.executable, "-m", "benchmarks.some", "--note", "two words"]
    as_json, as_markdown = write_result(
        "speed-up", "Speed-up", rows, command, "Only a rehearsal.", facts, tmp_path / "results"
    )
    stored = json.loads(as_json.read_text(encoding="utf-8"))
    assert stored["command"] == "python -m benchmarks.some --note 'two words'"
    assert stored["machine"] == facts
    assert stored["rows"][0] == {**rows[0], "loss": "nan"}
    text = as_markdown.read_text(encoding="utf-8")
    assert text.startswith("# Speed-up\n")
    assert "| aladdin | 1235 | nan |  |" in text
    assert "| bsp | 98765 |  | 8 |" in text
    for part in ("Only a rehearsal.", stored["command"], "a CPU", "2026-01-02"):
        assert part in text


def test_table_columns_keep_their_order() -> None:
    assert table([{"b": 1, "a": "x|y"}]) == "| b | a |\n| --- | --- |\n| 1 | x\\|y |"


def test_write_result_rejects_invalid_name_and_empty_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^name: .*\.\./up"):
        write_result("../up", "Up", [{"a": 1}], "x", folder=tmp_path)
    with pytest.raises(UserError, match=r"^rows: "):
        write_result("none", "None", [], "x", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
