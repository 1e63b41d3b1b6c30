"""Runs that are closed before their loop ends, and runs that follow them in the same process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.commands import summary
from tests.launch import Completed, environment, needs
from tests.run.test_own_loop import HERE, run_script

pytestmark = needs("openmpi")

ALONE = """
import os, signal, sys, threading
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError

algorithm = sys.argv[1]
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

def new_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
    )

class Unreadable(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if torch.is_grad_enabled() and fails_now:
            raise OSError("a sample cannot be read")
        return data[index]

class Unmovable(nn.Linear):
    def to(self, *place, **how):
        raise MemoryError("the model does not fit")

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("backward fails")

def evaluate(module):
    raise ZeroDivisionError("at the end")

def make(model, **settings):
    return DataParallel(
        model, algorithm=algorithm, epochs=2, batch_size=8, run_dir="run", overwrite=True,
        quiet=True, **settings
    )

def loop(run, model, fault=None):
    global fails_now
    for number, (batch, targets) in enumerate(run.batches(Unreadable())):
        is_last = number == 3
        hidden = model[0](batch)
        if is_last and fault == "backward":
            hidden = Failing.apply(hidden)
        model(batch)
        loss = nn.functional.mse_loss(model[1:](hidden), targets)
        if is_last and fault == "forward":
            model(batch[:, :3])
        loss.backward()
        if is_last and fault == "after backward":
            raise ValueError("in the loop")
        if is_last and fault == "algorithm":
            model[0].weight.grad = torch.zeros(16, 8)
        fails_now = is_last and fault == "data"
        if is_last and fault == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        run.step(loss)

def fail(model, fault, way):
    global run
    settings = {"eval_every": 0, "evaluate": evaluate} if fault == "evaluate" else {}
    run = make(Unmovable(8, 1) if fault == "constructor" else model, **settings)
    if way == "with":
        with run:
            loop(run, model, fault)
    else:
        loop(run, model, fault)

def train():
    model = new_model()
    loop(make(model), model)
    return [value.clone() for value in model.state_dict().values()]

def leftovers(model):
    hooks = sum(len(h) for m in model.modules() for n, h in vars(m).items() if "_hooks" in n)
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    frozen = sum(not p.requires_grad for p in model.parameters())
    threads = sum(thread.name == "mpi-progress" for thread in threading.enumerate())
    return [hooks, on_parameters, frozen, threads, int(os.path.exists("run/.lock"))]

fails_now = False
first = train()
faults = [
    "forward", "backward", "after backward", "algorithm", "data", "interrupt", "evaluate",
    "constructor",
]
ways = ["close", "with", "a second run"]
for place, fault in enumerate(faults):
    for way in ways if fault == "after backward" else [ways[place % 3]]:
        run, model = None, new_model()
        try:
            fail(model, fault, way)
        except (Exception, KeyboardInterrupt) as error:
            kind = type(error).__name__
        fails_now = False
        if way == "close" and run is not None:
            run.close()
        if way != "a second run":
            assert leftovers(model) == [0] * 5, (fault, way, leftovers(model))
        assert all(map(torch.equal, first, train())), (fault, way)
        assert leftovers(model) == [0] * 5, (fault, way, leftovers(model))
        if run is not None:
            run.close()
            assert run.is_over
            for use in (run.step, lambda: run.summary, lambda: run.lr):
                try:
                    use()
                except UserError as error:
                    assert "was closed before its loop ended" in str(error), error
                else:
                    raise AssertionError("a closed run was used")
    print(fault, kind)
"""

FAULTS = """forward RuntimeError
backward RuntimeError
after backward ValueError
algorithm UserError
data OSError
interrupt KeyboardInterrupt
evaluate ZeroDivisionError
constructor MemoryError
"""


def alone(tmp_path: Path, text: str, *words: str, command: Sequence[str] = ()) -> Completed:
    """Run a script in one process, as a user would."""
    file = tmp_path / "script.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, *command, str(file), *words],
        cwd=tmp_path,
        env=environment("openmpi", HERE),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Completed(done.returncode, done.stdout, done.stderr, 0.0)


@pytest.mark.parametrize("algorithm", ["ar-sgd", pytest.param("multistep", marks=pytest.mark.long)])
def test_run_after_an_error_equals_a_fresh_one(tmp_path: Path, algorithm: str) -> None:
    """The failed run keeps no hook, thread or lock, however it is closed."""
    done = alone(tmp_path, ALONE, algorithm)
    assert (done.returncode, done.stdout) == (0, FAULTS), done
    warnings = done.stderr.count("the run before this one was not over and has been closed")
    assert warnings == 2


PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from aladdin_mpi import DataParallel

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)

def pair():
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

plain, optimizer = pair()
for number, (batch, targets) in enumerate(loader):
    if number == 3:
        break
    optimizer.zero_grad()
    nn.functional.mse_loss(plain(batch), targets).backward()
    optimizer.step()

model, optimizer = pair()
run = DataParallel(model, optimizer=optimizer, epochs=2, run_dir="run", quiet=True)
for epoch in run.epochs(loader):
    for number, (batch, targets) in enumerate(epoch):
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        if number == 3:
            run.close()
            break
        run.step(loss)
    break
assert torch.equal(plain.weight, model.weight)

with DataParallel(model, epochs=2, run_dir="left", quiet=True) as run:
    batches = run.batches(loader)
    for batch, targets in batches:
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        run.step(loss)
        break
print(run.is_over, run.summary["samples"] < 2 * 64)
run.close()
run.close()
with DataParallel(model, epochs=1, run_dir="never begun", quiet=True) as run:
    pass
run = DataParallel(model, epochs=1, run_dir="never begun", quiet=True)
run.close()
"""


def test_close_leaves_the_model_of_the_last_step(tmp_path: Path) -> None:
    """As plain PyTorch does. A block left without an error ends the run as ``break`` does."""
    done = alone(tmp_path, PLAIN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "left" / "summary.json").exists()


INTERACTIVE = """
import sys
sys.ps1 = "In : "  # as in a notebook
import os, signal
import torch
from torch import nn
from aladdin_mpi import DataParallel

model = nn.Linear(8, 1)
for cell in range(3):
    run = DataParallel(model, epochs=1, batch_size=8, run_dir="run", overwrite=True, quiet=True)
    try:
        for batch in run.batches(torch.randn(96, 8)):
            loss = model(batch).mean()
            loss.backward()
            os.kill(os.getpid(), signal.SIGINT)
            run.step(loss)
    except KeyboardInterrupt:
        print("interrupted")
    run.close()
try:
    raise ValueError
except ValueError:
    sys.excepthook(*sys.exc_info())
print("goes on")
"""


def test_notebook_survives_interrupts_and_errors(tmp_path: Path) -> None:
    done = alone(tmp_path, INTERACTIVE)
    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 3 + "goes on\n"), done


