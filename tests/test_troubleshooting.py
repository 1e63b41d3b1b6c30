"""docs/troubleshooting.md quotes messages of the code, and explains those that refer to it.

In a quoted message a word in capitals, such as NAME or N, or ``...`` stands for a value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.launch import ROOT

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
TEXT = DOCUMENT.read_text()
VALUE = "\0"
"""Stands for a value in the text of a message."""
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z0-9_]*\b|\.\.\.")
REFERENCE = "docs/troubleshooting.md"
FOREIGN = frozenset(
    {
        # Python and torch
        "AF_UNIX path too long",
        "Intel oneMKL FATAL ERROR: Cannot load",
        # Open MPI and mpi4py
        "Unable to get the current working directory",
        "Error: Unable to get the user home directory",
        "mca_base_var_init failed",
        "RuntimeError: cannot load MPI library",
        "There are not enough slots available in the system to satisfy the N slots",
        "prterun has detected an attempt to run as root.",
        "MPI_ERR_INTERN: internal error",
        "Error in MPI_Isend(...) (-12)",
        "At least one pair of MPI processes are unable to reach each other for MPI communications.",
        "An invalid value was given for btl_tcp_if_include",
        "Unknown interface name",
        "At least one of the requested hosts is not included in the current allocation.",
        "Sorry! ... find-available:not-valid",
        "mca_pml_ob1_recv_frag_callback_match",
        "PRTE has lost communication with a remote daemon",
        "prterun detected that one or more processes exited with non-zero status",
        "Exit code: 75",
        # Slurm and PMI
        "no-pmix-but",
        "OMPI was not built with SLURM's PMI support",
        "srun: error: Invalid MPI type 'pmix_v9', --mpi=list for acceptable types",
        "Runtime environment uses unsupported PMI version PMIx. Aborting.",
        "slurmstepd: error: *** JOB N ON NODE CANCELLED AT ... DUE TO JOB REQUEUE ***",
        "srun: error: Node failure on NODE",
        # Python, torch, the system
        "operator torchvision::nms does not exist",
        "torch._dynamo.exc.Unsupported: Skip calling",
        "Tried to step N times. The total number of steps is M",
        "You must initialize the accelerate state by calling either",
        "[rank R] Traceback",
        "Segmentation fault",
        "User defined signal 2",
    }
)
"""Messages of other programs, which the code does not contain."""


def quoted() -> list[str]:
    """Return the messages that head an entry of the document."""
    return re.findall(r"\*\*`(.+?)`\*\*", TEXT)


def template(node: ast.expr) -> str | None:
    """Return the text of an expression, with `VALUE` for what is only known when it runs."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = template(node.left), template(node.right)
        return None if both == (None, None) else "".join(each or VALUE for each in both)
    return None


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of the expressions in ``node``, each in full; no docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = template(node) if isinstance(node, ast.expr) else None
    if text is not None:
        yield text
    for child in ast.iter_child_nodes(node):
        is_part = text is not None and not isinstance(child, ast.FormattedValue)
        if not is_part:
            yield from texts(child)


def messages() -> Iterator[str]:
    """Yield the texts in the package's code, and each batch script as a whole."""
    for path in (ROOT / "aladdin_mpi").rglob("*.py"):
        yield from texts(ast.parse(path.read_text()))
    for path in (ROOT / "slurm").glob("*.s*"):
        text = re.sub(r'" \\\s*"', " ", path.read_text())
        yield re.sub(r"\$\{[^}]*\}|\$\w+|\$\([^)]*\)", VALUE, text)


MESSAGES = sorted(set(messages()))


def pattern(message: str) -> re.Pattern[str]:
    """Return a pattern for a quoted message; its placeholders match any value."""
    literal = [re.escape(part) for part in PLACEHOLDER.split(message)]
    return re.compile(r"[^\n]{1,80}?".join(literal))


def test_no_foreign_message_is_unused() -> None:
    assert sorted(FOREIGN - set(quoted())) == []


@pytest.mark.parametrize("message", sorted(set(quoted()) - FOREIGN))
def test_quoted_message_is_in_the_code(message: str) -> None:
    words = re.findall(r"[a-z]{2,}", PLACEHOLDER.sub("", message))
    assert len(words) >= 2, "too short to be found in the code"
    assert any(pattern(message).search(text) for text in MESSAGES)


@pytest.mark.parametrize("text", [text for text in MESSAGES if REFERENCE in text])
def test_message_that_refers_to_the_document_has_an_entry(text: str) -> None:
    assert any(pattern(message).search(text) for message in set(quoted()) - FOREIGN)
    for heading in re.findall(rf'{re.escape(REFERENCE)}, "([^"]+)"', text):
        assert re.search(rf"^#+ {re.escape(heading)}$", TEXT, re.M)


def test_entry_has_an_explanation() -> None:
    entries = re.findall(r"^(\*\*.+)\n\n?(.*)$", TEXT, re.M)
    assert [entry for entry, explanation in entries if not explanation.strip()] == []
