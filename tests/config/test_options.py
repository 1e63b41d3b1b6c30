"""Options: types, ranges, help, TOML files, and errors for invalid input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import AladdinOptions, own
from aladdin_mpi.options.fields import extra, leaves, nested, submodel
from aladdin_mpi.options.general import CheckpointInterval
from aladdin_mpi.options.reader import HELP_WIDTH, make_parser
from aladdin_mpi.options.run import (
    RunOptions,
    SimulateOptions,
    TrainOptions,
    agreed,
    check_cluster,
    check_workers,
    differences,
    parse,
)
from aladdin_mpi.options.settings import Setting, Settings, build
from aladdin_mpi.options.toml_file import to_toml
from tests.messages import naming

MODELS = [RunOptions, TrainOptions, SimulateOptions]


def read(line: str = "", model: type[RunOptions] = TrainOptions) -> RunOptions:
    return parse(model, line.split(), "prog", "What it does.")


def simulated(line: str = "") -> SimulateOptions:
    return parse(SimulateOptions, line.split(), "prog", "What it does.")


def complaint(line: str, model: type[RunOptions] = TrainOptions) -> str:
    with pytest.raises(UserError) as caught:
        read(line, model)
    return str(caught.value)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


# -- requirements on every field -----------------------------------------------
@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_described_and_has_a_default(model: type[BaseModel]) -> None:
    for leaf in leaves(model).values():
        assert leaf.info.description, leaf.flag
        assert not leaf.info.is_required(), leaf.flag
    for info in model.model_fields.values():
        inner = submodel(info)
        assert inner is None or inner.__doc__


@pytest.mark.parametrize("model", MODELS)
def test_options_without_a_value_in_toml_default_to_none(model: type[BaseModel]) -> None:
    # None is omitted from TOML files, so it must be the default.
    for leaf in leaves(model).values():
        if leaf.optional:
            assert leaf.info.get_default() is None, leaf.flag


def test_run_options_have_units() -> None:
    without = {
        leaf.path[-1]
        for leaf in leaves(RunOptions).values()
        if leaf.plain_type in (int, float) and "unit" not in extra(leaf.info)
    }
    assert without == {"seed"}


# -- help -----------------------------------------------------------------------
def shown_help(model: type[BaseModel]) -> str:
    return make_parser(model, "prog", "What it does.").format_help()


@pytest.mark.parametrize("model", MODELS)
def test_help_shows_every_option_with_its_default(model: type[BaseModel]) -> None:
    text = shown_help(model)
    for leaf in leaves(model).values():
        flag = re.escape(f"--[no-]{leaf.flag[2:]}" if leaf.is_bool else leaf.flag)
        entry = re.search(rf"^ +{flag}\s.*?\(default:\s(.*?)\)\n", text, re.M | re.S)
        assert entry, leaf.flag
        assert " ".join(entry[1].split()) == leaf.default_text


@pytest.mark.parametrize("model", MODELS)
def test_help_lines_fit_width(model: type[BaseModel]) -> None:
    assert max(len(line) for line in shown_help(model).splitlines()) <= HELP_WIDTH


def test_help_has_groups_units_and_choices() -> None:
    text = shown_help(SimulateOptions)
    for title in ("run", "data", "optimisation", "communication", "computing", "output"):
        assert f"\n{title}:\n" in text
    for title in ("aladdin", "cluster"):
        assert text.count(f"\n{title}:\n") == 1
    assert "--timeout SECONDS" in text
    assert "--wire {auto,fp32,bf16,int8,int4,int2}" in text
    assert "--[no-]nesterov " in text
    assert "--cluster FILE" in text


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_exit_before_the_command_runs(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(option)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(("usage: prog", "prog "))


# -- the command line -----------------------------------------------------------
def test_parsed_options_have_defaults() -> None:
    options = read()
    assert (options.epochs, options.samples) == (30.0, None)
    assert options == TrainOptions()


def test_option_values_are_converted_to_their_types() -> None:
    options = read(
        "--samples 500 --lr 0.1 --nesterov --no-download --data-dir d --wire bf16 "
        "--aladdin-pi 2 --aladdin-alpha 0.5 --checkpoint-every 10min"
    )
    assert (options.samples, options.epochs, options.lr) == (500, None, 0.1)
    assert (options.nesterov, options.download) == (True, False)
    assert options.data_dir == Path("d")
    assert (own(options, AladdinOptions).pi, own(options, AladdinOptions).alpha) == (2, 0.5)
    assert options.checkpoint_every == CheckpointInterval(seconds=600)


@pytest.mark.parametrize("given", ["10,20,25", "10 20 25", "10,20 --lr-steps 25"])
def test_list_options_accept_commas_words_and_repetition(given: str) -> None:
    assert read(f"--lr-schedule step --lr-steps {given}").lr_steps == (10, 20, 25)


@pytest.mark.parametrize("given", ["0=2,0=3", "0=2 3=1 --slowdown 3=2"])
def test_key_given_twice_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"--slowdown: [03] is given twice"):
        read(f"--slowdown {given}")


@pytest.mark.parametrize("given", ["0=2,3=1.5", "0=2 3=1.5", "0=2 --slowdown 3=1.5"])
def test_mapping_options_accept_commas_words_and_repetition(given: str) -> None:
    assert read(f"--slowdown {given}").slowdown == {0: 2.0, 3: 1.5}


def test_options_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read().lr = 1.0


# -- TOML files -----------------------------------------------------------------
def test_config_file_overrides_defaults_and_yields_to_command_line(config: Path) -> None:
    config.write_text(
        "batch-size = 8\nlr_decay = 0.5\nlr = 1\n[aladdin]\npi = 7\nring = 3\n[slowdown]\n1 = 2\n"
    )
    options = read(f"--config {config} --lr 2 --aladdin-ring 4")
    assert (options.batch_size, options.lr_decay, options.lr) == (8, 0.5, 2.0)
    assert (own(options, AladdinOptions).pi, own(options, AladdinOptions).ring) == (7, 4)
    assert options.slowdown == {1: 2.0}
    assert options.momentum == TrainOptions().momentum


def test_samples_option_replaces_epochs_of_config_file(config: Path) -> None:
    config.write_text("epochs = 3")
    options = read(f"--config {config} --samples 10")
    assert (options.epochs, options.samples) == (None, 10)
    config.write_text("samples = 7")
    assert read(f"--config {config} --epochs none").samples == 7


def test_none_resets_option_of_config_file(config: Path) -> None:
    config.write_text('checkpoint-every = "1epoch"\n[slowdown]\n0 = 2')
    options = read(f"--config {config} --checkpoint-every none --slowdown none")
    assert options.checkpoint_every is None
    assert options.slowdown == {}


def test_cluster_options_override_cluster_file_and_table(config: Path, tmp_path: Path) -> None:
    config.write_text("workers = 4\n[cluster]\nhosts = 3\nlatency-us = 7.0\nbandwidth-gbit = 3.0")
    nodes = tmp_path / "nodes.toml"
    nodes.write_text("latency_us = 8.0\nbandwidth-gbit = 4.0")
    cluster = simulated(f"--config {config} --cluster {nodes} --bandwidth-gbit 5").cluster
    assert (cluster.hosts, cluster.latency_us, cluster.bandwidth_gbit) == (3, 8.0, 5.0)


def test_cluster_file_sets_computing_options(tmp_path: Path) -> None:
    nodes = tmp_path / "cluster.toml"
    nodes.write_text(
        "hosts = 3\nworkers = 6\ncompute-time = 0.25\njitter = 0.1\nforward-share = 0.4\n"
        'placement = "workers"\nbackward-shape = [[0.5, 0.1]]\n[links]\n2 = 1.5\n[slowdown]\n5 = 3'
    )
    options = simulated(f"--cluster {nodes}")
    assert (options.workers, options.compute_time, options.jitter) == (6, 0.25, 0.1)
    assert (options.slowdown, options.cluster.links) == ({5: 3.0}, {2: 1.5})
    assert (options.forward_share, options.backward_shape) == (0.4, ((0.5, 0.1),))
    over = simulated(f"--cluster {nodes} --workers 9 --links 0=2,1=3 --backward-shape 0.1:0.2")
    assert (over.workers, over.cluster.links) == (9, {0: 2.0, 1: 3.0})
    assert (over.compute_time, over.backward_shape) == (0.25, ((0.1, 0.2),))


@pytest.mark.parametrize(
    ("text", "key", "parts"),
    [
        ("bandwith-gbit = 3", "bandwith-gbit", ["bandwidth-gbit?"]),
        ("epochs = 3", "epochs", []),
        ("bandwidth-gbit = 25e9", "bandwidth-gbit", ["100000", "Gbit/s", "2.5e+10"]),
        ("hosts = 2\n[links]\n1 = 1e10", "links", ["100000", "Gbit/s"]),
        ("bandwidth-gbit = '25 Gbit/s'", "bandwidth-gbit", ["more than 0", "'25 Gbit/s'"]),
        ("bandwidth-gbit = 0", "bandwidth-gbit", ["more than 0", "got 0"]),
        ("[links]\n0 = 0", "links", ["HOST=GBIT/S"]),
        ("hosts = 2\n[links]\n2 = 1", "links", ["host 2", "--hosts 3"]),
        (
            "hosts = 2\nworkers = 3\nworker-hosts = [0, 1]",
            "worker-hosts",
            ["3 workers", "2 hosts", "--worker-hosts none"],
        ),
        ("hosts = 2\nworkers = 2\nworker-hosts = [0, 2]", "worker-hosts", ["0 to 1", "2"]),
        ("workers = 2\n[slowdown]\n2 = 3", "slowdown", ["0 to 1", "worker 2"]),
        ("compute-time = 0", "compute-time", ["more than 0", "got 0"]),
        (
            "backward-shape = [[0.5, 0.2], [0.2, 0.4]]",
            "backward-shape",
            ["increase", "0.5:0.2 0.2:0.4"],
        ),
        ("backward-shape = [[0.5, 1.2]]", "backward-shape", ["list"]),
        ("hosts", None, ["TOML"]),
    ],
)
def test_cluster_file_fault_is_one_line_error_with_key(
    text: str, key: str | None, parts: list[str], tmp_path: Path
) -> None:
    nodes = tmp_path / "cluster.toml"
    nodes.write_text(text)
    error = complaint(f"--cluster {nodes}", SimulateOptions)
    assert error.startswith(f"--cluster: {nodes}" if key is None else f"{key} in {nodes}: "), error
    assert all(part in error for part in parts), error
    assert "\n" not in error


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--samples 100 --lr 1e-7 --lr-schedule step --lr-steps 1.5,2 --slowdown 0=2,1=3.25 "
        "--data-dir a/b --aladdin-alpha since-last --checkpoint-every 0.1epochs",
        "--aladdin-alpha 0.25 --checkpoint-every 90s --run-dir runs/é --eval-every 0",
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_options_round_trip_through_toml(line: str, model: type[RunOptions], config: Path) -> None:
    options = read(line, model)
    config.write_text(to_toml(options), encoding="utf-8")
    assert read(f"--config {config}", model) == options


def test_cluster_options_round_trip_through_toml(config: Path) -> None:
    options = simulated(
        "--hosts 3 --ranks-per-host 5 --failures 1=2.5 --pauses 3:10:2.5,0:1:1 --links 2=1.5 "
        "--backward-shape 0.1:0.5,0.6:0.7 --forward-share 0.2 --workers 2 --worker-hosts 2,0"
    )
    assert options.cluster.pauses == ((3, 10.0, 2.5), (0, 1.0, 1.0))
    config.write_text(to_toml(options))
    assert simulated(f"--config {config}") == options


def test_toml_is_complete() -> None:
    text = to_toml(simulated())
    for leaf in leaves(SimulateOptions).values():
        table = f"[{leaf.key}]" if leaf.is_mapping else f"{leaf.key.split('.')[-1]} = "
        assert leaf.optional or f"\n{table}" in f"\n{text}", leaf.key


def test_nested_algorithm_options_appear_in_cli_toml_and_help(config: Path) -> None:
    class OtherOptions(BaseModel):
        """Options of another algorithm."""

        max_lag: int = Field(3, ge=0, description="steps that a worker may be ahead")

    class WithOther(TrainOptions):
        other: OtherOptions = nested(OtherOptions)

    config.write_text("[other]\nmax-lag = 5")
    assert parse(WithOther, ["--other-max-lag", "4"], "prog", "").other.max_lag == 4
    assert parse(WithOther, ["--config", str(config)], "prog", "").other.max_lag == 5
    assert complaint("--other-max-lag -1", WithOther).startswith("--other-max-lag: ")
    assert "--other-max-lag N" in shown_help(WithOther)


# -- invalid input --------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--batch-size 0", ["--batch-size: ", "1 or more", "'0'", "32"]),
        ("--batch-size two", ["--batch-size: ", "whole number", "'two'"]),
        ("--lr nan", ["--lr: ", "more than 0", "'nan'", "default: 0.01"]),
        ("--momentum 1", ["--momentum: ", "0 or more and below 1", "'1'"]),
        ("--wire fp23", ["--wire: ", "auto", "bf16", "int8", "int4", "'fp23'", "fp32?"]),
        ("--aladdin-alpha theorie", ["--aladdin-alpha: ", "theory?"]),
        ("--aladdin-pi 0", ["--aladdin-pi: ", "1 or more", "'0'"]),
        ("--batchsize 64", ["--batchsize: ", "--batch-size?"]),
        ("--batch 64", ["--batch: ", "--batch-size?", "prog --help"]),
        ("--epochs", ["--epochs: ", "more than 0", "nothing", "=EPOCHS"]),
        ("--nesterov=yes", ["--nesterov: ", "no value", "--nesterov or --no-nesterov"]),
        ("resnet50", ["'resnet50': ", "option"]),
        ("--slowdown 3", ["--slowdown: ", "WORKER=FACTOR", "'3'", "0=2"]),
        ("--slowdown 3=0.5", ["--slowdown: ", "WORKER=FACTOR", "'0.5' for 3"]),
        ("--slowdown first=2", ["--slowdown: ", "WORKER=FACTOR", "'first'"]),
        ("--lr-steps 1,b", ["--lr-steps: ", "list", "'b'"]),
        ("--checkpoint-every 5x", ["--checkpoint-every: ", "Nsamples", "'5x'"]),
        ("--epochs 1 --samples 9", ["--epochs and --samples"]),
        ("--epochs 1 --samples 9 --steps 2", ["--epochs", "--samples", "--steps"]),
        ("--allow-resize", ["--allow-resize", "--resume"]),
        ("--lr-schedule step", ["--lr-schedule step", "--lr-steps"]),
        ("--lr-steps 3", ["--lr-steps", "--lr-schedule step"]),
        ("--lr-schedule step --lr-steps 3,2", ["--lr-steps", "increasing", "3,2"]),
        ("--nesterov --momentum 0", ["--nesterov", "--momentum"]),
        ("--compute timed", ["--compute timed", "--compute-time"]),
        ("--compute-time 1", ["--compute-time", "--compute timed"]),
        ("--check-images", ["--check-images", "imagefolder"]),
        ("--corrupt-images skip", ["--corrupt-images skip", "imagefolder", "digits"]),
        ("--shuffle-buffer 9", ["--shuffle-buffer 9", "shards"]),
        ("--config no.toml", ["--config: ", "TOML", "'no.toml'"]),
    ],
)
def test_invalid_option_is_one_line_error_with_its_name(line: str, parts: list[str]) -> None:
    text = complaint(line)
    assert all(part in text for part in parts), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ("batch-size = 0", ["batch-size in FILE: ", "1 or more", "got 0"]),
        ("batchsize = 3", ["batchsize in FILE: ", "batch-size?"]),
        ("[aladdin]\nphi = 3", ["aladdin.phi in FILE: ", "pi?"]),
        ("aladdin = 3", ["aladdin in FILE: ", "got 3", "[aladdin]"]),
        ("lr-steps = 3", ["lr-steps in FILE: ", "list", "got 3"]),
        ("epochs = true", ["epochs in FILE: ", "more than 0", "got true"]),
        ("download = 1", ["download in FILE: ", "true or false", "got 1"]),
        ("batch-size = 3\nbatch_size = 3", ["batch-size in FILE: ", "twice"]),
        ("epochs = 1\nsamples = 3", ["epochs in FILE", "samples in FILE"]),
        ("nesterov = true\nmomentum = 0", ["nesterov in FILE", "--momentum"]),
        ("resume = 5", ["resume in FILE: ", "got 5"]),
        ("[slowdown]\n3 = 0.5", ["slowdown in FILE: ", "WORKER=FACTOR", "0.5 for 3"]),
        ("epochs = ", ["--config: ", "FILE", "TOML"]),
    ],
)
def test_invalid_toml_error_names_key_and_file(toml: str, parts: list[str], config: Path) -> None:
    config.write_text(toml)
    text = complaint(f"--config {config}").replace(str(config), "FILE")
    assert all(part in text for part in parts), text


def test_all_invalid_options_are_reported_at_once() -> None:
    lines = complaint("--batch-size 0 --lr 0 --aladdin-ring 0").splitlines()
    assert [line.split(":")[0] for line in lines] == ["--batch-size", "--lr", "--aladdin-ring"]


def test_slowdown_of_nonexistent_worker_is_rejected() -> None:
    options = read("--slowdown 3=2")
    check_workers(options, 4)
    with pytest.raises(UserError, match=r"--slowdown: .*\b0 to 2\b.*\bworker 3\b"):
        check_workers(options, 3)
    error = complaint("--slowdown 3=2 --workers 3", SimulateOptions)
    assert error.startswith("--slowdown: ") and "worker 3" in error


def test_ranks_must_not_exceed_slots_of_hosts() -> None:
    options = simulated("--workers 8 --hosts 2 --ranks-per-host 4")
    assert options.cluster.placement == "block"
    check_cluster(options, 8)
    with pytest.raises(UserError, match=r"\b9 ranks\b.*\b2 hosts\b.*\b4\b") as caught:
        check_cluster(options, 9)
    assert "--ranks-per-host 5 or --hosts 3" in str(caught.value)
    text = complaint("--ranks-per-host 4 --placement cyclic", SimulateOptions)
    assert re.search(r"--ranks-per-host\b.*\bblock placement\b.*\bcyclic\b", text)


@pytest.mark.parametrize("option", ["--failures 2=9.5,9=3", "--pauses 2:1:1 9:10:2.5"])
def test_failure_or_pause_of_nonexistent_rank_is_rejected(option: str) -> None:
    options = simulated(option)
    check_cluster(options, 10)
    with pytest.raises(UserError, match=rf"{option.split()[0]}: .*\b0 to 8\b.*\brank 9\b"):
        check_cluster(options, 9)


def test_invalid_pause_error_names_option_and_value() -> None:
    text = complaint("--pauses 3:x:1", SimulateOptions)
    assert text.startswith("--pauses: ") and "'x'" in text
    text = complaint("--pauses 3:1", SimulateOptions)
    assert text.startswith("--pauses: ") and "RANK:START:SECONDS" in text and "got 3:1;" in text


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--slowdown 0:2", ["--slowdown", "WORKER=FACTOR", "'0:2'", "--slowdown 0=2"]),
        (
            "--decay-factors bias",
            ["--decay-factors", "PATTERN=FACTOR", "'bias'", "--decay-factors bias=2"],
        ),
        ("--jitter 1e9", ["--jitter", "at most 10", "'1e9'"]),
    ],
)
def test_error_of_a_value_shows_its_form(line: str, names: list[str]) -> None:
    assert re.search(naming(*names), complaint(line, SimulateOptions))


def test_error_shows_the_form_of_tables_in_files_and_arguments(config: Path) -> None:
    config.write_text('slowdown = "0=10"\n')
    assert "'0=10'; give a table, such as {0 = 10}" in complaint(f"--config {config}")
    given: Settings = {("aladdin",): Setting(3, "aladdin")}
    with pytest.raises(UserError, match=re.escape("aladdin: expected a dict, got 3; write for")):
        build(TrainOptions, given)


# -- intervals ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("50000", CheckpointInterval(samples=50000)),
        ("50000samples", CheckpointInterval(samples=50000)),
        ("0.5epochs", CheckpointInterval(epochs=0.5)),
        ("1epoch", CheckpointInterval(epochs=1)),
        ("1.5 min", CheckpointInterval(seconds=90)),
        ("20s", CheckpointInterval(seconds=20)),
        (7, CheckpointInterval(samples=7)),
    ],
)
def test_interval_accepts_all_units(text: object, interval: CheckpointInterval) -> None:
    assert CheckpointInterval.parse(text) == interval


@pytest.mark.parametrize("text", ["", "0", "0epochs", "-5", "1.5", "1.5samples", "5 hours", "min"])
def test_interval_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="N, Nsamples, Nepochs, Nmin or Ns"):
        CheckpointInterval.parse(text)


@given(st.floats(1e-9, 1e30) | st.integers(1, 10**12))
def test_interval_round_trips_through_text(amount: float) -> None:
    in_epochs = CheckpointInterval(epochs=float(amount))
    in_seconds = CheckpointInterval(seconds=float(amount))
    for interval in (in_epochs, in_seconds):
        assert CheckpointInterval.parse(str(interval)) == interval


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "nesterov = true\nmomentum = 0",
            "nesterov in {} requires a momentum above 0. Add --momentum 0.9, or leave --nesterov "
            "out.",
        ),
        (
            "lr-schedule = 'step'\nlr-steps = [3, 2]",
            "lr-steps in {}: expected epochs in increasing order, got 3,2; sort them",
        ),
        (
            "samples = 9\nsteps = 2",
            "samples in {} and steps in {} cannot be combined. Keep one of them.",
        ),
    ],
)
def test_conflict_in_file_names_its_keys_and_remedy_names_options(
    config: Path, content: str, message: str
) -> None:
    config.write_text(content)
    assert complaint(f"--config {config}") == message.replace("{}", str(config))


# -- resume ---------------------------------------------------------------------
@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    options = read("--lr 0.3 --epochs 5 --timeout 9 --run-dir elsewhere --overwrite")
    (tmp_path / "config.toml").write_text(to_toml(options))
    return tmp_path


def test_resume_uses_stored_configuration(run_dir: Path) -> None:
    options = read(f"--resume {run_dir} --timeout 60 --samples 1000 --checkpoint-every 5min")
    assert (options.lr, options.timeout, options.overwrite) == (0.3, 60.0, False)
    assert (options.epochs, options.samples) == (None, 1000)
    assert options.checkpoint_every == CheckpointInterval(seconds=300)
    assert options.run_dir == options.resume == run_dir


def test_resume_rejects_other_options_by_name(run_dir: Path, config: Path) -> None:
    text = complaint(f"--resume {run_dir} --lr 0.5 --aladdin-pi 2 --quiet")
    assert re.match(r"--lr, --aladdin-pi\b.*--resume\b", text)
    assert "--timeout" in text
    config.write_text("seed = 3")
    assert complaint(f"--resume {run_dir} --config {config}").startswith(f"seed in {config} cannot")


def test_resume_requires_run_folder(tmp_path: Path) -> None:
    text = complaint(f"--resume {tmp_path}")
    assert text.startswith("--resume: ") and "config.toml" in text


# -- agreement between ranks ------------------------------------------------------
def test_ranks_agree_on_options_that_results_depend_on() -> None:
    base = agreed(read())
    local = "--device cpu --run-dir x --data-dir y --loader-workers 3 --timeout 5 --quiet"
    assert agreed(read(local)) == base
    for other in ("--seed 1", "--lr 0.0100001", "--aladdin-pi 5", "--slowdown 0=2", "--samples 3"):
        assert agreed(read(other)) != base, other


def test_agreed_options_do_not_depend_on_spelling(config: Path) -> None:
    config.write_text("[slowdown]\n1 = 3\n0 = 2")
    assert agreed(read(f"--config {config}")) == agreed(read("--slowdown 0=2.0,1=3"))


def test_configuration_differences_name_the_options() -> None:
    a, b = agreed(read("--lr 1 --aladdin-pi 2")), agreed(read("--lr 2 --slowdown 1=3"))
    assert differences(a, b) == [
        "aladdin.pi: 2 and 4",
        "lr: 1.0 and 2.0",
        "slowdown.1: absent and 3.0",
    ]
    assert differences(a, a) == []