SEVERAL = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

algorithm, failing, way = sys.argv[1:]
torch.manual_seed(0)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

def train(folder, fails, way):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    run = DataParallel(
        model, algorithm=algorithm, epochs=2, batch_size=8, run_dir=folder, quiet=True, timeout=60
    )
    rank = run.transport.rank
    if way == "with":
        with run:
            loop(run, model, fails)
    else:
        try:
            loop(run, model, fails)
        except ValueError:
            run.close()
            raise
    return rank, [round(value.sum().item(), 6) for value in model.state_dict().values()]

def loop(run, model, fails):
    for number, (batch, targets) in enumerate(run.batches(data)):
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        if fails and number == 2 and failing in ("all", str(run.transport.rank)):
            raise ValueError("in the loop")
        run.step(loss)

if failing == "fresh":
    print("rank %d %s" % train("run", False, way), flush=True)
elif way == "uncaught":
    train("failed", True, "with")
    print("the other ranks went on", flush=True)
else:
    try:
        train("failed", True, way)
    except Exception as error:
        print(f"caught {type(error).__name__}", flush=True)
    print("rank %d %s" % train("run", False, way), flush=True)
"""


def several(tmp_path: Path, *words: str, **how: bool) -> Completed:
    file = tmp_path / "script.py"
    file.write_text(SEVERAL.replace("sys.argv[1:]", repr(words)))
    return run_script(tmp_path, file.read_text(), timeout=120, **how)


def trained(done: Completed) -> set[str]:
    found = re.findall(r"^rank (\d) (.*)$", done.stdout, re.M)
    assert sorted(rank for rank, _ in found) == ["0", "1", "2"], done
    return {values for _, values in found}


@pytest.mark.parametrize(
    ("algorithm", "failing", "way", "errors"),
    [
        ("ar-sgd", "1", "with", ["ClosedError", "ClosedError", "ValueError"]),
        ("bsp", "1", "close", ["ClosedError", "ClosedError", "ValueError"]),
        pytest.param("ar-sgd", "all", "close", ["ValueError"] * 3, marks=pytest.mark.long),
        pytest.param("bsp", "all", "with", None, marks=pytest.mark.long),
    ],
)
def test_an_error_on_one_rank_closes_the_run_for_all(
    tmp_path: Path, algorithm: str, failing: str, way: str, errors: list[str] | None
) -> None:
    """Also for servers; the next run is like a fresh one."""
    done = several(tmp_path, algorithm, failing, way)
    caught = sorted(re.findall(r"^caught (\w+)$", done.stdout, re.M))
    assert caught == errors if errors else len(caught) == 3, done
    (weights,) = trained(done)
    assert not (tmp_path / "failed" / "summary.json").exists()
    assert summary(tmp_path / "run")["samples"] == 2 * 96
    (tmp_path / "fresh").mkdir()
    assert trained(several(tmp_path / "fresh", algorithm, "fresh", way)) == {weights}


def test_an_uncaught_error_in_a_with_block_ends_the_job(tmp_path: Path) -> None:
    done = several(tmp_path, "bsp", "1", "uncaught", check=False)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert done.stderr.count("ValueError: in the loop") == 1, done


def test_second_run_among_several_ranks_names_the_remedy(tmp_path: Path) -> None:
    text = """
