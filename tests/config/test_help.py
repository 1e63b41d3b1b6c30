"""``--help``: the options that most runs need on one screen, and pages for the rest."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, Algorithm
from aladdin_mpi.options.fields import leaves
from aladdin_mpi.options.reader import HELP_WIDTH, help_page
from aladdin_mpi.options.run import SimulateOptions, TrainOptions, parse

LONGEST_DESCRIPTION = HELP_WIDTH - 30


def page(topic: str | None, model: type[BaseModel] = TrainOptions) -> str:
    return help_page(model, "prog", "What it does.", topic)


def test_help_fits_one_screen_and_has_thirty_options() -> None:
    lines = page(None).splitlines()
    options = [line for line in lines if line.startswith("  -")]
    assert len(lines) <= 60
    assert 28 <= len(options) <= 34
    assert "--help-all" in "".join(lines[-4:])


@pytest.mark.parametrize("model", [TrainOptions, SimulateOptions])
def test_help_all_has_every_option_with_its_details(model: type[BaseModel]) -> None:
    text = page("all", model)
    words = " ".join(text.split())
    for leaf in leaves(model).values():
        assert (f"--[no-]{leaf.flag[2:]} " if leaf.is_bool else f"{leaf.flag} ") in words
        assert " ".join(leaf.help.split()) in words
    assert max(map(len, text.splitlines())) <= HELP_WIDTH


@pytest.mark.parametrize("model", [TrainOptions, SimulateOptions])
def test_descriptions_fit_one_line(model: type[BaseModel]) -> None:
    long = [
        leaf.flag
        for leaf in leaves(model).values()
        if len(str(leaf.info.description)) > LONGEST_DESCRIPTION
    ]
    assert long == []


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda each: each.name)
def test_topic_of_an_algorithm_has_its_options_alone(algorithm: Algorithm) -> None:
    text = page(algorithm.name)
    own = [leaf for leaf in leaves(TrainOptions).values() if leaf.path[0] == algorithm.group]
    assert own
    listed = [line for line in text.splitlines() if line.startswith("  --")]
    assert len(listed) == len(own) + 3  # --help-all, --version and --config


def test_unknown_topic_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--help: expected one of .*, got 'sg'; did you mean sgp"):
        page("sg")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--help", "sgp"], ["--help-all"]])
def test_help_is_printed_to_standard_output(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(TrainOptions, words, "prog", "What it does.")
    captured = capsys.readouterr()
    assert caught.value.code in (0, None)
    assert captured.out.startswith("usage: prog")
    assert captured.err == ""
