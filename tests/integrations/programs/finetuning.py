"""Fine-tune a tiny GPT-2 with transformers' Trainer, or with this project's.

Arguments: ``real`` or ``parallel``, and cases of ``CASES`` with their algorithms, as in
``everything:ar-sgd``. Each rank writes its figures to ``CASE-ALGORITHM-RANK.json`` and its weights
to ``CASE-ALGORITHM-RANK.pt``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback

from aladdin_mpi.integrations.transformers import Trainer, TrainingArguments

WORKERS = 2
PLAIN = {
    "per_device_train_batch_size": 2,
    "num_train_epochs": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "metric_for_best_model": "shift",
    "greater_is_better": False,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.05,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "eval_strategy": "epoch",
    },
    "best": {
        **EVALUATED,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    },
    "stopped": EVALUATED,
    "resumed": {**EVALUATED, "save_strategy": "steps", "save_steps": 6},
    "bf16": {"bf16": True},
}


evaluations = 0


def samples(count: int) -> list[dict[str, list[int]]]:
    """Return sequences of different lengths that count up."""
    return [
        {"input_ids": [(start + step) % 32 for step in range(3 + start % 9)]}
        for start in range(count)
    ]


def collate(items: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad with tokens that are no labels."""
    longest = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] + [-100] * (longest - len(item["input_ids"])) for item in items]
    labels = torch.tensor(rows)
    mask = (labels >= 0).long()
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask, "labels": labels}


def compute_metrics(prediction: Any) -> dict[str, float]:
    """Return a figure that becomes worse from the third evaluation on."""
    global evaluations
    evaluations += 1
    return {"tokens": int((prediction.label_ids >= 0).sum()), "shift": abs(evaluations - 2)}


class Recorder(TrainerCallback):
    """Records events in their order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name not in ("on_prediction_step", "on_init_end"):
            return lambda *args, **values: self.events.append(name[3:])
        return super().__getattribute__(name)


class Interruption(TrainerCallback):
    """Raises an error after step 8."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 8:
            raise InterruptedError


def train(kind: str, name: str, algorithm: str, is_interrupted: bool = False) -> None:
    """Train with the arguments of a case, and write the results."""
    global evaluations
    evaluations = int(name == "resumed" and kind == "parallel" and not is_interrupted)
    label = f"{name}-{algorithm}"
    settings: dict[str, Any] = {**PLAIN, "output_dir": label, **CASES[name]}
    if kind == "real":
        settings["per_device_train_batch_size"] *= WORKERS
        args: Any = transformers.TrainingArguments(**settings)
    else:
        args = TrainingArguments(**settings, algorithm=algorithm)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if algorithm in ("ar-sgd", "bsp") and name != "bf16":
        model.double()
    dtypes: list[torch.dtype] = []
    model.get_submodule("transformer.h.0.mlp.c_fc").register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    recorder = Recorder()
    others: list[TrainerCallback] = [EarlyStoppingCallback(1)] if name == "stopped" else []
    if is_interrupted:
        others.append(Interruption())
    make: Any = transformers.Trainer if kind == "real" else Trainer
    trainer = make(
        model,
        args,
        data_collator=collate,
        train_dataset=samples(48),
        eval_dataset=samples(10),
        compute_metrics=compute_metrics,
        callbacks=[recorder, *others],
    )
    try:
        output = trainer.train(resume_from_checkpoint=name == "resumed" and kind == "parallel")
    except InterruptedError:
        trainer.run.close()
        return
    figures = {
        "step": output.global_step,
        "loss": output.training_loss,
        "log": trainer.state.log_history,
        "best": trainer.state.best_model_checkpoint,
        "is_first": trainer.is_world_process_zero(),
        "events": recorder.events,
        "dtypes": [str(each) for each in dtypes[:1]],
    }
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    with open(f"{label}-{rank}.json", "w") as file:
        json.dump(figures, file)
    torch.save(
        {each: value.clone() for each, value in model.state_dict().items()}, f"{label}-{rank}.pt"
    )
    trainer.save_model(f"{label}-saved")


if __name__ == "__main__":
    kind = sys.argv[1]
    for case in sys.argv[2:]:
        name, algorithm = case.split(":")
        if name == "resumed" and kind == "parallel":
            train(kind, name, algorithm, is_interrupted=True)
        train(kind, name, algorithm)
