"""Check error messages by the arguments and values that they name, not by sentences."""

from __future__ import annotations

import re


def naming(*names: str) -> str:
    """Return a pattern for ``pytest.raises(match=)`` that requires all of ``names``."""
    return "(?s)" + "".join(f"(?=.*{re.escape(name)})" for name in names)


def check_names(text: str, *names: str) -> None:
    """Check that ``text`` contains all of ``names``."""
    missing = [name for name in names if name not in text]
    assert not missing, f"missing {missing} in: {text}"
