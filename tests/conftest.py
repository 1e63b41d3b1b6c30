"""Settings for the whole suite: one thread to a process, as many processes share few cores."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes share the tests one by one; those of one slow fixture stay together."""
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
        if any(fixture[-1].scope == "module" for fixture in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
