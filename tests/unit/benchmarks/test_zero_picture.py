"""The picture of `make zero`: a disc with a 0 for what is equal, a number for what is not."""

import json

import torch
from zero import picture, witness
from zero.witness import PROMPT, Counts, Turn

from onepolicy.support.trace import SupportTrace
from support.objective_batches import batch


def counted(**more):
    return Turn(**({"tokens": 10, "routes": 40, "newest": 3, "free": 5, "older": 4} | more))


def test_only_a_token_with_a_choice_can_differ(monkeypatch):
    """Five slots: a prompt, two sure tokens and two with a choice, one of each of older weights."""
    monkeypatch.setattr(witness, "_compare_routes", lambda own: (torch.zeros(5),) * 2)
    logp = torch.tensor([0, 0, 0, -0.5, -0.25])
    own = batch([5], torch.tensor([False, True, True, True, True]), [0.0], logp_rollout=logp)
    own = own.replace(
        logp_old=logp,
        version=torch.tensor([0, 0, 1, 0, 1]),
        support=SupportTrace.from_sets([[], [0], [0], [0, 1], [0, 2]]),
    )
    counts = Counts(weights=["a", "b"], rewards=[0.5])
    counts.add(own, torch.tensor([0, 0, 0, -0.75, -0.25]), step=1)
    expected = Turn(tokens=4, values=0, newest=1, free=2, older=1)
    assert counts.turns[0] == expected
    assert counts.is_zero
    words = (
        "0 of 4 log-probabilities differ between what was sampled and what is trained, 2 of them "
    )
    assert counts.line().startswith(f"{words}with a choice; 0 requests")
    assert "1 log-probabilities would differ, of 1 older ones with a choice" in counts.describe()
    rows = picture.tables_of(counts)["line"]["rows"]
    assert ["control: older ones with a choice, under the newest weights", 1, 1] in rows


def test_zeros_are_discs_and_other_counts_are_red():
    turns = {PROMPT: Turn(routes=100), 0: counted(), 1: counted(values=2)}
    drawn = picture.drawn(turns)
    assert "2 of 20 log-probabilities differ" in drawn
    assert "0 of 180" in drawn  # choices of experts, those of prompts too
    assert "6 of 8 older with a choice would differ" in drawn
    assert "20, with a choice 10" in drawn
    assert drawn.count("<circle") == 5
    assert drawn.count('class="bad newest"') == 1


def test_late_turns_are_one_column():
    columns = picture.columns_of({number: counted() for number in (PROMPT, *range(20))})
    assert list(columns)[-2:] == ["12", "13+"]
    assert columns["13+"].tokens == 70


def test_the_page_has_the_picture_of_its_numbers():
    tables = json.loads(picture.DATA.read_text(encoding="utf-8"))
    assert picture.OUT.read_text(encoding="utf-8") == picture.drawn(picture.turns_of(tables))
