"""The audit's page in headless Chromium: every figure is drawn, no script fails, nothing is
loaded."""

from __future__ import annotations

import pytest

from onepolicy.audit.report import write_report
from onepolicy.audit.run import audit
from support.audit_dumps import gaussian_rows, write_jsonl
from support.browser import opened


@pytest.mark.full
@pytest.mark.process
def test_two_dumps_in_a_browser(tmp_path) -> None:
    rows = []
    for step in range(20):
        gap = (1e-4, 0.2)[step >= 10]
        rows += gaussian_rows(gap, rows=2, seed=step, step=step, reward=float(step))
    paths = [write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", rows[:20])]
    report = write_report(tmp_path / "out", [audit(path, {}) for path in paths])[1]
    page = report.read_text(encoding="utf-8")
    with opened(page, tmp_path / "browser", width=500) as tab:
        drawn = tab.drawn()
    assert "data-errors" not in drawn.roots["html"]
    assert drawn.roots["body"]["data-figures"] == "drawn"
    assert drawn.roots["html"]["data-loaded"] == ""
    assert int(drawn.roots["html"]["data-overflow"] or "1") <= 0
    pictures = [name for name in drawn.marks if name.startswith(("rows_", "scatter_"))]
    assert len(pictures) == 4
    others = {name: marks for name, marks in drawn.marks.items() if name not in pictures}
    lines = {name: marks.get("js-line", 0) for name, marks in others.items()}
    assert set(lines) == {"f_tau", "k3", "f2", "reward"}
    assert min(lines.values()) >= 1
