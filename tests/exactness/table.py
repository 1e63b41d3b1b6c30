"""The table: all rows by name."""

from __future__ import annotations

from tests.exactness import table_data, table_loops, table_models, table_optimizers

ROWS = [
    *table_models.MODELS,
    *table_models.LOSSES,
    *table_optimizers.OPTIMIZERS,
    *table_optimizers.FORMS,
    *table_optimizers.RATES,
    *table_optimizers.ORDERLESS,
    *table_data.DATA,
    *table_loops.LOOPS,
    *table_loops.RUNS,
]
TABLE = {row.name: row for row in ROWS}
