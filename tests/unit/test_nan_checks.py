"""A check that compares numbers does not pass on NaN, nor on a bound that is infinite."""

import asyncio
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from onepolicy.config import TrainingError, UsageError
from onepolicy.config.rules import Check
from onepolicy.engine_check import checks, command, weight_sync
from onepolicy.measure.measure import _stale, _with_fit
from onepolicy.nonfinite import LeftOut
from onepolicy.rollout.remote.engine import RemoteEngine
from onepolicy.rollout.remote.start_up import check_processed_logprobs
from onepolicy.sync import canary, push
from onepolicy.train import rescore
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.rules import verdict
from support.stated_gap import StatedGap

NAN, INF = math.nan, math.inf


def fake_engine(answers, *, top_logprobs=5):
    """Return an engine from `answers(sampling, prompt)` -> log-probabilities of the sampled token
    and of the likeliest."""

    async def generate(prompt_ids, sampling, *, seed):
        logp, top = answers(sampling, prompt_ids[0])
        return SimpleNamespace(logp=torch.tensor([logp]), top_logp=torch.tensor([top]))

    return SimpleNamespace(generate=generate, caps=SimpleNamespace(top_logprobs=top_logprobs))


def tempered(sampling, _):
    return (0.0 if sampling.top_k else -1.0), [0.0, -1 / sampling.temperature, -INF, -INF, -INF]


def test_an_engine_may_report_tokens_that_its_head_rules_out():
    asyncio.run(check_processed_logprobs(fake_engine(tempered)))


def at_top_k(value, only=None):
    """Return answers with this value for the token that narrowed sampling draws."""

    def answers(sampling, prompt):
        logp, top = 0.0, tempered(sampling, prompt)[1]
        if sampling.top_k and only in (None, prompt):
            logp = value
        return logp, top

    return answers


def top_of_prompt_3(sampling, prompt):
    return 0.0, {3: [NAN, -1.0]}.get(prompt, [0.0, -1 / sampling.temperature])


def test_an_engine_with_incomparable_values_is_refused(subtests):
    for name, answers in {
        # infinity is not more than infinity
        "untempered": lambda *_: (0.0, [0.0, -1.0, -INF, -INF, -INF]),
        "a NaN among the likeliest": top_of_prompt_3,
        "a NaN of the last prompt": at_top_k(NAN, only=7),
        "an infinite one": at_top_k(-INF),
    }.items():
        with subtests.test(name), pytest.raises(UsageError, match="does not return the log-prob"):
            asyncio.run(check_processed_logprobs(fake_engine(answers)))


async def nothing(*_):
    return None


def probes_of(monkeypatch, probes):
    """Let the canary's probes give these values in turn."""
    rest = iter([torch.tensor(values) for values in probes])

    async def probe(engine, vocab):
        return next(rest)

    monkeypatch.setattr(canary, "canary_logp", probe)


def test_a_sync_check_needs_a_finite_noise_to_compare_with(monkeypatch):
    monkeypatch.setattr(push, "push_weights", nothing)
    engine = SimpleNamespace(reset_cache=nothing, caps=SimpleNamespace(inexact_dtype=None))
    for values in ((NAN, NAN, NAN), (-1.0, -INF, -2.0), (-1.0, -1.0, NAN)):
        probes_of(monkeypatch, [[value] for value in values])
        with pytest.raises(TrainingError, match="weight sync"):
            asyncio.run(push.checked_push(SimpleNamespace(), engine, vocab=8))


def test_a_reload_check_needs_a_finite_noise_to_compare_with(monkeypatch):
    probes_of(monkeypatch, [[-1.0], [-INF]])
    dialect = SimpleNamespace(canary=[-5.0], shape=SimpleNamespace(vocab=8))
    engine = SimpleNamespace(
        name="a server",
        dialect=dialect,
        caps=SimpleNamespace(inexact_dtype=None),
        load_checkpoint=nothing,
        _initial_canary=lambda: RemoteEngine._initial_canary(engine),
    )
    with pytest.raises(UsageError, match="wrong after a reload"):
        asyncio.run(RemoteEngine.check_reload(engine))


def samples(trainer, rollout=None):
    fields = {"logp_old": torch.tensor(trainer), "trainable": torch.tensor([True, True])}
    if rollout is not None:
        fields["logp_rollout"] = torch.tensor(rollout)
    return SimpleNamespace(**fields)


