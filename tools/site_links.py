"""A hook of mkdocs: files of the repository that the guides link to become part of the site.

The guides link to files outside docs/, such as a benchmark's results or an example, with the
relative paths that work in the repository. The site gets these files below ``repository/``:
Markdown as pages, everything else as it is. Links to folders become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "repository"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md")
"""In the site whether or not a guide links to them."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to, directly or through another one."""
    queue = [Path(config.docs_dir, file.src_uri) for file in files.documentation_pages()]
    queue += [ROOT / name for name in PAGES]
    added: set[Path] = set()
    while queue:
        source = queue.pop()
        if _is_outside(source, config) and source not in added:
            added.add(source)
            uri = f"{PREFIX}/{source.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(source)))
        if source.suffix == ".md":
            links = LINK.findall(source.read_text(encoding="utf-8"))
            targets = ((source.parent / link).resolve() for _, _, link, _ in links)
            queue += [
                each
                for each in targets
                if each.is_file() and each not in added and _is_outside(each, config)
            ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the page's links to files outside docs/ to their copies in the site.

    Code that looks like a link is left alone, since it does not name a file.
    """
    uri = PurePosixPath(page.file.src_uri)
    is_copy = uri.parts[0] == PREFIX
    source = ROOT / uri.relative_to(PREFIX) if is_copy else Path(config.docs_dir, uri)

    def moved(match: re.Match[str]) -> str:
        mark, text, link, anchor = match.groups("")
        target = (source.parent / link).resolve()
        if not target.is_file():
            return text if target.is_dir() else match[0]
        if _is_outside(target, config):
            to = f"{PREFIX}/{target.relative_to(ROOT).as_posix()}"
        else:
            to = target.relative_to(config.docs_dir).as_posix()
        return f"{mark}[{text}]({os.path.relpath(to, uri.parent)}{anchor})"

    return LINK.sub(moved, markdown)


def _is_outside(path: Path, config: MkDocsConfig) -> bool:
    return path.is_relative_to(ROOT) and not path.is_relative_to(config.docs_dir)
