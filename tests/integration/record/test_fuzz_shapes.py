"""Dumps that are framed right and shaped oddly, under odd names: each is refused, or judged and
shown without a word that a terminal or a browser would obey."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from onepolicy.audit.report import write_report
from onepolicy.audit.run import audit, run_audit
from onepolicy.config import UsageError
from onepolicy.console import Console
from onepolicy.record.read import read_dump
from support.audit_dumps import check_blocks, rewrite
from support.fuzz import SLOW, Damage, survives
from support.odd_dumps import FILE_NAMES, MAKERS

INPUTS = [
    pytest.param(50, id="few"),
    pytest.param(2000, id="fast", marks=pytest.mark.full),
    pytest.param(SLOW, id="slow", marks=pytest.mark.slow),
]


def shown(path: Path, mapping: dict[str, str]) -> str:
    text = io.StringIO()
    run_audit([path], mapping, None, Console(file=text, width=80))
    return text.getvalue()


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage", "ignore:.*nested")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("suffix", MAKERS)
def test_odd_dumps(tmp_path: Path, suffix: str, inputs: int) -> None:
    """Every thirtieth dump that is taken gets its page too."""
    pages = 0

    def make(damage: Damage) -> tuple[Path, bytes, str | None]:
        made = MAKERS[suffix](damage), damage.random.choice(FILE_NAMES)
        given = damage.random.choice((None, None, None, "mask", "\x1b[2J", ""))
        return tmp_path / (made[1] + suffix), made[0], given

    def read(given: tuple[Path, bytes, str | None]) -> str:
        nonlocal pages
        path, data, theirs = given
        mapping = {} if theirs is None else {"mask": theirs}
        rewrite(path, data)
        try:
            check_blocks(list(read_dump(path, mapping)))
            pages += 1
            if pages % 30 == 1:
                write_report(tmp_path / "out", [audit(path, mapping)])
                assert "<x1>" not in (tmp_path / "out" / "audit.html").read_text("utf-8")
            return shown(path, mapping)
        except UsageError as error:
            check(str(error))
            raise
        finally:
            path.unlink()

    def check(text: str) -> None:
        assert text.replace("\n", "").isprintable()

    survives(f"shape {suffix}", inputs, make, read, check, UsageError)
