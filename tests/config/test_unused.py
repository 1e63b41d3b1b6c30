"""Options of another algorithm cause one warning and do not end the run."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm
from aladdin_mpi.options.run import (
    SimulateOptions,
    TrainOptions,
    read_request,
    unused,
    warnings,
)
from tests.commands import simulate, train

OWN = [each.options for each in ALGORITHMS.values() if each.options]


def unused_options(words: str) -> dict[str, str]:
    request = read_request(TrainOptions, words.split(), "", "")
    return unused(request.options, request.given)


def names(make: Callable[..., Any]) -> set[str]:
    """Return the names used by a function, and by functions of the same file that it calls."""
    result = set(make.__code__.co_names)
    for inner in map(make.__globals__.get, make.__code__.co_names):
        if isfunction(inner) and inner.__module__ == make.__module__:
            result |= set(inner.__code__.co_names)
    return result


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda each: each.name)
def test_option_group_matches_options_read_by_algorithm(algorithm: Algorithm) -> None:
    code = implementation(algorithm)
    makers = [
        make.__init__ if isclass(make) else make for make in (code.worker, code.server) if make
    ]
    read = {make.__globals__.get(name) for make in makers for name in names(make)}
    assert {each for each in read if each in OWN} == {algorithm.options}


def test_options_of_selected_algorithm_count_as_used() -> None:
    assert unused_options("--algorithm aladdin --aladdin-pi 2 --lr 0.1") == {}
    assert unused_options("--algorithm eamsgd --easgd-tau 4") == {}
    assert unused_options("--compression dgc --dgc-ratio 0.1") == {}


def test_momentum_is_that_of_sgd() -> None:
    assert unused_options("--momentum 0.5 --nesterov") == {}
    ignored = unused_options("--optimizer adamw --momentum 0.5 --nesterov")
    assert set(ignored) == {"--momentum", "--nesterov"}


@pytest.mark.parametrize(
    ("option", "unused_with", "used_with"),
    [
        ("--servers 2", "--algorithm ar-sgd", "--algorithm bsp"),
        ("--wire fp32", "--algorithm aladdin-local", "--algorithm aladdin-ahead"),
        ("--nesterov", "--algorithm eamsgd", "--algorithm easgd"),
        ("--lr-decay 0.5", "--lr-schedule cosine", "--lr-schedule step --lr-steps 3"),
    ],
)
def test_unused_option_names_the_other_it_depends_on(
    option: str, unused_with: str, used_with: str
) -> None:
    assert unused_options(f"{option} {used_with}") == {}
    ((name, remedy),) = unused_options(f"{option} {unused_with}").items()
    assert name == option.split()[0]
    assert unused_with in remedy


def test_refused_option_has_no_warning() -> None:
    assert unused_options("--wire int4 --algorithm aladdin-local") == {}


def test_unused_options_of_other_algorithms_are_named_with_remedy() -> None:
    ignored = unused_options("--algorithm bsp --aladdin-pi 2 --no-shat-self-update")
    assert set(ignored) == {"--aladdin-pi", "--shat-self-update"}
    assert all("--algorithm bsp" in reason for reason in ignored.values())
    ((option, reason),) = unused_options("--dgc-ratio 0.1").items()
    assert option == "--dgc-ratio" and "--compression dgc" in reason


def test_links_between_hosts_are_unused_on_one_host() -> None:
    words = "--workers 8 --bandwidth-gbit 1 --latency-us 90"
    options = [
        unused(request.options, request.given)
        for hosts in ("", " --hosts 2")
        for request in [read_request(SimulateOptions, (words + hosts).split(), "", "")]
    ]
    assert set(options[0]) == {"--bandwidth-gbit", "--latency-us"} and options[1] == {}
    assert all("--hosts" in remedy for remedy in options[0].values())


def test_unused_options_in_config_file_cause_no_warning(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("algorithm = 'bsp'\n[aladdin]\npi = 2\n")
    request = read_request(TrainOptions, ["--config", str(file)], "", "")
    assert warnings(request.options, request.given) == []


WARNING = re.compile(r"^aladdin_mpi: warning: --aladdin-pi\b.*--algorithm bsp\b", re.MULTILINE)
WORDS = ("--algorithm", "bsp", "--aladdin-pi", 2, "--samples", 64, "--quiet")


def test_unused_option_warning_is_printed_once_over_mpi(tmp_path: Path) -> None:
    completed = train(3, tmp_path / "run", *WORDS)
    assert len(WARNING.findall(completed.stderr)) == 1
    assert (tmp_path / "run" / "summary.json").exists()


def test_unused_option_warning_is_printed_once_in_simulation(tmp_path: Path) -> None:
    completed = simulate(tmp_path / "run", *WORDS)
    assert len(WARNING.findall(completed.stderr)) == 1
    assert (tmp_path / "run" / "summary.json").exists()
