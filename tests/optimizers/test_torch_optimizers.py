"""Any torch optimizer applied to parts of a flat vector matches its steps on the parameters."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Collection
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.registry import check_optimizer
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.unused import within
from aladdin_mpi.optimizers.base import INHERITED, without_parts
from aladdin_mpi.optimizers.from_torch import TorchOptimizer, treats_values_alike
from aladdin_mpi.optimizers.named import arguments, find, groups, known
from aladdin_mpi.optimizers.script_access import ScriptAccess
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.run import RunOptions
from tests.messages import naming

Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 4


class Lion(torch.optim.Optimizer):
    """A common implementation of Lion (Chen et al., 2023)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "steps": 0})
        self.bias = 0.0  # an additional attribute

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average, (first, second) = state["average"], group["betas"]
                p.sub_((average * first + p.grad * (1 - first)).sign(), alpha=group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second).add_(self.bias)


class Normalised(torch.optim.Optimizer):
    """Optimizer with steps of constant length over all parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm, alpha=0.1)


BY_VALUE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "lion": lambda p: Lion(p, 0.01),
}
WHOLE: dict[str, Make] = {
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "normalised": lambda p: Normalised(p, 0.01),
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Linear(4, 3))
    model[2].bias.requires_grad_(False)
    return model


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups for weights, and for biases at another rate; one parameter is in neither."""
    own = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in own if p.dim() > 1]},
        {"params": [p for p in own if p.dim() == 1][:-1], "lr": 0.003},
    ]


def gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    model.zero_grad()
    nn.functional.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 3)).backward()


def cuts(numel: int) -> list[slice]:
    edges = [0, 7, 20, 21, 60, numel]
    return [slice(a, b) for a, b in pairwise(edges)]


class Pair:
    """A model trained by torch, and one trained by parts of its flat vector."""

    def __init__(self, make: Make, parts: bool = True) -> None:
        self.plain, self.flat = network(), network()
        self.reference = make(two_groups(self.plain))
        self.given = make(two_groups(self.flat))
        self.replica = Replica(self.flat)
        self.x = self.replica.parameters
        self.optimizer = TorchOptimizer(self.given, self.flat, self.x)
        self.parts = cuts(len(self.x)) if parts else [slice(0, len(self.x))]

    def step(self, number: int, how: str = "descend") -> None:
        gradients(self.plain, number)
        self.reference.step()
        g = self.gradient(number)
        for part in self.parts:
            if how == "descend":
                self.optimizer.descend(part, g[part], self.x[part], 1.0)
            elif how == "halved and doubled":
                self.optimizer.descend(part, g[part] * 2, self.x[part], 1.0, factor=0.5)
            else:
                self.optimizer.correct(part, g[part], self.x[part])
                self.x[part] -= g[part]

    def gradient(self, number: int) -> Tensor:
        self.flat.zero_grad()
        gradients(self.flat, number)
        every = [p for p in self.flat.parameters() if p.requires_grad][::-1]
        return torch.cat([p.grad.flatten() for p in every if p.grad is not None])

    def check(self) -> None:
        for a, b in zip(self.plain.parameters(), self.flat.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["descend", "halved and doubled", "correct"])
@pytest.mark.parametrize("name", BY_VALUE)
def test_torch_optimizer_on_parts_equals_steps_of_parameters(name: str, how: str) -> None:
    pair = Pair(BY_VALUE[name])
    assert pair.optimizer.takes_parts
    before = pair.x.clone()
    for number in range(STEPS):
        pair.step(number, how)
    pair.check()
    assert not torch.equal(before, pair.x)


UNUSED = [set[int](), {0}, {1, 2}, {0, 1, 2, 3, 4}, {4}, set[int](), {2, 4}]
"""For each step, the trainable parameters without a gradient, in flat order."""


def skip(
    pair: Pair, number: int, how: str = "descend", places: Collection[int] | None = None
) -> None:
    """Take a step of both in which torch has no gradient for some parameters."""
    places = UNUSED[number] if places is None else places
    own = [p for p in pair.plain.parameters() if p.requires_grad][::-1]
    edges = [sum(p.numel() for p in own[:place]) for place in range(len(own) + 1)]
    gradients(pair.plain, number)
    g, unused = pair.gradient(number), []
    for place in sorted(places):
        own[place].grad = None
        unused.append(slice(edges[place], edges[place + 1]))
        g[unused[-1]] = 0.0
    pair.reference.step()
    for part in pair.parts:
        left_out = within(part, unused)
        if how == "descend":
            pair.optimizer.descend(part, g[part], pair.x[part], 1.0, unused=left_out)
        elif how == "correct":
            pair.optimizer.correct(part, g[part], pair.x[part], unused=left_out)
            pair.x[part] -= g[part]
        else:
            pair.optimizer.correct_and_descend(part, g[part], pair.x[part], 1.0, unused=left_out)


