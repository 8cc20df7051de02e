"""Write the tables of the pages and of the README from docs/data/*.json; a test compares them.

python benchmarks/doc_tables.py

A page has a pair of comments where a table of docs/data/SET.json belongs:

    <!-- table: SET/ID -->
    <!-- end -->

The file has for each: `claim`, the sentence above it; `columns`, with units; `rows`; `commands`,
which made it; `measured`, the machine. `"printed": false`: no page prints the table; in a column,
its page leaves it out. A row has a cell for every column: a text, a number, null for nothing, or a
number that another table has:

    {"table": "SET/ID", "row": FIRST_CELL or [FIRST_CELLS], "column": NAME}
    {"table": "SET/ID", "of": "lowest" or "highest", "column": NAME}

A claim or a text names such a number as {SET/ID: FIRST_CELL: NAME}; FIRST_CELL may be several, as
`fresh & r3`. In place of `rows`, `from` names a table whose rows they are, in columns of the same
name or of `value`; `study` computes them from benchmarks/evidence/runs.jsonl.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
BLOCK = re.compile(r"<!-- table: ([\w/-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
NAMED = re.compile(r"\{([\w/-]+): ([^:{}]+): ([^:{}]+)\}")
WIDTH = 130
KEYS = {"id", "claim", "columns", "rows", "from", "study", "commands", "measured", "printed"}
COLUMN_KEYS = {"name", "unit", "signed", "value", "printed"}
TEXTS = {"study", "arm", "against"}
"""Values of a study that are no numbers."""

Table = dict[str, Any]


class Number(str):
    """A number with the digits that docs/data has: 0.20 stays 0.20, and 1.5e-4 stays 1.5e-4."""


def main() -> None:
    for path in pages():
        write_page(path)


def write_page(path: Path) -> None:
    """Write the tables into a page, where they differ."""
    before = path.read_text(encoding="utf-8")
    after = written(before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


def pages() -> list[Path]:
    """Return the files that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def sets() -> list[str]:
    """Return the names of the files of docs/data."""
    return sorted(path.stem for path in DATA.glob("*.json"))


@functools.cache
def tables(name: str) -> dict[str, Table]:
    """Return the tables of a set by their ids, numbers with their digits."""
    text = (DATA / f"{name}.json").read_text(encoding="utf-8")
    found = json.loads(text, parse_float=Number, parse_int=Number)
    return {table["id"]: table for table in found}


def replace_rows(name: str, table_id: str, rows: list[list[Any]]) -> None:
    """Write other rows into a set's data. A number is given as it shall be printed: Number."""
    found = tables(name)
    found[table_id]["rows"] = rows
    (DATA / f"{name}.json").write_text(source(list(found.values())), encoding="utf-8")


def source(found: list[Table]) -> str:
    """Return the text of a data file: a line for each column and each row."""
    return "[\n" + ",\n".join(map(table_source, found)) + "\n]\n"


def table_source(table: Table) -> str:
    fields = []
    for key, value in table.items():
        text = compact(value)
        if key in ("columns", "rows"):
            text = "[\n    " + ",\n    ".join(map(compact, value)) + "\n  ]"
        fields.append(f'  "{key}": {text}')
    return "{\n" + ",\n".join(fields) + "\n}"


def compact(value: Any) -> str:
    """Return JSON on one line, numbers with their digits."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(compact, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{compact(key)}: {compact(each)}' for key, each in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def written(text: str) -> str:
    """Return a page's text with every table as its data has it."""
    return BLOCK.sub(lambda match: block(match.group(1)), text)


def block(table_name: str) -> str:
    """Return one table with its claim above and its commands below."""
    table = other(table_name)
    shown = [column.get("printed", True) for column in table["columns"]]
    head = list(itertools.compress(map(heading, table["columns"]), shown))
    rows = [list(itertools.compress(row, shown)) for row in cells(table)]
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head) + "\n")
    claim = NAMED.sub(lambda match: printed(named(*match.groups())), table["claim"])
    parts = [wrapped(claim), "".join(lines)]
    parts.append(wrapped(". ".join(origin(table))))
    body = "\n".join(part for part in parts if part)
    return f"<!-- table: {table_name} -->\n{body}<!-- end -->"


