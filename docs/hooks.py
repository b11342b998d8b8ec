"""Add benchmarks/ to the site: results and notes as pages, scripts as files.

The links in docs/ and benchmarks/ are those of the repository; on the site, docs/ is the top folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SUFFIXES = (".csv", ".md", ".py")


def on_files(files: Files, *, config: Any) -> None:
    """Add the files of benchmarks/."""
    for path in sorted(BENCHMARKS.rglob("*")):
        if path.suffix in SUFFIXES:
            name = path.relative_to(BENCHMARKS.parent).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Change the links between docs/ and benchmarks/ to those of the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r'([("](?:\.\./)+)docs/', r"\1", markdown)
    return re.sub(r"\(\.\./((?:\.\./)*benchmarks/)", r"(\1", markdown)
