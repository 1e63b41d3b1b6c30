"""Compare training with plain torch for a table of models, losses, optimizers, data and loops.

Each row of the table (``table.py``) is trained over MPI by the algorithms whose result is
deterministic, and in plain torch on the same samples of all workers. The parameters must be equal
to 1e-6, relative to the largest of them, unless the row names the section of the documentation
that explains the difference; then they must differ, and equal the result described there.

The samples of each worker's batches are recorded: samples contain their own number. Plain torch
replays these rounds (``plain.py``) from its own data set in a separate loop. A column is an
algorithm with a number of workers (``row.py``). One job runs all rows of a column in sequence, and
is restarted after a row that ends it (``jobs.py``, ``program.py``).

To add a row, add a ``Row`` to one of the lists that ``table.py`` combines:

- ``model``, ``loss``, ``samples`` and ``feed`` define the training. Keep it tiny. Samples contain
  their number; if it is not the last item of a batch, ``numbers`` returns it.
- ``optimizer`` is used by plain torch and, unless ``arguments`` is set, by the project.
- ``train`` is the loop over ``training.batches()`` or ``training.epochs()``; ``replay`` is the same
  in plain torch, on ``plain.rounds``. The defaults are a loop of forward, backward and step.
- ``differences`` and ``documented`` declare a documented difference.
- ``faults`` declares a known fault: once the row passes, the test fails; then remove the entry.

``pytest tests/exactness -k "ar-sgd and lstm"`` runs one row in one column.
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
"""Minimum change by training, relative to the largest parameter: else nothing is tested."""
LONG = ("ar-sgd, islands",)
"""Columns in ``make test-long`` only; "ar-sgd, sharded" has islands too."""
APART = 10
"""Multiple of the tolerance by which a documented difference has to exceed rounding."""


def _cases() -> list[object]:
    return [
        pytest.param(row, column, id=f"{column}: {row.name}", marks=_marks(row, column))
        for column in COLUMNS
        for row in ROWS
        if column in row.columns
    ]


def _marks(row: Row, column: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.long] if column in LONG else []
    if column in row.faults:
        marks.append(pytest.mark.xfail(reason=row.faults[column], strict=True))
    return marks


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Outcome]]:
    """Run the selected rows of a column when its first test requests it."""
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


@pytest.mark.sample(36)
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
