"""Top-p, top-k and min-p: the engine records which tokens it kept, the trainer scores over them."""

import copy
import dataclasses
import itertools

import pytest
import torch

from onepolicy.config import HFEngineConfig
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.models.top_k_top_p import apply_min_p, apply_top_k_top_p
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.support.checks import SupportError
from onepolicy.support.score import support_logits
from onepolicy.support.trace import KeptSet, SupportTrace
from onepolicy.train.forward import forward, tempered_logits
from onepolicy.train.pack import minibatches as minibatches_of
from onepolicy.train.sharded.wire import Message, batch_from_message, batch_message
from onepolicy.types import Sampling
from support.engine_runs import prompts, run
from support.invariant_models import batch_of, differing, pair
from support.learner_steps import learner_of, one_step
from support.models import make

NARROWED = {
    "top-p 0.8": {"top_p": 0.8},
    "top-k 20": {"top_k": 20},
    "min-p 0.05": {"min_p": 0.05},
    "all three": {"top_p": 0.9, "top_k": 12, "min_p": 0.02},
}
TOKENS = 12  # of a request
PEAKED = 8.0
"""Factor of the head's weights: untrained models are so flat that top-p keeps nearly all tokens."""


def peaked(name: str, dtype: torch.dtype = torch.float32):
    model = make(name, dtype=dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(PEAKED)
    return model


def requests_of(narrowed, *, count=8, tokens=TOKENS, temperature=0.8, logp=False):
    sampling = Sampling(temperature, tokens, support=True, support_logp=logp, **narrowed)
    return [(prompt, sampling, seed) for seed, prompt in enumerate(prompts(count))]


def sampled(model, narrowed, **settings):
    """Return the batch that an engine of this model samples."""
    config = HFEngineConfig(dtype="float32", max_num_seqs=4)
    engine = HFEngine(copy.deepcopy(model), config, return_routes=True, max_len=64)
    requests = requests_of(narrowed, **settings)
    return batch_of(requests, run(engine, requests))


@torch.no_grad()
def replayed(trained, batch, compute):
    """Return what `compute` returns while the trainer replays the batch's routes."""
    with bind_routers(trained).replay(batch.routing, check=False):
        return compute()


def trainer_of(model):
    trained = copy.deepcopy(model)
    prepare_for_training(trained, torch.device("cpu"))
    return trained


def own_sets(logits, narrowed):
    """Return the mask [n, V] that the trainer's own logits give."""
    column = (len(logits), 1)
    if "min_p" in narrowed:
        logits = apply_min_p(logits, torch.full(column, narrowed["min_p"]))
    top_k = torch.full(column, narrowed.get("top_k", 1 << 40))
    top_p = torch.full(column, narrowed.get("top_p", 1.0))
    return apply_top_k_top_p(logits, top_k=top_k, top_p=top_p).isfinite()


@pytest.mark.few(2)
@pytest.mark.parametrize("narrowed", NARROWED.values(), ids=NARROWED)
def test_rollout_and_trainer_agree(narrowed):
    """Values agree over the recorded sets, which are the trainer's own. They do not over all
    tokens, as a trainer without supports would score."""
    model = peaked("qwen3_moe")
    batch, trained = sampled(model, narrowed), trainer_of(model)
    mask, slots = batch.trainable, batch.trainable.nonzero()[:, 0]
    found = replayed(trained, batch, lambda: forward(trained, batch, displaced=True))
    whole = replayed(trained, batch, lambda: forward(trained, batch.replace(support=None)))
    logits = replayed(trained, batch, lambda: tempered_logits(trained, batch, slots))
    own = SupportTrace.from_mask(own_sets(logits, narrowed)).as_sets()
    recorded = batch.support.at(slots).as_sets()
    assert sum(map(list.__ne__, own, recorded)) <= 1  # a token at the border
    torch.testing.assert_close(found.logp[mask], batch.logp_rollout[mask], atol=2e-5, rtol=0)
    assert (whole.logp[mask] - batch.logp_rollout[mask]).mean() < -1e-3
    torch.testing.assert_close(found.logp_vocabulary, whole.logp.detach())
    assert (found.displaced[mask] < 1e-3).all()
    assert (found.entropy_support[mask] <= found.entropy[mask] + 1e-5).all()
    assert (batch.support.sizes[mask] < 64).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_policy_numerics_are_equal_to_the_bit(family, dtype):
    """Requests of every kind sample in one batch of the engine."""
    engine, trained, routers = pair(family, dtype)
    kinds = itertools.cycle(map(requests_of, NARROWED.values()))
    requests = [next(kinds)[number] for number in range(8)]
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, [[0, 3, 5], [1, 2], [7, 4, 6]]) == (0, 0)
    assert differing(trained, routers, batch.replace(support=None), [range(8)])[0] > 0


