"""Models that FSDP divides among the ranks of an island, over MPI.

Equality with plain PyTorch is tested by the column "ar-sgd, sharded" of ``tests/exactness``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from aladdin_mpi.options.algorithms import ALGORITHMS
from tests.commands import checkpoint_part, metrics, refusal, summary
from tests.launch import Completed, needs, start_ranks
from tests.messages import check_names
from tests.run.jobs import ULFM, kill_ranks, samples_so_far, wait_until
from tests.run.program_runs import HERE, program, run_alone, run_program

ABLE = sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.islands)
SERVED = [name for name in ABLE if ALGORITHMS[name].has_servers]
PARAMETERS = 9 * 5 + 9 + 9 + 9 + 9 * 9 + 9 + 3 * 9 + 3
pytestmark = needs("openmpi")


def ranks_of(algorithm: str) -> int:
    """Return the ranks of two islands of two and, if it has servers, one for each part."""
    return 6 if algorithm in SERVED else 4


def train(folder: Path, algorithm: str, **given: Any) -> Completed:
    """Train two islands of two."""
    check = bool(given.pop("check", True))
    given = {"servers": 2, "run_dir": str(folder / "run"), **given}
    ranks = given.pop("ranks", ranks_of(algorithm))
    return run_program(folder, "sharded", algorithm, json.dumps(given), ranks=ranks, check=check)


def reports(completed: Completed) -> list[dict[str, Any]]:
    """Return the lines of workers, then that of rank 0."""
    lines = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line.get("rank", 99))


def check(completed: Completed, samples: int = 768, parameters: int = PARAMETERS) -> dict[str, Any]:
    """Check a run's accounts, and that all workers have the model that was measured."""
    *workers, figures = reports(completed)
    assert len(workers) == 4
    assert {each["test_loss"] for each in workers} == {f"{figures['test_loss']:.6g}"}
    assert figures["samples"] == samples and figures["parameters"] == parameters
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert figures["model"] == "Sequential"  # not the class that FSDP derives
    return figures


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "model.pt")
    return state


USUAL = ("aladdin-ahead", "ar-sgd")
OF_EACH = [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in ABLE]


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", OF_EACH)
def test_sharded_model_learns(tmp_path: Path, algorithm: str) -> None:
    """By every algorithm whose workers can be islands; its model is saved as a whole."""
    completed = train(tmp_path, algorithm)
    figures = check(completed)
    lines = metrics(tmp_path / "run", "eval")
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert lines[-1]["test_loss"] == pytest.approx(figures["test_loss"])
    if algorithm == "local-sgd":  # it averages, without the outer steps of others
        assert {line["model_variance"] for line in lines[-1:]} == {0.0}
    best = min(line["test_loss"] for line in lines)
    assert best < 1.0 < lines[0]["test_loss"] + 0.3
    state = model_of(tmp_path / "run")
    assert sum(each.numel() for each in state.values()) == PARAMETERS
    assert {name: tuple(each.shape) for name, each in state.items() if each.dim() > 1} == {
        "0.0.weight": (9, 5),
        "1.weight": (9, 9),
        "3.weight": (3, 9),
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        ["bfloat16", "recomputed", "clipped"],
        ["batch norm"],
        pytest.param(["frozen", "only the root"], marks=pytest.mark.long),
        pytest.param(["epochs", "clipped"], marks=pytest.mark.long),
    ],
    ids=" and ".join,
)
def test_sharded_model_equals_the_replicated_one(tmp_path: Path, how: list[str]) -> None:
    """The same run with islands of one rank, which has the whole model."""
    losses = []
    for name, more in (("sharded", {}), ("whole", {"mesh": 1, "island": 1})):
        (tmp_path / name).mkdir()
        completed = train(tmp_path / name, "ar-sgd", how=how, **more)
        trained = PARAMETERS - 90 * ("frozen" in how)
        losses.append(check(completed, parameters=trained)["test_loss"])
    if "bfloat16" not in how:
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert max(losses) < 1.0
    states = [model_of(tmp_path / name / "run") for name in ("sharded", "whole")]
    tolerance = 0.03 if "bfloat16" in how else 1e-5  # another order of additions
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.allclose(one, other, atol=tolerance)


