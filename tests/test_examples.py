"""Example scripts for one process, and the changes that make them train in parallel."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from aladdin_mpi.options.run import TrainOptions, parse
from tests import warm
from tests.commands import EPOCH, metrics, rises, simulate, summary, train
from tests.launch import ROOT, Completed, environment, needs, run_ranks, turn
from tests.run.test_custom_loop import HERE

ONE, PARALLEL = ROOT / "examples" / "one_process", ROOT / "examples" / "parallel"
MOST = 8
"""Maximum number of new or changed lines."""


@pytest.mark.parametrize("name", sorted(path.name for path in ONE.glob("*.py")))
def test_parallel_example_changes_few_lines(name: str) -> None:
    before, after = ((folder / name).read_text().splitlines() for folder in (ONE, PARALLEL))
    text = after.index('"""', 1)  # the docstring says how it is started
    diff = difflib.ndiff(before[text:], after[text:])
    changed = [line for line in diff if line.startswith("+ ") and line[2:].strip()]
    most = 2 if name.startswith(("accelerate", "finetune", "lightning")) else MOST
    assert 2 <= len(changed) <= most, changed


LONG = pytest.mark.long
FOUR = ("aladdin", "ar-sgd", "bsp", "osgp")
USUAL = {
    ("accelerate_digits", "ar-sgd"),
    ("char_gpt", "aladdin"),
    ("finetune", "ar-sgd"),
    ("image_folder", "bsp"),
    ("lightning_digits", "aladdin"),
    ("text_classifier", "osgp"),
}
CASES = [
    pytest.param(path.stem, algorithm, marks=() if (path.stem, algorithm) in USUAL else LONG)
    for path in sorted(ONE.glob("*.py"))
    for algorithm in FOUR
]
LOSSES = {
    "char_gpt": 3.5,
    "finetune": 4.5,
    "gan": 0.9,
    "stream": 5.0,
    "word_language_model": 5.0,
}
"""Figures of these examples are losses; the others are shares, with chance at 0.5 or less."""


def draw_images(folder: Path) -> None:
    """Write images of horizontal or vertical stripes with noise."""
    noise = torch.Generator().manual_seed(3)
    for part, count in (("train", 48), ("test", 16)):
        for number in range(count):
            values = torch.rand(16, 16, 3, generator=noise)
            values[number % 3 :: 4] += 1
            for name, image in (("lying", values), ("standing", values.transpose(0, 1))):
                place = folder / "images" / part / name
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray((image * 127).byte().numpy()).save(place / f"{number}.png")


@pytest.mark.sample(1)
@needs("openmpi")
@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_parallel_example_trains_on_three_ranks(tmp_path: Path, name: str, algorithm: str) -> None:
    text = (PARALLEL / f"{name}.py").read_text()
    text = text.replace("inspect.getsource(argparse) +", "")  # half of the GPT's text
    how = f"algorithm={algorithm!r}, run_dir='run'"
    for argument in ("optimizer=optimizer", 'mixed_precision="bf16"'):
        text = text.replace(argument, f"{argument}, {how}")
    text = text.replace("AladdinStrategy()", f"AladdinStrategy({how})")
    # Its run folder is in the Trainer's.
    text = text.replace('"finetuned",', f'".", algorithm={algorithm!r},')
    (tmp_path / "script.py").write_text(text)
    draw_images(tmp_path)
    process = run_ranks(3, ["script.py"], env=HERE, cwd=tmp_path, timeout=200)
    figures = [
        float(each)
        for each in re.findall(
            r"^(?:accuracy|\w+ \d+:|\{'eval_loss':) '?([\d.]+)", process.stdout, re.M
        )
    ]
    if name in LOSSES:
        assert figures[-1] < figures[0] < LOSSES[name]
    else:
        assert figures[-1] > (0.8 if name == "image_folder" else 0.48)
    run_summary = summary(tmp_path / "run")
    assert run_summary["algorithm"] == algorithm
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]


