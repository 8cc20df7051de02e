"""Breakdowns of a scored batch whose samples have two turns, and its worst tokens."""

import math

import pytest
import torch

from onepolicy.config import ObjectiveConfig
from onepolicy.divergence.breakdown import TURNS, turn_bins, turn_name
from onepolicy.measure.breakdowns import breakdowns_of, worst_tokens
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample
from support.scripted_engine import make_tokenizer

TOKENIZER = make_tokenizer()
PROMPT, FIRST, REPLY, SECOND = "12345=", "12+", "say 9", "12345."


def two_turns():
    """Return a batch in which the policy answers, reads a reply, and answers again. Its last
    characters repeat the prompt."""
    texts = [(PROMPT, None), (FIRST, 0), (REPLY, None), (SECOND, 1)]
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text, _ in texts]
    ids[-1].append(TOKENIZER.eos_token_id)
    turns = [turn for part, (_, turn) in zip(ids, texts, strict=True) for _ in part][1:]
    own = torch.tensor([turn is not None for turn in turns])
    return Sample(
        tokens=torch.tensor([each for part in ids for each in part], dtype=torch.int32),
        trainable=own,
        logp_rollout=torch.where(own, -1.0, torch.nan),
        version=torch.where(own, 0, -1).int(),
        turn=torch.tensor([-1 if turn is None else turn for turn in turns], dtype=torch.int32),
        temperature=1.0,
        reward=0.0,
        finish="stop",
    )


@pytest.fixture(scope="module")
def found():
    config = ObjectiveConfig(baseline="none", normalise="none")
    batch = pack(compute_outcomes([Group(0, (two_turns(),))], config, max_tokens=20))
    gap = torch.where(batch.turn == 1, 0.5, 0.1)
    gap[-1] = 2.0  # the end token
    scored = batch.replace(logp_old=batch.logp_rollout - gap, entropy=torch.ones(batch.num_slots))
    stop = (TOKENIZER.eos_token_id,)
    return breakdowns_of(scored, TOKENIZER, stop), worst_tokens(scored, TOKENIZER)


def test_turns_are_distinguished(found):
    rows = {row.name: row for row in found[0]["turn"]}
    tokens = {name: row.tokens for name, row in rows.items()}
    assert tokens == {"turn 1": len(FIRST), "turn 2": len(SECOND) + 1}
    assert rows["turn 1"].mean_dlogp == pytest.approx(0.1)
    assert sum(row.share for row in rows.values()) == pytest.approx(1)


def test_classes_of_sampled_tokens(found):
    """`12+`: two digits and a sign; `12345.`: three digits, then the prompt's `1234` and `2345`
    come back."""
    counts = {row.name: row.tokens for row in found[0]["class of token"]}
    assert counts == {"end": 1, "prompt echo": 2, "digits": 5, "punctuation": 2}
    k3 = {row.name: row.k3 for row in found[0]["class of token"]}
    assert k3["end"] == pytest.approx(math.exp(-2) - 1 + 2)  # the trainer is 2 nats below


def test_the_worst_token_is_shown_in_its_text(found):
    worst = found[1][0]
    assert (worst.token, worst.after) == ("<eos>", "")
    assert worst.before.endswith(REPLY + SECOND)
    assert worst.p_rollout / worst.p_trainer == pytest.approx(torch.e**2, rel=1e-4)
    assert worst.place == len(FIRST) + len(SECOND)


def test_late_turns_share_a_row():
    turn = torch.tensor([0, 7, 8, 15, 16, 511, 512, 9999])
    assert [TURNS[i] for i in turn_bins(turn).tolist()] == [0, 7, 8, 8, 16, 256, 512, 512]
    names = [turn_name(start) for start in TURNS]
    assert names[:2] == ["1", "2"]
    assert names[7:10] == ["8", "9 to 16", "17 to 32"]
    assert names[-2:] == ["257 to 512", "from 513"]
