"""A script for Hugging Face's accelerate and transformers, as it is and with any algorithm."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from aladdin_mpi.accelerate import Accelerator
from aladdin_mpi.errors import UserError
from tests.commands import summary
from tests.launch import Completed, needs, run_ranks
from tests.run.test_own_loop import HERE

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup
)

algorithm, epochs = sys.argv[1], 4
if algorithm == "real":
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
else:
    from aladdin_mpi.accelerate import Accelerator
    accelerator = Accelerator(
        gradient_accumulation_steps=2, algorithm=algorithm, epochs=epochs, run_dir=algorithm
    )

torch.manual_seed(0)
words = torch.randint(1, 50, (96, 12))
data = [
    {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": (each[0] > 25).long()}
    for each in words
]
config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=16, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader, test = DataLoader(data, 8), DataLoader(data, 32)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, epochs * len(loader) // 2)
model, optimizer, loader, test, scheduler = accelerator.prepare(
    model, optimizer, loader, test, scheduler
)
for epoch in range(epochs):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**each).loss.reshape(1)) for each in test]
    accelerator.print(f"epoch {epoch}: {torch.cat(losses).mean():.6f}")
    if epoch == 2 and sys.argv[2:] == ["leave"]:
        break
accelerator.wait_for_everyone()
accelerator.end_training()
"""


def losses(done: Completed) -> list[float]:
    return [float(each) for each in re.findall(r"^epoch \d: ([\d.]+)$", done.stdout, re.M)]


@needs("openmpi")
def test_a_script_trains_as_it_does_with_accelerate(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = partial(run_ranks, env=HERE, cwd=tmp_path, timeout=120)
    real = losses(run(1, ["script.py", "real"]))
    assert len(real) == 4 and real[-1] < 0.9 * real[0]
    assert losses(run(1, ["script.py", "ar-sgd"])) == pytest.approx(real, rel=1e-4)
    several = losses(run(3, ["script.py", "aladdin"]))
    assert len(several) == 4 and several[-1] < several[0]
    found = summary(tmp_path / "aladdin")
    assert (found["samples"], found["workers"]) == (4 * 96, 2)


@needs("openmpi")
@pytest.mark.long
def test_a_loop_that_is_left(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["script.py", "bsp", "leave"]
    done = run_ranks(3, words, env=HERE, cwd=tmp_path, timeout=120)
    assert len(losses(done)) == 3
    assert summary(tmp_path / "bsp")["samples"] < 4 * 96


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="length of the run"):
        Accelerator()
    with pytest.raises(UserError, match="mixed_precision: expected 'no', got 'fp16'"):
        Accelerator(mixed_precision="fp16", epochs=1)


REFUSED = """
from aladdin_mpi import Accelerator
accelerator = Accelerator(epochs=1)
for use in (
    lambda: accelerator.save_state("folder"), lambda: accelerator.run, accelerator.prepare
):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
"""


@needs("openmpi")
def test_what_is_not_there_yet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REFUSED)
    lines = run_ranks(1, ["script.py"], env=HERE, cwd=tmp_path).stdout.splitlines()
    expected = (
        "UserError accelerator.save_state: expected one of those",
        "UserError accelerator: expected prepare(model, optimizer, loader) first",
        "UserError accelerator.prepare: expected one model, got 0",
    )
    assert all(map(str.startswith, lines, expected)), lines
    assert len(lines) == 3


BEGINNING = """
import sys
import torch
from torch.utils.data import DataLoader
if sys.argv[1] == "real":
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, mixed_precision=None)
else:
    from aladdin_mpi import Accelerator
    accelerator = Accelerator(mixed_precision=None, algorithm=sys.argv[1], epochs=1, quiet=True)

def place():
    return [accelerator.is_main_process, accelerator.is_local_main_process, accelerator.device,
            accelerator.num_processes]

before = place()
accelerator.print("once", "before", sep=" ", flush=True)
model = torch.nn.Linear(4, 1).to(accelerator.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader([torch.ones(4) for _ in range(8)], 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert place() == before
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("once after")
print("place", *before, flush=True)
"""


@needs("openmpi")
def test_what_a_script_asks_before_prepare(tmp_path: Path) -> None:
    """In one process the same as of accelerate; a server is no main process."""
    (tmp_path / "script.py").write_text(BEGINNING)
    run = partial(run_ranks, env=HERE, cwd=tmp_path, timeout=120)
    real, alone = (run(1, ["script.py", each]).stdout for each in ("real", "asp"))
    assert alone == real == "once before\nonce after\nplace True True cpu 1\n"
    done = run(3, ["script.py", "asp"]).stdout
    places = sorted(re.findall(r"^place (.*)$", done, re.M))
    assert places == ["False False cpu 2", "False False cpu 2", "True True cpu 2"]
    assert (done.count("once before"), done.count("once after")) == (1, 1)