def test_the_check_of_narrowed_sampling(monkeypatch):
    monkeypatch.setattr(command, "topk_share", lambda *_: (1.0, torch.tensor([-1.0, -1.0])))
    whole = Check("support", True, "whole vocabulary")
    for rollout, passed in (([-1.0, -1.0], True), ([-2.0, -2.0], False), ([-1.0, NAN], False)):
        batch = samples([-2.0, -2.0], rollout)
        assert command.check_topk_request(None, batch, whole).passed is passed, rollout


def test_a_share_that_is_nan_is_no_greedy_engine(monkeypatch):
    monkeypatch.setattr(command, "topk_share", lambda *_: (NAN, torch.tensor([-1.0])))
    assert command.check_greedy(None, None, Check("temperature", True, "")).passed is False
    batch, whole = samples([-2.0, -2.0], [-1.0, -1.0]), Check("support", True, "")
    assert command.check_topk_request(None, batch, whole).passed is False


def test_a_single_nan_of_the_trainer_fails_an_engine_check(monkeypatch):
    found = Diagnosis(0.0, (), nonfinite=LeftOut(4000, {"logp_trainer": 1}))
    monkeypatch.setattr(checks, "diagnose_batch", lambda batch: found)
    result = checks._known_fault(None)
    assert result.passed is False
    assert "1 of 4,000 tokens" in result.found


def test_no_verdict_rests_on_a_replay_whose_k3_is_nan():
    small = StatedGap(tokens=10_000, sequences=100, k3=1e-5, f2=0.0, f5=0.0, max_dlogp=0.01)
    large = dataclasses.replace(small, k3=1e-2, f2=0.1, max_dlogp=3.0)
    broken = dataclasses.replace(large, k3=NAN)
    for gap in (small, large):
        assert verdict(gap, Diagnosis(0.0, ()), replayed=small).action != "unclear"
        assert verdict(gap, Diagnosis(0.0, ()), replayed=broken).action == "unclear"


def test_a_fit_whose_k3_is_nan_is_not_taken(monkeypatch):
    """The fit counts neither as the trainer's temperature nor as the engine's."""

    @dataclasses.dataclass(frozen=True)
    class Fake:
        factor: float

        def __call__(self, batch):
            return samples([NAN, -self.factor])

    start = samples([-1.0, -1.0], [-2.0, -2.0])
    monkeypatch.setattr(rescore, "k3_of", lambda batch: float(batch.logp_old.sum()) ** 2)
    first = Fake(1.0)
    assert rescore.fit_temperature(first, start) == (first, start)


def test_the_limit_of_an_engines_distance_stays_finite(monkeypatch):
    batch = SimpleNamespace(replace=lambda **_: None)
    copy = object.__new__(weight_sync.RoundedModel)
    copy._dtype = "bfloat16"
    scored = SimpleNamespace(logp_old=torch.zeros(1))
    copy._scorer = SimpleNamespace(score=lambda batch, replay: scored)
    for largest, limit in ((INF, weight_sync.MIN_LIMIT["bfloat16"]), (0.2, 1.0)):
        gaps = torch.tensor([0.1, largest])
        monkeypatch.setattr(weight_sync, "upper_quartile_gap", lambda batch, gaps=gaps: gaps)
        assert copy.limit(batch) == pytest.approx(limit)


def test_a_nan_second_measurement_does_not_make_the_engine_stale():
    def look(k3):
        return SimpleNamespace(explained=SimpleNamespace(k3=k3))

    assert _stale(look(1.0), look(0.01)) is not None
    assert _stale(look(1.0), look(NAN)) is None
    assert _stale(look(NAN), look(0.01)) is None


def test_findings_stay_where_the_refit_is_nan(monkeypatch):
    monkeypatch.setattr("onepolicy.measure.measure.k3_of", lambda batch: 1.0)
    why = SimpleNamespace(
        aligned=None, narrowed=None, k3=NAN, scorer=SimpleNamespace(support="top-k 5", factor=2.0)
    )
    seen = SimpleNamespace(diagnosis=SimpleNamespace(findings=()), explained=why)
    assert _with_fit(seen) == ()
