"""Parsing of cluster descriptions in words, and errors for the rest."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing.cluster_file import check, described_sections, interpretation, rendered
from aladdin_mpi.probing.description import EXAMPLES, described
from aladdin_mpi.probing.options import ProbeOptions, read


def said(text: str) -> dict[str, Any]:
    return {name: setting.value for name, setting in described(text).items()}


def complaint(*argv: object) -> str:
    with pytest.raises(UserError) as caught:
        read([str(word) for word in argv])
    return str(caught.value)


def simulated(*argv: object) -> SimulateOptions:
    """Return the options that a simulation reads from the file."""
    options, _ = read([str(word) for word in argv])
    return check(rendered("test", described_sections(options)), "cluster.toml")


PARTS = ["16 nodes x 4 GPUs", "25 Gbit/s", "latency 20 us", "step 0.18 s", "one node 3x slower"]
WHOLE = {
    "nodes": 16,
    "gpus_per_node": 4,
    "bandwidth_gbit": 25.0,
    "latency_us": 20.0,
    "step_seconds": 0.18,
    "node_slowdown": {0: 3.0},
}


def test_description_order_does_not_matter() -> None:
    for parts in itertools.permutations(PARTS):
        assert said(", ".join(parts)) == WHOLE


@pytest.mark.parametrize("between", [", ", "; ", " and ", " with ", "\n", "  "])
def test_description_separators_do_not_matter(between: str) -> None:
    assert said(between.join(PARTS)) == WHOLE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "two sites, 1 Gbit/s, 30 ms between them",
            {"nodes": 2, "bandwidth_gbit": 1.0, "latency_us": 3e4},
        ),
        (
            "3 regions x 8 GPUs, 500 Mbit/s, 80 ms apart",
            {"nodes": 3, "gpus_per_node": 8, "bandwidth_gbit": 0.5, "latency_us": 8e4},
        ),
        (
            "8 GPUs in two data centres connected by 1 gigabit per second, RTT 30 ms",
            {"nodes": 2, "gpus_per_node": 4, "bandwidth_gbit": 1.0, "latency_us": 1.5e4},
        ),
        (
            "2 sites, 4 GPUs at each site, 30 ms and 1 Gbit/sec between the sites",
            {"nodes": 2, "gpus_per_node": 4, "bandwidth_gbit": 1.0, "latency_us": 3e4},
        ),
        ("a round-trip time of 30 ms", {"latency_us": 1.5e4}),
        ("latency 30 ms round trip", {"latency_us": 1.5e4}),
        ("latency between hosts: 2 ms", {"latency_us": 2000.0}),
        ("one-way latency 2 ms", {"latency_us": 2000.0}),
        ("25 Gbit/s", {"bandwidth_gbit": 25.0}),
        ("25 Gb/s", {"bandwidth_gbit": 25.0}),
        ("25Gbps", {"bandwidth_gbit": 25.0}),
        ("100 GbE", {"bandwidth_gbit": 100.0}),
        ("3.125 GB/s", {"bandwidth_gbit": 25.0}),
        ("3 GByte/s links", {"bandwidth_gbit": 24.0}),
        ("250 Mbit/s", {"bandwidth_gbit": 0.25}),
        ("0.18 s per step", {"step_seconds": 0.18}),
        ("180 ms/step", {"step_seconds": 0.18}),
        ("a step takes 180 ms", {"step_seconds": 0.18}),
        ("step time: 2 seconds", {"step_seconds": 2.0}),
        ("0.18 s", {"step_seconds": 0.18}),
        ("20 µs", {"latency_us": 20.0}),
        ("latency of 2 ms", {"latency_us": 2000.0}),
        ("local latency 1.5 us", {"local_latency_us": 1.5}),
        ("200 Gbit/s inside a node", {"local_bandwidth_gbit": 200.0}),
        ("local 200 Gbit/s, 10 Gbit/s", {"local_bandwidth_gbit": 200.0, "bandwidth_gbit": 10.0}),
        ("memory 10 GB/s, 25 Gb/s", {"memory_gbyte": 10.0, "bandwidth_gbit": 25.0}),
        ("jitter 5%", {"jitter": 0.05}),
        ("jitter 0.05", {"jitter": 0.05}),
        ("1 host, 1 worker", {"nodes": 1, "gpus_per_node": 1}),
        ("4 GPUs per node, 3 nodes", {"nodes": 3, "gpus_per_node": 4}),
        ("an 8-node cluster with 2 GPUs each", {"nodes": 8, "gpus_per_node": 2}),
        ("two machines x8 gpus", {"nodes": 2, "gpus_per_node": 8}),
        ("64 workers on 16 hosts", {"nodes": 16, "gpus_per_node": 4}),
        ("16 hosts, 64 workers in total", {"nodes": 16, "gpus_per_node": 4}),
        ("node 2 3x slower", {"node_slowdown": {2: 3.0}}),
        ("node 3x slower", {"node_slowdown": {0: 3.0}}),
        ("node 23x slower", {"node_slowdown": {0: 23.0}}),
        ("nodes 2 and 5 are 3 times slower", {"node_slowdown": {2: 3.0, 5: 3.0}}),
        ("2 nodes 1.5x slower", {"node_slowdown": {0: 1.5, 1: 1.5}}),
        ("one node 3x slower, one node 2x slower", {"node_slowdown": {0: 3.0, 1: 2.0}}),
        ("one worker 10x slower", {"slowdown": {0: 10.0}}),
        ("GPU 7 50 % slower", {"slowdown": {7: 1.5}}),
        ("node 3 at 10 Gbit/s, 25 Gbit/s", {"links": {3: 10.0}, "bandwidth_gbit": 25.0}),
        ("25 Gbit/s, one node has a link of 1 Gbit/s", {"links": {0: 1.0}, "bandwidth_gbit": 25.0}),
    ],
)
def test_description_units_and_words_are_parsed(text: str, expected: dict[str, Any]) -> None:
    assert said(text) == expected


def test_description_examples_are_understood() -> None:
    for example in EXAMPLES:
        assert said(example)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("16 nodes, fast ethernet", "fast ethernet"),
        ("16 nodes x 4 GPUs, 25 Gbit/s, 12 monkeys", "12 monkeys"),
        ("16 nodes, one node 3x faster", "one node 3x faster"),
        ("25 furlongs", "25 furlongs"),
        ("16 nodes, -3 Gbit/s", "-3 Gbit/s"),
        ("-16 nodes", "-16 nodes"),
        ("2-4 nodes", "2-4 nodes"),
        ("16 nodes, 0,18 s", "0"),
        ("", ""),
        (", ;", ", ;"),
    ],
)
def test_unknown_description_part_is_named_with_examples(text: str, part: str) -> None:
    error = complaint("--describe", text)
    assert error.startswith("--describe: ") and f"got {part!r};" in error
    assert "one node 3x slower" in error


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (["--describe", "2 nodes, 3 hosts"], "--describe: .*'2 nodes'.*'3 hosts'"),
        (["--describe", "one node 3x slower, node 0 2x slower"], "--describe: 'node 0 2x .* 0"),
        (["--describe", "node 1 at 1 Gb/s, node 1 at 2 Gb/s"], "--describe: 'node 1 at 2 .* 1"),
        (
            ["--describe", "2 nodes, 18 ms"],
            "--describe: .*step 18 ms.*latency 18 ms.*round trip 18",
        ),
        (
            ["--describe", "2 nodes, latency 9 ms, ping 18 ms"],
            "--describe: 'ping 18 ms'.*'latency 9",
        ),
        (["--describe", "3 nodes, 64 workers in total"], "--describe: .* 3 hosts.*'64 workers"),
        (["--describe", "25 Gbit/s"], "--nodes: "),
        (["--describe", "4 nodes, 8 workers"], "--describe: '8 workers'.*4 hosts.*in total"),
        (["--describe", "8 GPUs and 4 nodes"], "--describe: '8 GPUs'.*4 hosts.*per host"),
        (["--describe", "2 nodes, 0 Gbit/s"], r"--describe: .*\bmore than 0\b"),
        (["--describe", "0 nodes"], r"--describe: .*\b1 or more\b"),
        (["--describe", "2 nodes, 1e9 Gbit/s"], r"--describe: .*\b100000\b"),
        (["--describe", "2 nodes, node 2 3x slower"], r"--describe: .*hosts from 0 to 1.*\b2\b"),
        (["--describe", "2 nodes, GPU 4 3x slower"], r"--describe: .*workers from 0 to 1.*\b4\b"),
        (["--nodes", 2, "--links", "2=1"], r"--links: .*hosts from 0 to 1.*\b2\b"),
        (["--nodes", 2, "--slowdown", "0=0.5"], r"--slowdown: .*\b0\.5\b"),
        (["--nodes", 2, "--model", "mlp"], "--model "),
        (["--node", 2], "--node: .*--nodes"),
    ],
)
def test_invalid_description_is_one_line_error(argv: list[object], cause: str) -> None:
    error = complaint(*argv)
    assert re.match(cause, error), error
    assert "\n" not in error


def test_description_and_options_give_the_same_cluster() -> None:
    text = "16 nodes x 4 GPUs, 25 Gbit/s, latency 20 us, step 0.18 s, one node 3x slower, jitter 2%"
    options = "--nodes 16 --gpus-per-node 4 --bandwidth-gbit 25 --latency-us 20 --step-seconds 0.18"
    words = simulated("--describe", text)
    typed = simulated(*options.split(), "--node-slowdown", "0=3", "--jitter", "0.02")
    assert words == typed
    assert (words.workers, words.cluster.hosts, words.compute_time) == (64, 16, 0.18)
    assert words.slowdown == dict.fromkeys(range(4), 3.0)
    hosts = [words.cluster.placed(1).host_of(rank, 65) for rank in range(65)]
    assert hosts == [0, *(worker // 4 for worker in range(64))]


def test_options_override_description() -> None:
    result = simulated("--describe", "4 nodes, 25 Gbit/s", "--nodes", 8, "--links", "7=1")
    assert (result.cluster.hosts, result.cluster.bandwidth_gbit) == (8, 25.0)
    assert result.cluster.links == {7: 1.0}


def test_undescribed_settings_are_omitted_from_file() -> None:
    options, _ = read(["--describe", "4 nodes x 2 GPUs"])
    text = rendered("test", described_sections(options))
    assert re.search(r"^# bandwidth-gbit: .*\b10\b", text, re.MULTILINE)
    assert "\nbandwidth-gbit" not in text
    assert check(text, "x").compute_time == 0.1


def test_interpretation_lists_described_settings() -> None:
    options, _ = read(
        ["--describe", "3 nodes x 2 GPUs, 10 Gb/s, node 1 3x slower, GPU 0 2x slower"]
    )
    patterns = [
        r"3 hosts\b.*\b2 workers\b.*\b6\b",
        r"10 Gbit/s\b",
        r"host 1 \(workers 2 to 3\): .*\b3\b",
        r"worker 0 \(host 0\): .*\b2\b",
    ]
    lines = list(interpretation(options))
    assert len(lines) == len(patterns)
    assert all(map(re.match, patterns, lines)), lines


def test_slowdowns_of_worker_and_host_multiply() -> None:
    result = simulated("--nodes", 2, "--node-slowdown", "1=3", "--slowdown", "1=2,0=4")
    assert result.slowdown == {0: 4.0, 1: 6.0}


def test_control_characters_in_description_do_not_alter_file() -> None:
    options = ProbeOptions(nodes=2, describe="2 nodes\n\x00[links]\r\n0 = 1")
    text = rendered(f"Described: {options.describe}", described_sections(options))
    assert check(text, "x").cluster.links == {}
