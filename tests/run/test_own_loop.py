"""One's own training loop: what the docstring of DataParallel promises, and its mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.run.api_options import as_arguments
from tests.commands import metrics, refusal, rises, summary
from tests.launch import ROOT, Completed, needs, run_ranks

pytestmark = needs("openmpi")

HERE = {"PYTHONPATH": str(ROOT), "ALADDIN_MPI_TEST": "own loop"}


def run_script(tmp_path: Path, text: str, ranks: int = 3, **how: Any) -> Completed:
    file = tmp_path / "script.py"
    file.write_text(text)
    return run_ranks(ranks, [str(file)], env=HERE, cwd=tmp_path, **{"timeout": 60, **how})


# -- what is promised -----------------------------------------------------------------------
def test_example(tmp_path: Path) -> None:
    done = run_ranks(3, [str(ROOT / "examples" / "own_loop.py")], env=HERE, cwd=tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    found = summary(run_dir)
    assert found["samples"] == 10 * 1437
    assert found["gradients_applied"] == found["gradients_computed"]
    assert found["test_accuracy"] is None
    printed = re.findall(r"^accuracy ([\d.]+)$", done.stdout, re.M)
    assert len(printed) == 1
    assert float(printed[0]) > 0.9
    assert rises(metrics(run_dir, "train"))


def test_example_adds_few_lines() -> None:
    lines = (ROOT / "examples" / "own_loop.py").read_text().splitlines()
    added = [line for line in lines if "# +" in line and not line.startswith('"""')]
    assert 3 <= len(added) <= 12
    for word in ("DataParallel", "run."):
        assert all("# +" in line for line in lines if word in line)


SUMS = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

# The gradient of every sample is 1, whatever the parameters, and so is that of a batch.
data = TensorDataset(torch.ones(64, 3), torch.zeros(64))
model = nn.Linear(3, 1, bias=False)
nn.init.zeros_(model.weight)
run = DataParallel(
    model, samples=240, batch_size=8, lr=1.0, lr_scaling="none", lr_schedule="constant",
    warmup_epochs=0, momentum=0, weight_decay=0, run_dir="run",
    algorithm="aladdin", aladdin={"normalize": "none"},
    evaluate=lambda module: {"weight": module.weight.mean().item()}, quiet=True,
)
sizes = 0
for inputs, _ in run.batches(data):
    sizes += len(inputs)
    with run.accumulate():
        for part in inputs[:2], inputs[2:4]:
            (model(part).sum() / len(inputs)).backward()
    loss = model(inputs[4:]).sum() / len(inputs)
    loss.backward()
    run.step(loss)
    if MOST and sizes >= MOST:
        run.stop()
rank = run.transport.rank
print(f"rank {rank} {run.is_server} {sizes} {model.weight.tolist()}", flush=True)
"""


@pytest.mark.parametrize(
    "most",
    [pytest.param(0, id="to the end", marks=pytest.mark.long), pytest.param(40, id="stopped")],
)
def test_every_gradient_counts_once(tmp_path: Path, most: int) -> None:
    """Accumulated over parts of a batch; and also when the run is stopped early."""
    done = run_script(tmp_path, SUMS.replace("MOST", str(most)))
    found = summary(tmp_path / "run")
    assert found["samples"] == 240 if not most else 40 <= found["samples"] < 240
    steps = found["gradients_applied"]
    assert steps == found["gradients_computed"] == found["samples"] / 8
    assert found["weight"] == -steps
    ranks = sorted(re.findall(r"^rank (\d) (\w+) (\d+) (.*)$", done.stdout, re.M))
    assert [server for _, server, _, _ in ranks] == ["True", "False", "False"]
    assert sum(int(sizes) for _, _, sizes, _ in ranks) == found["samples"]
    # Every rank ends with the global model.
    assert {weight for *_, weight in ranks} == {str([[-float(steps)] * 3])}


LEFT_OVER = """
import gc
from torch import nn
from aladdin_mpi import DataParallel
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi import load_dataset

def train(algorithm, number):
    model = nn.Linear(64, 10)
    flat = nn.Flatten()
    folder = f"{algorithm}-{number}"
    run = DataParallel(
        model, algorithm=algorithm, samples=64, batch_size=8, run_dir=folder, quiet=True
    )
    for images, labels in run.batches(load_dataset("digits").train):
        loss = nn.functional.cross_entropy(model(flat(images)), labels)
        loss.backward()
        run.step(loss)
    return run.transport.rank

