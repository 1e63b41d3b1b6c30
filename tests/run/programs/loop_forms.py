"""Custom training loops of several forms.

Arguments: the form, one of the functions below; the algorithm; the settings, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel

torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(4, 1)


def train(batch: Sequence[Tensor], parts: int = 1) -> None:
    loss = nn.functional.mse_loss(model(batch[0]), batch[1]) / parts
    loss.backward()
    run.step(loss)


def epochs(most: float = float("inf")) -> None:
    for epoch in run.epochs(DataLoader(data, 8, shuffle=True)):
        count = 0
        for batch in epoch:
            train(batch)
            count += len(batch[0])
            if count >= most:
                break
        whole = run.reduce(count, "sum").item()
        print(f"epoch {epoch} {count} of {whole:.0f}", flush=True)


def left_epochs() -> None:
    epochs(most=16)


def left_by_rank_1(error: Exception | None = None) -> None:
    for number, batch in enumerate(run.batches(DataLoader(data, 8))):
        if number == 2 and run.transport.rank == 1:
            if error is not None:
                raise error
            break
        train(batch)


def left_before_state_dict() -> None:
    left_by_rank_1()
    model.state_dict()


def left_before_summary() -> None:
    left_by_rank_1()
    assert run.summary is not None


def left_before_forward() -> None:
    left_by_rank_1()
    model(inputs)


def left_at_the_end() -> None:
    left_by_rank_1()


def left_by_an_error() -> None:
    left_by_rank_1(KeyError("mine"))


def skipped() -> None:
    for number, batch in enumerate(run.batches(DataLoader(data, 8))):
        if number % 2:
            continue
        train(batch)


def whole_batches() -> None:
    for batch in run.batches(DataLoader(data, 8, shuffle=True)):
        train(batch)


def half_batches() -> None:
    for batch in run.batches(DataLoader(data, 4, shuffle=True)):
        train(batch, parts=2)


def state_and_figures() -> None:
    for batch in run.batches(DataLoader(data, 8)):
        run.state["batches"] = run.state.get("batches", 0) + 1
        run.state["where"] = {"list": [1, "two", torch.ones(2)]}
        run.log(batches=run.state["batches"], rank=run.transport.rank)
        train(batch)
    if not run.is_server:
        print(f"state {run.state['batches']}", flush=True)


def unsavable_state() -> None:
    for batch in run.batches(DataLoader(data, 8)):
        run.state["model"] = model
        train(batch)


FORMS: list[Callable[[], None]] = [
    *(epochs, left_epochs, left_before_state_dict, left_before_summary, left_before_forward),
    *(left_at_the_end, left_by_an_error, skipped, whole_batches, half_batches),
    *(state_and_figures, unsavable_state),
]
form, algorithm, settings = sys.argv[1:]
run = DataParallel(model, algorithm=algorithm, run_dir="run", seed=2, **json.loads(settings))
{each.__name__: each for each in FORMS}[form]()
if form != "left_at_the_end":  # any use of the model would end the run before the program ends
    print(f"weight {[round(w, 5) for w in model.weight[0].tolist()]}", flush=True)
