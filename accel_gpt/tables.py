"""Text tables with aligned columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *columns: str, gap: int = 2) -> str:
    """Format `rows` of cells as lines; an empty row is an empty line.

    Each of `columns` is `<` or `>`, its alignment, and a minimum width: `<12`.
    """
    widths = [
        max(int(column[1:] or 0), *(len(row[i]) for row in rows if row))
        for i, column in enumerate(columns)
    ]
    specs = [f"{column[0]}{width}" for column, width in zip(columns, widths, strict=True)]
    lines = (
        (" " * gap).join(f"{cell:{spec}}" for cell, spec in zip(row, specs, strict=True)).rstrip()
        if row
        else ""
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)
