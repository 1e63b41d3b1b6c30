"""Write docs/reference/options.md from the options' declarations.

Run ``python tools/reference.py``; ``make docs`` does so before it builds the site, and
``tests/test_reference.py`` fails if the page in the repository is out of date.
"""

from __future__ import annotations

from pathlib import Path

from aladdin_mpi.options.fields import Leaf, leaves
from aladdin_mpi.options.reader import option_groups
from aladdin_mpi.options.run import SimulateOptions, TrainOptions

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "options.md"
START = """# Options

<!-- Written by tools/reference.py from the declarations in aladdin_mpi/options. -->

All options of `aladdin_mpi.train` and `aladdin_mpi.simulate`, grouped as in `--help-all`. Values \
of options with `...` are separated by commas or spaces.

In a TOML file (`--config`), keys are the same names without the leading dashes; options of an \
algorithm, of `dgc`, of `powersgd` and of the cluster are in tables of that name. In \
`DataParallel`, names have underscores, and the options of an algorithm are a dict: \
`aladdin={"pi": 8}`.
"""
SIMULATED = "Options marked with * exist only in the simulation."


def page() -> str:
    """Return the page as Markdown."""
    trained = {leaf.flag for leaf in leaves(TrainOptions).values()}
    sections = [f"{START}\n{SIMULATED}\n"]
    for title, (about, group) in option_groups(SimulateOptions).items():
        rows = "\n".join(_row(leaf, leaf.flag not in trained) for leaf in group)
        about = f"{about}\n\n" if about else ""
        sections.append(
            f"## {title}\n\n{about}| option | meaning | default |\n| --- | --- | --- |\n{rows}\n"
        )
    return "\n".join(sections)


def _row(leaf: Leaf, is_simulated: bool) -> str:
    values = f"{leaf.metavar} ..." if leaf.is_list or leaf.is_mapping else leaf.metavar
    flag = f"--[no-]{leaf.flag[2:]}" if leaf.is_bool else f"{leaf.flag} {values}"
    cells = (f"`{flag}`" + " *" * is_simulated, leaf.meaning, leaf.default_text)
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    """Return ``text`` for a table: stars and bars outside code would be markup."""
    return (
        text.replace("|", "\\|").replace("*.", "\\*.").replace("*=", "\\*=").replace(".*", ".\\*")
    )


if __name__ == "__main__":
    PAGE.write_text(page())
