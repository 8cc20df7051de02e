"""The audit's page in headless Chromium: every figure is drawn, no script fails, nothing is
loaded."""

from __future__ import annotations

from onepolicy.audit.report import write_report
from onepolicy.audit.run import audit
from support.audit_dumps import gaussian_rows, write_jsonl
from support.browser import opened


def test_two_dumps_in_a_browser(tmp_path) -> None:
    rows = [
        row
        for step in range(20)
        for row in gaussian_rows(
            1e-4 if step < 10 else 0.2, rows=2, seed=step, step=step, reward=float(step)
        )
    ]
    paths = [write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", rows[:20])]
    page = write_report(tmp_path / "out", [audit(path, {}) for path in paths])[1].read_text(
        encoding="utf-8"
    )
    with opened(page, tmp_path / "browser", width=500) as tab:
        drawn = tab.drawn()
    assert "data-errors" not in drawn.roots["html"]
    assert drawn.roots["body"]["data-figures"] == "drawn"
    assert drawn.roots["html"]["data-loaded"] == ""
    assert int(drawn.roots["html"]["data-overflow"] or "1") <= 0
    pictures = [name for name in drawn.marks if name.startswith("rows_")]
    assert len(pictures) == 2
    lines = {
        name: counts.get("js-line", 0)
        for name, counts in drawn.marks.items()
        if name not in pictures
    }
    assert lines == dict.fromkeys(
        ("log_ratio", "f_tau", "k3", "f2", "reward"), 4
    )  # two curves, and their legend
