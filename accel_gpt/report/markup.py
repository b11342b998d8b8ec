"""HTML in which nothing of a run can be more than text."""

import html
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit


class Markup(str):
    """Text that is HTML already; all other texts are escaped."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A value as HTML; what no terminal or browser should get is left out."""
    if isinstance(value, Markup):
        return value
    clean = "".join(c for c in str(value) if c.isprintable() or c in "\n\t")
    return Markup(html.escape(clean))


def tag(name: str, *content: object, **attributes: str) -> Markup:
    """An element; `class_` is written class."""
    given = "".join(f' {key.rstrip("_")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{''.join(map(text, content))}</{name}>")


def link(url: str, content: object) -> Markup:
    """A link to another site, or text alone where `url` is none."""
    if urlsplit(url).scheme != "https":
        return text(content)
    return tag("a", content, href=url, rel="noreferrer")


def table(
    rows: Iterable[tuple[object, Sequence[object]]], head: Sequence[object] = (), kind: str = ""
) -> Markup:
    """A table with a name before each row; a `Markup` cell that is a whole td stays as it is."""
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))) if head else ""
    body = [tag("tr", tag("th", name, scope="row"), *map(cell, cells)) for name, cells in rows]
    return tag("table", Markup(top), tag("tbody", *body), class_=kind)


def cell(value: object) -> Markup:
    """One cell of a table."""
    if isinstance(value, Markup) and value.startswith("<td"):
        return value
    return tag("td", value)


def section(title: str, name: str, *content: object) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag("h2", title, id=name), *content)
