"""The table: all rows by name."""

from __future__ import annotations

from dataclasses import replace

from tests.exactness import table_data, table_loops, table_models, table_optimizers
from tests.exactness.row import Row

ISLANDS = ("ar-sgd, islands", "ar-sgd, sharded")
"""The columns with islands of two workers, whose rows equal those of ``ar-sgd``."""
NOT_ON_ISLANDS = (
    *(f"optimizer: {name}" for name in ("adafactor", "muon")),  # require whole parameters
    *(f"loop: {name}" for name in ("run.project()", "weights clamped after a step", "max_loss")),
    "loop: checkpoints within rounds",  # a member without samples records no batch
    "loop: node_sums",
)
NOT_IN: dict[str, tuple[str, ...]] = {
    "ar-sgd, sharded": (
        # FSDP refuses or cannot train these by itself.
        *(f"loss: {name}" for name in ("regularisation by parameters", "gradient penalty")),
        "sparse embedding",
        "parameter lists and a scalar",
        "strided and empty parameters",
        "channels last",
        "channels_last=True",
        "loop: hook of a parameter",
        "parameters in bfloat16 and float32",  # it adds gradients in bfloat16
        "loop: continue of one worker",  # all members of an island have to compute
        "loop: all-reduce by torch",  # refused: torch's process group is the island's
    ),
}
"""Further rows that a column does not have."""


def _with_islands(row: Row) -> Row:
    """Return the row, also with islands if it is one of ``ar-sgd``."""
    if "ar-sgd" not in row.columns or row.name in NOT_ON_ISLANDS:
        return row
    columns = [each for each in ISLANDS if row.name not in NOT_IN.get(each, ())]
    differences = dict(row.differences)
    if "ar-sgd" in differences:
        differences |= dict.fromkeys(columns, differences["ar-sgd"])
    return replace(row, columns=(*row.columns, *columns), differences=differences)


_OF_WORKERS = [
    *table_models.MODELS,
    *table_models.LOSSES,
    *table_optimizers.OPTIMIZERS,
    *table_optimizers.FORMS,
    *table_optimizers.RATES,
    *table_optimizers.ORDERLESS,
    *table_loops.LOOPS,
    *table_loops.RUNS,
]
ROWS = [*map(_with_islands, _OF_WORKERS), *table_data.DATA]
TABLE = {row.name: row for row in ROWS}