SKIPPING = {name: make for name, make in BY_VALUE.items() if name != "lion"}


@pytest.mark.sample(16)
@pytest.mark.parametrize("how", ["descend", "correct", "correct and descend"])
@pytest.mark.parametrize("name", [*SKIPPING, "adafactor"])
def test_torch_optimizer_keeps_unused_parameters_and_states(name: str, how: str) -> None:
    pair = Pair({**BY_VALUE, **WHOLE}[name], parts=name in BY_VALUE)
    for number in range(len(UNUSED)):
        skip(pair, number, how)
        pair.check()


@pytest.mark.parametrize("name", ["adamw", "adamw, fused", "radam"])
def test_torch_optimizer_resumes_state_with_unused_parameters(name: str) -> None:
    straight, resumed = Pair(BY_VALUE[name]), Pair(BY_VALUE[name])
    for number in range(len(UNUSED)):
        skip(straight, number)
    for number in range(4):
        skip(resumed, number)
    stored = io.BytesIO()
    torch.save(resumed.optimizer.state_dict(), stored)
    stored.seek(0)
    again = Pair(BY_VALUE[name])
    again.x.copy_(resumed.x)
    again.optimizer.load_state_dict(torch.load(stored, weights_only=True))
    for number in range(4, len(UNUSED)):
        skip(again, number)
    assert torch.equal(straight.x, again.x)


def test_torch_optimizer_is_not_called_if_nothing_is_used() -> None:
    pair = Pair(BY_VALUE["lion"], parts=False)  # it requires a gradient for each parameter
    whole = slice(0, len(pair.x))
    before = pair.x.clone()
    pair.optimizer.descend(whole, torch.zeros_like(pair.x), pair.x, 1.0, unused=[whole])
    assert torch.equal(pair.x, before)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_model_optimizers_step_the_whole_vector(name: str) -> None:
    pair = Pair(WHOLE[name], parts=False)
    assert not pair.optimizer.takes_parts
    for number in range(STEPS):
        pair.step(number)
    pair.check()
    with pytest.raises(AssertionError, match="whole vector"):
        pair.optimizer.descend(slice(0, 7), pair.gradient(0)[:7], pair.x[:7], 1.0)


@pytest.mark.parametrize("lr", [0.0, 0.5])
def test_learning_rate_factor_scales_step(lr: float) -> None:
    one, other = Pair(BY_VALUE["adamw"]), Pair(BY_VALUE["adamw"])
    before, part = one.x.clone(), slice(0, len(one.x))
    one.optimizer.descend(part, one.gradient(0), one.x, lr)
    g = other.gradient(0)
    other.optimizer.correct_and_descend(part, g, other.x, lr)
    torch.testing.assert_close(one.x, other.x)
    torch.testing.assert_close(before - lr * g, one.x)
    assert g.abs().max() > 0.001  # the direction includes the groups' rates, but not the factor


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("workers", [1, 2, 16])
def test_adam_direction_is_normalised_by_mean_gradient(
    kind: type[torch.optim.Adam | torch.optim.AdamW], workers: int
) -> None:
    """``m / sqrt(v / n + (1 - 1/n) m^2)``, apart from weight decay that is decoupled."""
    decay, rate = 0.1, 0.01
    coupled = 0.0 if kind is torch.optim.AdamW else decay
    pair = Pair(lambda p: kind(p, rate, (0.9, 0.95), eps=1e-30, weight_decay=decay))
    m, v = torch.zeros_like(pair.x), torch.zeros_like(pair.x)
    rates = _rates(pair, torch.full_like(pair.x, rate))
    for step in range(1, 5):
        g = pair.gradient(step)
        owned = _is_stepped(pair)
        whole = torch.where(owned, g + coupled * pair.x, 0.0)
        m, v = 0.9 * m + 0.1 * whole, 0.95 * v + 0.05 * whole**2
        first, second = m / (1 - 0.9**step), v / (1 - 0.95**step)
        mean = second / workers + (1 - 1 / workers) * first**2
        expected = rates * (first / (mean.sqrt() + 1e-30) + (decay - coupled) * pair.x)
        before = pair.x.clone()
        for part in pair.parts:
            pair.optimizer.correct(part, g[part], pair.x[part], workers=workers)
        assert torch.equal(pair.x, before)
        torch.testing.assert_close(g[owned], expected[owned], rtol=1e-3, atol=1e-6)
        assert not g[~owned].any()
        pair.x.sub_(g)


