"""Custom training loops: guarantees in the docstring of DataParallel, and user errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aladdin_mpi.run.api_options import as_arguments
from tests.commands import metrics, refusal, rises, summary
from tests.launch import ROOT, needs, run_ranks
from tests.messages import check_names
from tests.run.program_runs import HERE as HERE
from tests.run.program_runs import run_program
from tests.run.program_runs import run_script as run_script

pytestmark = needs("openmpi")
LONG = pytest.mark.long


# -- guarantees -----------------------------------------------------------------------------
def test_custom_loop_example_trains(tmp_path: Path) -> None:
    completed = run_ranks(3, [str(ROOT / "examples" / "own_loop.py")], env=HERE, cwd=tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    figures = summary(run_dir)
    assert figures["samples"] == 10 * 1437
    assert figures["gradients_applied"] == figures["gradients_computed"]
    assert figures["test_accuracy"] is None
    printed = re.findall(r"^accuracy ([\d.]+)$", completed.stdout, re.M)
    assert len(printed) == 1
    assert float(printed[0]) > 0.9
    assert rises(metrics(run_dir, "train"))


def test_custom_loop_example_adds_few_lines() -> None:
    lines = (ROOT / "examples" / "own_loop.py").read_text().splitlines()
    added = [line for line in lines if "# +" in line and not line.startswith('"""')]
    assert 3 <= len(added) <= 12
    for word in ("DataParallel", "run."):
        assert all("# +" in line for line in lines if word in line)


@pytest.mark.parametrize(
    "most",
    [pytest.param(0, id="to the end", marks=pytest.mark.long), pytest.param(40, id="stopped")],
)
def test_every_gradient_is_applied_once_in_a_custom_loop(tmp_path: Path, most: int) -> None:
    """Gradients are accumulated over parts of a batch, and the run is stopped early."""
    completed = run_program(tmp_path, "accumulated_sums", most)
    figures = summary(tmp_path / "run")
    assert figures["samples"] == 240 if not most else 40 <= figures["samples"] < 240
    steps = figures["gradients_applied"]
    assert steps == figures["gradients_computed"] == figures["samples"] / 8
    assert figures["weight"] == -steps
    ranks = sorted(re.findall(r"^rank (\d) (\w+) (\d+) (.*)$", completed.stdout, re.M))
    assert [server for _, server, _, _ in ranks] == ["True", "False", "False"]
    assert sum(int(sizes) for _, _, sizes, _ in ranks) == figures["samples"]
    # Every rank ends with the global model.
    assert {weight for *_, weight in ranks} == {str([[-float(steps)] * 3])}


def test_run_releases_its_model_vectors(tmp_path: Path) -> None:
    """Otherwise many runs would not fit into one process."""
    completed = run_program(tmp_path, "repeated_runs", ranks=2)
    lines = sorted(re.findall(r"^rank (\d) (\S+) (\d) left (\d+)$", completed.stdout, re.M))
    algorithms = ("aladdin", "ar-sgd", "multistep")
    assert lines == [(rank, name, run, "0") for rank in "01" for name in algorithms for run in "12"]


@pytest.mark.long
@pytest.mark.parametrize("chosen", [False, True])
def test_memory_freed_by_a_step_is_kept_by_the_process(tmp_path: Path, chosen: bool) -> None:
    """By default, glibc releases it and fetches 256 zeroed pages per 1 MB for the next step."""
    variables = {"MALLOC_TRIM_THRESHOLD_": "131072"} if chosen else {}
    env = {**HERE, **variables}  # read by the C library at process startup
    completed = run_program(tmp_path, "page_faults", ranks=1, env=env, is_warm=False)
    printed = re.search(r"^pages (\d+) (\d+)$", completed.stdout, re.M)
    assert printed, repr(completed)
    before, after = map(int, printed.groups())
    assert before > 100_000
    assert (after > before / 2) == chosen


def test_two_runs_in_one_program_train_one_after_the_other(tmp_path: Path) -> None:
    run_program(tmp_path, "two_runs")
    assert [summary(tmp_path / f"run-{n}")["samples"] for n in (1, 2)] == [100, 100]


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "evaluation"),
    [
        ("aladdin", "evaluated"),
        pytest.param("easgd", "unevaluated", marks=pytest.mark.long),
        ("ar-sgd", "unevaluated"),
        pytest.param("gosgd", "evaluated", marks=pytest.mark.long),
    ],
)
def test_batch_norm_statistics_fit_the_global_model(
    tmp_path: Path, algorithm: str, evaluation: str
) -> None:
    """In evaluations, on every rank after the loop, and in the file."""
    completed = run_program(tmp_path, "batch_norm_loop", algorithm, evaluation, "whole")
    ranks = re.findall(r"^rank (\d) ([\d.]+) (\S+)$", completed.stdout, re.M)
    assert sorted(rank for rank, _, _ in ranks) == ["0", "1", "2"]
    (same,) = {(accuracy, sums) for _, accuracy, sums in ranks}
    assert float(same[0]) > 0.9
    assert f"file {same[0]}\n" in completed.stdout
    evaluations = metrics(tmp_path / "run", "eval")
    # An evaluation that is due during another is skipped.
    assert len(evaluations) in ((2, 3, 4) if evaluation == "evaluated" else (0,))
    assert all(line["test_accuracy"] > 0.5 for line in evaluations)
    assert "warning" not in completed.stderr


