"""The adviser as a user runs it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import simulate, summary
from tests.launch import ROOT
from tests.pasted import check, commands_in

SMALL = "3 nodes x 2 GPUs, 0.05 Gbit/s, step 0.1 s, one worker 2x slower"
MODEL = ["--model", "size:1", "--batch-size", 8]
FEW = ["--algorithms", "aladdin", "ar-sgd", "bsp"]


def advise(*words: object, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aladdin_mpi.advise", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def known(advice: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in advice["candidates"] if "samples_per_second" in each]


@pytest.mark.long
def test_the_recommended_is_the_fastest_and_runs(tmp_path: Path) -> None:
    out = tmp_path / "advice"
    done = advise(
        *("--describe", SMALL, *MODEL, *FEW, "--target", "time", "--out", out),
        *("--what-if", "bandwidth=10", "workers=12"),
    )
    assert done.returncode == 0, done.stderr
    advice = json.loads((out / "advice.json").read_text())
    found = known(advice)
    assert {"aladdin", "ar-sgd", "bsp"} == {each["options"].split()[1] for each in found}
    best = max(each["samples_per_second"] for each in found)
    assert found[0]["options"] == advice["recommended"]
    assert found[0]["samples_per_second"] >= 0.99 * best
    assert found[0]["is_long"] and found[0]["likely"][0] < found[0]["samples_per_second"]
    # The slow worker sets the pace of the synchronous ones, of 3 of 5.5 possible.
    assert advice["ideal_speed_up"] == 5.5
    assert all(each["speed_up"] <= 3.0 for each in found if "aladdin" not in each["options"])
    # What is predicted is what a simulation of the same command says.
    words = advice["mpirun"]
    start = words.index("aladdin_mpi.train") + 1
    assert words[0] == "mpirun" and words[start - 3 : start - 1] == ["python", "-m"]
    (tmp_path / "cluster.toml").write_text(
        'hosts = 3\nworkers = 6\nplacement = "spread"\nbandwidth-gbit = 0.05\ncompute-time = 0.1\n'
        "jitter = 0.01\n[slowdown]\n0 = 2.0\n"
    )
    options = words[start : words.index("--batch-size")]
    timed = ["--cluster", tmp_path / "cluster.toml", "--compute", "timed", "--batch-size", 8]
    simulate(tmp_path / "run", *options, *timed, "--samples", 8 * 6 * 100)
    again = summary(tmp_path / "run")["samples_per_second"]
    assert found[0]["samples_per_second"] == pytest.approx(again, rel=0.1)
    assert [each["change"] for each in advice["what_if"]] == ["bandwidth=10", "workers=12"]
    assert advice["what_if"][1]["samples_per_second"] > 1.5 * best
    for text in (done.stdout, (out / "advice.md").read_text()):
        assert "What holds it up: " in text and "bandwidth=10: " in text
        assert shlex.join(words) in text and "sbatch --nodes=3 --gpus-per-node=2" in text
        commands = commands_in(text)
        assert {"mpirun", "sbatch", "python"} <= {
            word for each in commands for word in each.split()
        }
        for command in commands:
            check(command, tmp_path)
    assert (out / "advice.png").stat().st_size > 10_000
    again_there = advise("--describe", SMALL, *MODEL, "--out", out)
    assert again_there.returncode == 2 and "expected a folder without advice" in again_there.stderr


@pytest.mark.long
def test_what_a_sample_teaches_counts_by_table_or_pilot(tmp_path: Path) -> None:
    text = "2 nodes x 2 GPUs, 10 Gbit/s, step 0.1 s"
    out = tmp_path / "pilot"
    words = ["--describe", text, "--algorithms", "asp", "ar-sgd", "--seconds", 60]
    done = advise(
        *words,
        *("--model", "digits", "--dataset", "digits", "--batch-size", 16, "--pilot", 60),
        *("--out", out),
    )
    assert done.returncode == 0, done.stderr
    found = {
        each["options"].split()[1]: each
        for each in known(json.loads((out / "advice.json").read_text()))
    }
    assert found["ar-sgd"]["a_sample_teaches"] == 1.0
    assert 0 < found["asp"]["a_sample_teaches"] <= 1
    assert found["asp"]["by"].startswith("pilot of 60 steps, 1 seed")
    counts = found["asp"]["a_sample_teaches"] * found["asp"]["samples_per_second"]
    assert found["asp"]["counts"] == pytest.approx(counts)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "--cluster and --describe: expected one of them, got none"),
        (["--describe", "2 nodes x 2 GPUs"], "expected the time of a step, got none"),
        (["--describe", "1 node x 1 GPU, step 1 s"], "expected at least 2 workers, got 1"),
        (["--describe", SMALL, "--algorithms", "bps"], "did you mean bsp?"),
        (["--describe", SMALL, "--what-if", "speed=2"], "--what-if: expected NAME=VALUE"),
        (["--describe", "12 monkeys"], "'12 monkeys', which is not understood"),
        (["--cluster", "nowhere.toml"], "--cluster: expected a TOML file, got 'nowhere.toml'"),
        (["--describe", SMALL, "--model", "resnet5"], "--model: unknown model 'resnet5'"),
        (["--describe", SMALL, *map(str, MODEL), "--seconds", "0.01"], "--seconds 0.01: expected"),
    ],
)
def test_bad_input_is_one_error(words: list[str], error: str) -> None:
    done = advise(*words)
    assert done.returncode == 2 and error in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
