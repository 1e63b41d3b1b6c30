"""Scripts for Hugging Face's accelerate, unchanged and with any algorithm.

Most tests simulate the ranks. Where they compare with the real package, it runs in this process.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from aladdin_mpi import Accelerator
from aladdin_mpi.errors import SUSPENDED_STATUS, ClosedError, ServedError, UserError
from aladdin_mpi.integrations import accelerate as replacement
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.commands import metrics, simulate, summary
from tests.launch import ROOT, Completed, needs
from tests.quadratic import NO_DELAY
from tests.run_program import run_program

PROGRAMS = ROOT / "tests" / "programs"
LONG = pytest.mark.long
SAMPLES, EPOCHS = 96, 2
DATA = TensorDataset(
    torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)),
    torch.arange(SAMPLES) % 3,
)
Script = Callable[[Any], Any]


def simulated(folder: Path, algorithm: str, ranks: int, script: Script, **settings: Any) -> Any:
    """Return the results of ``script(accelerator)`` on each rank, workers first."""

    def rank(transport: Any) -> Any:
        length = {} if settings.keys() & {"steps", "samples"} else {"epochs": EPOCHS}
        accelerator = Accelerator(
            transport=transport,
            algorithm=algorithm,
            compute_time=0.01,
            quiet=True,
            **{"run_dir": folder / algorithm, "overwrite": True, **length, **settings},
        )
        result = script(accelerator)
        accelerator.end_training()
        return accelerator.process_index, result

    results: list[Any] = VirtualCluster(ranks, NO_DELAY).run(rank)
    return [result for _, result in sorted(results, key=lambda each: each[0])]


@pytest.fixture
def real() -> Iterator[type]:
    """The real class; its state, which is global, is dropped after the test."""
    yield accelerate.Accelerator
    # There is no public function for this; accelerate's own tests call this one.
    AcceleratorState._reset_state(reset_partial_state=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def decreasing(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


# -- compared with accelerate -----------------------------------------------------------------
def training(
    accelerator: Any, batch: int, clip: float = 0.05, scheduled: str = "prepared"
) -> torch.Tensor:
    """Return the weights after two epochs with accumulation, clipping and a scheduler."""
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    loader: Any = DataLoader(DATA, batch)
    k = accelerator.gradient_accumulation_steps
    scheduler: Any = decreasing(optimizer, EPOCHS * len(loader) // k)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if scheduled == "prepared":
        scheduler = accelerator.prepare(scheduler)
    else:
        scheduler = decreasing(optimizer, EPOCHS * len(loader) // k)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if scheduled == "prepared" or accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    return values(accelerator.unwrap_model(model))


@pytest.mark.parametrize(
    ("steps", "scheduled", "precision"),
    [(2, "prepared", "no"), (1, "prepared", "bf16"), (2, "later", "no")],
)
def test_two_workers_with_half_the_batch_equal_accelerate(
    tmp_path: Path, real: type, steps: int, scheduled: str, precision: str
) -> None:
    how: Any = {"gradient_accumulation_steps": steps, "mixed_precision": precision}
    expected = training(real(cpu=True, **how), 8, scheduled=scheduled)
    script = partial(training, batch=4, scheduled=scheduled)
    first, second = simulated(tmp_path, "ar-sgd", 2, script, **how)
    assert torch.equal(first, second)
    assert torch.allclose(first, expected, rtol=1e-4, atol=1e-3 if precision == "bf16" else 1e-5)
    assert (expected - values(network())).norm() > 0.1


def test_scheduler_ends_with_a_run_of_a_number_of_steps(tmp_path: Path, real: type) -> None:
    """As with accelerate, a prepared scheduler advances for the steps of all workers."""
    expected = training(real(cpu=True), 8)
    steps = EPOCHS * SAMPLES // 8
    for split, batch in ((False, 4), (True, 8)):
        script = partial(training, batch=batch)
        first, _ = simulated(tmp_path, "ar-sgd", 2, script, steps=steps, split_batches=split)
        assert torch.allclose(first, expected, rtol=1e-4, atol=1e-5)


def test_arguments_and_methods_have_the_names_of_accelerate() -> None:
    """Every argument of the real constructor is supported, or refused by name."""
    known = {*inspect.signature(Accelerator).parameters, *replacement.NO_ARGUMENTS}
    theirs = accelerate.Accelerator
    assert set(inspect.signature(theirs.__init__).parameters) - {"self"} <= known
    of_objects = {"run", "state"}  # ours, and an attribute that their constructor sets
    for name in set(vars(Accelerator)) - of_objects:
        assert name.startswith("_") or hasattr(theirs, name), name
    methods = (name for name in vars(Accelerator) if inspect.isfunction(vars(theirs).get(name)))
    for name in methods:
        given = inspect.signature(getattr(theirs, name)).parameters.values()
        names = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        mine = inspect.signature(getattr(Accelerator, name)).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in mine.values())
        unknown = set(names) - set(mine) - {"scale", "keep_fp32_wrapper", "keep_torch_compile"}
        assert takes_any or not unknown, (name, unknown)


def test_properties_equal_those_of_accelerate(tmp_path: Path, real: type) -> None:
    names = [
        *("device", "distributed_type", "is_main_process", "is_local_main_process"),
        *("is_last_process", "process_index", "local_process_index", "num_processes"),
        *("mixed_precision", "use_distributed", "split_batches", "project_dir", "sync_gradients"),
        "gradient_accumulation_steps",
    ]

    def properties(accelerator: Any) -> dict[str, Any]:
        accelerator.wait_for_everyone()
        return {name: getattr(accelerator, name) for name in names}

    theirs = properties(real(cpu=True))
    assert simulated(tmp_path, "ar-sgd", 1, properties) == [theirs]
    kinds = {accelerate.DistributedType.MULTI_CPU, "MULTI_CPU"}
    of_ranks = simulated(tmp_path, "asp", 3, properties)
    assert [each["process_index"] for each in of_ranks] == [0, 1, 2]  # the server is the last
    assert [each["is_main_process"] for each in of_ranks] == [True, False, False]
    assert [each["is_local_main_process"] for each in of_ranks] == [True, False, False]
    assert [each["is_last_process"] for each in of_ranks] == [False, True, False]
    assert {each["num_processes"] for each in of_ranks} == {2}
    assert {each["distributed_type"] for each in of_ranks} <= kinds


# -- orders of preparing, and forms of loops ----------------------------------------------------
def loop(accelerator: Any, model: nn.Module, optimizer: Any, batches: Iterable[Any]) -> None:
    for inputs, labels in batches:
        accelerator.backward(functional.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def parts() -> tuple[Any, Any, Any]:
    model = network()
    return model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(DATA, 4, shuffle=True)


def together(accelerator: Any) -> torch.Tensor:
    model, optimizer, loader = accelerator.prepare(*parts())
    for _ in range(EPOCHS):
        loop(accelerator, model, optimizer, loader)
    accelerator.wait_for_everyone()
    return values(model)


def apart(accelerator: Any) -> torch.Tensor:
    """Prepare everything by itself, twice, and another model that is not trained."""
    model, optimizer, loader = parts()
    loader = accelerator.prepare(loader)
    assert len(loader) == math.ceil(SAMPLES / 4 / accelerator.num_processes)
    optimizer = accelerator.prepare(optimizer)
    frozen = accelerator.prepare(nn.Linear(6, 6).requires_grad_(False))
    model = accelerator.prepare(model)
    assert accelerator.prepare(model, optimizer, loader) == (model, optimizer, loader)
    assert isinstance(frozen, nn.Linear)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        loop(accelerator, model, optimizer, loader)
    return torch.cat([each.reshape(-1) for each in model.state_dict().values()])


def saved_apart(accelerator: Any) -> torch.Tensor:
    """Return the weights in the state dicts of two prepared models after the last step."""
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    both = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    loader: Any = DataLoader(DATA, 4)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for _ in range(EPOCHS):
        loop(accelerator, both, optimizer, loader)
    states = [accelerator.unwrap_model(each).state_dict() for each in (first, second)]
    return torch.cat([value.clone().reshape(-1) for state in states for value in state.values()])


def test_state_dict_of_each_prepared_model_completes_the_run(tmp_path: Path) -> None:
    saved = simulated(tmp_path, "asp", 4, saved_apart)
    assert all(torch.equal(each, saved[0]) for each in saved)


def test_batch_sampler_determines_the_length_in_samples(tmp_path: Path) -> None:
    def script(accelerator: Any) -> None:
        model, optimizer, _ = parts()
        batches = BatchSampler(RandomSampler(DATA), 8, drop_last=True)
        loader = DataLoader(DATA, batch_sampler=batches)
        scheduler = decreasing(optimizer, SAMPLES // 8)
        _, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for inputs, labels in loader:
            accelerator.backward(functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    simulated(tmp_path, "ar-sgd", 1, script, steps=SAMPLES // 8)
    assert summary(tmp_path / "ar-sgd")["samples"] == SAMPLES


def endless(accelerator: Any) -> torch.Tensor | None:
    """A library's loop over steps; its server leaves the loop when the run ends."""

    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    model, optimizer, loader = parts()
    batches = cycle(accelerator.prepare(loader))
    model, optimizer = accelerator.prepare(model, optimizer)
    try:
        for _ in range(EPOCHS * SAMPLES // 4 // accelerator.num_processes):
            loop(accelerator, model, optimizer, [next(batches)])
            accelerator.wait_for_everyone()
    except SystemExit as error:
        assert not error.code and accelerator.process_index == accelerator.num_processes
    return values(model)


@pytest.mark.parametrize(("algorithm", "ranks"), [("ar-sgd", 2), ("aladdin-ahead", 3)])
def test_order_of_preparing_and_form_of_loop_do_not_matter(
    tmp_path: Path, algorithm: str, ranks: int
) -> None:
    """With the default algorithm, no option is needed for clipping."""
    results = {
        script.__name__: simulated(tmp_path, algorithm, ranks, script)
        for script in (together, apart, endless)
    }
    first = results["together"][0]
    assert (first - values(network())).norm() > 0.1
    for ranks_of in results.values():
        assert all(torch.allclose(each, ranks_of[0]) for each in ranks_of)
        if algorithm == "ar-sgd":
            assert torch.allclose(ranks_of[0], first, rtol=1e-5, atol=1e-7)
    run_summary = summary(tmp_path / algorithm)
    assert run_summary["samples"] == EPOCHS * SAMPLES
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]


