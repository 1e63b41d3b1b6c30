"""An extension of griffe, which reads docstrings for the site: Sphinx markup becomes Markdown.

``:meth:`run.step``` turns into code, and ``::`` at the end of a paragraph into ``:``.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":[a-z]+:`[~.!]*([^`]+)`")
LITERAL_BLOCK = re.compile(r"::(?=\n\n? )")


class DocstringMarkup(Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of ``obj`` in place."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = LITERAL_BLOCK.sub(":", text)
