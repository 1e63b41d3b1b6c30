"""Hugging Face's Trainer with this project's training loop, compared with the original."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import IterableDataset

from aladdin_mpi.errors import UserError
from aladdin_mpi.integrations.transformers import (
    REFUSED,
    REFUSED_VALUES,
    Trainer,
    TrainingArguments,
)
from aladdin_mpi.run.job import Job, find_job
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.commands import metrics, summary
from tests.launch import needs
from tests.quadratic import NO_DELAY
from tests.run_program import run_program

PROGRAM = Path(__file__).parent / "programs" / "finetuning.py"
EXACT = ("everything", "best", "stopped", "resumed")
TIMES = ("runtime", "per_second", "grad_norm", "flos")
"""Parts of the names of logged figures that differ: times, padding, and what is not logged."""


@dataclass
class Trained:
    """Results of a rank."""

    figures: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def log(self) -> list[dict[str, float]]:
        return [
            {name: value for name, value in line.items() if not any(each in name for each in TIMES)}
            for line in self.figures["log"]
        ]


def trained(folder: Path, case: str, rank: int = 0) -> Trained:
    figures = json.loads((folder / f"{case}-{rank}.json").read_text())
    return Trained(figures, torch.load(folder / f"{case}-{rank}.pt", weights_only=True))


def are_close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float = 1e-9) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in a)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train with the original, on the batches of two workers, and with ar-sgd on two workers."""
    real, parallel = (tmp_path_factory.mktemp(name) for name in ("real", "parallel"))
    cases = [f"{name}:ar-sgd" for name in EXACT]
    run_program(PROGRAM, 1, "real", *cases, cwd=real, timeout=240)
    run_program(PROGRAM, 2, "parallel", *cases, "bf16:ar-sgd", cwd=parallel, timeout=240)
    return real, parallel


@pytest.mark.sample(1)
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_ar_sgd_trains_as_one_process_with_all_batches(exact: tuple[Path, Path], name: str) -> None:
    """Also with different numbers of tokens, and resumed in the middle of an epoch."""
    case = f"{name}-ar-sgd"
    real = trained(exact[0], case)
    for rank in (0, 1):
        ours = trained(exact[1], case, rank)
        assert are_close(real.weights, ours.weights)
        assert ours.figures["step"] == real.figures["step"]
        assert ours.figures["is_first"] == (rank == 0)
        assert ours.figures["best"] == real.figures["best"]
        assert [set(line) for line in ours.log] == [set(line) for line in real.log]
        for line, expected in zip(ours.log[:-1], real.log[:-1], strict=True):
            assert line == pytest.approx(expected, rel=1e-5)
        if name != "resumed":  # which begins after the step of its checkpoint
            assert ours.figures["events"] == real.figures["events"]
            assert ours.figures["loss"] == pytest.approx(real.figures["loss"], rel=1e-5)


@needs("openmpi")
@pytest.mark.slow
def test_resumed_run_counts_the_operations_of_all_its_steps(exact: tuple[Path, Path]) -> None:
    """These depend on the batches alone, which are the same in both cases."""
    whole, resumed = (trained(exact[1], f"{name}-ar-sgd") for name in ("best", "resumed"))
    assert resumed.figures["log"][-1]["total_flos"] == whole.figures["log"][-1]["total_flos"] > 0


@needs("openmpi")
@pytest.mark.slow
def test_trainer_saves_models_for_from_pretrained(exact: tuple[Path, Path]) -> None:
    real, ours = (sorted(p.name for p in each.glob("best-ar-sgd/*")) for each in exact)
    assert ours == [*real, "run"]
    for folder in (exact[1] / "best-ar-sgd-saved", exact[1] / "best-ar-sgd" / "checkpoint-6"):
        model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
        assert are_close(model.state_dict(), trained(exact[1], "best-ar-sgd").weights)
    state = json.loads((exact[1] / "best-ar-sgd/checkpoint-24/trainer_state.json").read_text())
    assert state["global_step"] == 24


