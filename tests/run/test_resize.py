"""Resuming with other numbers of workers and servers than those of the checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.data.sampler import ShardedStream
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.session.session import Session
from tests.commands import checkpoint, checkpoint_part, summary
from tests.launch import needs
from tests.messages import check_names, naming
from tests.run.program_runs import run_program
from tests.simulation import start

EPOCH = 100
SMALL = ["--dataset", f"synthetic:1x4x4:4:{EPOCH}", "--model", "mlp"]
LENGTHS = (240, 430, 640)
"""Checkpoints in samples, at each number of workers: 4, 3 and 5."""
DGC = ["--compression", "dgc", "--dgc-ratio", 0.05, "--dgc-warmup-epochs", 0]
VARIANTS: dict[str, list[object]] = {
    **{name: ["--algorithm", name] for name in sorted(ALGORITHMS)},
    "aladdin adamw": ["--algorithm", "aladdin", "--optimizer", "adamw"],
    "aladdin lazy": ["--algorithm", "aladdin", "--aladdin-pi", 3, "--aladdin-momentum", "split"],
    "asp dgc": ["--algorithm", "asp", *DGC],
    "ar-sgd dgc": ["--algorithm", "ar-sgd", *DGC],
    "ar-sgd int4": ["--algorithm", "ar-sgd", "--wire", "int4"],
    "ar-sgd powersgd": ["--algorithm", "ar-sgd", "--compression", "powersgd"],
    "local-sgd int2": ["--algorithm", "local-sgd", "--wire", "int2"],
    "diloco powersgd": ["--algorithm", "diloco", "--compression", "powersgd"],
    "adsp int4": ["--algorithm", "adsp", "--wire", "int4"],
    "async-diloco int4": [
        *("--algorithm", "async-diloco", "--wire", "int4", "--async-diloco-steps", 3)
    ],
}


class Watched:
    """Records distributed samples, and the states of ranks after they load a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dealt: Counter[tuple[int, int]] = Counter()
        self.models: list[Tensor] = []
        self.states: list[dict[str, Any]] = []
        take, resize = ShardedStream.take, Session.resize

        def noted_take(stream: ShardedStream, count: int) -> Any:
            epochs, indices = take(stream, count)
            # Samples for the statistics of batch norm come from a stream of one worker.
            if stream.workers > 1:
                self.dealt.update(zip(epochs.tolist(), indices.tolist(), strict=True))
            return epochs, indices

        def noted_resize(of: Session, *arguments: Any) -> None:
            resize(of, *arguments)
            layout = of.context.layout
            parts = layout.owned_by(of.context.transport.rank)
            mine = torch.full((layout.numel,), torch.nan)
            for bucket in parts if of.context.is_server else layout.buckets:
                mine[bucket.part] = of.role.part(bucket)
            self.models.append(mine)
            self.states.append(json_free(of.role.state_dict()))

        monkeypatch.setattr(ShardedStream, "take", noted_take)
        monkeypatch.setattr(Session, "resize", noted_resize)

    def forget(self) -> None:
        self.models, self.states = [], []