@pytest.mark.long
def test_passes_without_backward_between_steps_use_the_present_model(tmp_path: Path) -> None:
    """FSDP keeps the gathered parameters of such a pass, which later steps have changed."""
    losses: list[float] = []
    printed: list[list[str]] = []
    for how in (["epochs", "destroyed"], ["epochs", "replicated"], []):
        folder = tmp_path / str(len(losses))
        folder.mkdir()
        completed = train(folder, "ar-sgd", how=how)
        losses.append(check(completed)["test_loss"])
        printed.append([line for line in completed.stdout.splitlines() if "epoch" in line])
        assert "Traceback" not in completed.stderr
    assert losses[0] == losses[2] == pytest.approx(losses[1], rel=1e-5)
    # At the end of an epoch, the loop has the model after its last step.
    of_epochs = [[float(line.split()[-1]) for line in lines] for lines in printed[:2]]
    assert of_epochs[0] == pytest.approx(of_epochs[1], rel=1e-4) and len(of_epochs[0]) == 8


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ar-sgd", pytest.param("aladdin", marks=pytest.mark.long)])
def test_ranks_write_their_parts_of_the_model(tmp_path: Path, algorithm: str) -> None:
    """In the format of torch.distributed.checkpoint, which one process can read as a whole."""
    check(train(tmp_path, algorithm, epochs=2, model_format="dcp"), 192)
    folder = tmp_path / "run" / "model"
    assert len(list(folder.glob("*.distcp"))) == 2 and not (folder.parent / "model.pt").exists()
    (tmp_path / "file").mkdir()
    check(train(tmp_path / "file", algorithm, epochs=2), 192)
    whole = model_of(tmp_path / "file" / "run")
    state = {name: torch.zeros_like(each) for name, each in whole.items()}
    load(state, checkpoint_id=folder, no_dist=True)
    apart = max(float((each - whole[name]).abs().max()) for name, each in state.items())
    assert apart == 0 if algorithm == "ar-sgd" else apart < 0.2


@pytest.mark.long
@pytest.mark.parametrize("samples", [93, pytest.param(95, marks=pytest.mark.long)])
def test_samples_that_an_island_cannot_divide_are_passed_over(tmp_path: Path, samples: int) -> None:
    """FSDP adds gradients of equal parts of an island's samples."""
    figures = check(train(tmp_path, "ar-sgd", epochs=None, samples=samples), samples - 1)
    assert figures["gradients_computed"] == 2 * 6


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin-ahead"])
def test_members_leave_the_loop_together(tmp_path: Path, algorithm: str) -> None:
    *workers, figures = reports(train(tmp_path, algorithm, how=["left"]))
    assert len({each["test_loss"] for each in workers}) == 1
    assert 48 <= figures["samples"] < 768


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ar-sgd", pytest.param("aladdin", marks=pytest.mark.long)])
def test_sharded_run_is_resumed(tmp_path: Path, algorithm: str) -> None:
    """Its checkpoint has a part for each rank; the resumed run equals an uninterrupted one."""
    folders = [tmp_path / "whole", tmp_path / "halves"]
    for folder in folders:
        folder.mkdir()
    settings: dict[str, Any] = {"checkpoint_every": "192 samples"}
    whole = train(folders[0], algorithm, **settings, epochs=4)
    train(folders[1], algorithm, **settings, epochs=2)
    lanes = [checkpoint_part(folders[1] / "run", rank)["role"] for rank in range(4)]
    if algorithm == "ar-sgd":
        sizes = [lane["parameters"].numel() for lane in lanes]
        assert sizes[0] == sizes[2] and sum(sizes[:2]) == PARAMETERS
    again = train(
        folders[1], algorithm, **settings, epochs=4, resume=str(folders[1] / "run"), run_dir=None
    )
    if algorithm == "ar-sgd":
        assert check(whole, 384) == check(again, 384)
        states = [model_of(folder / "run") for folder in folders]
        assert all(torch.equal(states[0][name], each) for name, each in states[1].items())
    else:
        assert check(again, 384)["test_loss"] < 1.1


