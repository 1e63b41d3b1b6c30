"""Lightning's Trainer with any algorithm, by the strategy."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from aladdin_mpi.integrations.lightning_base import strategy
from tests.commands import metrics, refusal, summary
from tests.launch import needs
from tests.messages import check_names
from tests.run_program import run_program

pytestmark = needs("openmpi")
PROGRAMS = Path(__file__).parent / "programs"
TRAINING = PROGRAMS / "lightning_training.py"


@pytest.mark.slow
def test_ar_sgd_equals_lightning_with_larger_batches(tmp_path: Path) -> None:
    """Weights, validation losses, epochs and steps; every rank has them."""
    completed = run_program(TRAINING, 2, "compare", "ar-sgd", cwd=tmp_path, timeout=200)
    lines = re.findall(r"^(\w+): (\S+) of (\S+), (\S+) (\w+)$", completed.stdout, re.M)
    assert len(lines) == 2 * 8, completed
    assert len(re.findall(r"^refused: .* Leave max_steps out", completed.stdout, re.M)) == 2
    for kind, difference, moved, of_losses, has_same_counts in lines:
        tolerance = 1e-2 if kind == "bfloat16" else 1e-5
        if kind != "skipped":  # its epochs continue with the samples that the previous one left
            assert float(difference) < tolerance * float(moved), kind
        assert float(of_losses) < tolerance, kind
        assert has_same_counts == "True", kind


@pytest.mark.long
@pytest.mark.slow
def test_callbacks_and_tests_use_one_result_on_every_rank(tmp_path: Path) -> None:
    """With a server, a slow worker, checkpoints, a logger and early stopping."""
    completed = run_program(TRAINING, 3, "train", "aladdin-ahead", cwd=tmp_path, timeout=200)
    lines = re.findall(
        r"^rank (\d) of (\d): (\d+) epochs, tested (\S+) best (\S+), (\[.*\]), (\S+), (\S+), "
        r"validated (\[.*\])$",
        completed.stdout,
        re.M,
    )
    assert sorted(line[0] for line in lines) == ["0", "1", "2"], completed
    (same,) = {line[1:8] for line in lines}
    workers, epochs, tested, best, names, path, _ = same
    assert workers == "2" and 2 <= int(epochs) < 40
    assert float(tested) < 0.9 and float(best) < 0.9
    assert "'val_accuracy'" in names and "'train_loss_epoch'" in names
    assert path in {str(each) for each in (tmp_path / "checkpoints").iterdir()}
    validated = {line[0]: line[8] for line in lines}
    assert validated["0"] == validated["1"] != "[]" == validated["2"]
    (logged,) = (tmp_path / "logs").rglob("metrics.csv")
    assert "val_loss" in logged.read_text()
    figures = summary(tmp_path / "run")
    assert figures["gradients_applied"] == figures["gradients_computed"]
    assert metrics(tmp_path / "run", "train")


@pytest.mark.long
@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    run = partial(run_program, TRAINING, 1, "resume", "ar-sgd", cwd=tmp_path, timeout=140)
    suspended = run(check=False)
    assert suspended.returncode == 75
    assert "yielded None" not in suspended.stderr  # the remaining epochs, without batches
    difference, ours, theirs = run().stdout.splitlines()[-3:]
    assert float(difference.split()[1]) < 1e-5
    assert ours == theirs == "(5, 20)"
    validated = (tmp_path / "validated").read_text().split()
    assert validated == ["0", "1", "2", "3", "4"]  # each once, in either program


def test_hooks_are_not_called_without_a_batch() -> None:
    """As for a worker that has none in an epoch."""
    called: list[tuple[object, ...]] = []
    empty: list[tuple[object, ...]] = []
    hook = strategy._of_batches(lambda *each: called.append(each), lambda *each: empty.append(each))
    hook("trainer", "module", "outputs", "batch", 0)
    hook("trainer", "module", None, None, 1)
    assert called == [("trainer", "module", "outputs", "batch", 0)]
    assert empty == [("trainer", "module", None, None, 1)]


@pytest.mark.long
def test_refused_setting_is_reported_by_one_rank(tmp_path: Path) -> None:
    completed = run_program(TRAINING, 2, "mistake", "ssp", cwd=tmp_path, check=False)
    check_names(refusal(completed), "AladdinStrategy: algorithm='ssp'", "Use asp or bsp")


@pytest.mark.slow
def test_unsupported_features_are_refused_by_name(tmp_path: Path) -> None:
    completed = run_program(PROGRAMS / "lightning_refusals.py", 1, cwd=tmp_path, timeout=200)
    errors = dict(re.findall(r"^(\w+): (.*)$", completed.stdout, re.M))
    words = {
        "epochs": "max_epochs",
        "ssp": "'ssp'",
        "manual": "automatic_optimization",
        "clipping": "configure_gradient_clipping",
        "value": "gradient_clip_algorithm",
        "frequency": "frequency=2",
        "closure": "LBFGS",
        "interval": "val_check_interval",
        "endless": "max_epochs=-1",
        "partial": "gradient_clip_val",
        "unsized": "no length.*without max_epochs",
        "schedule": "interval='epoch' requires",
        "devices": "devices",
        "batchnorm": "sync_batchnorm",
        "reload": "reload_dataloaders_every_n_epochs",
        "timer": "Timer",
        "accumulation": "GradientAccumulationScheduler",
        "checkpoint": r"fit\(ckpt_path",
        "trained": "^trained$",
        "pytorch_lightning": "^12 steps$",
    }
    assert errors.keys() == words.keys(), completed
    for name, word in words.items():
        assert re.search(word, errors[name]), (name, errors[name])
