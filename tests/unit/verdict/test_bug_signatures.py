"""Each bug is named by the log-probabilities it leaves. Plain mismatch of any size is never
accused."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.verdict.bug_signatures import Diagnosis, diagnose, diagnose_batch
from onepolicy.verdict.scored_tokens import CAUSES
from support.examples import examples
from support.token_batches import batch_with

SEQUENCES, LENGTH, VOCABULARY = 16, 40, 60
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


@dataclass
class World:
    """Logits of two engines at every slot, sampled from the rollout engine's softmax."""

    logits: Tensor  # [S, T, V] trainer
    logits_rollout: Tensor

    def sample(self, seed: int, temperature: float = 1.0, top: int = VOCABULARY) -> Tensor:
        p = kept_by_top(self.logits_rollout / temperature, top).softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(p.flatten(0, 1), 1, generator=generator).reshape(p.shape[:2])

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of trainer and rollout engine."""
        return logp(self.logits, tokens), logp(self.logits_rollout, tokens)


def world(seed: int, noise: float = 0.05, spread: float = 3.0) -> World:
    """Make a world. `spread` differs from slot to slot, as peaked and open positions do."""
    g = torch.Generator().manual_seed(seed)
    scale = spread * torch.rand(SEQUENCES, LENGTH, 1, generator=g) + 0.5
    logits = torch.randn(SEQUENCES, LENGTH, VOCABULARY, generator=g) * scale
    return World(logits + noise * torch.randn(logits.shape, generator=g), logits)


def kept_by_top(logits: Tensor, top: int) -> Tensor:
    return logits.masked_fill(logits < logits.topk(top).values[..., -1:], -math.inf)


def random_mask(g: torch.Generator, masked: float) -> Tensor:
    mask = torch.rand(MASK.shape, generator=g) >= masked
    mask[0] = True
    return mask


def logp(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy().flatten()


SEGMENT = torch.arange(SEQUENCES).repeat_interleave(LENGTH)
MASK = torch.ones(SEQUENCES * LENGTH, dtype=torch.bool)


def check(old: Tensor, rollout: Tensor, mask: Tensor = MASK, **more: Tensor) -> Diagnosis:
    return diagnose(old.flatten(), rollout.flatten(), mask, segment=SEGMENT, **more)


def causes(diagnosis: Diagnosis) -> list[str]:
    return [finding.cause for finding in diagnosis.findings]


SEED, MASKED, NEWEST = st.integers(0, 10**6), st.floats(0, 0.9), st.floats(0.01, 1)


@given(SEED, st.floats(0, 1.0), st.floats(0, 4), MASKED, NEWEST, st.floats(0, 0.5))
@examples(40)
@example(2838, 0, 0, 0.75, 1, 0.5)  # the engine is equal to the bit, the last weights are not
def test_plain_mismatch_and_all_fields_of_a_clean_run_accuse_it_of_nothing(
    seed, noise, spread, masked, newest, drift
) -> None:
    """The noise is on either side. The fields are weight versions without an effect, and a previous
    policy farther from the rollout than the present one.

    Noise beside logits as small as itself is a temperature: one side has the other's, flattened.
    """
    w = world(seed, min(noise, spread / 2), spread)
    if seed % 2:
        w = World(w.logits_rollout, w.logits)
    g = torch.Generator().manual_seed(seed)
    tokens, mask = w.sample(seed), random_mask(g, masked)
    known = {"version": 5 + (torch.rand(MASK.shape, generator=g) < newest).long()}
    before = w.logits + drift * torch.randn(w.logits.shape, generator=g)
    known["logp_previous"] = logp(before, tokens).flatten()
    for fields in ({}, known):
        found = check(*w.score(tokens), mask, entropy=entropy(w.logits), **fields)
        assert causes(found) == []


def noisy(g: torch.Generator, kl: float, jumps: float, masked: float) -> tuple[Tensor, ...]:
    """Return (old, rollout, mask) of Gaussian noise, and of tokens that one engine finds
    impossible."""
    rollout = -torch.rand(MASK.shape, generator=g) * 6
    log_ratio = torch.randn(MASK.shape, generator=g) * math.sqrt(2 * kl) - kl
    log_ratio = torch.where(torch.rand(MASK.shape, generator=g) < jumps, -6.0, log_ratio)
    return (rollout + log_ratio).clamp(max=-1e-4), rollout, random_mask(g, masked)


# of a KL above 0.5 the clamp is what moves E[rho]
@given(SEED, st.floats(1e-6, 0.5), st.floats(0, 0.01), MASKED, NEWEST)
@examples(40)
def test_gaussian_and_heavy_tailed_noise_is_never_accused(seed, kl, jumps, masked, newest) -> None:
    """The dumps also have a few tokens that one engine finds impossible, as quantised rollouts
    have."""
    g = torch.Generator().manual_seed(seed)
    old, rollout, mask = noisy(g, kl, jumps, masked)
    known = {"version": (torch.rand(MASK.shape, generator=g) < newest).long()}
    known["entropy"] = (-rollout * 2 * torch.rand(MASK.shape, generator=g)).abs()
    assert causes(check(old, rollout, mask, version=known["version"])) == []
    # this entropy is noise
    assert set(causes(check(old, rollout, mask, **known))) <= {"support"}


@pytest.mark.slow
def test_at_most_one_of_3000_noisy_dumps_has_unrelated_rows() -> None:
    accused = []
    for seed in range(3000):
        g = torch.Generator().manual_seed(seed)
        kl, jumps, masked = (most * float(torch.rand((), generator=g)) for most in (0.5, 0.01, 0.9))
        found = check(*noisy(g, kl, jumps, masked))
        if found.findings or "follow" in " ".join(found.marks):
            accused.append((seed, found.text()))
    assert len(accused) <= 1, accused


def test_the_same_weights_and_kernels_are_clean() -> None:
    w = world(0, noise=0)
    values = logp(w.logits, w.sample(0))
    diagnosis = check(values, values, entropy=entropy(w.logits))
    assert not diagnosis.bug
    assert diagnosis.gap == 0
    assert "it is mismatch" in diagnosis.text()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_token_shift(seed: int) -> None:
    w = world(seed)
    old, rollout = w.score(w.sample(seed))
    for by, word in ((1, "previous"), (-1, "next")):
        diagnosis = check(old.roll(by, 1), rollout)
        assert causes(diagnosis) == ["shift"]
        assert word in diagnosis.text()


def raw_is_first(found) -> bool:
    text = found.text()
    assert str(found) == text
    return text.index("log-probabilities are raw") < text.index("engine's temperature is about")


@pytest.mark.parametrize("seed", SEEDS)
def test_temperature(seed: int, subtests) -> None:
    """The rollout samples and reports at a temperature that the trainer does not use; and the other
    way round."""
    w = world(seed)
    for temperature in (0.5, 0.7, 1.5):
        with subtests.test(temperature=temperature):
            tokens = w.sample(seed, temperature)
            sides = logp(w.logits, tokens), logp(w.logits_rollout, tokens, temperature)
            found = check(*sides, entropy=entropy(w.logits))
            assert causes(found) == ["temperature"]
            assert f"{temperature:.1f}" in found.text() or temperature == 1.5
            assert raw_is_first(found) == (temperature > 1)
            # not told apart from mismatch without the entropy
            assert "temperature" not in causes(check(*sides))
            tokens = w.sample(seed)
            sides = logp(w.logits, tokens, temperature), logp(w.logits_rollout, tokens)
            found = check(*sides, entropy=entropy(w.logits / temperature))
            assert causes(found) == ["temperature"]
            assert raw_is_first(found) == (temperature < 1)  # as raw values of both at 0.7 are


def test_a_scored_step_is_its_trainer_against_its_engine() -> None:
    w = world(0)
    tokens = w.sample(0, 0.5)
    batch = replace(
        batch_with([LENGTH] * SEQUENCES),
        target_ids=tokens.flatten(),
        logp_old=logp(w.logits, tokens).flatten(),
        logp_rollout=logp(w.logits_rollout, tokens, 0.5).flatten(),
        entropy=entropy(w.logits),
    )
    found = diagnose_batch(batch)
    assert causes(found) == ["temperature"]
    assert "the engine's temperature is about 0.5" in found.text()


@pytest.mark.parametrize("seed", SEEDS)
def test_support(seed: int, subtests) -> None:
    """The engine uses top-k, reported as renormalised over the kept tokens, or (seen with the
    entropy) as if nothing had been cut."""
    w = world(seed)
    for top in (3, 8, 12):
        with subtests.test(top=top):
            tokens = w.sample(seed, top=top)
            kept = logp(kept_by_top(w.logits_rollout, top), tokens)
            found = check(logp(w.logits, tokens), kept)
            assert causes(found) == ["support"]
            assert "log-probabilities are processed: renormalised over a part" in found.text()
            if top < 10:
                plain = w.score(tokens)
                found = check(*plain, entropy=entropy(w.logits))
                assert causes(found) == ["support"]
                assert "the log-probabilities are not: they are raw" in found.text()
                assert causes(check(*plain)) == []  # the ratio is right then, and cannot show it
    for temperature in (0.7, 1.3):
        with subtests.test(temperature=temperature):
            tokens = w.sample(seed, temperature, top=8)
            kept = logp(kept_by_top(w.logits_rollout, 8), tokens, temperature)
            found = check(logp(w.logits, tokens), kept, entropy=entropy(w.logits))
            if temperature < 1:
                assert causes(found) == ["temperature", "support"]
            else:  # flatter and cut: no one temperature explains it
                assert found.marks or causes(found) == ["support"]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_token_left_by_top_p(seed: int) -> None:
    """Its log-probability is truly 0, not a missing value. Zeros that are filled in beside it are
    still named."""
    w = world(seed)
    p, order = w.logits_rollout.softmax(-1).sort(descending=True)
    p = p.masked_fill(p.cumsum(-1) - p >= 0.7, 0.0)
    kept = torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))
    g = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(kept.flatten(0, 1), 1, generator=g).reshape(SEQUENCES, LENGTH)
    old, rollout = logp(w.logits, tokens), logp(kept.log(), tokens)
    assert ((rollout == 0) & (old < -0.1)).double().mean() > 0.01
    assert causes(check(old, rollout)) == ["support"]
    some = torch.rand(rollout.shape, generator=g) < 0.1
    assert causes(check(old, rollout.masked_fill(some, 0.0))) == ["fill", "support"]


def test_sampling_causes_say_raw_and_processed_and_name_no_engines_setting() -> None:
    """The dump may be of a trainer whose engine has no setting `logprobs_mode`."""
    for cause in ("temperature", "support"):
        assert re.search(r"\braw\b.*\bprocessed ones", CAUSES[cause])
        assert "logprobs_mode" not in CAUSES[cause]


def test_fill() -> None:
    w = world(0)
    old, rollout = w.score(w.sample(0))
    some = torch.rand(rollout.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    zeros = check(old, rollout.masked_fill(some, 0.0))
    assert causes(zeros) == ["fill"]
    assert "exactly 0 on one side" in zeros.text()
    nans = check(old, rollout.masked_fill(some, math.nan))
    assert causes(nans) == ["fill"]
    assert "NaN" in nans.text()
    assert causes(check(old, rollout.exp())) == ["not_log"]
    assert causes(check(old.masked_fill(some, 0.0), rollout)) == ["fill"]
    # masked: not our business
    assert causes(check(old, rollout.masked_fill(some, math.nan), ~some.flatten())) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_retokenised(seed: int) -> None:
    """From the middle of half of the sequences on, the trainer scores other tokens than were
    sampled."""
    w = world(seed)
    sampled, g = w.sample(seed), torch.Generator().manual_seed(seed)
    trained = sampled.clone()
    other = torch.randint(1, VOCABULARY, trained.shape, generator=g)
    trained[::2, 20:] = (trained + other)[::2, 20:] % VOCABULARY
    old, rollout = logp(w.logits, trained), logp(w.logits_rollout, sampled)
    assert causes(check(old, rollout)) == ["retokenised"]
    scored, asked = trained.flatten(), sampled.flatten()
    known = check(old, rollout, tokens=scored, tokens_rollout=asked)
    assert causes(known) == ["retokenised"]
    assert "first at slot 20;" in known.text()
    assert causes(check(old, old + 0.001, tokens=asked, tokens_rollout=asked)) == []


def test_stale_weights() -> None:
    w = world(0, noise=0.02)
    moved = w.logits + 0.5 * torch.randn(w.logits.shape, generator=torch.Generator().manual_seed(1))
    tokens = w.sample(0)
    previous, rollout = w.score(tokens)
    old = logp(moved, tokens)
    assert causes(check(old, rollout, logp_previous=previous.flatten())) == ["stale"]
    assert causes(check(previous, rollout, logp_previous=old.flatten())) == []
    half = torch.arange(SEQUENCES) < 8
    mixed = torch.where(half[:, None], previous, old)
    version = half.long().repeat_interleave(LENGTH) + 6
    assert causes(check(mixed, rollout, version=version)) == ["stale"]
    assert causes(check(previous, rollout, version=version)) == []


def certain_world(seed: int, noise: float) -> World:
    """Make a world of a trained policy: of 40 tokens of a row two are uncertain."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(SEQUENCES, LENGTH, VOCABULARY, generator=g)
    margin = 8 + 4 * torch.rand(SEQUENCES, LENGTH, generator=g)
    margin[:, ::20] = 2.0
    logits[..., 0] += margin
    return World(logits + noise * torch.randn(logits.shape, generator=g), logits)