def test_other_division_of_the_model_is_refused(tmp_path: Path) -> None:
    """Its parts have equal lengths, so nothing else would notice it."""
    train(tmp_path, "ar-sgd", epochs=2, how=["replicated"])
    again = {"resume": str(tmp_path / "run"), "run_dir": None, "epochs": 4}
    completed = train(tmp_path, "ar-sgd", **again, check=False)
    check_names(refusal(completed), "resume", "divided by FSDP")


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [pytest.param("ar-sgd", 6, marks=pytest.mark.long), ("aladdin-ahead", 8)],
)
def test_number_of_islands_changes(tmp_path: Path, algorithm: str, ranks: int) -> None:
    """The third island starts from the global model; a part of it remains with each rank."""
    folder = tmp_path / "run"
    before = check(train(tmp_path, algorithm, epochs=2), 192)
    again = {"resume": str(folder), "run_dir": None, "allow_resize": True, "ranks": ranks}
    *workers, figures = reports(train(tmp_path, algorithm, **again, epochs=8))
    assert len(workers) == 6 and len({each["test_loss"] for each in workers}) == 1
    assert figures["samples"] == 768
    assert figures["gradients_computed"] == figures["gradients_applied"] == 24 + 72
    assert figures["test_loss"] < 0.6 * before["test_loss"]


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin-ahead"])
def test_size_of_islands_changes(tmp_path: Path, algorithm: str) -> None:
    """The parts of parameters and of AdamW's moments are divided among more ranks."""
    before = check(train(tmp_path, algorithm, epochs=2), 192)
    model = model_of(tmp_path / "run")
    again: dict[str, Any] = {"resume": str(tmp_path / "run"), "run_dir": None}
    again |= {"allow_resize": True, "mesh": 3, "island": 3, "servers": 3}
    again["ranks"] = 6 + 3 * (algorithm in SERVED)
    train(tmp_path, algorithm, **again, epochs=2)
    assert all(each.equal(model[name]) for name, each in model_of(tmp_path / "run").items())
    *workers, figures = reports(train(tmp_path, algorithm, **again, epochs=8))
    assert len(workers) == 6 and len({each["test_loss"] for each in workers}) == 1
    assert figures["gradients_computed"] == figures["gradients_applied"] == 24 + 48
    assert figures["test_loss"] < 0.6 * before["test_loss"]


