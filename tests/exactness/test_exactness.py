"""Train as plain torch does: a table of models, losses, optimizers, data and loops.

Each row of the table (``table.py``) is trained over MPI by the algorithms whose result is
determined, and in plain torch on the same samples, of all workers together. The parameters must be
equal to 1e-6, relative to the largest of them, or the row names the section of the documentation
that says why they are not; then they must differ, and equal what that section says.

Which samples each worker's batches held is recorded: samples contain their own number. Plain torch
replays these rounds (``plain.py``), from its own data set, in a loop of its own. A column is an
algorithm with a number of workers (``row.py``). One job runs all rows of a column one after the
other, and is begun again behind a row that ends it (``jobs.py``, ``program.py``).

To add a row, add a ``Row`` to one of the lists that ``table.py`` puts together:

- ``model``, ``loss``, ``samples`` and ``feed``: what is trained. Keep it tiny. Samples hold their
  number; where it is not the last item of a batch, ``numbers`` returns it.
- ``optimizer`` is plain torch's and, unless ``arguments`` says otherwise, the project's.
- ``train`` is the loop over ``training.batches()`` or ``training.epochs()``; ``replay`` is the same
  in plain torch, on ``plain.rounds``. The defaults are a loop of forward, backward and step.
- ``differences`` and ``documented`` for a documented difference.
- ``faults`` for a known fault: the test fails as soon as the row passes; remove the entry then.

``pytest tests/exactness -k "ar-sgd and lstm"`` runs that row in that column alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.exactness import plain
from tests.exactness.jobs import Outcome, run_column
from tests.exactness.row import COLUMNS, Row
from tests.exactness.table import ROWS, TABLE
from tests.launch import ROOT, needs
from tests.test_documents import anchors

MOVED = 1e-3
"""The least change of a parameter in training, relative to the largest: else nothing is tested."""
APART = 10
"""Tolerances by which a documented difference has to exceed rounding."""


def _cases() -> list[object]:
    return [
        pytest.param(
            row,
            column,
            id=f"{column}: {row.name}",
            marks=[pytest.mark.xfail(reason=row.faults[column], strict=True)]
            if column in row.faults
            else [],
        )
        for column in COLUMNS
        for row in ROWS
        if column in row.columns
    ]


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Outcome]]:
    """Run a column when the first of its tests asks for it: the rows that were selected."""
    kept: dict[str, dict[str, Outcome]] = {}
    chosen: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(params.get("row"), Row) and "column" in params:
            chosen[params["column"]].append(params["row"].name)

    def of(column: str) -> dict[str, Outcome]:
        if column not in kept:
            kept[column] = run_column(column, chosen[column], tmp_path_factory.mktemp("column"))
        return kept[column]

    return of


@needs("openmpi")
@pytest.mark.slow
@pytest.mark.timeout(600)  # the first test of a column waits for the whole column
@pytest.mark.parametrize(("row", "column"), _cases())
def test_row_trains_as_plain_torch(
    row: Row, column: str, outcomes: Callable[[str], dict[str, Outcome]]
) -> None:
    outcome, tolerance = outcomes(column)[row.name], row.tolerance
    assert outcome.error is None, outcome.error
    _check_samples(row, column, outcome)
    seen = len(outcome.workers), outcome.rounds, outcome.epochs
    before, expected = plain.train(row, row.replay, *seen)
    assert plain.distance(expected, before) > max(MOVED, 2 * tolerance)
    result = [plain.decoded(report["parameters"], before) for report in outcome.reports]
    distances = [plain.distance(each, expected) for each in result]
    if column not in row.differences:
        assert max(distances) <= tolerance
        return
    assert min(distances) > APART * tolerance, "the documented difference is none any more"
    if row.documented is not None:
        _, expected = plain.train(row, row.documented, *seen)
        distances = [plain.distance(each, expected) for each in result]
        assert max(distances) <= tolerance


def _check_samples(row: Row, column: str, outcome: Outcome) -> None:
    assert len(outcome.workers) == COLUMNS[column].workers
    counts = Counter(number for each in outcome.rounds for batch in each for number in batch)
    if row.is_even:
        every = [counts[number] for number in range(len(row.samples()))]
        assert max(every) - min(every) <= 1, f"how often each sample was seen: {every}"
    if row.check is not None:
        row.check(outcome.rounds)


@pytest.mark.parametrize("row", [row for row in ROWS if row.differences], ids=lambda row: row.name)
def test_row_differences_are_documented(row: Row) -> None:
    for section in set(row.differences.values()):
        page, _, anchor = section.partition("#")
        document = ROOT / "docs" / page
        assert document.exists()
        assert anchor in anchors(document)


def test_row_names_are_unique() -> None:
    assert len(TABLE) == len(ROWS)
