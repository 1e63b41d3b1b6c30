"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.process.files import write_whole, written_whole


def test_an_error_leaves_the_former_content_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "before")
    with pytest.raises(ZeroDivisionError), written_whole(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "before"
        assert temporary.suffix == ".json"
        print(1 / 0)
    assert path.read_text() == "before"
    write_whole(path, b"after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