def test_batch_that_a_script_looks_at_is_trained_on(tmp_path: Path) -> None:
    def looking(accelerator: Any) -> torch.Tensor:
        model, optimizer, loader = accelerator.prepare(*parts())
        if accelerator.process_index == 2:  # a server, whose process ends with the run
            with pytest.raises(ServedError):
                next(iter(loader))
            return values(model)
        assert len(next(iter(loader))[1]) == 4
        next(iter(loader)).clear()
        for _ in range(EPOCHS):
            loop(accelerator, model, optimizer, loader)
        return values(model)

    expected = simulated(tmp_path, "ar-sgd", 2, together)
    for mine in simulated(tmp_path, "ar-sgd", 2, looking):
        assert torch.equal(mine, expected[0])
    first, *others = simulated(tmp_path, "bsp", 3, looking)
    assert all(torch.equal(each, first) for each in others)


def test_class_inside_a_library_can_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(Accelerator=accelerate.Accelerator)

    def rank(transport: Any) -> torch.Tensor:
        accelerator = library.Accelerator(split_batches=False, mixed_precision="no")
        return together(accelerator)

    def of(transport: Any) -> torch.Tensor:
        library.Accelerator = partial(
            Accelerator, transport=transport, epochs=EPOCHS, run_dir=tmp_path / "run", quiet=True
        )
        return rank(transport)

    (result,) = VirtualCluster(1, NO_DELAY).run(of)
    assert result is not None and (result - values(network())).norm() > 0.1


