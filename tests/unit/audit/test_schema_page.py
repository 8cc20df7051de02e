"""docs/dump_schema.md lists the columns that the code reads, no more and no fewer."""

import re

from onepolicy.audit.schema import COLUMNS
from support.paths import ROOT


def test_the_page_lists_every_column_and_which_are_required():
    page = (ROOT / "docs" / "dump_schema.md").read_text(encoding="utf-8")
    table = page[page.index("| column | type |") : page.index("`onepolicy.audit.schema.write_par")]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:] if row.startswith("|")]
    listed = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(listed) == set(COLUMNS)
    required = {name for name, kind in listed.items() if "required" in kind}
    assert required == {name for name, spec in COLUMNS.items() if spec.required}
