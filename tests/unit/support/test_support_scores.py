"""Log-probabilities over a support against a dense softmax with -inf outside, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onepolicy
from onepolicy.config import UsageError
from onepolicy.support.checks import (
    SupportError,
    check_certain,
    check_displaced,
    check_supports,
    displaced_mass,
)
from onepolicy.support.score import log_probs, support_logits, support_scores
from onepolicy.support.trace import SupportTrace


def drawn(slots, vocabulary, seed):
    """Return logits, sampled tokens and the sets that they are in."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(slots, vocabulary, generator=generator) * 3
    kept = torch.rand(slots, vocabulary, generator=generator) < 0.3
    tokens = torch.randint(vocabulary, (slots,), generator=generator)
    kept[torch.arange(slots), tokens] = True
    return logits, tokens, kept


def dense(logits, tokens, kept, temperature):
    """Return the log-probabilities and their mean's gradient by a table of the whole vocabulary."""
    exact = logits.double().requires_grad_()
    table = torch.log_softmax((exact / temperature).masked_fill(~kept, -math.inf), -1)
    logp = table.gather(-1, tokens[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logp.mean(), exact)
    entropy = -(table.exp() * table.masked_fill(~kept, 0.0)).sum(-1)
    return logp, gradient, entropy


@given(st.integers(1, 20), st.integers(2, 60), st.integers(0, 10_000), st.sampled_from([0.5, 1, 2]))
def test_the_dense_softmax_is_the_same(slots, vocabulary, seed, temperature):
    logits, tokens, kept = drawn(slots, vocabulary, seed)
    support = SupportTrace.from_mask(kept)
    ours = logits.clone().requires_grad_()
    logp = log_probs(ours, tokens, support=support, temperature=temperature)
    (gradient,) = torch.autograd.grad(logp.mean(), ours)
    expected, expected_gradient, entropy = dense(logits, tokens, kept, temperature)
    torch.testing.assert_close(logp.double(), expected, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-6, rtol=0)
    assert not gradient[~kept].any()
    found = support_scores(logits / temperature, tokens, support)
    torch.testing.assert_close(found.entropy.double(), entropy, atol=5e-6, rtol=0)


def test_by_hand():
    """Of four equal logits two are kept, so the token has a probability of one half."""
    support = SupportTrace.from_sets([[1, 3], [0]])
    logits = torch.zeros(2, 4)
    assert log_probs(logits, torch.tensor([3, 0]), support=support).exp().tolist() == [0.5, 1.0]
    whole = log_probs(logits, torch.tensor([3, 0]))
    assert whole.exp().tolist() == [0.25, 0.25]
    found = support_scores(logits, torch.tensor([3, 0]), support)
    assert found.entropy.tolist() == pytest.approx([math.log(2), 0.0])


def test_what_prime_rl_scores_over_the_whole_vocabulary_in_silence():
    """Ids and counts as prime-rl ships them: a count of 0, and a set without its label."""
    logits, tokens = torch.zeros(3, 8), torch.tensor([4, 2, 7])
    whole = SupportTrace.from_counts(torch.tensor([4, 1, 2, 7, 3]), torch.tensor([2, 1, 2]))
    assert log_probs(logits, tokens, support=whole).exp().tolist() == [0.5, 1.0, 0.5]
    hole = SupportTrace.from_counts(torch.tensor([4, 1, 7, 3]), torch.tensor([2, 0, 2]))
    with pytest.raises(SupportError, match=r"1 of 3 sampled tokens have no support, .* slot 1"):
        log_probs(logits, tokens, support=hole)
    other = SupportTrace.from_counts(torch.tensor([4, 1, 2, 6, 3]), torch.tensor([2, 1, 2]))
    with pytest.raises(SupportError, match="token 7 in slot 2, whose set has 2 other tokens"):
        log_probs(logits, tokens, support=other)


def test_slots_that_are_not_scored_need_no_set():
    logits, tokens, kept = drawn(5, 9, 0)
    support = SupportTrace.from_mask(kept)
    mask = torch.tensor([False, True, True, False, True])
    cut = SupportTrace.concat([SupportTrace.missing(1), support.at(slice(1, None))])
    found = log_probs(logits, tokens, support=cut, mask=mask)
    assert found[~mask].tolist() == [0.0, 0.0]
    assert torch.equal(found[mask], log_probs(logits, tokens, support=support)[mask])


def test_temperatures_of_slots():
    logits, tokens, kept = drawn(4, 9, 1)
    support = SupportTrace.from_mask(kept)
    temperatures = torch.tensor([0.5, 1.0, 0.5, 2.0])
    found = log_probs(logits, tokens, support=support, temperature=temperatures)
    for slot, temperature in enumerate(temperatures.tolist()):
        one = slice(slot, slot + 1)
        alone = log_probs(
            logits[one], tokens[one], support=support.at(one), temperature=temperature
        )
        assert float(found[slot]) == pytest.approx(float(alone[0]), abs=1e-6)


def test_a_token_that_the_head_rules_out():
    """-inf inside the set: probability 0, no part of the entropy, and no NaN in the gradient."""
    logits = torch.tensor([[1.0, -math.inf, 1.0, 5.0]], requires_grad=True)
    support = SupportTrace.from_sets([[0, 1, 2]])
    found = support_scores(logits, torch.tensor([2]), support)
    assert found.logp.item() == pytest.approx(math.log(0.5))
    assert found.entropy.item() == pytest.approx(math.log(2))
    gradients = torch.autograd.grad(found.logp.sum() + found.entropy.sum(), logits)
    assert torch.allclose(gradients[0], torch.tensor([[-0.5, 0.0, 0.5, 0.0]]))


def test_the_table_of_the_engine():
    logits, _, kept = drawn(3, 7, 2)
    table = support_logits(logits, SupportTrace.from_mask(kept))
    assert torch.equal(table, logits.masked_fill(~kept, -math.inf))


def test_a_set_without_its_token_or_without_tokens_is_never_filled_in():
    logits, tokens, kept = drawn(6, 9, 3)
    support = SupportTrace.from_mask(kept)
    holes = SupportTrace.concat([support.at(slice(0, 5)), SupportTrace.missing(1)])
    with pytest.raises(SupportError, match=r"1 of 6 sampled tokens have no support, .* slot 5"):
        log_probs(logits, tokens, support=holes)
    other = tokens.clone()
    other[2] = int((~kept[2]).nonzero()[0, 0])
    with pytest.raises(SupportError, match=f"1 of 6 .* token {int(other[2])} in slot 2"):
        log_probs(logits, other, support=support)
    assert support_scores(logits, other, support).logp.isnan().tolist() == [
        slot == 2 for slot in range(6)
    ]


@pytest.mark.parametrize(("shift", "words"), [(1, "before"), (-1, "after")])
def test_a_shift_by_one_slot_is_named(shift, words):
    _, tokens, kept = drawn(40, 60, 4)
    sets = SupportTrace.from_mask(kept.roll(shift, 0))
    mask = torch.ones(40, dtype=torch.bool)
    mask[[0, -1]] = False
    with pytest.raises(SupportError, match=f"sets are those of the token {words}: 100.0%"):
        check_supports(sets, tokens, mask, name="batch")
    torch.manual_seed(0)
    unrelated = SupportTrace.from_mask(kept[torch.randperm(40)])
    with pytest.raises(SupportError, match="another request"):
        check_supports(unrelated, tokens, mask, name="batch")


def test_displaced_mass_by_hand():
    """A set of the likeliest tokens displaces none, whatever top-p was. The set {3} leaves out all
    that is likelier; {0, 3} has token 0 itself."""
    logps = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 4).log()
    sets = SupportTrace.from_sets([[0], [0, 1, 2], [3], [0, 3]])
    assert displaced_mass(logps, sets).tolist() == pytest.approx([0.0, 0.0, 0.9, 0.5])