@pytest.mark.long
def test_smaller_islands_continue_as_single_workers_do(tmp_path: Path) -> None:
    """So they have AdamW's moments, wherever they were."""
    models = []
    for name, how, sizes in (
        ("sharded", (), (3, 2)),
        ("replicated", ("replicated",), (3, 2)),
        ("single", ("replicated",), (1, 1)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (first, ranks), (now, fewer) = zip(sizes, (6, 4), strict=True)
        given: dict[str, Any] = {"how": how, "clip": 0.5, "mesh": first, "island": first}
        train(folder, "ar-sgd", **given, ranks=ranks, epochs=2)
        given |= {"resume": str(folder / "run"), "run_dir": None, "allow_resize": True}
        train(folder, "ar-sgd", **given | {"mesh": now, "island": now}, ranks=fewer, epochs=4)
        models.append(model_of(folder / "run"))
        part = checkpoint_part(folder / "run", 0)["role"]["optimizer"]["parts"][0]["state"]
        assert part["inner"]["state"][0]["step"] == 2 * 96 / (6 * 4) + 2 * 96 / (4 * 4)
    for other in models[1:]:
        assert all(torch.allclose(models[0][n], each, atol=1e-5) for n, each in other.items())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("algorithm", "given", "names"),
    [
        ("gosgd", {}, ["island", "gosgd", "ar-sgd"]),
        ("aladdin", {"servers": 1, "ranks": 5}, ["servers", "2 parts", "got 1", "use 2"]),
        ("ar-sgd", {"ranks": 5}, ["island", "2 workers", "got 1 and 2"]),
        ("ar-sgd", {"island": 4}, ["island: expected 2", "got 4", "island_mesh()"]),
        ("ar-sgd", {"mesh": 4, "island": 4}, ["rank 3", "fewer rows", "smaller islands"]),
        ("ar-sgd", {"how": ["only a layer"]}, ["0.0.weight", "fully_shard"]),
        ("ar-sgd", {"how": ["only a layer", "frozen"]}, ["0.0.weight", "fully_shard"]),
        ("ar-sgd", {"how": ["written"]}, ["3.bias", "written to after", "run.project()"]),
        ("ar-sgd", {"how": ["divided by columns"]}, ["0.0.weight", "fully_shard"]),
        ("ar-sgd", {"how": ["epochs", "batches"]}, ["evaluation_batches()", "evaluate="]),
        ("ar-sgd", {"compression": "powersgd"}, ["island", "compression powersgd"]),
        ("ar-sgd", {"channels_last": True}, ["channels_last", "fully_shard"]),
        ("ar-sgd", {"ar_sgd": {"allreduce": "torch"}}, ["all-reduce torch", "process group"]),
    ],
)
def test_bad_sharding_is_refused(
    tmp_path: Path, algorithm: str, given: dict[str, Any], names: list[str]
) -> None:
    completed = train(tmp_path, algorithm, check=False, **given)
    check_names(refusal(completed), *names)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.long
def test_sharded_model_trains_in_one_process(tmp_path: Path) -> None:
    """To debug the script."""
    given = json.dumps({"run_dir": str(tmp_path / "run")})
    completed = run_alone(tmp_path, "sharded", "ar-sgd", given)
    assert completed.returncode == 0, completed
    written = json.dumps({"run_dir": str(tmp_path / "other"), "how": ["written"]})
    refused = run_alone(tmp_path, "sharded", "ar-sgd", written)
    assert "written to after" in refused.stderr, refused
    worker, figures = reports(completed)
    assert figures["samples"] == 768 and float(worker["test_loss"]) < 0.5


@pytest.mark.long
def test_sharded_model_cannot_be_simulated(tmp_path: Path) -> None:
    command = ["-m", "aladdin_mpi.simulate"]
    options = ["--workers", 4, "--run-dir", tmp_path / "run", "--", "ar-sgd", "{}"]
    completed = run_alone(tmp_path, "sharded", *options, command=command)
    check_names(refusal(completed), "island_mesh()", "without fully_shard")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "killed"),
    [
        pytest.param("aladdin-ahead", 5, marks=pytest.mark.long),
        ("aladdin-ahead", 2),  # of the island that measures
        pytest.param("ar-sgd", 3, marks=pytest.mark.long),
        pytest.param("async-diloco", 4, marks=pytest.mark.long),
    ],
)
def test_failed_rank_ends_its_island_only(tmp_path: Path, algorithm: str, killed: int) -> None:
    """FSDP's exchange fails in the other member, which leaves; the other island continues."""
    folder = tmp_path / "run"
    given = {"servers": 2, "run_dir": str(folder), "epochs": 60, "log_every": 96}
    given["eval_every"] = 20
    words = [program("sharded"), algorithm, json.dumps(given)]
    ranks = ranks_of(algorithm)
    with start_ranks(ranks, words, env=HERE, cwd=tmp_path, mpirun=ULFM) as job:
        wait_until(job, lambda: samples_so_far(folder) >= 384, seconds=60)
        kill_ranks(job, [killed])
        completed = job.wait(200)
    assert completed.returncode == 0, repr(completed)
    figures = summary(folder)
    failures = {failure["rank"]: failure["what"] for failure in figures["failures"]}
    assert failures.keys() == {killed, killed ^ 1}
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert figures["test_loss"] < 0.5
    # An evaluation that the failed rank had begun has no result.
    losses = [line["test_loss"] for line in metrics(folder, "eval") if "test_loss" in line]
    assert losses and all(loss < 1.5 for loss in losses)