@needs("openmpi")
@pytest.mark.slow
def test_trainer_computes_in_bfloat16(exact: tuple[Path, Path]) -> None:
    ranks = [trained(exact[1], "bf16-ar-sgd", rank) for rank in (0, 1)]
    assert are_close(ranks[0].weights, ranks[1].weights, tolerance=0.0)
    losses = [line["loss"] for line in ranks[0].log if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert ranks[0].figures["dtypes"] == ["torch.bfloat16"]
    assert ranks[0].weights["lm_head.weight"].dtype == torch.float32


@pytest.mark.long
@needs("openmpi")
@pytest.mark.slow
def test_trainer_serves_and_stops_with_asynchronous_algorithms(tmp_path: Path) -> None:
    cases = ("plain:bsp", "plain:aladdin-ahead", "stopped:aladdin")
    run_program(PROGRAM, 3, "parallel", *cases, cwd=tmp_path, timeout=200)
    for case in ("plain-bsp", "plain-aladdin-ahead", "stopped-aladdin"):
        server, first, second = (trained(tmp_path, case, rank) for rank in range(3))
        assert are_close(server.weights, first.weights, tolerance=0.0)
        assert are_close(server.weights, second.weights, tolerance=0.0)
        assert [each.figures["is_first"] for each in (server, first, second)] == [
            False,
            True,
            False,
        ]
        assert server.figures["events"] == ["train_begin", "log", "train_end"]
        for worker in (first, second):
            events = worker.figures["events"]
            assert events.count("epoch_begin") == events.count("epoch_end")
        # A worker may find that the others have taken all samples.
        losses = [worker.figures["loss"] for worker in (first, second)]
        assert any(loss > 0 for loss in losses)
        assert all(loss > 0 or isnan(loss) for loss in losses)
        if case != "stopped-aladdin":
            assert {each.figures["step"] for each in (server, first, second)} == {24}
            assert summary(tmp_path / case / "run")["samples"] == 96
            assert [line["step"] for line in first.log[:-1]] == list(range(1, 25))
            assert first.log[-2]["loss"] < 0.9 * first.log[0]["loss"]
    first = trained(tmp_path, "stopped-aladdin", 1)
    evaluations = [line["step"] for line in first.log if "eval_loss" in line]
    assert evaluations == [3, 6, 9] and first.figures["step"] == 9
    assert not any("eval_loss" in line for line in trained(tmp_path, "stopped-aladdin", 2).log)
    assert summary(tmp_path / "stopped-aladdin" / "run")["samples"] < 96
    assert metrics(tmp_path / "plain-bsp" / "run", "train")[-1]["samples"] == 96


# -- arguments ----------------------------------------------------------------------------------
def arguments(**settings: Any) -> TrainingArguments:
    return TrainingArguments("out", use_cpu=True, report_to="none", **settings)


VALUES = {"parallelism_config": object()}
SPECIAL = {"lr_scheduler_type": {"eval_strategy": "epoch"}}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_argument_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf"\b{name} is not supported\. Leave it out, and \w+"):
        arguments(**{name: VALUES.get(name, True)})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, each) for name, (values, _) in REFUSED_VALUES.items() for each in values],
)
def test_unsupported_value_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {name: value, **SPECIAL.get(name, {})}
    if name == "mixed_precision":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
        settings = {}
    with pytest.raises(UserError, match=rf"\b{name}={value} is not supported\. Instead, \w+"):
        arguments(**settings)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"run_options": "{servers"}, ["run_options", "JSON", "'{servers'"]),
        ({"run_options": "[1]"}, ["run_options", "dict"]),
        ({"run_options": {"clip": 1.0}}, ["run_options", "clip", "max_grad_norm"]),
        ({"accelerator_config": {"split_batches": True}}, ["split_batches", "per_device"]),
    ],
)
def test_invalid_arguments_name_the_remedy(settings: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(UserError) as error:
        arguments(**settings)
    assert all(name in str(error.value) for name in names), error.value


def test_epochs_of_data_without_a_length_are_refused() -> None:
    class Stream(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            yield {"input": torch.zeros(2)}

    settings = arguments(save_strategy="epoch", max_steps=3)
    trainer = Trainer(torch.nn.Linear(2, 1), settings, train_dataset=Stream())
    with pytest.raises(UserError, match=r"save_strategy='epoch' .*Use 'steps'"):
        trainer.train()


def test_arguments_can_be_parsed_from_a_command_line() -> None:
    words = ["--output_dir", "out", "--use_cpu", "--algorithm", "bsp"]
    words += ["--run_options", '{"servers": 2, "aladdin": {"pi": 2}}']
    parser = transformers.HfArgumentParser([TrainingArguments])  # type: ignore[list-item]
    (args,) = parser.parse_args_into_dataclasses(words)
    assert (args.algorithm, args.run_options) == ("bsp", {"servers": 2, "aladdin": {"pi": 2}})
    assert (args.world_size, args.process_index, args.should_save) == (1, 0, True)
    assert args.data_seed == args.seed


def test_arguments_can_be_saved_in_a_simulation() -> None:
    """They have the rank's place in the job; a simulated rank itself cannot be pickled."""

    def main(transport: Transport) -> int:
        copied: Job = pickle.loads(pickle.dumps(find_job({"transport": transport})))
        return copied.rank

    assert VirtualCluster(3, NO_DELAY).run(main) == [0, 1, 2]