@pytest.mark.parametrize(("name", "is_alike"), [("sgd", True), ("lion", True), ("adamw", False)])
def test_only_adams_direction_depends_on_number_of_workers(name: str, is_alike: bool) -> None:
    directions = []
    for workers in (1, 8):
        pair = Pair(BY_VALUE[name], parts=False)
        for number in range(2):  # Adam's first direction is the sign for any number of workers
            g = pair.gradient(number).clone()
            pair.optimizer.correct(pair.parts[0], g, pair.x, workers=workers)
        directions.append(g)
    assert torch.equal(*directions) is is_alike


def test_aladdin_ahead_looks_further_ahead_with_averaged_momentum() -> None:
    assert Pair(BY_VALUE["sgd"]).optimizer.lookahead == 1
    assert Pair(BY_VALUE["adamw"]).optimizer.lookahead == 3


def _is_stepped(pair: Pair) -> Tensor:
    """Return which values of the flat vector are in a group."""
    stepped = {p for group in pair.given.param_groups for p in group["params"]}
    own = [p for p in pair.flat.parameters() if p.requires_grad][::-1]
    return torch.cat([torch.full((p.numel(),), p in stepped) for p in own])


def _rates(pair: Pair, rates: Tensor) -> Tensor:
    at, rates = 0, rates.clone()
    for p in [p for p in pair.flat.parameters() if p.requires_grad][::-1]:
        if any(p is each for each in pair.given.param_groups[1]["params"]):
            rates[at : at + p.numel()] = 0.003
        at += p.numel()
    return rates


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((make, True) for make in BY_VALUE.values()),
        (WHOLE["adafactor"], False),
        (WHOLE["normalised"], False),
    ],
)
def test_elementwise_optimizer_is_detected(make: Make, expected: bool) -> None:
    model = network()
    given = make(two_groups(model))
    for group in given.param_groups:  # as at the start of a scheduler's warm-up
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    assert treats_values_alike(given) is expected
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(state["step"] == 0 for state in given.state.values())  # Adagrad has one


@pytest.mark.parametrize(
    ("algorithm", "name", "settings", "cause"),
    [
        ("aladdin", "adafactor", {}, r"^optimizer: .*\baladdin\b.*\bAdafactor\b"),
        (
            "bsp",
            "normalised",
            {},
            r"^optimizer: .*\bbsp\b.*\bad-psgd, adsp, aladdin-local, ar-sgd\b",
        ),
        ("multistep", "adamw", {}, r"^optimizer: .*\bmultistep\b.*\bAdamW\b.*\bar-sgd\.$"),
        (
            "bsp",
            "adamw",
            {"compression": "dgc"},
            r"^optimizer: .*--compression dgc.*\bAdamW\b.*, or leave --compression out\.$",
        ),
        ("asp", "adamw", {"asp": {"momentum": "server"}}, "--asp-momentum: server .*AdamW"),
        ("aladdin", "sgd", {"aladdin": {"lookahead": 0.5}}, "--aladdin-lookahead requires .*SGD"),
        ("aladdin", "adamw", {}, ""),
        ("easgd", "adafactor", {}, ""),
    ],
)
def test_check_optimizer_accepts_or_rejects_combination(
    algorithm: str, name: str, settings: dict[str, Any], cause: str
) -> None:
    optimizer = Pair({**BY_VALUE, **WHOLE}[name]).optimizer
    options = RunOptions.model_validate({"algorithm": algorithm, **settings})
    expected = pytest.raises(UserError, match=cause) if cause else nullcontext()
    with expected:
        check_optimizer(ALGORITHMS[algorithm], options, optimizer)


def test_muon_is_not_detected_as_elementwise() -> None:
    model = nn.Linear(6, 9, bias=False)
    assert not treats_values_alike(torch.optim.Muon(model.parameters()))


