"""The adviser from the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.commands import simulate, summary
from tests.launch import ROOT
from tests.pasted import check, commands_in

SMALL = "3 nodes x 2 GPUs, 0.05 Gbit/s, step 0.1 s, one worker 2x slower"
MODEL = ["--model", "size:1", "--batch-size", 8]
FEW = ["--algorithms", "aladdin", "ar-sgd", "bsp"]


def advise(
    *words: object, timeout: float = 250, is_warm: bool = False
) -> subprocess.CompletedProcess[str]:
    python = warm.python() if is_warm else sys.executable
    command = [python, "-m", "aladdin_mpi.advise", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def known(advice: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in advice["candidates"] if "samples_per_second" in each]


@pytest.mark.long
def test_advise_recommends_fastest_runnable_candidate(tmp_path: Path) -> None:
    out = tmp_path / "advice"
    completed = advise(
        *("--describe", SMALL, *MODEL, *FEW, "--target", "time", "--out", out),
        *("--what-if", "bandwidth=10", "workers=12"),
    )
    assert completed.returncode == 0, completed.stderr
    advice = json.loads((out / "advice.json").read_text())
    result = known(advice)
    assert {"aladdin", "ar-sgd", "bsp"} == {each["options"].split()[1] for each in result}
    best = max(each["samples_per_second"] for each in result)
    assert result[0]["options"] == advice["recommended"]
    assert result[0]["samples_per_second"] >= 0.99 * best
    assert result[0]["is_long"] and result[0]["likely"][0] < result[0]["samples_per_second"]
    # The slow worker limits synchronous algorithms to 3 of 5.5 times one worker.
    assert advice["ideal_speed_up"] == 5.5
    assert all(each["speed_up"] <= 3.0 for each in result if "aladdin" not in each["options"])
    # The prediction equals the result of a simulation with the same command.
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
    assert result[0]["samples_per_second"] == pytest.approx(again, rel=0.1)
    assert [each["change"] for each in advice["what_if"]] == ["bandwidth=10", "workers=12"]
    assert advice["what_if"][1]["samples_per_second"] > 1.5 * best
    for text in (completed.stdout, (out / "advice.md").read_text()):
        assert re.search(r"holds it up: |[Bb]ottleneck", text) and "bandwidth=10: " in text
        assert shlex.join(words) in text and "sbatch --nodes=3 --gpus-per-node=2" in text
        commands = commands_in(text)
        assert {"mpirun", "sbatch", "python"} <= {
            word for each in commands for word in each.split()
        }
        for command in commands:
            check(command, tmp_path)
    assert (out / "advice.png").stat().st_size > 10_000
    second = advise("--describe", SMALL, *MODEL, "--out", out)
    assert second.returncode == 2 and f"--out {out}: " in second.stderr


@pytest.mark.long
def test_advise_uses_sample_efficiency_of_pilot(tmp_path: Path) -> None:
    text = "2 nodes x 2 GPUs, 10 Gbit/s, step 0.1 s"
    out = tmp_path / "pilot"
    words = ["--describe", text, "--algorithms", "asp", "ar-sgd", "--seconds", 60]
    completed = advise(
        *words,
        *("--model", "digits", "--dataset", "digits", "--batch-size", 16, "--pilot", 60),
        *("--out", out),
    )
    assert completed.returncode == 0, completed.stderr
    result = {
        each["options"].split()[1]: each
        for each in known(json.loads((out / "advice.json").read_text()))
    }
    assert result["ar-sgd"]["a_sample_teaches"] == 1.0
    assert 0 < result["asp"]["a_sample_teaches"] <= 1
    assert result["asp"]["by"].startswith("pilot of 60 steps, 1 seed")
    counts = result["asp"]["a_sample_teaches"] * result["asp"]["samples_per_second"]
    assert result["asp"]["counts"] == pytest.approx(counts)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ([], "--cluster and --describe: "),
        (["--describe", "2 nodes x 2 GPUs"], r"\btime of a step\b"),
        (["--describe", "1 node x 1 GPU, step 1 s"], r"\b2 workers\b.*\b1\b"),
        (["--describe", SMALL, "--algorithms", "bps"], r"--algorithms: .*\bbsp\?"),
        (["--describe", SMALL, "--what-if", "speed=2"], "--what-if.*NAME=VALUE"),
        (["--describe", "12 monkeys"], "--describe: .*'12 monkeys'"),
        (["--cluster", "nowhere.toml"], "--cluster: .*'nowhere.toml'"),
        (["--describe", SMALL, "--model", "resnet5"], "--model: .*'resnet5'"),
        (["--describe", SMALL, *map(str, MODEL), "--seconds", "0.01"], r"--seconds 0\.01 "),
        (["--describe", SMALL, *map(str, MODEL), "--out", __file__], "--out .*: .*a file"),
    ],
)
def test_advise_reports_one_error_for_bad_input(words: list[str], cause: str) -> None:
    completed = advise(*words, is_warm=True)
    assert completed.returncode == 2 and re.search(cause, completed.stderr), completed.stderr
    assert completed.stderr.count("error:") == 1 and "Traceback" not in completed.stderr