@pytest.mark.long
@needs("openmpi")
def test_word_language_model_example_equals_one_process(tmp_path: Path) -> None:
    """Each worker carries the hidden state of its own columns."""
    text = (PARALLEL / "word_language_model.py").read_text()
    (tmp_path / "script.py").write_text(
        text.replace("optimizer=optimizer", "algorithm='ar-sgd', optimizer=optimizer")
    )
    one, several = (
        re.findall(r"^epoch (\d): ([\d.]+)", process.stdout, re.M)
        for process in (
            run_ranks(1, [str(ONE / "word_language_model.py")], timeout=120),
            run_ranks(3, ["script.py"], env=HERE, cwd=tmp_path, timeout=120),
        )
    )
    assert [epoch for epoch, _ in several] == ["1", "2", "3", "4"]
    losses = [[float(loss) for _, loss in each] for each in (one, several)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0][-1] < losses[0][0]


# -- commands -----------------------------------------------------------------------------------
def example(name: str, *words: object, timeout: float = 120) -> str:
    """Run ``examples/NAME WORDS`` in a shell; return the output."""
    path = f"{Path(warm.python()).parent}:{os.environ['PATH']}"
    process = subprocess.run(
        [ROOT / "examples" / name, *map(str, words)],
        env=environment("openmpi", {"PATH": path, "PYTHONPATH": str(ROOT)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.long
@needs("openmpi")
def test_own_data_example_trains_with_user_model_and_data(tmp_path: Path) -> None:
    words = ["--model", "own_data:net", "--dataset", "own_data:data", "--epochs", 20, "--lr", 0.05]
    words += ["--bn-batches", 100]
    train(3, tmp_path / "run", *words, modules=ROOT / "examples")
    run_summary = summary(tmp_path / "run")
    assert run_summary["samples"] == 20 * 4000
    assert run_summary["test_accuracy"] > 0.95


def test_simulate_cluster_example_runs(tmp_path: Path) -> None:
    example("simulate_cluster.sh", "--samples", 3200, "--run-dir", tmp_path / "run")
    run_summary = summary(tmp_path / "run")
    assert (run_summary["engine"], run_summary["workers"], run_summary["samples"]) == (
        "virtual",
        16,
        3200,
    )
    synchronous = 16 * 32 / 1.0  # all wait for the slow worker's second
    assert run_summary["samples_per_second"] > 3 * synchronous


@LONG
def test_compare_three_example_compares_three_algorithms(tmp_path: Path) -> None:
    example("compare_three.sh", tmp_path, "--samples", 640, timeout=200)
    names = {"aladdin-ahead", "ar-sgd", "ad-psgd"}
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert {row["algorithm"] for row in rows} == names
    assert all(name in (tmp_path / "report.md").read_text() for name in names)


@LONG
@needs("openmpi")
def test_resume_example_stops_by_signal_and_resumes(tmp_path: Path) -> None:
    with turn():
        printed = example("resume.sh", tmp_path / "run")
    assert re.search(r"\bstatus 75\b", printed)
    run_summary = summary(tmp_path / "run")
    assert run_summary["samples"] == 20 * EPOCH
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]
    assert rises(metrics(tmp_path / "run", "train"))


@pytest.mark.long
def test_rehearsal_example_scales_with_workers(tmp_path: Path) -> None:
    printed = example("rehearsal.sh", tmp_path, "aladdin")
    assert re.findall(r"^  workers +(\d+)", printed, re.M) == ["8", "16", "64"]
    rates = [summary(tmp_path / f"aladdin-{n}")["samples_per_second"] for n in (8, 16, 64)]
    assert rates[1] > 1.5 * rates[0]
    assert rates[2] > 3 * rates[1]


MPIEXEC = """#!/bin/bash
printf '%s\\n' "${@:1:6}" >"$ASKED"
shift 6
PALS_LOCAL_RANKID=7 exec "$@"
"""
PYTHON = """#!/bin/bash
printf '%s\\n' "$ZE_FLAT_DEVICE_HIERARCHY $ZE_AFFINITY_MASK" "$@" >>"$ASKED"
"""


@pytest.mark.parametrize("own", ["", "--model resnet20 --dataset cifar10 --run-dir runs/mine"])
def test_pbs_aurora_example_calls_mpiexec_with_ranks_and_cores(tmp_path: Path, own: str) -> None:
    """The real script, with stubs for the site's module, mpiexec and one rank."""
    for name, text in (("mpiexec", MPIEXEC), ("python3", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    surroundings = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BASH_FUNC_module%%": '() { [ "$*" = "load frameworks" ]; }',
        "ASKED": str(tmp_path / "asked"),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_JOBID": "17.aurora",
        "PBS_O_WORKDIR": str(tmp_path),
        "PYTHON": "python3",
        **({"OPTIONS": own} if own else {}),
    }
    script = ["bash", str(ROOT / "examples" / "pbs_aurora.sh")]
    subprocess.run(script, env=surroundings, check=True, timeout=60)
    words = (tmp_path / "asked").read_text().splitlines()
    assert words[:4] == ["-n", "24", "--ppn", "12"]
    assert words[4] == "--cpu-bind" and words[5].count(":") == 12  # one list per rank
    assert words[6:9] == ["FLAT 7", "-m", "aladdin_mpi.train"]  # the tile at the rank's index
    options = parse(TrainOptions, words[9:], "train", "")
    assert (options.device, options.resume) == ("xpu", "auto")
    assert str(options.run_dir) == ("runs/mine" if own else "runs/17.aurora")


# -- in simulation ------------------------------------------------------------------------------
PROGRAM = Path(__file__).parent / "programs" / "sum_by_easgd.py"


def simulated(folder: Path, *words: str) -> Completed:
    *options, run = words
    return simulate(None, PROGRAM, *options, folder / run)


def test_simulated_script_is_deterministic_and_command_line_overrides_it(tmp_path: Path) -> None:
    """Real gradients, and the same bytes each time; the command line overrides the script."""
    words = ("--workers", "5", "--slowdown", "0=10", "--quiet", "--", "a")
    first = simulated(tmp_path, *words)
    again = simulated(tmp_path, *words[:-1], "b")
    run_summary = summary(tmp_path / "a")
    assert (run_summary["workers"], run_summary["engine"], run_summary["samples"]) == (
        5,
        "virtual",
        640,
    )
    assert "of 6 ranks" in first.stdout
    assert first.stdout == again.stdout
    assert float(first.stdout.split()[1]) < 0.5
    files = [(tmp_path / name / "metrics.jsonl").read_text() for name in "ab"]
    assert files[0] == files[1]
    simulated(tmp_path, "--workers", "3", "--algorithm", "ar-sgd", "--quiet", "--", "c")
    run_summary = summary(tmp_path / "c")
    assert (run_summary["algorithm"], run_summary["workers"], run_summary["servers"]) == (
        "ar-sgd",
        3,
        0,
    )


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["none.py"], r"\bnone\.py\b"),
        ([PROGRAM, "--compute", "timed", "--", "d"], r"\bscript\b.*--compute timed"),
        (["empty.py"], r"\bDataParallel\b"),
    ],
)
def test_simulate_rejects_unsuitable_script(
    tmp_path: Path, words: list[str | Path], cause: str
) -> None:
    (tmp_path / "empty.py").write_text("")
    completed = simulate(None, tmp_path / words[0], *words[1:], check=False)
    assert completed.returncode == 2
    assert re.search(cause, completed.stderr)


@LONG
@needs("openmpi")
def test_sharded_gpt_trains_and_is_resumed(tmp_path: Path) -> None:
    """Two islands of two divide the model; the same command continues, or ends at once."""
    words = [str(PARALLEL / "sharded_gpt.py"), "--epochs"]
    env = {**HERE, "PYTHONPATH": f"{ROOT}:{PARALLEL}"}
    ended = [run_ranks(4, [*words, n], cwd=tmp_path, env=env) for n in ("1", "2", "2")]
    lines = metrics(tmp_path / "sharded-gpt", "eval")
    losses = [line["test_loss"] for line in lines]
    assert [line["epoch"] for line in lines] == [1, 2] and 2.2 < losses[0] < 2.8 > losses[1] + 0.2
    assert summary(tmp_path / "sharded-gpt")["test_loss"] == losses[1]
    assert "is complete" in ended[2].stdout and "test loss" not in ended[2].stdout
    state = torch.load(tmp_path / "sharded-gpt" / "model.pt")
    assert state["letters.weight"].shape[1] == 64
