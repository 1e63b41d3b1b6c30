"""Links between documents have targets, and lists of options are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aladdin_mpi.options.run import RESUME_FIELDS
from tests.launch import ROOT

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub creates them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_have_targets(document: Path) -> None:
    broken = []
    for link in LINK.findall(without_code(document.read_text())):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_guide_lists_all_options_that_a_resumed_run_may_change() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    listed = re.search("You can change only these options:\n\n`(.*)`\n", text)
    assert listed is not None
    names = {f"--{name.replace('_', '-')}" for name in RESUME_FIELDS - {"join", "resume"}}
    assert listed[1].split() == sorted(names)