def origin(table: Table) -> list[str]:
    """Return the commands of a table, and the machine with its full stop."""
    made = [f"`{command}`" for command in table.get("commands", [])]
    if len(made) > 1:
        made = [f"{', '.join(made[:-1])} and {made[-1]}"]
    if "measured" in table:
        made.append(f"{table['measured']}.")
    return made


def wrapped(text: str) -> str:
    if not text:
        return ""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def heading(column: dict[str, Any]) -> str:
    """Return a column's title with its unit."""
    if "unit" in column:
        return f"{column['name']} [{column['unit']}]"
    return str(column["name"])


def cells(table: Table) -> list[list[str]]:
    """Return the printed cells of every row."""
    signed = [column.get("signed", False) for column in table["columns"]]
    return [list(map(printed, row, signed)) for row in values(table)]


def values(table: Table) -> list[list[Any]]:
    """Return the cells of every row: Number, text or None."""
    if "study" in table:
        names = tuple(column["value"] for column in table["columns"])
        return study_rows(json.dumps(table["study"]), names)
    if "from" in table:
        columns = [column.get("value", column["name"]) for column in table["columns"]]
        return list(
            map(list, zip(*(cells_of(table["from"], each) for each in columns), strict=True))
        )
    return [[resolved(cell) for cell in row] for row in table["rows"]]


def resolved(cell: Any) -> Any:
    """Return the cell that a reference names, or the cell itself."""
    if type(cell) is str:
        return NAMED.sub(lambda match: printed(named(*match.groups())), cell)
    if not isinstance(cell, dict):
        return cell
    if "of" in cell:
        choose = {"lowest": min, "highest": max}[cell["of"]]
        found = [each for each in cells_of(cell["table"], cell["column"]) if each is not None]
        return choose(found, key=float)
    return named(cell["table"], cell["row"], cell["column"])


def named(table_name: str, first: str | list[str], column: str) -> Any:
    """Return the cell of the row of another table that begins with these."""
    keys = first.split(" & ") if isinstance(first, str) else first
    rows = values(other(table_name))
    (found,) = [
        cell
        for row, cell in zip(rows, cells_of(table_name, column), strict=True)
        if row[: len(keys)] == keys
    ]
    return found


def cells_of(table_name: str, column: str) -> list[Any]:
    """Return the cells of a column of another table."""
    table = other(table_name)
    (at,) = [at for at, each in enumerate(table["columns"]) if each["name"] == column]
    return [row[at] for row in values(table)]


def other(table_name: str) -> Table:
    set_name, _, table_id = table_name.partition("/")
    return tables(set_name)[table_id]


def printed(cell: Any, signed: bool = False) -> str:
    """Return the text of a cell: thousands with a comma, a plus where the column has a sign."""
    if cell is None:
        return ""
    if not isinstance(cell, Number):
        return str(cell)
    text = str(cell)
    large = re.fullmatch(r"(-?)(\d{4,})(\.\d+)?", cell)
    if large:
        text = f"{large[1]}{int(large[2]):,}{large[3] or ''}"
    if signed and float(cell) > 0:
        text = f"+{text}"
    return text


@functools.cache
def study_rows(study: str, names: tuple[str, ...]) -> list[list[Any]]:
    """Return the rows that are computed from the runs of a study, JSON, in the tree."""
    found = evidence_rows().rows(json.loads(study), list(names))
    return [[typed(name, text) for name, text in zip(names, row, strict=True)] for row in found]


def typed(name: str, text: str) -> Any:
    """Return a computed value: text, number, or None where it is empty."""
    if name in TEXTS:
        return text
    return Number(text.replace("e-0", "e-")) if text else None


@functools.cache
def evidence_rows() -> Any:
    """Return the module page_rows of benchmarks/evidence."""
    folder = str(ROOT / "benchmarks" / "evidence")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("page_rows")
    finally:
        sys.path.remove(folder)
        for name in ("page_rows", "run", "tables", "turn_rows"):
            sys.modules.pop(name, None)


if __name__ == "__main__":
    main()