for algorithm in "aladdin", "ar-sgd", "multistep":
    for number in 1, 2:
        rank = train(algorithm, number)
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is Replica]
        print(f"rank {rank} {algorithm} {number} left {len(found)}", flush=True)
"""


def test_a_run_leaves_no_vectors(tmp_path: Path) -> None:
    """Behind it all memory is given back: many runs fit into one process."""
    done = run_script(tmp_path, LEFT_OVER, ranks=2)
    lines = sorted(re.findall(r"^rank (\d) (\S+) (\d) left (\d+)$", done.stdout, re.M))
    algorithms = ("aladdin", "ar-sgd", "multistep")
    assert lines == [(rank, name, run, "0") for rank in "01" for name in algorithms for run in "12"]


FAULTS = """
import resource, torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
model = nn.Linear(3, 1)
run = DataParallel(model, algorithm="ar-sgd", samples=8, batch_size=8, run_dir="run", quiet=True)
for inputs, _ in run.batches(TensorDataset(torch.randn(8, 3), torch.zeros(8))):
    loss = model(inputs).square().mean()
    loss.backward()
    run.step(loss)
print(f"pages {before} {faults()}", flush=True)
"""


@pytest.mark.parametrize("chosen", [False, True])
def test_memory_that_a_step_frees_is_kept_for_the_next(tmp_path: Path, chosen: bool) -> None:
    """By itself glibc gives it back, and fetches 256 zeroed pages for each 1 MB of the next."""
    variables = {"MALLOC_TRIM_THRESHOLD_": "131072"} if chosen else {}
    file = tmp_path / "script.py"
    file.write_text(FAULTS)
    env = {**HERE, **variables}  # read by the C library when the process begins
    done = run_ranks(1, [str(file)], env=env, cwd=tmp_path, timeout=60, is_warm=False)
    found = re.search(r"^pages (\d+) (\d+)$", done.stdout, re.M)
    assert found, repr(done)
    before, behind = map(int, found.groups())
    assert before > 100_000
    assert (behind > before / 2) == chosen


TWO_RUNS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
for number in 1, 2:
    model = nn.Linear(3, 1)
    run = DataParallel(model, samples=100, batch_size=8, run_dir=f"run-{number}", quiet=True)
    for inputs, _ in run.batches(data):
        loss = model(inputs).square().mean()
        loss.backward()
        run.step(loss)
"""


def test_two_runs_in_one_program(tmp_path: Path) -> None:
    run_script(tmp_path, TWO_RUNS)
    assert [summary(tmp_path / f"run-{n}")["samples"] for n in (1, 2)] == [100, 100]


BATCH_NORM = """
import torch
from torch import nn
from aladdin_mpi import DataParallel
from aladdin_mpi import load_dataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10),
        )
    def forward(self, *, images, scale):
        return self.layers(images * scale)

data = load_dataset("digits")
pixels, names = (torch.stack(list(map(torch.as_tensor, each))) for each in zip(*data.test))

def accuracy(model):
    return (model(images=pixels, scale=2.0).argmax(1) == names).float().mean().item()

def evaluate(model):
    assert not model.training and not torch.is_grad_enabled()
    return {"test_accuracy": accuracy(model)}

model = Net()
run = DataParallel(
    model, algorithm="ALGORITHM", epochs=4, batch_size=32, lr=0.05, run_dir="run", quiet=True,
    eval_every=1, evaluate=EVALUATE,
)
for images, labels in run.batches(data.train):
    loss = nn.functional.cross_entropy(model(images=images, scale=2.0), labels)
    loss.backward()
    run.step(loss)
model.eval()
sums = sum(buffer.sum().item() for buffer in model.buffers())
print(f"rank {run.transport.rank} {accuracy(model)} {sums}", flush=True)
if run.transport.rank == 0:
    model.load_state_dict(torch.load("run/model.pt"))
    print(f"file {accuracy(model)}", flush=True)
"""