def test_optimizer_with_closure_is_rejected() -> None:
    with pytest.raises(UserError, match=r"^optimizer: .*step\(\).*\bLBFGS\b"):
        treats_values_alike(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))


def test_changed_hyperparameters_apply_and_optimizer_specific_ones_are_kept() -> None:
    pair = Pair(BY_VALUE["lion"])
    for number in range(STEPS):
        for each in (pair.reference, pair.given):
            each.param_groups[0]["lr"] = 0.01 / (number + 1)
            each.param_groups[1]["betas"] = (0.8, 0.9)
        pair.step(number)
    pair.check()
    inner = pair.optimizer.state_dict()["parts"][0]["state"]["inner"]["param_groups"][0]
    assert inner["steps"] == STEPS  # ``given`` takes no steps and counts none


def test_scheduler_advances_every_step_and_rejects_extra_step() -> None:
    pair = Pair(BY_VALUE["adamw"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(pair.given, 0.1, total_steps=20)
    theirs = torch.optim.lr_scheduler.OneCycleLR(pair.reference, 0.1, total_steps=20)
    optimizer = pair.optimizer = TorchOptimizer(pair.given, pair.flat, pair.x, scheduler)
    for number in range(STEPS):
        pair.step(number)
        optimizer.advance(number + 1)
        theirs.step()
        assert optimizer.rate == theirs.get_last_lr()[0]
    pair.check()
    scheduler.step()
    with pytest.raises(UserError, match=r"scheduler.step\(\) was called"):
        optimizer.advance(STEPS + 1)


@pytest.mark.parametrize("name", ["adamw", "adamw, fused", "lion", "rmsprop"])
def test_restored_torch_optimizer_is_bit_identical(name: str) -> None:
    """The state goes through a file that contains only tensors and plain values."""
    straight, resumed = (Pair(BY_VALUE[name]) for _ in range(2))

    def steps(pair: Pair, numbers: range) -> None:
        for number in numbers:
            g = pair.gradient(number)
            for part in pair.parts:
                pair.optimizer.correct(part, g[part], pair.x[part])
            pair.x.sub_(g)
            # As a scheduler does, before a checkpoint that may follow.
            pair.given.param_groups[0]["lr"] = 0.01 / (number + 2)

    steps(straight, range(4))
    steps(resumed, range(2))
    stored = io.BytesIO()
    torch.save(resumed.optimizer.state_dict(), stored)
    stored.seek(0)
    again = Pair(BY_VALUE[name])
    again.x.copy_(resumed.x)
    again.optimizer.load_state_dict(torch.load(stored, weights_only=True))
    steps(again, range(2, 4))
    assert torch.equal(straight.x, again.x)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [3],
        ),
    ],
    ids=["one cycle", "cosine", "lambda", "steps", "sequential"],
)
def test_restored_scheduler_continues(make: Any) -> None:
    def fresh() -> TorchOptimizer:
        model = network()
        given = torch.optim.SGD(model.parameters(), 0.1)
        return TorchOptimizer(given, model, Replica(model).parameters, make(given))

    straight, before, after = fresh(), fresh(), fresh()
    straight.advance(8)
    before.advance(3)
    stored = io.BytesIO()
    torch.save(before.state_dict(), stored)
    stored.seek(0)
    after.load_state_dict(torch.load(stored, weights_only=True))
    after.advance(3)  # as on fast workers: the others have not reached this step
    after.advance(8)
    assert after.rate == straight.rate


@pytest.mark.parametrize("name", ["adagrad", "adamw", "sgd"])
def test_preloaded_optimizer_state_is_split_into_parts(name: str) -> None:
    """As loaded by a program; one parameter has made more steps than the others."""
    pair = Pair(BY_VALUE[name])
    for model, optimizer in ((pair.plain, pair.reference), (pair.flat, pair.given)):
        kept = copy.deepcopy(model.state_dict())
        for number in range(3):
            gradients(model, number)
            if number:
                model[0].weight.grad = None
            optimizer.step()
        model.load_state_dict(kept)
    for number in range(STEPS):
        pair.step(number)
    pair.check()


