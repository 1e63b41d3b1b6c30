"""Options of another algorithm: said to have no effect, once, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.options import command_line
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm
from aladdin_mpi.options.run import TrainOptions, followed, unused, warnings
from tests.commands import simulate, train

OWN = [each.options for each in ALGORITHMS.values() if each.options]


def found(words: str) -> dict[str, str]:
    given = command_line.read(TrainOptions, words.split(), "", "")
    return unused(followed(TrainOptions, given), given)


def names(make: Callable[..., Any]) -> set[str]:
    """What a function names, and those that it calls in its own file."""
    found = set(make.__code__.co_names)
    for inner in map(make.__globals__.get, make.__code__.co_names):
        if isfunction(inner) and inner.__module__ == make.__module__:
            found |= set(inner.__code__.co_names)
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda each: each.name)
def test_the_group_is_what_the_algorithm_reads(algorithm: Algorithm) -> None:
    code = implementation(algorithm)
    makers = [make for make in (code.worker, code.server) if make]
    read = {make.__globals__.get(name) for make in makers for name in names(make)}
    assert {each for each in read if each in OWN} == {algorithm.options}


def test_own_options_are_used() -> None:
    assert found("--algorithm aladdin --aladdin-pi 2 --lr 0.1") == {}
    assert found("--algorithm eamsgd --easgd-tau 4") == {}
    assert found("--compression dgc --dgc-ratio 0.1") == {}


def test_those_of_others_are_named_with_a_remedy() -> None:
    assert found("--algorithm bsp --aladdin-pi 2 --no-shat-self-update") == {
        "--aladdin-pi": "with --algorithm bsp; leave it out",
        "--shat-self-update": "with --algorithm bsp; leave it out",
    }
    assert found("--dgc-ratio 0.1") == {
        "--dgc-ratio": "without --compression dgc; add that, or leave it out"
    }


def test_a_file_may_hold_all_options(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("algorithm = 'bsp'\n[aladdin]\npi = 2\n")
    given = command_line.read(TrainOptions, ["--config", str(file)], "", "")
    assert warnings(followed(TrainOptions, given), given) == []


WARNING = "aladdin_mpi: warning: --aladdin-pi: has no effect with --algorithm bsp; leave it out"
WORDS = ("--algorithm", "bsp", "--aladdin-pi", 2, "--samples", 64, "--quiet")


def test_over_mpi_one_rank_says_it_and_the_run_goes_on(tmp_path: Path) -> None:
    done = train(3, tmp_path / "run", *WORDS)
    assert done.stderr.count(WARNING) == 1
    assert (tmp_path / "run" / "summary.json").exists()


def test_in_virtual_time(tmp_path: Path) -> None:
    done = simulate(tmp_path / "run", *WORDS)
    assert done.stderr.count(WARNING) == 1
    assert (tmp_path / "run" / "summary.json").exists()
