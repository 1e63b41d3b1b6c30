"""Forms of a training loop: epochs, break, continue, accumulation, a state, figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import metrics, summary
from tests.launch import Completed, needs
from tests.run.test_own_loop import HERE, run_script

pytestmark = needs("openmpi")
LONG = pytest.mark.long

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from aladdin_mpi import DataParallel

torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(4, 1)
run = DataParallel(model, algorithm="ALGORITHM", run_dir="run", seed=2, SETTINGS)

def train(batch, parts=1):
    loss = nn.functional.mse_loss(model(batch[0]), batch[1]) / parts
    loss.backward()
    run.step(loss)

BODY
rank = run.transport.rank
print(f"weight {[round(w, 5) for w in model.weight[0].tolist()]}", flush=True)
"""

EPOCHS = """
for epoch in run.epochs(DataLoader(data, 8, shuffle=True)):
    count = 0
    for batch in epoch:
        train(batch)
        count += len(batch[0])
        if BREAK:
            break
    whole = run.reduce(count, "sum").item()
    print(f"epoch {epoch} {count} of {whole:.0f}", flush=True)
"""


def loop(tmp_path: Path, body: str, algorithm: str = "aladdin", settings: str = "") -> Completed:
    text = LOOP.replace("BODY", body).replace("ALGORITHM", algorithm)
    return run_script(tmp_path, text.replace("SETTINGS", settings))


def one_model(done: Completed) -> None:
    """Every rank ends with the same."""
    weights = re.findall(r"^weight (.*)$", done.stdout, re.M)
    assert len(weights) == 3
    assert len(set(weights)) == 1, done.stdout


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("asp", "samples=104, timeout=20"),
        pytest.param(
            "aladdin", "samples=200, checkpoint_every='100samples', timeout=20", marks=LONG
        ),
        pytest.param("gosgd", "samples=104, timeout=20", marks=LONG),
    ],
)
def test_a_worker_without_a_batch_comes_by_the_end_of_an_epoch(
    tmp_path: Path, algorithm: str, settings: str
) -> None:
    """A run, or what is before a checkpoint, ends within an epoch that only one has a batch of."""
    done = loop(tmp_path, EPOCHS.replace("BREAK", "False"), algorithm, settings)
    ends = re.findall(r"^epoch (\d) (\d+) of (\d+)$", done.stdout, re.M)
    workers = 3 if algorithm == "gosgd" else 2
    epochs = 2 if "104" in settings else 3
    assert sorted(number for number, _, _ in ends) == sorted("012"[:epochs] * workers)
    assert {int(whole) for number, _, whole in ends if number == "0"} == {96}
    one_model(done)


@pytest.mark.parametrize("algorithm", ["aladdin", pytest.param("ar-sgd", marks=LONG)])
def test_epochs(tmp_path: Path, algorithm: str) -> None:
    """Every worker comes by every end, and together they have seen all samples in each."""
    done = loop(tmp_path, EPOCHS.replace("BREAK", "False"), algorithm, "epochs=3")
    ends = re.findall(r"^epoch (\d) (\d+) of (\d+)$", done.stdout, re.M)
    workers = 2 if algorithm == "aladdin" else 3
    assert sorted(number for number, _, _ in ends) == sorted("012" * workers)
    assert all(int(whole) == 96 for _, _, whole in ends)
    assert summary(tmp_path / "run")["samples"] == 3 * 96
    one_model(done)


@pytest.mark.parametrize("algorithm", [pytest.param("aladdin", marks=LONG), "ar-sgd"])
def test_an_epoch_that_is_left_ends_for_all(tmp_path: Path, algorithm: str) -> None:
    done = loop(tmp_path, EPOCHS.replace("BREAK", "count >= 16"), algorithm, "epochs=3")
    ends = re.findall(r"^epoch (\d) (\d+) of (\d+)$", done.stdout, re.M)
    workers = 2 if algorithm == "aladdin" else 3
    assert len(ends) == 3 * workers
    found = summary(tmp_path / "run")
    assert found["samples"] < 3 * 96
    assert found["gradients_applied"] == found["gradients_computed"]
    if algorithm == "ar-sgd":  # all of them leave it after the same batch
        assert {int(count) for _, count, _ in ends} == {16}
    one_model(done)


LEFT = """
for number, batch in enumerate(run.batches(DataLoader(data, 8))):
    if number == 2 and run.transport.rank == 1:
        break
    train(batch)
"""


@pytest.mark.parametrize(
    "behind",
    [
        "model.state_dict()",
        pytest.param("figures = run.summary", marks=LONG),
        pytest.param("model(inputs)", marks=LONG),
    ],
)
def test_break_ends_the_run_for_all(tmp_path: Path, behind: str) -> None:
    """At the first thing that is done with the model or the run afterwards."""
    done = loop(tmp_path, LEFT + behind, "aladdin", "epochs=1000, quiet=True")
    found = summary(tmp_path / "run")
    assert 16 <= found["samples"] < 96_000
    assert found["gradients_applied"] == found["gradients_computed"]
    one_model(done)


