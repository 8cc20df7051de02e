"""The tables of the Evidence pages and of the README: written from data, a number a cell."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import doc_tables
import pytest
import yaml

from support.paths import ROOT

NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
EVIDENCE = [
    next(iter(entry.values())).removesuffix(".md")
    for part in yaml.safe_load(NAV[NAV.index("\nnav:\n") :])["nav"][1:]
    for entry in part.get("Evidence", [])
]
WRITTEN = re.compile(r"<!-- [\w ]+: written by .*?<!-- end of ", re.DOTALL)
"""A table that another script writes from data in the tree, and another test compares."""
NUMBER = r"[-+~<>]{0,2}\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
sets = pytest.mark.parametrize("name", doc_tables.sets())
PRINTED = "".join(path.read_text(encoding="utf-8") for path in doc_tables.pages())


@functools.cache
def values_of(name: str) -> dict[str, list[list[Any]]]:
    """Return the cells of every table of a set by the table's id."""
    return {at: doc_tables.values(table) for at, table in doc_tables.tables(name).items()}


def text_of(page: str) -> str:
    """Return the text of README or of a page of docs."""
    path = ROOT / "README.md" if page == "README" else ROOT / "docs" / f"{page}.md"
    return path.read_text(encoding="utf-8")


def texts_in(rows: list[list[Any]]) -> list[str]:
    return [cell for row in rows for cell in row if type(cell) is str]


def words(cell: str) -> list[str]:
    """Return the words of three letters and more of a cell, outside of code."""
    return re.findall(r"[^\W\d_]{3,}", re.sub(r"`[^`]*`", "", cell))


def has_measured_numbers(cell: str) -> bool:
    """Return whether a cell is a number or several, with units at most."""
    plain = re.sub(r"`[^`]*`", "", cell)
    return bool(re.search(r"\b\d", plain)) and not words(plain)


def has_several_numbers(cell: str) -> bool:
    """Return whether a cell has more than one number: 0.1 → 0.3, 0.5 ± 0.1, 2 [1, 3], 18 / 0."""
    plain = re.sub(r"`[^`]*`|\"[^\"]*\"", "", cell)
    joined = rf"{NUMBER}%?\s*(?:→|±|;|/|\[|\()\s*{NUMBER}"
    several = has_measured_numbers(plain) and len(re.findall(NUMBER, plain)) > 1
    return several or bool(re.search(joined, plain))


def table_cells(text: str) -> list[str]:
    """Return the cells below the heads of all tables of a text."""
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    rows = [line.strip() for line in lines if line.lstrip().startswith("|")]
    heads = {i - 1 for i, row in enumerate(rows) if re.fullmatch(r"[|\s:-]+", row)}
    return [
        cell.strip()
        for i, row in enumerate(rows)
        if i not in heads and i - 1 not in heads
        for cell in re.split(r"(?<!\\)\|", row.strip("|"))
    ]


def test_what_counts_as_several_numbers() -> None:
    for cell in (
        "0.1 → 0.3",
        "0.5 ± 0.1",
        "2.0 [1, 3]",
        "18 / 0",
        "95 to 229",
        "7 (21)",
        "0.1, 2%",
    ):
        assert has_several_numbers(cell), cell
    for cell in (
        "0.1",
        "-3e-4",
        "",
        "3 layers, 1 of 8 experts",
        "`--lengths 16 64`",
        "9 to 16, each",
    ):
        assert not has_several_numbers(cell), cell