def test_accumulation_by_hand_equals_accumulate(tmp_path: Path) -> None:
    def by_hand(accelerator: Any) -> torch.Tensor:
        model, optimizer, loader = accelerator.prepare(*parts())
        for _ in range(EPOCHS):
            for step, (inputs, labels) in enumerate(loader):
                loss = functional.cross_entropy(model(inputs), labels) / 2
                accelerator.backward(loss)
                if (step + 1) % 2 == 0:
                    loop(accelerator, model, optimizer, ())
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.wait_for_everyone()
        return values(model)

    def marked(accelerator: Any) -> torch.Tensor:
        model, optimizer, loader = accelerator.prepare(*parts())
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(functional.cross_entropy(model(inputs), labels))
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.wait_for_everyone()
        return values(model)

    def assigned(accelerator: Any) -> torch.Tensor:
        accelerator.gradient_accumulation_steps = 2
        assert accelerator.gradient_accumulation_steps == 2
        return marked(accelerator)

    one, _ = simulated(tmp_path, "ar-sgd", 2, by_hand, accumulate=2)
    other, _ = simulated(tmp_path, "ar-sgd", 2, marked, gradient_accumulation_steps=2)
    third, _ = simulated(tmp_path, "ar-sgd", 2, assigned)
    assert torch.allclose(one, other)
    assert torch.equal(other, third)
    with pytest.raises(UserError, match=r"^gradient_accumulation_steps cannot be combined"):
        simulated(tmp_path, "ar-sgd", 2, assigned, accumulate=2)