@pytest.mark.parametrize(
    ("algorithm", "evaluate"),
    [
        ("aladdin", "evaluate"),
        pytest.param("easgd", "None", marks=pytest.mark.long),
        ("ar-sgd", "None"),
        pytest.param("gosgd", "evaluate", marks=pytest.mark.long),
    ],
)
def test_batch_norm_fits_the_model(tmp_path: Path, algorithm: str, evaluate: str) -> None:
    """Where it is evaluated, on every rank after the loop, and in the file."""
    text = BATCH_NORM.replace("ALGORITHM", algorithm).replace("EVALUATE", evaluate)
    done = run_script(tmp_path, text)
    ranks = re.findall(r"^rank (\d) ([\d.]+) (\S+)$", done.stdout, re.M)
    assert sorted(rank for rank, _, _ in ranks) == ["0", "1", "2"]
    (same,) = {(accuracy, sums) for _, accuracy, sums in ranks}
    assert float(same[0]) > 0.9
    assert f"file {same[0]}\n" in done.stdout
    evaluations = metrics(tmp_path / "run", "eval")
    # One that is due while another runs is left out.
    assert len(evaluations) in ((2, 3, 4) if evaluate == "evaluate" else (0,))
    assert all(line["test_accuracy"] > 0.5 for line in evaluations)
    assert "warning" not in done.stderr


def test_batch_norm_of_a_model_that_is_never_called_whole(tmp_path: Path) -> None:
    text = BATCH_NORM.replace("ALGORITHM", "aladdin").replace("EVALUATE", "None")
    done = run_script(
        tmp_path,
        text.replace(
            "model(images=images, scale=2.0), labels", "model.layers(images * 2.0), labels"
        ),
    )
    assert done.stderr.count("batch norm: no training call of the model was seen") == 1
    ranks = re.findall(r"^rank \d ([\d.]+) (\S+)$", done.stdout, re.M)
    assert len(ranks) == 3 and len(set(ranks)) == 1
    assert float(ranks[0][0]) > 0.8


# -- mistakes -------------------------------------------------------------------------------
LOOP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
model = nn.Linear(3, 1)
run = DataParallel(model, samples=100_000, batch_size=8, run_dir="run", quiet=True)
rank = run.transport.rank
count = 0
for inputs, _ in run.batches(data):
    count += 1
    loss = model(inputs).square().mean()
    BODY
