"""Prompts that siblings share are computed once: the same scores and gradients to rounding."""

import dataclasses
import itertools

import pytest
import torch

from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.packed_attention import causal_mask, packed_attention
from onepolicy.models.prepare import prepare_for_training
from onepolicy.train.shared_prompts import SharedPacking, share_prompts
from support.learner_steps import learner_of
from support.models import MOE, VOCAB, make
from support.siblings import distance, scored_and_gradients, siblings, with_routes_of, with_top_ids

ON, OFF = "train.share_prompts=true", "train.share_prompts=false"


def rows_computed(batch) -> int:
    shared = share_prompts(batch).shared
    if shared is None:
        return batch.num_slots
    return len(shared.slots)


def test_a_prompt_is_computed_once():
    """Up to the first slot at which routes differ. Without siblings nothing is shared."""
    batch = siblings((9, 5), members=3)
    assert batch.num_slots == 3 * (9 + 5) + 2 * sum(3 + 5 * m for m in range(3))
    assert rows_computed(batch) == batch.num_slots - 2 * (9 + 5)
    for slot in (0, 4, 8):
        batch = siblings((9, 9), members=3, routes_differ_at=slot)
        assert rows_computed(batch) == batch.num_slots - 2 * 2 * slot
    assert share_prompts(siblings((9, 5), members=1)).shared is None


def test_rows_hold_the_tokens_and_routes_of_their_slots():
    batch = siblings((9, 5, 1), members=3)
    shared = share_prompts(batch).shared
    for field in (batch.input_ids, batch.positions, batch.routing.ids):
        assert torch.equal(field[shared.slots][shared.row_of], field)


SETTINGS = {
    "r3": [],
    "off": ["replay.mode=off"],
    "r2": ["replay.mode=r2"],
    "several micro-batches": ["train.tokens_per_micro_batch=70"],
    "a sample each": ["train.tokens_per_micro_batch=1"],
    "reused": ["train.tokens_per_micro_batch=70", "train.reuse_scoring_forward=true"],
    "checkpointing": ["train.activation_checkpointing=true"],
    "chunks": ["train.logits_chunk=8"],
    "entropy": ["objective.entropy_coef=0.01"],
    "bypass": ["correction.ratio=new/rollout"],
}


def some(names, full):
    """Return parameters, those of `full` for `make test-all` alone."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name in full)) for name in names]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", some(SETTINGS, {"a sample each", "r3", "r2"}))
def test_scores_and_gradients_are_those_of_whole_samples(name):
    assert_equal(siblings(), *SETTINGS[name])


@pytest.mark.parametrize("name", some(["r3", "several micro-batches", "reused"], {"r3", "reused"}))
def test_top_log_probabilities_are_scored(name):
    scored = assert_equal(with_top_ids(siblings(), 6), *SETTINGS[name])
    for field in (scored.top_logp_old, scored.trainer_top_logp):
        assert (field[scored.trainable] < 0).all()


@pytest.mark.parametrize("name", some(["r3", "checkpointing", "chunks"], {"r3", "checkpointing"}))
def test_score_centering(name):
    """The update takes the gradients of the rollout's likeliest tokens too."""
    settings = ["correction.preset=score-centering", "objective.surrogate=pg", *SETTINGS[name]]
    top = learner_of(*settings).config.correction.top_logprobs(VOCAB)
    assert_equal(with_top_ids(siblings(), top), *settings)


@pytest.mark.parametrize("reuse", some(["true", "false"], {"false"}))
def test_replayed_weights(reuse):
    batch = with_routes_of(siblings(), learner_of().routers, weights=True)
    assert rows_computed(batch) < batch.num_slots
    assert_equal(batch, "replay.mode=weights", f"train.reuse_scoring_forward={reuse}")


@pytest.mark.parametrize("kind", some(["k3", "k2"], {"k2"}))
def test_a_reference(kind):
    """The reference computes shared prompts once too."""
    reference = make("qwen3_moe", seed=1).requires_grad_(False)
    prepare_for_training(reference, torch.device("cpu"))
    settings = ["objective.kl.coef=0.1", f"objective.kl.estimator={kind}"]
    assert_equal(siblings(), *settings, reference=reference)