@pytest.mark.long
def test_batch_norm_warns_if_the_model_is_never_called_as_a_whole(tmp_path: Path) -> None:
    completed = run_program(tmp_path, "batch_norm_loop", "aladdin", "unevaluated", "layers")
    assert completed.stderr.count("batch norm") == 1
    ranks = re.findall(r"^rank \d ([\d.]+) (\S+)$", completed.stdout, re.M)
    assert len(ranks) == 3 and len(set(ranks)) == 1
    assert float(ranks[0][0]) > 0.8


# -- user errors ----------------------------------------------------------------------------
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        ("no_step", ["step()", "batch", "not called"]),
        ("no_backward", ["loss.backward()", "gradient"]),
        pytest.param("two_steps", ["step()", "without a batch"], marks=LONG),
        pytest.param("zero_grad", ["zero_grad()"], marks=LONG),
        pytest.param("two_backward", ["backward()", "run.accumulate()"], marks=LONG),
        ("clip", ["gradients", "backward()", "wait_free=False"]),
        pytest.param("optimizer_before_step", ["SGD.step()", "weight"], marks=LONG),
        ("optimizer_after_step", ["AdamW.step()"]),
        pytest.param("written", ["parameter bias", "changed"], marks=LONG),
        ("renewed", ["parameter weight", "memory"]),
        pytest.param("frozen", ["parameter bias", "requires_grad"], marks=LONG),
        ("scaler", ["GradScaler", "run.scale(loss)"]),
        pytest.param("two_loops", ["batches()", "second"], marks=LONG),
    ],
)
def test_mistake_in_a_custom_loop_ends_the_job_with_one_error(
    tmp_path: Path, mistake: str, names: list[str]
) -> None:
    completed = run_program(tmp_path, "loop_mistakes", mistake, check=False)
    assert completed.returncode != 0
    # One worker reports the error for all.
    (line,) = re.findall(r"aladdin_mpi: error \(rank [12]\): training loop: (.*)", completed.stderr)
    check_names(line, *names)
    assert "Traceback" not in completed.stderr
    assert "after the loop" not in completed.stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        ("unknown option", ["epoch:", "epochs"]),
        pytest.param("option of an algorithm", ["aladdin_pi", "aladdin={'pi': ...}"], marks=LONG),
        pytest.param(
            "unknown option of an algorithm", ["aladdin.pii", "aladdin={'pi': ...}"], marks=LONG
        ),
        ("built-in training only", ["precision", "torch.autocast"]),
        ("compression without servers", ["compression", "gosgd"]),
        pytest.param("second run", ["DataParallel:", "second", "run.close()"], marks=LONG),
        pytest.param("optimizer", ["optimizer:", "adadelta", "adafactor", "adamv"], marks=LONG),
        ("module", ["DataParallel:", "torch.nn.Module", "str"]),
        pytest.param("evaluate", ["evaluate:", "int"], marks=LONG),
        ("batch size", ["batch_size:", "DataLoader", "8", "4"]),
        ("iterator", ["batches():", "iterator", "epoch"]),
        pytest.param("data", ["batches():", "DataLoader", "int"], marks=LONG),
    ],
)
def test_mistake_before_a_custom_loop_is_reported_once(
    tmp_path: Path, mistake: str, names: list[str]
) -> None:
    completed = run_program(tmp_path, "setup_mistakes", mistake, ranks=2, check=False)
    check_names(refusal(completed), *names)
    assert not (tmp_path / "run").exists()


def test_gradients_may_be_changed_before_step_without_wait_free(tmp_path: Path) -> None:
    """All gradients become 0, and so does every step."""
    completed = run_program(tmp_path, "zeroed_gradients")
    assert completed.stdout.count("weight [[0.0, 0.0, 0.0]]") == 3


def test_as_arguments_turns_options_into_argument_names() -> None:
    text = as_arguments("--max-loss: with --aladdin-ahead-pi 2 or --ar-sgd-allreduce or --no-such")
    assert text == (
        "max_loss: with aladdin_ahead={'pi': ...} 2 or ar_sgd={'allreduce': ...} or --no-such"
    )


def test_as_arguments_gives_values_to_arguments_that_require_them() -> None:
    text = as_arguments("add --overwrite to replace it, or resume it with --resume /runs/mine")
    assert text == "pass overwrite=True to replace it, or resume it with resume='/runs/mine'"
    assert (
        as_arguments("add --allow-resize, or change --lr") == "pass allow_resize=True, or change lr"
    )


@LONG
def test_exception_in_a_custom_loop_ends_the_job(tmp_path: Path) -> None:
    completed = run_program(tmp_path, "loop_mistakes", "exception", check=False)
    assert completed.returncode != 0
    assert "[rank 2] ZeroDivisionError" in completed.stderr
    assert completed.stderr.count("Traceback") == 1
    assert "run.stop()" not in completed.stderr