def test_many_slots_are_compared_in_equal_steps():
    logps = torch.tensor([[0.9, 0.1]]).log().expand(1000, 2)
    found = displaced_mass(logps, SupportTrace.from_sets([[0]] * 500 + [[1]] * 500))
    seen = found[~found.isnan()]
    assert len(seen) == 250
    assert seen.mean() == pytest.approx(0.45)


def test_samples_of_wrong_sets_stop():
    """The second of two samples, or a batch whose samples are all too short to say."""
    segment = torch.arange(2).repeat_interleave(40)
    mask = torch.ones(80, dtype=torch.bool)
    displaced = torch.where(segment == 1, 0.6, 0.01)
    versions = torch.zeros(len(mask), dtype=torch.int32)
    with pytest.raises(SupportError, match=r"supports of 1 samples, the first is sample 1, .* 60%"):
        check_displaced(displaced, segment, mask, versions, now=0)
    check_displaced(displaced * 0.8, segment, mask, versions, now=0)
    check_displaced(displaced, segment, segment == 0, versions, now=0)
    short = torch.full((10,), 0.9)
    check_displaced(short, torch.zeros(10, dtype=torch.int64), mask[:10], versions[:10], now=0)
    with pytest.raises(SupportError, match=r"supports of 20 samples, .* sampled 3 updates ago"):
        check_displaced(torch.full((20,), 0.9), torch.arange(20), mask[:20], versions[:20], now=3)


def test_a_lone_token_that_the_engine_was_not_certain_of():
    support = SupportTrace.from_sets([[4], [4, 5], [4], []])
    mask = torch.tensor([True, True, True, False])
    check_certain(support, torch.tensor([0.0, -2.0, -1e-6, -9.0]), mask, name="batch")
    with pytest.raises(SupportError, match=r"1 supports have .* of -0.5, the first in slot 2"):
        check_certain(support, torch.tensor([0.0, -2.0, -0.5, 0.0]), mask, name="batch")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(1, 2, 3)}, r"logits is float32 \[1, 2, 3\]"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"tokens is int64 \[3\]"),
        ({"mask": torch.ones(2)}, r"mask is float32 \[2\]"),
        ({"support": SupportTrace.missing(3)}, "support has 3 slots, logits 2"),
        (
            {"support": SupportTrace.from_sets([[0, 4], [0]])},
            r"ids: 0 to 4, but the model's tokens are 0\.\.3",
        ),
        ({"support": SupportTrace(torch.tensor([-1, 0]).int(), torch.tensor([0, 1, 2]))}, "-1 to"),
        (
            {"support": SupportTrace(torch.tensor([0]).int(), torch.tensor([0, 2, 1]))},
            "rise from 0",
        ),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": torch.ones(3)}, r"temperature is float32 \[3\]"),
        ({"temperature": torch.tensor(-1.0)}, r"temperature is -1\.0 at slot 0"),
        ({"temperature": torch.tensor([1.0, 0.0])}, r"temperature is 0\.0 at slot 1"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    arguments = {"logits": torch.zeros(2, 4), "tokens": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(UsageError, match=words):
        onepolicy.log_probs(**arguments | change)