print("after the loop", flush=True)
"""

FORGOTTEN = "loss.backward()"
NO_BACKWARD = "run.step(loss)"
TWICE = "loss.backward(); run.step(loss); run.step(loss)"
UNBOUND = "loss.backward(); model.zero_grad(); run.step(loss)"
BACKWARD_TWICE = "loss.backward(retain_graph=True); loss.backward(); run.step(loss)"
STEP_AND = "loss.backward(); run.step(loss)\n    if rank == 2 and count == 5: "
CLIPPED = "loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.0); run.step(loss)"
OPTIMIZER = "loss.backward(); torch.optim.SGD(model.parameters(), 0.1).step(); run.step(loss)"
LATE_OPTIMIZER = "loss.backward(); run.step(loss); torch.optim.AdamW(model.parameters()).step()"
WRITTEN = "loss.backward(); torch.nn.init.zeros_(model.bias); run.step(loss)"
RENEWED = "loss.backward(); model.weight.data = model.weight.data.clone(); run.step(loss)"
FROZEN = "loss.backward(); run.step(loss); model.bias.requires_grad = count < 3"
SCALED = "scaler = torch.amp.GradScaler('cpu'); scaler.scale(loss).backward(); run.step(loss)"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(FORGOTTEN, "expected one call of step() for each batch", id="no step"),
        pytest.param(NO_BACKWARD, "call loss.backward() before", id="no backward"),
        pytest.param(TWICE, "got a call without a batch", id="two steps", marks=pytest.mark.long),
        pytest.param(
            UNBOUND, "step() clears the gradients", id="zero_grad", marks=pytest.mark.long
        ),
        pytest.param(
            BACKWARD_TWICE, "`with run.accumulate():`", id="two backward", marks=pytest.mark.long
        ),
        pytest.param(CLIPPED, "gradients were changed between backward() and step()", id="clip"),
        pytest.param(
            OPTIMIZER,
            "SGD.step() was called for parameter weight",
            id="optimizer",
            marks=pytest.mark.long,
        ),
        pytest.param(LATE_OPTIMIZER, "AdamW.step() was called for", id="optimizer behind"),
        pytest.param(WRITTEN, "parameter bias was changed", id="written", marks=pytest.mark.long),
        pytest.param(RENEWED, "the memory of parameter weight was replaced", id="renewed"),
        pytest.param(FROZEN, "parameter bias was frozen", id="frozen", marks=pytest.mark.long),
        pytest.param(SCALED, "a GradScaler has scaled the loss", id="scaler"),
        pytest.param(
            STEP_AND + "run.batches(data)", "got a second", id="two loops", marks=pytest.mark.long
        ),
    ],
)
def test_a_mistake_ends_the_job(tmp_path: Path, body: str, words: str) -> None:
    done = run_script(tmp_path, LOOP.replace("BODY", body), check=False)
    assert done.returncode != 0
    found = re.findall(r"aladdin_mpi: error \(rank [12]\): training loop: (.*)", done.stderr)
    (line,) = found  # of all workers, one tells of it
    assert words in line, repr(done)
    assert "Traceback" not in done.stderr
    assert "after the loop" not in done.stdout


BEFORE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
model = nn.Linear(3, 1)
BODY
"""
MAKE = "run = DataParallel(model, samples=64, run_dir='run', quiet=True)"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("DataParallel(model, epoch=5)", "epoch: no such option; did you mean epochs?"),
        pytest.param(
            "DataParallel(model, aladdin_pi=2)",
            "did you mean aladdin={'pi': ...}?",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "DataParallel(model, aladdin={'pii': 2})",
            "aladdin.pii: no such option; did you mean",
            marks=pytest.mark.long,
        ),
        (
            "DataParallel(model, precision='bf16')",
            "precision: expected only for the built-in training, got it for a loop of your own",
        ),
        ("DataParallel(model, algorithm='gosgd', compression='dgc')", "error: compression"),
        pytest.param(
            "DataParallel(model, samples=64); DataParallel(nn.Linear(2, 1), samples=8)",
            "expected one run at a time, got a second",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "DataParallel(model, optimizer='adamv')",
            "optimizer: expected one of adadelta, adafactor",
            marks=pytest.mark.long,
        ),
        ("DataParallel('resnet20')", "expected a torch.nn.Module first, got str"),
        pytest.param(
            "DataParallel(model, evaluate=5)",
            "evaluate: expected a function",
            marks=pytest.mark.long,
        ),
        (
            f"{MAKE[:-1]}, batch_size=4); list(run.batches(DataLoader(data, 8)))",
            "batch_size: expected that of the DataLoader, 8, or none, got 4",
        ),
        (f"{MAKE}; list(run.batches(iter(data)))", "which cannot begin anew"),
        pytest.param(
            f"{MAKE}; list(run.batches(64))",
            "expected a data set, a DataLoader, or an iterable of batches, got int",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_mistake_before_the_loop_is_told_once(tmp_path: Path, body: str, words: str) -> None:
    done = run_script(tmp_path, BEFORE.replace("BODY", body), ranks=2, check=False)
    assert words in refusal(done)
    assert not (tmp_path / "run").exists()


def test_gradients_may_be_changed_where_they_are_sent_at_step(tmp_path: Path) -> None:
    """With ``wait_free=False``: here all of them become 0, and so does every step."""
    text = BATCHES_OF_ONES.replace("BODY", "torch._foreach_zero_([model.weight.grad])")
    done = run_script(tmp_path, text)
    assert done.stdout.count("weight [[0.0, 0.0, 0.0]]") == 3


BATCHES_OF_ONES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.ones(64, 3), torch.zeros(64))
model = nn.Linear(3, 1, bias=False)
nn.init.zeros_(model.weight)
run = DataParallel(
    model, samples=64, batch_size=8, wait_free=False, weight_decay=0, run_dir="run", quiet=True
)
for inputs, _ in run.batches(data):
    model(inputs).sum().backward()
    BODY
    run.step()
print(f"weight {model.weight.tolist()}", flush=True)
"""


def test_options_have_the_names_of_arguments() -> None:
    text = as_arguments("--max-loss: with --aladdin-ahead-pi 2 or --ar-sgd-allreduce or --no-such")
    assert text == (
        "max_loss: with aladdin_ahead={'pi': ...} 2 or ar_sgd={'allreduce': ...} or --no-such"
    )


def test_an_exception_in_the_loop_ends_the_job(tmp_path: Path) -> None:
    done = run_script(tmp_path, LOOP.replace("BODY", STEP_AND + "1 / 0"), check=False)
    assert done.returncode != 0
    assert "[rank 2] ZeroDivisionError" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "run.stop()" not in done.stderr