def test_chunks_of_logits_and_gradients():
    """Values and gradients in chunks are those of the whole, and those of a dense mask, to 1e-6 of
    the largest."""
    model = peaked("qwen3_moe")
    batch, trained = sampled(model, {"top_p": 0.8}), trainer_of(model)
    slots = batch.trainable.nonzero()[:, 0]
    kept = torch.zeros(len(slots), model.config.vocab_size, dtype=torch.bool)
    own = batch.support.at(slots)
    kept[own.slot_of, own.ids.long()] = True

    def gradients(score):
        trained.zero_grad()
        with bind_routers(trained).replay(batch.routing, check=False):
            logp = score()
        (logp * torch.linspace(-1, 1, len(logp))).mean().backward()
        return logp.detach(), {n: p.grad.clone() for n, p in trained.named_parameters()}

    def dense():
        table = tempered_logits(trained, batch, slots).masked_fill(~kept, -torch.inf)
        return torch.log_softmax(table, -1).gather(-1, batch.target_ids[slots, None])[:, 0]

    whole = gradients(lambda: forward(trained, batch).logp[slots])
    expected = gradients(dense)
    install_logits_chunks(trained, 7)
    chunked = gradients(lambda: forward(trained, batch).logp[slots])
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert largest > 1e-2
    for found in (whole, chunked):
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
        for name, gradient in found[1].items():
            assert (gradient - expected[1][name]).abs().max() <= 1e-6 * largest, name


