"""Figures are rounded to their significant digits."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from aladdin_mpi.hooks.recorder import Metrics, read_metrics, rounded


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("samples_per_second", 58880000.000137225, "58880000.0"),
        ("samples_per_second", 1256.6746652624522, "1256.675"),
        ("samples_per_second", 0.0012345678912, "0.001234568"),
        ("bytes_sent_per_step", 340097.06666666665, "340097.1"),
        ("seconds", 4.5739761919999795, "4.573976"),
        ("seconds", 86400.12345678, "86400.123457"),
        ("seconds", 3.2123456e-07, "3.212e-07"),
        ("epoch", 0.534446764091858, "0.534446764"),
        ("loss", 0.1 + 0.2, "0.3"),
        ("model_variance", 3.435206337494428e-14, "3.43520634e-14"),
        ("my_clock", 1732386000.1234567, "1732386000.123457"),
        ("samples", 123456789012345, "123456789012345"),
        ("loss", None, "null"),
        ("loss", 0.0, "0.0"),
        ("test_accuracy", 1.0, "1.0"),
        ("what", "died", '"died"'),
    ],
)
def test_rounded_value_has_the_digits_of_its_figure(name: str, value: Any, text: str) -> None:
    assert json.dumps(rounded(value, name)) == text
    assert json.dumps(rounded(rounded(value, name), name)) == text


def test_rounding_keeps_the_shape_of_nested_values() -> None:
    tree = {"failures": [{"rank": 3, "seconds": 1.23456789}], "adsp": {"commits": (5, 5)}}
    expected = {"failures": [{"rank": 3, "seconds": 1.234568}], "adsp": {"commits": [5, 5]}}
    assert rounded(tree) == expected
    assert math.isnan(rounded({"loss": math.nan})["loss"])


def test_rounding_keeps_neighbouring_fp32_values_distinct() -> None:
    values = np.float32(2.277582) + np.arange(64) * np.spacing(np.float32(2.277582))
    read = [rounded(float(value), "loss") for value in values.astype(np.float32)]
    assert [np.float32(value) for value in read] == list(values.astype(np.float32))


def test_metrics_in_memory_equal_those_in_the_file(tmp_path: Any) -> None:
    """A resumed run, which reads the file, therefore has the lines of the uninterrupted one."""
    metrics = Metrics(tmp_path)
    metrics.open(0)
    metrics.append("train", {"samples": 64, "seconds": 1 / 3, "samples_per_second": 1e9 / 7})
    metrics.close()
    assert metrics.lines == read_metrics(tmp_path)
    assert '"seconds": 0.333333, "samples_per_second": 142857143.0}' in metrics.path.read_text()