@LONG
def test_break_as_the_last_thing_a_program_does(tmp_path: Path) -> None:
    text = LOOP[: LOOP.index("rank = run.tr")].replace("BODY", LEFT)
    text = text.replace("ALGORITHM", "aladdin").replace("SETTINGS", "epochs=1000, quiet=True")
    run_script(tmp_path, text)
    assert summary(tmp_path / "run")["samples"] < 96_000


def test_an_error_in_the_loop_is_no_break(tmp_path: Path) -> None:
    body = LEFT.replace("break", "raise KeyError('mine')")
    text = LOOP.replace("BODY", body).replace("ALGORITHM", "aladdin")
    done = run_script(tmp_path, text.replace("SETTINGS", "epochs=1000, quiet=True"), check=False)
    assert done.returncode != 0
    assert "KeyError: 'mine'" in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


def test_batches_that_are_passed_over_have_no_gradient(tmp_path: Path) -> None:
    body = """
for number, batch in enumerate(run.batches(DataLoader(data, 8))):
    if number % 2:
        continue
    train(batch)
    skipped = number
"""
    done = loop(tmp_path, body, "bsp", "samples=192, momentum=0, weight_decay=0")
    found = summary(tmp_path / "run")
    assert found["gradients_applied"] == found["gradients_computed"] == 24
    one_model(done)


ACCUMULATED = """
for batch in run.batches(DataLoader(data, 4, shuffle=True)):
    train(batch, parts=2)
"""


def test_accumulated_batches_make_one_step(tmp_path: Path) -> None:
    """Two batches of 4, of which each worker's gradient is the mean, are one of 8."""
    alike = "samples=96, momentum=0, lr_scaling='none', lr_schedule='constant', warmup_epochs=0"
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    body = ACCUMULATED.replace("4, ", "8, ").replace("parts=2", "parts=1")
    one = loop(tmp_path / "one", body, "bsp", alike)
    two = loop(tmp_path / "two", ACCUMULATED, "bsp", f"{alike}, accumulate=2")
    for folder in ("one", "two"):
        assert summary(tmp_path / folder / "run")["gradients_computed"] == 12
    found = [re.findall(r"^weight \[(.*)\]$", each.stdout, re.M)[0] for each in (one, two)]
    weights = [[float(w) for w in each.split(", ")] for each in found]
    assert weights[0] == pytest.approx(weights[1], abs=1e-4)


FIGURES = """
for batch in run.batches(DataLoader(data, 8)):
    run.state["batches"] = run.state.get("batches", 0) + 1
    run.state["where"] = {"list": [1, "two", torch.ones(2)]}
    run.log(batches=run.state["batches"], rank=run.transport.rank)
    train(batch)
if not run.is_server:
    print(f"state {run.state['batches']}", flush=True)
"""


def test_a_state_goes_on_and_figures_are_logged(tmp_path: Path) -> None:
    first = loop(tmp_path, FIGURES, "bsp", "samples=96, log_every=48")
    again = loop(tmp_path, FIGURES, "bsp", "samples=192, log_every=48, resume='run'")
    counts = [sorted(re.findall(r"^state (\d+)$", done.stdout, re.M)) for done in (first, again)]
    assert counts == [["6", "6"], ["12", "12"]]
    lines = metrics(tmp_path / "run", "train")
    assert all(1 <= line["rank"] <= 2 for line in lines)
    assert any(1 < line["rank"] < 2 for line in lines)  # a mean over both workers
    assert 6 < summary(tmp_path / "run")["own"]["batches"] <= 12
    assert "batches" in again.stdout


@LONG
def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    body = """
for batch in run.batches(DataLoader(data, 8)):
    run.state["model"] = model
    train(batch)
"""
    text = LOOP.replace("BODY", body).replace("ALGORITHM", "ar-sgd")
    done = run_script(tmp_path, text.replace("SETTINGS", "samples=96"), check=False)
    assert "run.state['model']: expected tensors, numbers" in done.stderr


@pytest.mark.parametrize("algorithm", ["aladdin", pytest.param("osgp", marks=LONG)])
def test_one_process_trains_alone(tmp_path: Path, algorithm: str) -> None:
    """Without mpirun."""
    text = LOOP.replace("BODY", EPOCHS.replace("BREAK", "False"))
    text = text.replace("ALGORITHM", algorithm).replace("SETTINGS", "epochs=2, servers=1")
    (tmp_path / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, **HERE},
        timeout=60,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "epoch 1 96 of 96" in done.stdout
    assert "one process trains alone" in done.stderr
    assert summary(tmp_path / "run")["algorithm"] == "ar-sgd"