@pytest.mark.parametrize("name", BY_VALUE)
def test_rows_on_a_cpu_are_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of long rows, as of a GPU or an earlier version, fits short ones, and back."""
    lengths = []
    for before, after in [(1000, 8), (8, 1000)]:
        monkeypatch.setattr("aladdin_mpi.optimizers.from_torch.ROW", before)
        pair = Pair(BY_VALUE[name], parts=False)
        for number in range(STEPS):
            pair.step(number)
        monkeypatch.setattr("aladdin_mpi.optimizers.from_torch.ROW", after)
        state = pair.optimizer.state_dict()
        pair.optimizer = TorchOptimizer(pair.given, pair.flat, pair.x)
        pair.optimizer.load_state_dict(state)
        for number in range(STEPS, 2 * STEPS):
            pair.step(number)
        pair.check()
        [part] = pair.optimizer.state_dict()["parts"]
        stops, starts = part["state"]["stops"], part["state"]["starts"]
        lengths.append(max(b - a for a, b in zip(starts, stops, strict=True)))
    assert lengths == [8, 8]  # cut once, rows stay short


def test_state_of_an_earlier_version_is_inherited_if_lanes_stay() -> None:
    """It did not say which of the pieces each state belongs to."""
    pair, other = Pair(BY_VALUE["adamw"]), Pair(BY_VALUE["adamw"])
    pair.step(0)
    state = copy.deepcopy(pair.optimizer.state_dict())
    for part in state["parts"]:
        del part["state"]["numbers"]
    other.x.copy_(pair.x)
    other.optimizer.inherit(state)
    other.parts = other.parts[1:] + other.parts[:1]
    for each in (pair, other):
        each.step(1)
    assert torch.equal(pair.x, other.x)
    with pytest.raises(UserError, match=naming("--allow-resize", "same ranks")):
        without_parts(state)


@pytest.mark.parametrize("name", ["adamw", "sgd", "rmsprop", "adafactor"])
def test_states_of_workers_that_used_different_parameters_are_averaged(name: str) -> None:
    """As on resuming with other ranks: a parameter that a worker has not used counts as zeros."""
    make, in_parts = {**BY_VALUE, **WHOLE}[name], name in BY_VALUE
    pairs = [Pair(make, in_parts) for _ in range(4)]
    merged: Any = None
    for count, (pair, unused) in enumerate(zip(pairs, [{0}, {1, 2}, (), {0, 4}], strict=True), 1):
        for number in range(count):
            skip(pair, number, places=unused)
        state = copy.deepcopy(pair.optimizer.state_dict())
        merged = state if merged is None else INHERITED.put(merged, state, count, "optimizer")
    new = Pair(make, in_parts)
    TorchOptimizer(new.given, new.flat, new.x, access=ScriptAccess([new.given])).inherit(merged)
    known = new.given.state_dict()["state"]
    states = [pair.reference.state_dict()["state"] for pair in pairs]
    assert known.keys() == set().union(*states)
    for number, state in known.items():
        here = [each[number] for each in states if number in each]
        for value, given in state.items():
            if value == "step":
                assert given == max(each["step"] for each in here)
            elif isinstance(given, Tensor):
                mean = sum(each[value] for each in here) / len(pairs)
                torch.testing.assert_close(given, mean)


def test_optimizer_settings_are_adopted() -> None:
    one, other = Pair(BY_VALUE["adamw"]), Pair(BY_VALUE["adamw"])
    one.given.param_groups[0]["lr"] = 0.5
    one.given.param_groups[1]["betas"] = (0.5, 0.75)
    other.optimizer.adopt(one.optimizer.settings())
    assert other.given.param_groups[0]["lr"] == 0.5
    assert other.given.param_groups[1]["betas"] == (0.5, 0.75)
    assert other.given.param_groups[1]["amsgrad"] is False
    assert other.optimizer.settings() == one.optimizer.settings()


# -- by name ----------------------------------------------------------------------------------
def test_torch_optimizers_are_found_by_name() -> None:
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "muon"} <= set(known())
    assert "lbfgs" not in known()
    with pytest.raises(UserError, match=r"--optimizer: .*'adamv'.*\badam\b"):
        find("adamv")


def test_default_weight_decay_is_that_of_each_torch_optimizer() -> None:
    signatures = {name: inspect.signature(make).parameters for name, make in known().items()}
    torchs = {
        name: p["weight_decay"].default for name, p in signatures.items() if "weight_decay" in p
    }
    defaults = {name: RunOptions(optimizer=name).weight_decay for name in known()}
    assert defaults == {name: torchs.get(name, 0.0) for name in known()} | {"sgd": 1e-4}
    assert RunOptions(optimizer="package.module:Lion").weight_decay == 0.0


def test_optimizer_options_become_arguments() -> None:
    adamw = find("adamw")
    assert arguments(adamw, {"beta2": 0.95, "eps": 1e-6, "amsgrad": 1.0}) == {
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "amsgrad": True,
    }
    with pytest.raises(UserError, match=r"--optimizer-options: .*\bbeta1, beta2\b.*'momentum'"):
        arguments(adamw, {"momentum": 0.9})


@pytest.mark.parametrize(
    ("optimizer", "option"),
    [("sgd", "momentum"), ("sgd", "dampening"), ("rmsprop", "momentum"), ("adagrad", "lr_decay")],
)
def test_fractional_options_are_kept_if_default_is_integer(optimizer: str, option: str) -> None:
    assert arguments(find(optimizer), {option: 0.9}) == {option: 0.9}


def test_parameter_groups_follow_patterns() -> None:
    model = network()
    result = groups(model, 0.1, 0.01, {"3.*": 10.0, "*.weight": 0.5}, {"*.bias": 0.0})
    rates = {
        id(p): (group["lr"], group["weight_decay"]) for group in result for p in group["params"]
    }
    by_name = {name: rates[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    assert by_name == {
        "0.weight": (0.05, 0.01),
        "0.bias": (0.1, 0.0),
        "2.weight": (0.05, 0.01),
        "3.weight": (0.5, 0.01),
        "3.bias": (1.0, 0.0),
    }
    with pytest.raises(UserError, match=r"--lr-factors: .*'head\.\*'"):
        groups(model, 0.1, 0.01, {"head.*": 1.0}, {})


def after_loading(
    make: Make, shapes: list[tuple[int, ...]], unused: int | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters after two plain steps and a third one: torch's, and on a flat vector."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    plainly = make(model.parameters())
    for _ in range(2):
        for number, parameter in enumerate(model):
            parameter.grad = None if number == unused else torch.ones_like(parameter)
        plainly.step()
    copied = copy.deepcopy(model)
    given = make(copied.parameters())
    given.load_state_dict(copy.deepcopy(plainly.state_dict()))
    replica = Replica(copied)
    flat = TorchOptimizer(given, copied, replica.parameters)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    plainly.step()
    flat.step(replica.parameters, torch.ones_like(replica.parameters), 1.0)
    return [*model], [*copied]


@pytest.mark.parametrize("unused", [None, 0, 1])
def test_state_of_some_parameters_is_continued(unused: int | None) -> None:
    """SGD has no momentum yet for a parameter that has not been used."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for one, other in zip(*after_loading(make, [(3, 2), (4,)], unused), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "RMSprop", "ASGD"]
)
def test_state_of_a_scalar_parameter_is_continued(kind: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if kind == "SGD" else {}
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **more)
        return made

    for one, other in zip(*after_loading(make, [(3, 2), (), (4,)], None), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "Adamax", "RMSprop"])