def test_certain_tokens_show_the_rows_that_other_weights_sampled() -> None:
    """Without a version, and with too few uncertain tokens in a row to compare rows by them."""
    w = certain_world(0, noise=0.02)
    g = torch.Generator().manual_seed(1)
    older = w.logits_rollout + torch.randn(w.logits.shape, generator=g)
    far = (torch.arange(SEQUENCES) % 3 == 0)[:, None, None]
    mixed = World(w.logits, torch.where(far, older, w.logits_rollout))
    found = check(*mixed.score(mixed.sample(0)))
    assert causes(found) == ["stale"]
    assert "6 of 16 rows" in found.text()
    assert causes(check(*w.score(w.sample(0)))) == []


def test_a_base_shows_in_certain_tokens() -> None:
    w = certain_world(0, noise=0.02)
    old, rollout = w.score(w.sample(0))
    found = check(old, rollout / math.log(10), entropy=entropy(w.logits))
    assert causes(found) == ["scale"]
    assert "base 10" in found.text()


@pytest.mark.parametrize("since", [0, 10])
def test_weights_that_came_late_to_some_requests_are_named_by_the_previous_ones(since) -> None:
    """From a token on, and in half of the rows: less than half of the slots."""
    w = world(0, noise=0.02)
    g = torch.Generator().manual_seed(1)
    older = w.logits_rollout + 0.5 * torch.randn(w.logits.shape, generator=g)
    late = (torch.arange(SEQUENCES) % 2 == 0)[:, None] & (torch.arange(LENGTH) >= since)
    mixed = World(w.logits, torch.where(late[..., None], older, w.logits_rollout))
    tokens = mixed.sample(0)
    previous = logp(older, tokens).flatten()
    found = check(*mixed.score(tokens), logp_previous=previous)
    assert causes(found) == ["stale"]
    assert "took the last weight update late" in found.text()
    drifted = logp(w.logits + 0.05 * torch.randn(w.logits.shape, generator=g), tokens).flatten()
    assert "late" not in check(*w.score(tokens), logp_previous=drifted).text()


