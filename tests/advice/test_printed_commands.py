"""Commands printed by the adviser and the probe can be pasted into a shell."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aladdin_mpi.advice import candidates, report
from aladdin_mpi.advice.bottleneck import Bottleneck
from aladdin_mpi.advice.candidate_search import CandidateResult
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits, ground
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.options import AdviceRequest, read
from aladdin_mpi.advice.report import Advice, as_data, as_text
from aladdin_mpi.advice.timed_run import LinkUse, TimedRun
from aladdin_mpi.comparison.figures import markdown, plain
from aladdin_mpi.probe import main as probe
from tests.launch import ROOT, environment, launcher, needs
from tests.pasted import check, commands_in

CLUSTERS = {
    "large": "16 nodes with 4 GPUs each, 25 Gbit/s Ethernet, one node three times slower",
    "one GPU each": "8 nodes x 1 GPU, 10 Gbit/s",
    "one host": "1 node x 4 GPUs",
    "three hosts": "3 nodes x 2 GPUs, 0.05 Gbit/s, one worker 2x slower",
}
SETS = {
    "imagenet": ["--dataset", "imagenet"],
    "imagenet in a folder": ["--dataset", "imagenet", "--data-dir", "IMAGES"],
    "folder": ["--dataset", "imagefolder", "--data-dir", "IMAGES"],
    "cifar10": ["--dataset", "cifar10"],
    "digits": ["--dataset", "digits", "--lr", "0.05"],
    "synthetic": ["--dataset", "synthetic:3x32x32:10:1000"],
    "size": ["--model", "size:94"],
}
MODELS = {"digits": "digits", "cifar10": "resnet20", "synthetic": "vgg8_cifar"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image folder whose path contains a space, as ImageNet's may."""
    folder = tmp_path_factory.mktemp("image net")
    for split in ("train", "val"):
        for label in ("ant", "bee"):
            (folder / split / label).mkdir(parents=True)
            for number, side in enumerate((80, 96)):
                pixels = np.full((side, side, 3), 100 + number, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    return folder


def asked(cluster: str, *words: str) -> AdviceRequest:
    return read(["--describe", f"{CLUSTERS[cluster]}, a step of 0.18 s", *words])


def ground_of(request: AdviceRequest) -> ClusterTraits:
    return ground(request, 10.0)


def advice_of(request: AdviceRequest, candidate: Candidate) -> Advice:
    """Return advice that recommends a given candidate, whatever its figures."""
    on = ground_of(request)
    timed = TimedRun(1000.0, 0.1, (LinkUse(0, "in", 0.5),), 1e6)
    entry = CandidateResult(candidate, 2000.0, SampleEfficiency(1.0), timed)
    nothing = Bottleneck("computing", "nothing", {}, "")
    return Advice(request, on, [entry], nothing, None, [])


def printed(advice: Advice) -> Iterator[str]:
    """The commands of an answer: on the terminal, in advice.md and in advice.json."""
    for text in (as_text(advice, plain, 12), as_text(advice, markdown, 12)):
        commands = commands_in(text)
        assert sum("aladdin_mpi.train " in each for each in commands) == 1
        assert text.count("slurm/train.sbatch") == sum("sbatch " in each for each in commands) == 1
        yield from commands
    data = json.loads(json.dumps(as_data(advice)))
    yield shlex.join(data["mpirun"])
    yield data["sbatch"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("data", SETS)
def test_training_accepts_every_printed_command(cluster: str, data: str, images: Path) -> None:
    model = [] if data == "size" else ["--model", MODELS.get(data, "resnet18")]
    words = [str(images) if word == "IMAGES" else word for word in SETS[data]]
    for batch in ("1", "64"):
        request = asked(cluster, *model, *words, "--batch-size", batch)
        candidate = candidates.plain("aladdin-ahead", ground_of(request))
        for command in set(printed(advice_of(request, candidate))):
            check(command, images)
            assert ("/path/to/imagenet" in command) == (data == "imagenet" and "train" in command)
            assert ("--lr 0.05" in command) == (data == "digits" and "train" in command)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_training_accepts_command_of_every_candidate(cluster: str, images: Path) -> None:
    request = asked(cluster, "--model", "digits", "--dataset", "digits")
    on = ground_of(request)
    for name in candidates.names((), on.workers):
        for candidate in (candidates.plain(name, on), *candidates.variants(name, on)):
            check(report.mpirun(candidate, on, request.options), images)
            check(report.sbatch(candidate, on, request.options), images)


def test_data_folder_placeholder_is_explained(images: Path) -> None:
    candidate = Candidate("ar-sgd", 0, False)
    text = as_text(advice_of(asked("large"), candidate), plain, 12)
    assert re.search(r"^.*Replace /path/to/imagenet\b", text, re.MULTILINE)
    text = as_text(advice_of(asked("large", "--data-dir", str(images)), candidate), plain, 12)
    assert "/path/to" not in text and str(images) in text
    text = as_text(advice_of(asked("large", "--model", "size:94"), candidate), plain, 12)
    assert re.search(r"\bsize:94\b.*\bgradients\b", text)


@pytest.mark.parametrize("cluster", ["large", "one host"])
def test_batch_script_accepts_printed_command(cluster: str) -> None:
    request = asked(cluster)
    on = ground_of(request)
    candidate = candidates.plain("aladdin-ahead", on)
    settings, _, rest = report.sbatch(candidate, on, request.options).partition("sbatch ")
    words = shlex.split(rest)
    options = words[words.index("slurm/train.sbatch") + 1 :]
    script = f"""set -euo pipefail
        . slurm/job.sh
        complete_options {shlex.join(options)}
        count_servers
        place_run {" ".join(f"n{host}" for host in range(on.hosts))}
        print_placement"""
    env = {
        **dict(setting.split("=") for setting in settings.split()),
        **{"ALADDIN_SLURM": "slurm", "ALADDIN_SCRIPT": "train.sbatch", "PYTHON": sys.executable},
        **{"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": str(on.on_host[0])},
        "PYTHONPATH": str(ROOT),
    }
    completed = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment("openmpi", env),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    each = on.on_host[0] + 1
    places = " ".join(f"n{host}:{each}" for host in range(on.hosts))
    summary = rf"{on.hosts * each} ranks\b.*\b{on.hosts}\b.*\bhost:ranks {places}"
    assert re.fullmatch(summary, completed.stdout.strip())


@needs("openmpi")
@pytest.mark.parametrize(
    ("candidate", "hosts"),
    [
        (Candidate("aladdin-ahead", 2, True), [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (Candidate("aladdin", 1, False), [[0, 1, 2], [3, 4], [5, 6]]),
        (Candidate("sgp", 0, False), [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_printed_mpirun_maps_workers_to_hosts(candidate: Candidate, hosts: list[list[int]]) -> None:
    request = asked("three hosts")
    command = shlex.split(report.mpirun(candidate, ground_of(request), request.options))
    mapping = command[1 : command.index("python")]
    # The slots of an allocation with one task per GPU, which leaves none for servers.
    slots = ",".join(f"n{host}:2" for host in range(3))
    env = environment("openmpi", {})
    del env["PRTE_MCA_rmaps_default_mapping_policy"]
    shown = ["--host", slots, "--do-not-launch", "--display", "map"]
    completed = subprocess.run(
        [launcher("openmpi"), *shown, *mapping, "true"],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    places = completed.stdout.split("Data for node: ")[1:]
    ranks = [
        [int(rank) for rank in re.findall(r"Data for proc: \[\S+,(\d+)\]", place)]
        for place in places
    ]
    assert [place.split()[0] for place in places] == ["n0", "n1", "n2"]
    assert ranks == hosts


@pytest.mark.parametrize("text", ["1 node x 1 GPU", "3 nodes x 2 GPUs, one worker 2x slower"])
def test_training_accepts_command_printed_by_probe(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "my cluster.toml"
    assert probe(["--describe", f"{text}, step 0.1 s", "--out", str(out)]) == 0
    (shown,) = commands_in(capsys.readouterr().out)
    (noted,) = commands_in(out.read_text())
    monkeypatch.chdir(tmp_path)
    for command, name in ((shown, str(out)), (noted, out.name)):
        check(command, tmp_path)
        assert shlex.split(command)[-1] == name
