"""What commands print: tables for people, JSON for scripts."""

import json
from collections.abc import Sequence
from typing import Any

import typer

JsonFlag = typer.Option(False, "--json", help="Print JSON for scripts instead of text.")


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, default=str, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table on stdout; cells are text, never markup."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)