def learner_and_batch(*overrides):
    """Return a learner and a batch of its own model, in groups of two with outcomes."""
    learner = learner_of("rollout.sampling.top_p=0.8", *overrides)
    batch = sampled(learner.model, {"top_p": 0.8}, temperature=1.0)
    outcome = torch.tensor([1.0, -1.0] * 4)
    return learner, batch.replace(outcome=outcome, group=torch.arange(8) // 2)


def test_a_step_over_supports():
    """The ratio of a step without noise is 1, and a step moves the weights."""
    learner, batch = learner_and_batch()
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    scored, metrics, after = one_step(learner, batch)
    mask = scored.trainable
    torch.testing.assert_close(scored.logp_old[mask], scored.logp_rollout[mask], atol=2e-5, rtol=0)
    assert (scored.entropy[mask] < scored.entropy_vocabulary[mask]).any()
    assert metrics["train/grad_norm"] > 0
    assert any(not torch.equal(before[name], after[name]) for name in before)


def other_values(support):
    """Return the sets with the values of another engine, which add up to 1 too."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(len(support.ids), generator=generator)
    rows = [each.log_softmax(-1) for each in drawn.split(support.sizes.tolist())]
    return dataclasses.replace(support, logp=torch.cat(rows))


@pytest.mark.parametrize("chunk", [0, 7])
def test_score_centering_over_the_support(chunk):
    """A step's gradient is that of log p_a - sum over the set of q log p, by plain autograd on a
    table with a dense mask; routes are replayed. The engine's own values are the trainer's, so
    they move nothing."""
    centering = ["correction.preset=score-centering", "correction.centering=support"]
    learner, _ = learner_and_batch(*centering, "objective.preset=reinforce")
    batch = sampled(learner.model, {"top_p": 0.8}, temperature=1.0, logp=True)
    outcome = torch.tensor([1.0, -1.0, 0.5, 2.0] * 2)
    batch = batch.replace(outcome=outcome, group=torch.arange(8) // 2)
    slots = batch.trainable.nonzero()[:, 0]
    own = forward(learner.model, batch).kept_logp
    torch.testing.assert_close(own, batch.support.at(slots).logp, atol=5e-2, rtol=0)
    batch = batch.replace(support=other_values(batch.support))
    if chunk:
        install_logits_chunks(learner.model, chunk)
    model = copy.deepcopy(learner.model)
    scored, metrics, _ = one_step(learner, batch)

    kept = batch.support.at(slots)
    q = torch.zeros(len(slots), model.config.vocab_size)
    q[kept.slot_of, kept.ids.long()] = kept.logp.exp()
    with bind_routers(model).replay(batch.routing, check=False):
        table = tempered_logits(model, batch, slots).masked_fill(q == 0, -torch.inf)
        logp = table.log_softmax(-1)
        of_token = logp.gather(-1, batch.target_ids[slots, None])[:, 0]
        centred = of_token - (q * logp.masked_fill(q == 0, 0.0)).sum(-1)
        (-(scored.advantage[slots] * centred).sum() / len(slots)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_a_reference_is_scored_over_the_same_sets():
    """So the KL of the loss is between two distributions over what the engine kept."""
    reference = trainer_of(peaked("qwen3_moe"))
    with torch.no_grad():
        reference.model.norm.weight.mul_(0.7)
    settings = ["rollout.sampling.top_p=0.8", "objective.kl.coef=0.1"]
    learner = learner_of(*settings, reference=reference)
    batch = sampled(learner.model, {"top_p": 0.8}, temperature=1.0)
    batch = batch.replace(outcome=torch.ones(8), group=torch.arange(8) // 2)
    scored, metrics, _ = one_step(learner, batch)
    slots = batch.trainable.nonzero()[:, 0]
    with torch.no_grad():
        table = support_logits(tempered_logits(reference, batch, slots), batch.support.at(slots))
    expected = table.log_softmax(-1).gather(-1, batch.target_ids[slots, None])[:, 0]
    torch.testing.assert_close(scored.logp_ref[slots], expected, atol=1e-5, rtol=0)
    assert metrics["train/kl"] > 0


def test_shared_prompts_do_not_change_a_step():
    found = []
    for setting in ("true", "false"):
        learner, batch = learner_and_batch(f"train.share_prompts={setting}")
        batch = batch.select([0, 0, 2, 2, 4, 4, 6, 6])
        found.append(one_step(learner, batch.replace(group=torch.arange(8) // 2))[0].logp_old)
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)


def least_likely(batch, learner):
    """Return sets of the same sizes that have the token and the least likely others."""
    slots = batch.trainable.nonzero()[:, 0]
    with torch.no_grad():
        order = tempered_logits(learner.model, batch, slots).argsort(-1).tolist()
    rows = dict(zip(slots.tolist(), order, strict=True))
    sizes = batch.support.sizes.tolist()
    sets = []
    for slot, (size, token) in enumerate(zip(sizes, batch.target_ids.tolist(), strict=True)):
        ids: set[int] = set()
        if size:
            ids = {*rows[slot][: size - 1], token}
        sets.append(sorted(ids))
    return SupportTrace.from_sets(sets)


def within(change):
    """Change the sets of the sampled tokens: list of KeptSet -> list of KeptSet."""

    def plant(batch, _):
        parts, slots = batch.support.split(), batch.trainable.nonzero()[:, 0].tolist()
        for slot, kept in zip(slots, change([parts[slot] for slot in slots]), strict=True):
            parts[slot] = kept
        return batch.replace(support=SupportTrace.join(parts))

    return plant


PLANTED = {
    "of the token before": (
        within(lambda sets: [sets[-1], *sets[:-1]]),
        "not in their own support, .* The sets are those of the token before",
    ),
    "of another request": (
        within(lambda sets: sets[TOKENS:] + sets[:TOKENS]),
        "not in their own support, .* belongs to another request",
    ),
    "shifted": (
        lambda batch, _: batch.replace(support=rolled(batch.support, 1)),
        "have no support|not in their own support",
    ),
    "missing in one slot": (
        lambda batch, _: batch.replace(support=without(batch.support, 30)),
        "have no support",
    ),
    "missing": (lambda batch, _: batch.replace(support=None), "sampled tokens have no support"),
    "without its token": (
        lambda batch, _: batch.replace(target_ids=(batch.target_ids + 1) % 64),
        "not in their own support",
    ),
    "of tokens that are not likely": (
        lambda batch, learner: batch.replace(support=least_likely(batch, learner)),
        "of the trainer's probability that are likelier than ones they have",
    ),
}


def rolled(support, shift):
    parts = list(support.split())
    return SupportTrace.join(parts[-shift:] + parts[:-shift])


def without(support, slot):
    parts = list(support.split())
    slot = next(i for i in range(slot, len(parts)) if len(parts[i].ids))
    return SupportTrace.join([*parts[:slot], KeptSet(parts[slot].ids[:0]), *parts[slot + 1 :]])


def test_planted_faults_stop_in_scoring(subtests):
    learner = learner_of("rollout.sampling.top_p=0.8")
    with torch.no_grad():
        learner.model.get_output_embeddings().weight.mul_(PEAKED)
    batch = sampled(learner.model, {"top_p": 0.8}, temperature=1.0).replace(outcome=torch.ones(8))
    before = [p.detach().clone() for p in learner.model.parameters()]
    for name, (plant, words) in PLANTED.items():
        with subtests.test(name), pytest.raises(SupportError, match=words):
            learner.score(plant(batch, learner))
    assert all(map(torch.equal, before, learner.model.parameters()))


def test_ranks_get_the_sets():
    batch = sampled(peaked("qwen3_moe"), {"top_k": 5})
    bare = {f.name: None for f in dataclasses.fields(batch) if getattr(batch, f.name) is None}
    sent = batch_from_message(Message.decode(batch_message({}, batch).encode()))
    assert sent.support == batch.support
    assert sent.routing == batch.routing
    assert all(getattr(sent, name) is None for name in bare)
    chosen = batch.select([5, 2])
    bounds = batch.cu_seqlens.tolist()
    expected = [batch.support.at(slice(bounds[s], bounds[s + 1])) for s in (5, 2)]
    assert chosen.support == SupportTrace.concat(expected)


@pytest.mark.parametrize(("minibatches", "wrong"), [(1, 3), (2, 6)])
def test_a_bypass_names_the_sample_and_what_was_trained_on(minibatches, wrong):
    """Its forwards are of parts of a minibatch, and the second one comes after a step."""
    learner = learner_of(
        *("rollout.sampling.top_p=0.8", "correction.preset=ppo-is", "optim.lr=1e-6"),
        *("train.tokens_per_micro_batch=50", "train.share_prompts=false"),
        f"objective.num_minibatches={minibatches}",
    )
    with torch.no_grad():
        learner.model.get_output_embeddings().weight.mul_(PEAKED)
    batch = sampled(learner.model, {"top_p": 0.8}, temperature=1.0, tokens=24)
    batch = batch.replace(outcome=torch.tensor([1.0, -1.0] * 4), group=torch.arange(8) // 2)
    right, other = batch.support.split(), least_likely(batch, learner).split()
    slots = set(batch.slots_of([wrong]).tolist())
    sets = [other[slot] if slot in slots else right[slot] for slot in range(batch.num_slots)]
    batch = batch.replace(support=SupportTrace.join(sets))
    (which,) = [m for m, own in enumerate(minibatches_of(batch, minibatches)) if wrong in own]
    name = minibatches_of(batch, minibatches)[which].index(wrong)
    words = "The batch was not trained on"
    if which:
        words = "counted within minibatch 2; those before it were used"
    with pytest.raises(SupportError, match=f"the first is sample {name}, .*{words}"):
        one_step(learner, batch)
    assert learner.updates == which
