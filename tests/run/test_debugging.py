"""Loops of one process in a debugger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import environment, needs
from tests.run.program_runs import HERE, run_script

pytestmark = needs("openmpi")

SCRIPT = """import torch
from aladdin_mpi import DataParallel

model = torch.nn.Linear(2, 1)
run = DataParallel(model, steps=3, batch_size=4, run_dir="run", quiet=True)
for number, batch in enumerate(run.batches(torch.ones(12, 2))):
    loss = model(batch).sum()
    loss.backward()
    run.step(loss)
    print("step", number)
print("over")
"""
COMMANDS = ("b 8", "c", "n", "n", "p 'stopped at', number", "n", "cl 1", "c", "q")


@pytest.mark.long
def test_debugger_steps_through_the_loop(tmp_path: Path) -> None:
    """Over run.step(), which switches to the algorithm, to the next line."""
    (tmp_path / "script.py").write_text(SCRIPT)
    commands = [word for command in COMMANDS for word in ("-c", command)]
    ended = subprocess.run(
        [sys.executable, "-m", "pdb", *commands, "script.py"],
        cwd=tmp_path,
        env=environment("openmpi", HERE),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    printed = [line for line in ended.stdout.splitlines() if line.startswith(("step", "over", "("))]
    assert printed == ["('stopped at', 0)", "step 0", "step 1", "step 2", "over"], ended


def test_own_excepthook_reports_errors_of_one_process(tmp_path: Path) -> None:
    """As a debugger's does."""
    hook = "import sys\nsys.excepthook = lambda *error: print('own hook', error[1])\n"
    text = hook + SCRIPT.replace("loss.backward()", "raise ValueError('in the loop')")
    completed = run_script(tmp_path, text, ranks=1, check=False)
    assert (completed.returncode, completed.stdout) == (1, "own hook in the loop\n"), completed
    assert "aladdin_mpi: error" not in completed.stderr
