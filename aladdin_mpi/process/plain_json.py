"""JSON as its standard has it (RFC 8259), which knows neither NaN nor infinities.

Python writes and reads both all the same, and most other programs refuse such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


def written(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON, with null in the place of every number that is not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def read(text: str | bytes) -> Any:
    """What :func:`written` has written. Of numbers that are not finite, in older files, None.

    Raises:
        ValueError: it is no JSON.
    """
    return json.loads(text, parse_constant=lambda _: None)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