def test_states_have_their_parameters_dtypes_before_and_after_a_run(kind: str) -> None:
    """A run steps parameters of several dtypes in the widest one."""
    shapes = {(3, 2): torch.float32, (4,): torch.bfloat16}
    model = nn.ParameterList([torch.ones(shape, dtype=dtype) for shape, dtype in shapes.items()])
    more = {"momentum": 0.9} if kind == "SGD" else {}
    given = getattr(torch.optim, kind)(model.parameters(), lr=0.125, **more)

    def step_plainly() -> None:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        given.step()

    step_plainly()
    replica = Replica(model)
    access = ScriptAccess([given])
    flat = TorchOptimizer(given, model, replica.parameters, access=access)
    flat.step(replica.parameters, torch.ones_like(replica.parameters), 1.0)
    replica.refresh()
    access.close()
    step_plainly()
    wide, narrow = model
    torch.testing.assert_close(narrow.float(), wide.flatten()[:4], rtol=0.05, atol=0.02)
    for parameter in model:
        for name, value in given.state[parameter].items():
            assert name == "step" or value.dtype == parameter.dtype, name


@pytest.mark.parametrize("name", ["lr", "weight_decay", "params"])
def test_options_of_the_run_are_refused_as_settings(name: str) -> None:
    with pytest.raises(UserError, match=naming("--optimizer-options", f"'{name}'")):
        arguments(torch.optim.AdamW, {name: 0.5})
