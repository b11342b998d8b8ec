"""Add benchmarks/ to the site, results and notes as pages, scripts as files; mark words of code.

The links in docs/ and benchmarks/ fit the repository. On the site, docs/ is the top folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SUFFIXES = (".csv", ".md", ".py")
LONGEST_WORD = 40  # characters of code in a column


def on_files(files: Files, *, config: Any) -> None:
    """Add the files of benchmarks/."""
    for path in sorted(BENCHMARKS.rglob("*")):
        if path.suffix in SUFFIXES:
            name = path.relative_to(BENCHMARKS.parent).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite the links between docs/ and benchmarks/ for the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r'([("](?:\.\./)+)docs/', r"\1", markdown)
    return re.sub(r"\(\.\./((?:\.\./)*benchmarks/)", r"(\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the words of inline code, so that in a table it breaks between them alone."""
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{mark_words(code[1])}</code>", html)


def mark_words(code: str) -> str:
    """Wrap each word in a span. A word that is too long for a column may break after each `_`."""
    return " ".join(
        f"<span>{word}</span>" if len(word) <= LONGEST_WORD else word.replace("_", "_<wbr>")
        for word in code.split(" ")
    )