from torch import nn
from aladdin_mpi import DataParallel
first = DataParallel(nn.Linear(2, 1), samples=8, algorithm="ar-sgd")
DataParallel(nn.Linear(2, 1), samples=8, algorithm="ar-sgd")
"""
    done = run_script(tmp_path, text, ranks=2, check=False)
    assert "run.close()" in done.stderr and "with DataParallel" in done.stderr, done


def test_close_in_virtual_time(tmp_path: Path) -> None:
    """All ranks are one process there, and each of them hears of it."""
    text = SEVERAL.replace("sys.argv[1:]", repr(("bsp", "1", "with")))
    done = alone(tmp_path, text, "--workers", "2", command=("-m", "aladdin_mpi.simulate"))
    caught = sorted(re.findall(r"^caught (\w+)$", done.stdout, re.M))
    assert caught == ["ClosedError", "ClosedError", "ValueError"], done
    assert len(trained(done)) == 1


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("leaves", ["break", "raise ValueError"])
def test_leaving_the_loop_after_its_last_step(tmp_path: Path, leaves: str, ranks: int) -> None:
    """The training is complete then: a block that is left without an error keeps its results."""
    text = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel
data = TensorDataset(torch.ones(64, 2))
for folder in ("first", "second"):
    settings = dict(algorithm="ar-sgd", batch_size=4, run_dir=folder, quiet=True, timeout=30)
    try:
        with DataParallel(nn.Linear(2, 1), steps=3, **settings) as run:
            for number, (inputs,) in enumerate(run.batches(data), start=1):
                loss = run.module(inputs).mean()
                loss.backward()
                run.step(loss)
                if number == 3 and run.is_first:
                    {leaves}
    except ValueError:
        pass
    assert run.is_over
"""
    run_script(tmp_path, text, ranks=ranks)
    if ranks > 1 or leaves == "break":
        for folder in ("first", "second"):
            assert summary(tmp_path / folder)["samples"] == 3 * 4 * ranks


def test_a_failed_run_that_the_script_ignores_ends_the_program_with_an_error(
    tmp_path: Path,
) -> None:
    """Python prints an error that is raised at its exit, and would end with status 0."""
    text = """
import torch
from torch import nn
from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
run = DataParallel(nn.Linear(2, 1), algorithm="ar-sgd", steps=3, batch_size=4, quiet=True)
try:
    for inputs in run.batches(torch.utils.data.StackDataset(inputs=torch.ones(64, 2))):
        loss = run.module(inputs["inputs"]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(run.module.parameters(), 0.01)
        run.step(loss)
except UserError:
    pass
"""
    done = run_script(tmp_path, text, ranks=2, check=False)
    assert done.returncode != 0
    assert "aladdin_mpi: error" in done.stderr and "Traceback" not in done.stderr, done
