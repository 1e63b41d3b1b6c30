"""Options that have been renamed: the former spelling is accepted for one release."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import leaves, with_current_names
from aladdin_mpi.options.run import SimulateOptions, parse, read_request, warnings
from aladdin_mpi.options.toml_file import to_toml
from tests.commands import simulate

FORMER = {leaf.former_flag: leaf for leaf in leaves(SimulateOptions).values() if leaf.former_flag}


def simulated(line: str) -> SimulateOptions:
    return parse(SimulateOptions, line.split(), "prog", "What it does.")


def test_former_flags_are_those_of_the_previous_release() -> None:
    assert {former: leaf.flag for former, leaf in FORMER.items()} == {
        "--deaths": "--failures",
        "--mirror-every": "--replicate-every",
    }


def test_former_flag_sets_the_option_and_is_reported() -> None:
    request = read_request(SimulateOptions, ["--deaths", "1=2.5"], "prog", "")
    assert request.options.cluster.failures == {1: 2.5}
    assert warnings(request.options, request.given) == [
        "--deaths has been renamed. Use --failures."
    ]


def test_both_spellings_together_are_refused() -> None:
    with pytest.raises(UserError, match="--deaths is the former name of --failures; keep one"):
        simulated("--deaths 1=2 --failures 2=3")


def test_former_flag_is_not_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulated("--help")
    text = capsys.readouterr().out
    assert "--failures" in text
    assert "--deaths" not in text


def test_former_keys_in_toml_set_the_options(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mirror-every = 3\n[cluster]\ndeaths = {1 = 2.5}\n")
    options = simulated(f"--config {file}")
    assert (options.replicate_every, options.cluster.failures) == (3, {1: 2.5})
    file.write_text(to_toml(options))
    assert "mirror" not in file.read_text()
    assert simulated(f"--config {file}") == options


def test_former_and_current_key_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("mirror_every = 3\nreplicate-every = 4\n")
    with pytest.raises(UserError, match="given twice, as mirror_every and as replicate-every"):
        simulated(f"--config {file}")


def test_stored_options_get_the_current_names() -> None:
    stored = {"mirror_every": 64, "cluster": {"deaths": {"1": 2.5}, "hosts": 2}, "other": 1}
    assert with_current_names(SimulateOptions, stored) == {
        "replicate_every": 64,
        "cluster": {"failures": {"1": 2.5}, "hosts": 2},
        "other": 1,
    }


def test_run_with_former_spelling_trains_and_warns(tmp_path: Path) -> None:
    words = ["--workers", 2, "--samples", 64, "--mirror-every", 8]
    output = simulate(tmp_path / "run", *words)
    assert "--mirror-every has been renamed. Use --replicate-every." in output.stderr
    assert "replicate-every = 8" in (tmp_path / "run" / "config.toml").read_text()
