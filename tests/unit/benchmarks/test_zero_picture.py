"""The picture of `make zero`: a disc with a 0 for what is equal, a number for what is not."""

import json

from zero import picture
from zero.witness import PROMPT, Turn


def counted(**more):
    return Turn(**({"tokens": 10, "routes": 40, "newest": 3} | more))


def test_zeros_are_discs_and_other_counts_are_red():
    turns = {PROMPT: Turn(routes=100), 0: counted(), 1: counted(values=2)}
    drawn = picture.drawn(turns)
    assert "2 of 20 log-probabilities differ" in drawn
    assert "0 of 180" in drawn  # choices of experts, those of prompts too
    assert "6 of 20 would differ" in drawn
    assert drawn.count("<circle") == 5
    assert drawn.count('class="bad newest"') == 1


def test_late_turns_are_one_column():
    columns = picture.columns_of({number: counted() for number in (PROMPT, *range(20))})
    assert list(columns)[-2:] == ["12", "13+"]
    assert columns["13+"].tokens == 70


def test_the_page_has_the_picture_of_its_numbers():
    tables = json.loads(picture.DATA.read_text(encoding="utf-8"))
    assert picture.OUT.read_text(encoding="utf-8") == picture.drawn(picture.turns_of(tables))