def test_float16_scales_losses_and_keeps_outputs_in_float32(tmp_path: Path) -> None:
    def script(accelerator: Any) -> tuple[torch.Tensor, list[float]]:
        model, optimizer, loader = accelerator.prepare(*parts())
        norms = []
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                outputs = model(inputs)
                assert outputs.dtype == torch.float32
                with accelerator.autocast():
                    assert (inputs @ inputs.T).dtype == torch.float16
                accelerator.backward(functional.cross_entropy(outputs, labels))
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
        assert accelerator.scaler is None
        return values(model), norms

    ((low, norms), _) = simulated(tmp_path, "ar-sgd", 2, script, mixed_precision="fp16")
    high = simulated(tmp_path, "ar-sgd", 2, together)[0]
    assert 0.01 < max(norms) < 10
    assert torch.allclose(low, high, atol=0.02)


# -- figures of several ranks -------------------------------------------------------------------
def test_figures_are_gathered_in_training_but_not_in_evaluation(tmp_path: Path) -> None:
    def script(accelerator: Any) -> dict[str, Any]:
        model, optimizer, loader = accelerator.prepare(*parts())
        test = accelerator.prepare(DataLoader(DATA, 32))
        figures: dict[str, Any] = {"len": len(test)}
        index = torch.tensor(accelerator.process_index)
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                loss = functional.cross_entropy(model(inputs), labels)
                figures["gathered"] = accelerator.gather((index, {"pair": index.repeat(2)}))
                figures["sum"] = accelerator.reduce(index + 1)
                figures["mean"] = accelerator.reduce(index.float(), reduction="mean")
                if accelerator.process_index == 1:
                    accelerator.set_trigger()
                figures["trigger"] = accelerator.check_trigger(), accelerator.check_trigger()
                accelerator.backward(loss)
                optimizer.step()
            accelerator.log({"own": float(index), "loss": 1.0})
            labels = torch.cat([accelerator.gather_for_metrics(y) for _, y in test])
            figures["labels"] = accelerator.gather(labels)
            figures["count"] = accelerator.reduce(torch.tensor(len(labels)))
            figures["padded"] = accelerator.pad_across_processes(labels)
        return figures

    for algorithm, ranks in (("ar-sgd", 2), ("bsp", 3)):
        for number, figures in enumerate(simulated(tmp_path, algorithm, ranks, script)):
            assert (figures["len"], figures["count"].item()) == (3, SAMPLES)
            assert torch.equal(figures["labels"], DATA.tensors[1])
            assert torch.equal(figures["padded"], DATA.tensors[1])
            if number == 2:  # the server
                continue
            index, pair = figures["gathered"][0].tolist(), figures["gathered"][1]["pair"]
            assert (index, pair.tolist()) == ([0, 1], [0, 0, 1, 1])
            assert (figures["sum"].item(), figures["mean"].item()) == (3, 0.5)
            assert figures["trigger"] == (True, False)
        assert metrics(tmp_path / algorithm, "train")[-1]["own"] == 0.5


def test_decorators_and_first_blocks_select_processes(tmp_path: Path) -> None:
    order: list[int] = []

    def script(accelerator: Any) -> tuple[Any, ...]:
        with accelerator.main_process_first():
            order.append(accelerator.process_index)
        with accelerator.local_main_process_first():
            pass
        accelerator.wait_for_everyone()
        index = lambda: accelerator.process_index  # noqa: E731
        called = (
            accelerator.on_main_process(index)(),
            accelerator.on_local_main_process(index)(),
            accelerator.on_process(index, process_index=1)(),
            accelerator.on_process(process_index=2)(index)(),
        )
        together(accelerator)
        return called

    results = simulated(tmp_path, "bsp", 3, script)
    assert order[0] == 0 and sorted(order) == [0, 1, 2]
    assert results == [(0, 0, None, None), (None, None, 1, None), (None, None, None, 2)]


