"""Check of stored runs by `benchmarks.gpt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpt


def stored(folder: Path, losses: dict[tuple[str, int], list[float]]) -> None:
    for (algorithm, workers), each in losses.items():
        for seed, loss in enumerate(each):
            run = folder / f"{algorithm}-{workers}-{seed}"
            run.mkdir()
            (run / "summary.json").write_text(json.dumps({"test_loss": loss}))


@pytest.mark.parametrize(("loss", "status"), [(2.03, 0), (2.05, 1)])
def test_gpt_check_compares_mean_losses_with_all_reduce(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float, status: int
) -> None:
    losses = {("ar-sgd", 2): [1.9, 2.1], ("aladdin", 2): [loss, loss], ("easgd", 2): [3.0, 3.0]}
    stored(tmp_path, losses)
    words = ["--algorithms", "ar-sgd", "aladdin", "easgd", "--workers", "2", "--seeds", "2"]
    assert gpt.main(["--out", str(tmp_path), *words, "--check"]) == status
    printed = capsys.readouterr().out
    assert "2.000 ± 0.141" in printed
    assert ("aladdin with 2 workers: 1.025 " in printed) is bool(status)
    assert "easgd with" not in printed  # has no expected value