@pytest.mark.parametrize("path", doc_tables.pages(), ids=lambda path: path.stem)
def test_the_page_has_the_tables_of_its_data(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == doc_tables.written(text), "run: python benchmarks/doc_tables.py"


@sets
def test_a_table_is_on_one_page_or_says_that_it_is_on_none(name: str) -> None:
    for table_id, table in doc_tables.tables(name).items():
        found = PRINTED.count(f"<!-- table: {name}/{table_id} -->")
        assert found == table.get("printed", True), table_id


@pytest.mark.parametrize("page", ["README", *sorted(EVIDENCE)])
def test_numbers_of_evidence_stand_in_such_tables(page: str) -> None:
    text = text_of(page)
    cells = table_cells(WRITTEN.sub("", doc_tables.BLOCK.sub("", text)))
    assert [cell for cell in cells if has_measured_numbers(cell)] == []


@sets
def test_a_cell_has_one_number(name: str) -> None:
    for table_id, rows in values_of(name).items():
        assert list(filter(has_several_numbers, texts_in(rows))) == [], table_id


@sets
def test_a_column_is_of_numbers_or_of_texts(name: str) -> None:
    for table_id, rows in values_of(name).items():
        columns = doc_tables.tables(name)[table_id]["columns"]
        for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
            assert len({type(cell) for cell in cells if cell is not None}) <= 1, (table_id, column)
            if "unit" in column or "signed" in column:
                numbers = (isinstance(cell, doc_tables.Number | None) for cell in cells)
                assert all(numbers), (table_id, column)


@sets
def test_a_table_says_what_it_shows_and_which_command_made_it(name: str) -> None:
    for table_id, table in doc_tables.tables(name).items():
        assert set(table) <= doc_tables.KEYS, table_id
        assert all(set(column) <= doc_tables.COLUMN_KEYS for column in table["columns"]), table_id
        names = {column["name"] for column in table["columns"]}
        if name != "README":  # docs/evidence.md has the commands of its numbers
            assert table.get("commands") or names & {"command", "test"}, table_id
            assert re.match(r"\*\*.+\*\*", table["claim"]), table_id


def test_the_readme_has_five_rows() -> None:
    assert len(doc_tables.values(doc_tables.tables("README")["results"])) == 5


def test_the_readme_types_no_result_of_the_study() -> None:
    """Its p-values and counts of runs stand in the claim, as references to the study's tables."""
    text = text_of("README")
    found = r"\bp = \d|\d+ fail\b|with replay \d"
    typed = re.sub(r"!\[.*?\]", "", doc_tables.BLOCK.sub("", text))  # but for a picture's text
    assert re.findall(found, typed) == []
    claim = doc_tables.tables("README")["results"]["claim"]
    assert re.findall(found, claim) == []
    assert len(re.findall(found, " ".join(doc_tables.block("README/results").split()))) > 5


def test_the_readme_counts_the_seeds_of_the_demonstration() -> None:
    rows = doc_tables.values(doc_tables.tables("evidence")["real-reward"])
    names = [column["name"] for column in doc_tables.tables("evidence")["real-reward"]["columns"]]
    found = [dict(zip(names, map(float, row), strict=True)) for row in rows]
    words = ("none", "one", "two", "three", "four", "five")
    more, less, lower = (
        words[sum(map(holds, found))]
        for holds in (
            lambda row: row["low"] > 0,
            lambda row: row["high"] < 0,
            lambda row: row["held-out with"] < row["held-out without"],
        )
    )
    said = (
        f"replay earned more on {more} of {len(rows)} seeds, less on {less}; held-out accuracy "
        f"ended lower on {lower}."
    )
    readme = " ".join(text_of("README").split())
    assert said in readme


def tables_by_section(text: str) -> dict[str, str]:
    """Return the tables of each section of a page, by the section's anchor: those that it prints,
    and those of docs/data that it names."""
    found = {}
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0].lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        named = [
            doc_tables.block(f"{name}/{table_id}")
            for name, table_id in re.findall(r"`(\w+)/([\w-]+)`", section)
            if name in doc_tables.sets() and table_id in doc_tables.tables(name)
        ]
        printed = [match[0] for match in doc_tables.BLOCK.finditer(section)]
        found[anchor] = "\n".join([*printed, *named])
    return found


def missing_numbers(verdict: str, tables: str) -> list[str]:
    """Return the numbers of a verdict that stand in none of the tables, but for those of a rule."""
    missing = []
    for number in re.findall(rf"(?<![\w.-]){NUMBER}%?", re.sub(r"asks for [\d.]+", "", verdict)):
        share = number.strip("%,+~<>")
        ways = [share]
        if number.endswith("%"):
            ways.append(f"{float(share) / 100:.3g}")
        if not any(re.search(rf"(?<![\d.]){re.escape(way)}(?!\d)", tables) for way in ways):
            missing.append(number)
    return missing


def test_the_verdicts_of_the_evidence_have_their_numbers_in_tables() -> None:
    text = text_of("evidence")
    sections = tables_by_section(text)
    appendix = tables_by_section(text_of("evidence_tables"))
    head = text.index("| claim | verdict |")
    rows = text[head : text.index("\n\n", head)].splitlines()[2:]
    assert len(rows) > 20
    for row in rows:
        _, verdict, where = (cell.strip() for cell in row.strip("|").split("|"))
        anchors = re.findall(r"#([\w-]+)\)", where) or [*sections, *appendix]
        tables = "\n".join(each.get(at, "") for at in anchors for each in (sections, appendix))
        assert missing_numbers(verdict, tables) == [], row
    assert missing_numbers("0.245 lower on 97% of 12", "| 0.245 | 0.97 | 120 |") == ["12"]


@sets
def test_the_data_are_plain_json_with_a_row_a_line(name: str) -> None:
    text = (doc_tables.DATA / f"{name}.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert len({table["id"] for table in found}) == len(found)
    assert text == doc_tables.source(list(doc_tables.tables(name).values()))


def test_a_number_keeps_its_digits() -> None:
    numbers = [doc_tables.Number(text) for text in ("0.20", "26624", "-1.5e-4", "1234.50")]
    assert list(map(doc_tables.printed, numbers)) == ["0.20", "26,624", "-1.5e-4", "1,234.50"]
    assert doc_tables.printed(numbers[0], signed=True) == "+0.20"
    assert doc_tables.heading({"name": "a step", "unit": "s"}) == "a step [s]"


def test_a_column_that_is_not_printed_stays_in_the_data() -> None:
    (head,) = re.findall(
        r"^\| rollouts .*", doc_tables.block("quantised_measured/falls"), re.MULTILINE
    )
    assert head == "| rollouts | method | fell back | held-out, last |"
    rows = doc_tables.values(doc_tables.tables("quantised_measured")["falls"])
    assert rows[0][2:6] == ["5", "0", "0.029", "0.047"]


def test_a_table_takes_numbers_of_another() -> None:
    cell = {"table": "on_policy_proof/exact", "row": "on-policy", "column": "that differ"}
    assert doc_tables.resolved(cell) == "0"
    highest = {"table": "plan_accuracy/memory-ranks", "of": "highest", "column": "off by"}
    assert doc_tables.resolved(highest) == "1.8"
    assert (
        doc_tables.named(
            "gym/warm-ups", "8 layers, 400 steps, `mistakes=0.2 mistakes_from=0.7`", "greedy"
        )
        == "0.98"
    )
    with pytest.raises(ValueError, match="unpack"):
        doc_tables.named("gym/warm-ups", "another", "greedy")