# -- refused ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"^Accelerator requires the length .*epochs="),
        ({"mixed_precision": "fp8", "epochs": 1}, r"^mixed_precision: .*'fp8'"),
        ({"rng_types": ["torch"], "epochs": 1}, r"^rng_types is not supported"),
        ({"device_placement": False, "epochs": 1}, r"^device_placement=False "),
        (
            {"kwargs_handlers": [accelerate.utils.AutocastKwargs()], "epochs": 1},
            r"^kwargs_handlers: AutocastKwargs",
        ),
        ({"gradient_accumulation_steps": 2, "accumulate": 2, "epochs": 1}, r"^gradient_accu"),
    ],
)
def test_accelerator_refuses_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Accelerator(**settings)


def hand(accelerator: Any, step_at: Callable[[int], bool]) -> None:
    """Accumulate by hand, with a step after the batches that ``step_at`` names."""
    model, optimizer, loader = accelerator.prepare(*parts())
    for number, (inputs, labels) in enumerate(loader):
        accelerator.backward(functional.cross_entropy(model(inputs), labels))
        if step_at(number):
            optimizer.step()


def by_epoch(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    scheduler = StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loop(accelerator, model, optimizer, loader)
    scheduler.step()


def too_long(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    for _ in range(EPOCHS + 1):
        loop(accelerator, model, optimizer, loader)


def clip_part(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    for inputs, labels in loader:
        accelerator.backward(functional.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
        optimizer.step()


def tracked(accelerator: Any) -> Any:
    model, optimizer, loader = accelerator.prepare(*parts())
    accelerator.init_trackers("digits", config={"lr": 0.1})
    for step, (inputs, labels) in enumerate(loader):
        accelerator.backward(functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        accelerator.log({"figure": float(step)}, step=step)
    tracker = accelerator.get_tracker("tensorboard", unwrap=accelerator.is_main_process)
    return type(tracker).__name__


def test_trackers_of_accelerate_log_on_the_first_worker(tmp_path: Path) -> None:
    how: Any = {"log_with": "tensorboard", "project_dir": tmp_path / "logs", "epochs": 1}
    assert simulated(tmp_path, "ar-sgd", 2, tracked, **how) == ["SummaryWriter", "GeneralTracker"]
    events = EventAccumulator(str(tmp_path / "logs" / "digits")).Reload()
    figures = [(each.step, each.value) for each in events.Scalars("figure")]
    assert figures == [(step, step) for step in range(SAMPLES // 2 // 4)]
    for name, message in (("wandb", "wandb is not installed"), ("none", "log_with: .*none")):
        with pytest.raises(UserError, match=message):
            simulated(tmp_path, "ar-sgd", 2, tracked, **{**how, "log_with": name})


def test_figures_that_are_no_numbers_are_for_trackers_only(tmp_path: Path) -> None:
    def script(accelerator: Any) -> None:
        model, optimizer, loader = accelerator.prepare(*parts())
        accelerator.log({"baseline": 0.5})
        for _ in range(EPOCHS):
            loop(accelerator, model, optimizer, loader)
            accelerator.log({"scores": {"f1": 0.5}, "name": "a", "done": True, "figure": 0.25})

    simulated(tmp_path, "ar-sgd", 2, script)
    assert summary(tmp_path / "ar-sgd")["own"] == {"figure": 0.25}


class Counter:
    """An object of the script with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


SAVED_AFTER = 5
"""Steps of a worker in the second epoch after which the state is saved."""


def saving(
    accelerator: Any, folder: Path | None, loads: bool = False, ends: bool = False
) -> tuple[torch.Tensor, int]:
    """Save states as scripts for accelerate do, and resume from one of them."""
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    model, optimizer, loader = accelerator.prepare(*parts())
    place = folder or Path("state")
    if loads:
        accelerator.load_state(place / "later")
    for epoch in range(int(loads), EPOCHS):
        batches = accelerator.skip_first_batches(loader, SAVED_AFTER) if loads else loader
        for step, (inputs, labels) in enumerate(batches):
            accelerator.backward(functional.cross_entropy(model(inputs), labels))
            counter.count += 1
            optimizer.step()
            if not loads and step == SAVED_AFTER:
                accelerator.save_state(place / ("later" if epoch else "earlier"))
            if ends and epoch and step == SAVED_AFTER + 3:
                accelerator.run.close()
                return values(model), counter.count
    accelerator.wait_for_everyone()
    return values(model), counter.count


def test_run_continues_from_the_state_saved_last(tmp_path: Path) -> None:
    def run(name: str, **how: Any) -> Any:
        settings = {"overwrite": "loads" not in how}
        script = partial(saving, folder=tmp_path / name, **how)
        return simulated(tmp_path / name, "ar-sgd", 2, script, **settings)

    (whole, count), _ = run("whole")
    with pytest.raises((UserError, ClosedError), match="closed"):
        run("interrupted", ends=True)
    (resumed, resumed_count), _ = run("interrupted", loads=True)
    assert torch.equal(resumed, whole)
    assert resumed_count == count
    (tmp_path / "whole" / "later").rename(tmp_path / "whole" / "last")
    (tmp_path / "whole" / "earlier").rename(tmp_path / "whole" / "later")
    with pytest.raises(UserError, match=r"load_state: expected state 1 .*got state 2"):
        run("whole", loads=True)


@pytest.mark.parametrize("use", ["forward", "state_dict", "copy"])
def test_loaded_model_is_not_used_before_the_loop(tmp_path: Path, use: str) -> None:
    """It would have its initial values; afterwards it can be used."""
    uses: dict[str, Callable[[nn.Module], Any]] = {
        "forward": lambda model: model(DATA.tensors[0]),
        "state_dict": lambda model: model.state_dict(),
        "copy": copy.deepcopy,
    }

    def script(accelerator: Any) -> None:
        model, optimizer, loader = accelerator.prepare(*parts())
        accelerator.register_for_checkpointing(Counter())
        accelerator.load_state(tmp_path / "later")
        other = accelerator.prepare(nn.Linear(6, 6))
        for each in (model, other):
            with pytest.raises(
                UserError, match=r"^accelerator\.load_state: .*when the loop begins"
            ):
                uses[use](each)
        for _ in range(1, EPOCHS):
            loop(accelerator, model, optimizer, loader)
        uses[use](model)

    simulated(tmp_path, "ar-sgd", 2, partial(saving, folder=tmp_path))
    simulated(tmp_path, "ar-sgd", 2, script, overwrite=False)


# Errors abandon the loops of all simulated ranks.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        (partial(hand, step_at=lambda n: n % 2 == 1), {}, r"not called .*accumulate=K"),
        (partial(hand, step_at=lambda n: n % 2 == 0), {"accumulate": 2}, r"after batch 1\b"),
        (partial(hand, step_at=lambda n: False), {"accumulate": 2}, r"not called .*accumulate=2"),
        (
            partial(hand, step_at=lambda n: True),
            {"gradient_accumulation_steps": 2},
            r"^gradient_accumulation_steps=2 requires .*accumulate\(model\)",
        ),
        (by_epoch, {}, r"prepared scheduler .*prepare\(\)"),
        (too_long, {}, r"ended after 2 epochs"),
        (clip_part, {}, r"clip_grad_norm_: .*all trained"),
        (together, {"clip": 0.5}, r"max_norm 1\.0 .*clip=0\.5"),
        (together, {"split_batches": True, "batch": 3}, r"batch"),
        (lambda a: a.save_state("x"), {}, r"^accelerator\.save_state .*before the loop"),
        (lambda a: a.load_state("x"), {}, r"^accelerator\.load_state: x has no state"),
        (lambda a: a.load_state(), {}, r"^accelerator\.load_state requires a folder"),
        (lambda a: a.skip_first_batches([], 1), {}, r"skip_first_batches requires .*load_state"),
        (lambda a: a.register_for_checkpointing(0), {}, r"register_for_checkpointing: .*got int"),
        (partial(saving, folder=None), {"run_dir": None, "overwrite": False}, r"run_dir="),
        (lambda a: a.no_such, {}, r"^accelerator\.no_such .*DataParallel"),
        (lambda a: a.run, {}, r"prepare\(\) was not called"),
        (lambda a: a.gather(torch.ones(1)), {}, r"^accelerator\.gather, or .*before the loop"),
        (lambda a: a.prepare(parts()[1]).step(), {}, r"optimizer\)\.step .*before the loop"),
    ],
)
def test_accelerator_refuses_use(
    tmp_path: Path, script: Script, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        simulated(tmp_path, "ar-sgd", 2, script, **settings)


# -- over MPI -----------------------------------------------------------------------------------
def losses(completed: Completed) -> list[float]:
    return [float(each) for each in re.findall(r"^epoch \d: ([\d.]+)$", completed.stdout, re.M)]


@needs("openmpi")
def test_accelerate_script_trains_as_with_accelerate(tmp_path: Path) -> None:
    run = partial(run_program, PROGRAMS / "accelerate_training.py", cwd=tmp_path)
    real = losses(run(1, "real"))
    assert len(real) == 4 and real[-1] < 0.9 * real[0]
    assert losses(run(1, "ar-sgd")) == pytest.approx(real, rel=1e-4)
    several = losses(run(3, "aladdin"))
    assert len(several) == 4 and several[-1] < several[0]
    run_summary = summary(tmp_path / "aladdin")
    assert (run_summary["samples"], run_summary["workers"]) == (4 * 96, 2)


@needs("openmpi")
def test_second_accelerator_follows_a_run_that_was_not_ended(tmp_path: Path) -> None:
    completed = run_program(PROGRAMS / "accelerate_folds.py", 3, "aladdin", cwd=tmp_path)
    assert completed.stdout.count("fold 1") == 3
    assert [summary(tmp_path / f"fold-{fold}")["samples"] for fold in range(2)] == [96, 96]


def check_steps(folder: Path, completed: Completed) -> None:
    assert sorted(re.findall(r"^end \d$", completed.stdout, re.M)) == ["end 0", "end 1"]
    assert summary(folder)["samples"] == 19 * 8  # 7, 6 and 6 steps of 3 * 7


@needs("openmpi")
def test_run_ends_with_a_script_whose_loop_has_fewer_steps(tmp_path: Path) -> None:
    program = PROGRAMS / "accelerate_steps.py"
    check_steps(tmp_path / "run", run_program(program, 2, "ar-sgd", tmp_path / "run"))


@LONG
def test_simulated_run_ends_with_a_script_whose_loop_has_fewer_steps(tmp_path: Path) -> None:
    program = PROGRAMS / "accelerate_steps.py"
    completed = simulate(None, program, "--workers", 2, "--", "ar-sgd", tmp_path / "run")
    check_steps(tmp_path / "run", completed)


@needs("openmpi")
@LONG
def test_accelerate_loop_may_be_left_early(tmp_path: Path) -> None:
    program = PROGRAMS / "accelerate_training.py"
    completed = run_program(program, 3, "bsp", "leave", cwd=tmp_path)
    assert len(losses(completed)) == 3
    assert summary(tmp_path / "bsp")["samples"] < 4 * 96


@needs("openmpi")
@LONG
def test_suspended_run_leaves_the_loop_at_once(tmp_path: Path) -> None:
    """It does not evaluate the model after each of the remaining epochs."""
    program = PROGRAMS / "accelerate_training.py"
    completed = run_program(program, 1, "ar-sgd", "suspend", cwd=tmp_path, check=False)
    assert completed.returncode == SUSPENDED_STATUS
    assert len(losses(completed)) == 1


@LONG
def test_endless_loop_ends_in_simulation(tmp_path: Path) -> None:
    program = PROGRAMS / "accelerate_library.py"
    completed = simulate(None, program, "--workers", 2, "--", "bsp", tmp_path)
    assert len(re.findall(r"^end [01] 12 ", completed.stdout, re.M)) == 2


@needs("openmpi")
def test_endless_loop_ends_over_mpi_without_end_training(tmp_path: Path) -> None:
    """Before the loop ranks wait for the main process; the program ends with its last step."""
    completed = run_program(PROGRAMS / "accelerate_library.py", 3, "bsp", tmp_path)
    assert completed.stdout.count("once before") == 1
    ends = sorted(re.findall(r"^end (\d) (\d+) (\S+)$", completed.stdout, re.M))
    assert [end[:2] for end in ends] == [("0", "12"), ("1", "12")]
    run_summary = summary(tmp_path / "run")
    assert run_summary["samples"] == 2 * 12 * 4
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]
