"""How loader processes are started where MPI is in use, as a user's script has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import run_ranks

PROGRAM = """
import multiprocessing
import sys

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, Dataset

from aladdin_mpi import DataParallel


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        started = type(multiprocessing.current_process()).__name__
        if started in ("ForkServerProcess", "SpawnProcess"):
            assert not MPI.Is_initialized()
        return torch.full((3,), float(index)), index % 2, started


def put_together(samples):
    images, labels, started = zip(*samples)
    return torch.stack(images), torch.tensor(labels), started[0]


def main(method, collate):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    run = DataParallel(
        model, algorithm="ar-sgd", epochs=1, lr=0.01, run_dir=sys.argv[1], quiet=True,
        loader_start_method=method,
    )
    loader = DataLoader(Samples(), batch_size=8, num_workers=1, collate_fn=collate)
    kinds = set()
    for images, labels, started in run.batches(loader):
        kinds.add(started)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        run.step(loss)
    run.print("started by", *sorted(kinds))
"""
GUARDED = '\n\nif __name__ == "__main__":\n    main({})\n'
UNGUARDED = "\n\nmain({})\n"


def program(folder: Path, end: str, arguments: str) -> str:
    path = folder / "own.py"
    path.write_text(PROGRAM + end.format(arguments))
    return str(path)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("auto", "ForkServerProcess"),
        pytest.param("spawn", "SpawnProcess", marks=pytest.mark.long),
        ("fork", "ForkProcess"),
    ],
)
def test_by_the_method_asked_for(tmp_path: Path, method: str, kind: str) -> None:
    path = program(tmp_path, GUARDED, f'"{method}", put_together')
    done = run_ranks(2, [path, str(tmp_path / "run")], timeout=100, is_warm=False)
    assert f"started by {kind}" in done.stdout
    assert "loader" not in done.stderr


@pytest.mark.parametrize(
    ("end", "collate", "why"),
    [
        (UNGUARDED, "put_together", r'own.py has no line `if __name__ == "__main__":`'),
        pytest.param(
            GUARDED,
            "lambda samples: put_together(samples)",
            r"cannot be pickled \(.*lambda",
            marks=pytest.mark.long,
        ),
    ],
)
def test_auto_forks_where_it_must_and_says_so_once(
    tmp_path: Path, end: str, collate: str, why: str
) -> None:
    path = program(tmp_path, end, f'"auto", {collate}')
    done = run_ranks(2, [path, str(tmp_path / "run")], timeout=100, is_warm=False)
    assert "started by ForkProcess" in done.stdout
    assert len(re.findall(r"are forked although MPI .*" + why, done.stderr)) == 1


@pytest.mark.parametrize(
    ("end", "collate", "expected"),
    [
        pytest.param(
            UNGUARDED,
            "put_together",
            "expected a program whose main file can be imported",
            marks=pytest.mark.long,
        ),
        (GUARDED, "lambda samples: put_together(samples)", "expected a data set and a collate_fn"),
    ],
)
def test_a_method_that_the_program_does_not_allow_is_refused(
    tmp_path: Path, end: str, collate: str, expected: str
) -> None:
    path = program(tmp_path, end, f'"forkserver", {collate}')
    done = run_ranks(2, [path, str(tmp_path / "run")], timeout=100, check=False, is_warm=False)
    assert done.returncode != 0
    assert f"loader_start_method forkserver: {expected}" in done.stderr