def test_a_diagnosis_without_entropy_does_not_say_that_a_gap_is_mismatch() -> None:
    """At another temperature: with the entropy it is named, without it nothing can be."""
    w = world(0, noise=0.02)
    tokens = w.sample(0, 0.7)
    old, rollout = logp(w.logits, tokens), logp(w.logits_rollout, tokens, 0.7)
    unclear = check(old, rollout)
    assert unclear.findings == ()
    assert "so it is mismatch" not in unclear.text()
    assert "another temperature" in unclear.text().splitlines()[-1]
    assert unclear.not_given == ("entropy", "version", "logp_previous", "logp_base")
    h = entropy(w.logits)
    assert causes(check(old, rollout, entropy=h)) == ["temperature"]
    sound = check(*w.score(w.sample(0)), entropy=h)
    assert "so it is mismatch" in sound.text()
    assert "not looked for: stale weights by version (version)" in sound.text()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_quiet_row_accuses_no_other(seed: int) -> None:
    """An engine that adds noise when it serves several requests serves its last request alone."""
    noisy, quiet = world(seed, noise=0.3), world(seed, noise=0.01)
    tokens = noisy.sample(seed)
    old, rollout = noisy.score(tokens)
    old[-1] = logp(quiet.logits, tokens)[-1]
    assert causes(check(old, rollout)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_two_or_three_causes_at_once(seed: int, subtests) -> None:
    """The causes are weights that the engine did not take, another temperature, and a shift of the
    trainer's record."""
    w = world(seed, noise=0.02)
    g = torch.Generator().manual_seed(seed)
    older = w.logits_rollout + 0.7 * torch.randn(w.logits.shape, generator=g)
    half = (torch.arange(SEQUENCES) < 8)[:, None, None]
    version = torch.where(half[:, 0], 6, 7).expand(SEQUENCES, LENGTH).flatten()
    engines = {"version": torch.where(half, older, w.logits_rollout), "previous": older}
    engines["fresh"] = w.logits_rollout
    entropies = entropy(w.logits).reshape(SEQUENCES, LENGTH)
    for (how, engine), temperature, by in product(engines.items(), [0.7, 1.4], [0, 1, -1]):
        tokens = World(w.logits, engine).sample(seed, temperature)
        before = {"logp_previous": logp(older, tokens).roll(by, 1).flatten()}
        known = {"version": {"version": version}, "previous": before, "fresh": {}}[how]
        wanted = [*["shift"] * abs(by), *["stale"] * (how != "fresh"), "temperature"]
        sides = logp(w.logits, tokens).roll(by, 1), logp(engine, tokens, temperature)
        with subtests.test(how=how, temperature=temperature, by=by):
            found = check(*sides, entropy=entropies.roll(by, 1).flatten(), **known)
            assert causes(found) == wanted, found.text()
            factor = float(found.findings[-1].evidence.split("about ")[1].split()[0])
            assert factor == pytest.approx(temperature, abs=0.15)
            aligned = check(*sides, entropy=entropies.flatten(), **known)
            assert causes(aligned) == wanted  # entropy in step with the rollout


def test_an_empty_mask_is_refused_and_few_slots_are_not_judged() -> None:
    with pytest.raises(UsageError, match="selects none"):
        check(torch.zeros(SEQUENCES, LENGTH), torch.zeros(SEQUENCES, LENGTH), ~MASK)
    few = MASK.clone()
    few[20:] = False
    assert not check(-torch.rand(SEQUENCES, LENGTH), -torch.rand(SEQUENCES, LENGTH) * 5, few).bug