def json_free(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that training does not change."""
    if isinstance(state, dict):
        return {name: json_free(value) for name, value in state.items()}
    if isinstance(state, list):
        return [json_free(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state


def parts_of(run_dir: Path) -> list[dict[str, Any]]:
    count = len(list(checkpoint(run_dir).glob("rank-*.pt")))
    return [checkpoint_part(run_dir, rank)["role"] for rank in range(count)]


def global_model(name: str, parts: list[dict[str, Any]]) -> Tensor:
    """Return the global model of a checkpoint, from its files alone."""
    workers = [part for part in parts if "parameters" in part]
    holder = find_algorithm(name).holder
    if holder == "servers":
        values = [part["server"]["values"] for part in parts if "server" in part]
        whole = {index: each for one in values for index, each in one.items()}
        return torch.cat([whole[index] for index in sorted(whole)])
    if holder == "first":
        return workers[0]["parameters"]
    weights = [torch.tensor(part.get("alpha", [part.get("w", 1.0)])) for part in workers]
    assert all(bool((each == each[0]).all()) for each in weights)  # a single bucket, or alike
    total = sum(each[0] for each in weights)
    return sum(p["parameters"] * (w[0] / total) for p, w in zip(workers, weights, strict=True))


def mean_of(parts: list[dict[str, Any]], *path: str) -> Tensor | None:
    """Return the mean of the workers' vectors at ``path``; None stands for zeros."""
    values: list[Any] = [part for part in parts if "parameters" in part]
    for name in path:
        values = [each.get(name) if each else None for each in values]
    known = [each for each in values if each is not None]
    return sum(known) / len(values) if known else None


def pending(states: list[dict[str, Any]]) -> Tensor | None:
    """Return the sums that ALADDIN's servers have not applied yet, as a flat vector."""
    sums: dict[int, Tensor] = {}
    for state in states:
        for index, shard in state.get("shards", {}).items():
            empty = torch.zeros_like(state["server"]["values"][index])
            sums[index] = empty if shard["sum"] is None else shard["sum"]
    return torch.cat([sums[index] for index in sorted(sums)]) if sums else None


OWN = (("optimizer", "velocity"), ("outbox", "codec", "left"), ("codec", "left"), ("v",))


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_every_algorithm_resumes_with_other_numbers_of_ranks(
    tmp_path: Path,
    variant: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From 4 to 3 and to 5 workers; algorithms with servers use 2 and 1 of them."""
    run_dir, name = tmp_path / "run", str(variant[1])
    watched = Watched(monkeypatch)
    plan = [*SMALL, "--workers", 4, "--samples", LENGTHS[0], "--eval-every", 0, "--jitter", 0.3]
    plan += ["--batch-size", 8, "--slowdown", "1=3", "--servers", 2, "--quiet", "--lr", 0.002]
    start(*plan, "--run-dir", run_dir, *variant)
    for workers, servers, length in ((3, 1, LENGTHS[1]), (5, 2, LENGTHS[2])):
        before = parts_of(run_dir)
        watched.forget()
        words = ["--resume", run_dir, "--allow-resize", "--workers", workers, "--samples", length]
        figures = start(*words, "--servers", servers)
        expected = global_model(name, before)
        for model in watched.models:
            here = ~model.isnan()
            assert here.any()
            torch.testing.assert_close(model[here], expected[here])
        assert figures["samples"] == length
        assert figures["gradients_applied"] == figures["gradients_computed"] > 0
        assert 0 <= figures["wait_fraction"] <= 1
        if (waiting := pending(before)) is not None:
            assert waiting.any() or "--aladdin-pi" not in variant
            torch.testing.assert_close(pending(watched.states), waiting)
        for path in OWN if name != "multistep" else ():
            mean = mean_of(before, *path)
            mine = mean_of(watched.states, *path)
            assert (mean is None) == (mine is None), path
            if mean is not None:
                torch.testing.assert_close(mine, mean)
    assert set(watched.dealt.values()) == {1}, "a sample came twice in an epoch"
    assert sum(watched.dealt.values()) == LENGTHS[-1]
    epochs = Counter(epoch for epoch, _ in watched.dealt)
    assert all(epochs[epoch] == EPOCH for epoch in range(LENGTHS[-1] // EPOCH - 3)), epochs
    assert not capfd.readouterr().err


def final(run_dir: Path) -> Tensor:
    state = torch.load(run_dir / "model.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


def test_resized_synchronous_algorithms_stay_equal(tmp_path: Path) -> None:
    """Each equals one process with all batches, also across the changes."""
    plan = [*SMALL, "--quiet", "--eval-every", 0, "--batch-size", 8, "--servers", 2]
    models = {}
    for name, servers in (("ar-sgd", 1), ("bsp", 1), ("bsp", 2), ("multistep", 1)):
        run_dir = tmp_path / f"{name}-{servers}"
        words = ["--algorithm", name, "--multistep-exchange", "activations"]
        start(*plan, *words, "--workers", 4, "--samples", 240, "--run-dir", run_dir)
        resume = ["--resume", run_dir, "--allow-resize", "--servers", servers]
        start(*resume, "--workers", 3, "--samples", 480)
        models[name, servers] = final(run_dir)
    for each in models.values():
        torch.testing.assert_close(each, models["ar-sgd", 1], rtol=1e-4, atol=1e-6)


def test_resizing_servers_does_not_change_training(tmp_path: Path) -> None:
    """An optimizer's state is redistributed with the model."""
    plan = [*SMALL, "--algorithm", "bsp", "--optimizer", "adamw", "--quiet", "--eval-every", 0]
    plan += ["--batch-size", 8, "--workers", 4, "--lr-schedule", "constant", "--warmup-epochs", 0]
    start(*plan, "--samples", 480, "--servers", 2, "--run-dir", tmp_path / "whole")
    start(*plan, "--samples", 160, "--servers", 2, "--run-dir", tmp_path / "cut")
    resume = ["--resume", tmp_path / "cut", "--allow-resize", "--servers"]
    for servers, length in ((3, 320), (1, 480)):
        start(*resume, servers, "--samples", length)
    torch.testing.assert_close(final(tmp_path / "cut"), final(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--workers", 3], ["--workers", "--resume", "--allow-resize"]),
        (["--allow-resize", "--lr", 1], ["--lr", "--resume"]),
        (["--allow-resize", "--workers", 1], ["gosgd", "2 ranks"]),
    ],
)
def test_incompatible_resize_is_refused(
    tmp_path: Path, words: list[object], names: list[str]
) -> None:
    plan: list[object] = [
        "--algorithm",
        "gosgd",
        "--compute",
        "timed",
        "--model",
        "size:0.01",
        "--quiet",
    ]
    start(*plan, "--steps", 3, "--workers", 2, "--run-dir", tmp_path / "run")
    with pytest.raises(UserError, match=naming(*names)):
        start("--resume", tmp_path / "run", "--steps", 4, *words)


@pytest.mark.parametrize("algorithm", ["bsp", "aladdin"])
def test_steps_keep_their_sample_count_after_resize(tmp_path: Path, algorithm: str) -> None:
    plan: list[object] = [
        "--algorithm",
        algorithm,
        "--compute",
        "timed",
        "--model",
        "size:0.01",
        "--quiet",
    ]
    plan += ["--batch-size", 4, "--accumulate", 2, "--slowdown", "0=3", "--checkpoint-every", 50]
    figures = start(*plan, "--workers", 3, "--steps", 7, "--run-dir", tmp_path / "run")
    assert (figures["samples"], figures["steps"]) == (7 * 3 * 4 * 2, 7)
    # A step keeps its size when the number of workers changes.
    longer = start("--resume", tmp_path / "run", "--allow-resize", "--workers", 5, "--steps", 9)
    assert (longer["samples"], longer["steps"]) == (9 * 3 * 4 * 2, 9)
    again = start("--resume", tmp_path / "run", "--steps", 10)
    assert (again["samples"], again["workers"]) == (10 * 3 * 4 * 2, 5)


@pytest.mark.parametrize("algorithm", ["bsp", "aladdin", "gosgd"])
def test_workers_may_fail_before_and_after_a_resize(tmp_path: Path, algorithm: str) -> None:
    plan: list[object] = ["--algorithm", algorithm, "--compute", "timed", "--model", "size:0.01"]
    words = [*plan, "--quiet", "--servers", 2, "--run-dir", tmp_path / "run", "--workers", 4]
    start(*words, "--samples", 800, "--failures", "3=1.35")
    resume = ["--resume", tmp_path / "run", "--allow-resize", "--workers", 3, "--servers", 1]
    figures = start(*resume, "--samples", 1600, "--failures", "2=4")
    assert figures["samples"] == 1600
    assert [failure["rank"] for failure in figures["failures"]] == [3, 2]
    assert figures["gradients_applied"] == figures["gradients_computed"] > 0


@needs("openmpi")
def test_custom_loop_resumes_with_other_numbers_of_ranks_over_mpi(tmp_path: Path) -> None:
    """On 3, 2 and 4 ranks; the run's length is in steps, and it has a scheduler."""
    for ranks, servers, steps in ((3, 1, 6), (2, 1, 12), (4, 2, 18)):
        completed = run_program(tmp_path, "resized_loop", servers, steps, ranks=ranks)
        figures = summary(tmp_path / "run")
        # A round of the first job's two workers: two batches of 4 each.
        assert (figures["samples"], figures["steps"]) == (steps * 16, steps)
        assert figures["gradients_applied"] == figures["gradients_computed"]
        assert f"rank {ranks - 1} {steps} " in completed.stdout
    check_names(completed.stderr, "2 workers and 2 servers", "1 worker and 1 server")
    dealt = [checkpoint_part(tmp_path / "run", rank)["local"]["user"] for rank in (2, 3)]
    assert dealt[0]["batches"] > dealt[1]["batches"] > 0  # the first took part throughout