def assert_equal(batch, *settings, tolerance=5e-6, **options):
    """Check scores and gradients of a learner that shares prompts against one that does not."""
    (scored, gradient), (expected, whole) = (
        scored_and_gradients(learner_of(*settings, *more, **options), batch)
        for more in ([ON], [OFF])
    )
    for name in ("logp_old", "entropy", "top_logp_old", "trainer_top_logp", "logp_ref"):
        wanted, found = getattr(expected, name), getattr(scored, name)
        assert (wanted is None) == (found is None), name
        if wanted is not None:
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=1e-5, msg=name)
    if expected.routing_native is not None:
        assert torch.equal(scored.routing_native.ids, expected.routing_native.ids)
    assert distance(gradient, whole) < 2 * tolerance
    assert all(g.abs().sum() > 0 for g in gradient.values())
    return scored


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "olmoe"])
@pytest.mark.parametrize("name", some(["r3", "several micro-batches", "checkpointing"], {"r3"}))
def test_on_policy_numerics_give_the_same_bits(name, family):
    batch = with_routes_of(siblings(temperature=0.7), learner_of(name=family).routers)
    options = ["numerics=on-policy", *SETTINGS[name]]
    batcher = learner_of(*options, name=family).scorer.batcher
    assert batcher.micro_batch(batch, list(range(batch.num_samples))).shared is not None
    scored = assert_equal(batch, *options, name=family)
    alone = learner_of(*options, OFF, name=family).scorer.score(batch)
    for field in ("logp_old", "entropy"):
        assert torch.equal(getattr(scored, field), getattr(alone, field)), field


def test_a_dense_model():
    batch = siblings().replace(routing=None)
    assert_equal(batch, "replay.mode=off", name="qwen3_dense", routed=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", MOE)
def test_families(family):
    batch = with_routes_of(siblings(), learner_of(name=family).routers)
    assert rows_computed(batch) == batch.num_slots - 2 * (9 + 5 + 1)
    assert_equal(batch, name=family)


def paths_of(batch):
    shared = share_prompts(batch).shared
    return [shared.row_of[a:b] for a, b in itertools.pairwise(batch.cu_seqlens.tolist())], shared


def test_attention_in_float64(subtests):
    """Every sample alone, by the formula, against all of them with shared rows."""
    for window, sinks in itertools.product([None, 4, 100], [False, True]):
        with subtests.test(window=window, sinks=sinks):
            check_attention(window, sinks)


def check_attention(window, sinks):
    batch = siblings((9, 5, 1), members=3)
    paths, shared = paths_of(batch)
    generator = torch.Generator().manual_seed(1)
    shape, options = (1, 2, len(shared.slots), 4), {"dtype": torch.float64, "generator": generator}
    q, k, v = (torch.randn(shape, requires_grad=True, **options) for _ in range(3))
    sink = torch.randn(2, **options) if sinks else None
    out, _ = packed_attention(
        torch.nn.Module(), q, k, v, None, packing=shared.packing, sliding_window=window, s_aux=sink
    )
    weight = torch.randn(batch.num_slots, 2, 4, **options)
    gradients = torch.autograd.grad((out[0][shared.row_of] * weight).sum(), (q, k, v))
    alone = []
    for path in paths:
        scores = q[0][:, path] @ k[0][:, path].transpose(1, 2) * 0.5
        scores = scores.masked_fill(~causal_mask(len(path), window, q.device), -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(2, len(path), 1)], -1)
        alone.append((scores.softmax(-1)[..., : len(path)] @ v[0][:, path]).transpose(0, 1))
    whole = torch.cat(alone)
    tolerance = {"atol": 1e-6 if sinks else 1e-12, "rtol": 1e-6 if sinks else 1e-12}
    torch.testing.assert_close(out[0][shared.row_of], whole, **tolerance)
    expected = torch.autograd.grad((whole * weight).sum(), (q, k, v))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_packing_without_shared_rows_is_the_usual_one():
    packing = BucketedPacking.of(torch.tensor([0, 5, 9]), torch.device("cpu"))
    paths = [torch.arange(5), torch.arange(5, 9)]
    shared = SharedPacking.of_paths(paths, [0, 0], 9)
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind(0)
    one, other = (
        packed_attention(torch.nn.Module(), q, k, v, None, packing=each)[0]
        for each in (packing, shared)
    )
    torch.testing.assert_close(one, other)


def test_siblings_stay_together_in_micro_batches():
    batch = siblings((9, 9, 9, 9), members=3)
    learner = learner_of(ON, f"train.tokens_per_micro_batch={batch.num_slots // 4 * 2}")
    micro = learner.scorer.micro_batches(batch)
    assert sorted(s for samples in micro for s in samples) == list(range(12))
    assert [sorted({s // 3 for s in samples}) for samples in micro] == [[0, 1], [2, 3]]


def test_weights_of_routes_must_agree_too():
    batch = siblings((9, 9), members=3)
    weights = torch.rand(batch.routing.ids.shape, generator=torch.Generator().manual_seed(2))
    routing = dataclasses.replace(batch.routing, weights=weights)
    assert rows_computed(batch.replace(routing=routing)) == batch.num_slots
