"""The learner against the same step written out by hand on the stock model, and its options against
each other."""

import dataclasses
import itertools

import pytest
import torch

from onepolicy.config import UsageError, resolve
from onepolicy.correct.weights import reweight
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_advantages
from onepolicy.replay.checks import RoutingError
from onepolicy.train.critic import explained_variance
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from support.learner_steps import BASE, batch_of, learner_of, one_step
from support.models import VOCAB, make


def test_step_equals_the_written_out_one():
    """The step is -sum(w A logp)/slots by plain autograd, sample by sample on the stock model, then
    torch's AdamW."""
    batch = batch_of(temperature=0.7)
    weight = torch.rand(batch.num_slots, generator=torch.Generator().manual_seed(5))
    learner = learner_of("replay.mode=off")
    scored, metrics, after = one_step(learner, batch.replace(routing=None), weight)

    model = make("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    slots, total, bounds = int(batch.trainable.sum()), torch.zeros(()), batch.cu_seqlens.tolist()
    for s, (a, b) in enumerate(itertools.pairwise(bounds)):
        logits = model(input_ids=batch.input_ids[None, a:b], use_cache=False).logits[0]
        logp = torch.log_softmax(logits / 0.7, -1).gather(-1, batch.target_ids[a:b, None])[:, 0]
        mask = batch.trainable[a:b]
        torch.testing.assert_close(
            scored.logp_old[a:b][mask], logp.detach()[mask], atol=1e-5, rtol=1e-5
        )
        total = total - (weight[a:b] * batch.outcome[s] * logp)[mask].sum() / slots
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        sure = (
            gradients[name].abs() > 1e-5
        )  # Adam's first step is the sign of the gradient: noise decides near 0
        torch.testing.assert_close(
            (after[name] - before[name])[sure],
            (parameter - before[name])[sure],
            atol=1e-4,
            rtol=1e-2,
        )


@pytest.mark.parametrize(
    "option", ["train.reuse_scoring_forward=true", "train.activation_checkpointing=true"]
)
def test_options_that_must_not_change_a_bit(option):
    _, metrics, plain = one_step(learner_of("train.reuse_scoring_forward=false"), batch_of())
    _, with_option, other = one_step(learner_of(option), batch_of())
    assert metrics == with_option
    assert all(torch.equal(plain[n], other[n]) for n in plain)


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        ((), 1),
        (("train.reuse_scoring_forward=false",), 2),
        (("train.activation_checkpointing=true",), 2),
        (("objective.num_minibatches=2",), 1 + 2),
        (("train.tokens_per_micro_batch=50",), 2 + 2),
        (("train.tokens_per_micro_batch=50", "train.reuse_scoring_forward=true"), 2),
        (("correction.preset=ppo-is",), 1),
    ],
)
def test_a_step_of_one_micro_batch_has_one_forward(settings, forwards):
    learner, calls = learner_of(*settings), []
    learner.model.register_forward_hook(lambda *_: calls.append(1))
    one_step(learner, batch_of())
    assert len(calls) == forwards


def test_micro_batches_add_up():
    _, whole, _ = one_step(learner_of(), batch_of())
    scored, parts, _ = one_step(learner_of("train.tokens_per_micro_batch=20"), batch_of())
    assert parts["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-4)
    assert parts["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
    torch.testing.assert_close(
        scored.logp_old, learner_of().score(batch_of()).logp_old, atol=1e-5, rtol=1e-5
    )


def test_replay_acts_in_score_and_update_and_keeps_native_routes():
    batch = batch_of()
    learner = learner_of()
    scored, without = learner.score(batch), learner.scorer.score(batch, replay=False)
    assert (scored.logp_old - without.logp_old).abs().max() > 1e-3
    assert not torch.equal(scored.routing_native.ids, batch.routing.ids)
    own = batch.replace(
        routing=without.routing_native
    )  # its own routes replayed: no difference to a bit
    assert torch.equal(learner.score(own).logp_old, without.logp_old)
    _, _, replayed = one_step(learner_of(), batch)
    _, _, native = one_step(learner_of("replay.mode=off"), batch)
    assert any(not torch.equal(replayed[n], native[n]) for n in native)


def test_minibatches_move_the_policy_between_them():
    _, one, _ = one_step(learner_of(), batch_of())
    _, two, _ = one_step(learner_of("objective.num_minibatches=2"), batch_of())
    assert one["train/ratio_dev"] == 0.0
    assert two["train/ratio_dev"] > 0.0


def test_warm_up_raises_the_rate_linearly():
    learner = learner_of("optim.warmup_steps=3")
    rates = [one_step(learner, batch_of())[1]["train/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_linear_decay_spends_the_rate_over_the_run():
    learner = learner_of(
        "optim.warmup_steps=1", "optim.lr_decay=linear", "steps=2", "objective.num_minibatches=2"
    )
    lr = [
        one_step(learner, batch_of())[1]["train/lr"] for _ in range(2)
    ]  # of the last of each step's two updates
    assert lr == pytest.approx([0.01 * 3 / 4, 0.01 * 1 / 4])
    learner = learner_of("optim.lr_decay=linear", "steps=3")
    learner.version, learner.updates = (
        2,
        8,
    )  # a fork after 2 of 3 steps, of a run with four minibatches each
    assert one_step(learner, batch_of())[1]["train/lr"] == pytest.approx(0.01 / 3)


def test_an_infinite_gradient_stops_before_the_weights_change():
    learner = learner_of()
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    with pytest.raises(RuntimeError, match="gradient norm is nan"):
        one_step(learner, batch_of(), weight=torch.full((batch_of().num_slots,), torch.nan))
    assert all(torch.equal(before[n], p) for n, p in learner.model.named_parameters())


def test_checkpointing_refuses_dropout():
    config = resolve(BASE, ["train.activation_checkpointing=true"])
    model = make("qwen3_moe")
    model.config.attention_dropout = 0.1
    with pytest.raises(UsageError, match=r"attention_dropout=0\.1"):
        LocalLearner(PolicyScorer(model, config, routers=None))
    model.config.attention_dropout = 0.0


def test_dense_model_trains_without_routers():
    batch = batch_of()
    learner = learner_of("replay.mode=off", routed=False, name="qwen3_dense")
    scored, metrics, _ = one_step(learner, dataclasses.replace(batch, routing=None))
    assert scored.routing_native is None
    assert metrics["train/grad_norm"] > 0


def test_bypass_measures_the_numbers_of_scoring():
    """With one minibatch, logp_old, entropy and the trainer's own routes are those of score(), and
    no forward scores."""
    batch, usual = batch_of(), learner_of()
    scored = usual.score(batch)
    learner = learner_of("correction.preset=ppo-is")
    left_out, metrics, _ = one_step(learner, batch)
    assert left_out.logp_old is None
    assert metrics["time/score_saved"] > 0
    for name in ("logp_old", "entropy", "gate_mass"):
        assert torch.equal(getattr(learner.scored, name), getattr(scored, name)), name
    assert torch.equal(learner.scored.routing_native.ids, scored.routing_native.ids)


@pytest.mark.parametrize(
    "objective",
    [["correction.preset=ppo-is"], ["objective.preset=gspo"], ["objective.entropy_coef=0.1"]],
    ids=str,
)
def test_options_change_no_bit_of_other_objectives(objective):
    """Checkpointed activations, and (with a scoring forward) its reuse, give the same metrics and
    weights."""
    _, metrics, plain = one_step(learner_of(*objective), batch_of())
    options = ["train.activation_checkpointing=true"]
    options += (
        [] if "correction.preset=ppo-is" in objective else ["train.reuse_scoring_forward=true"]
    )
    for option in options:
        _, with_option, other = one_step(learner_of(option, *objective), batch_of())
        assert {**metrics, "time/score_saved": 0} == {**with_option, "time/score_saved": 0}
        assert all(torch.equal(plain[n], other[n]) for n in plain)


def test_entropy_bonus_raises_the_entropy():
    learner = learner_of("objective.entropy_coef=10.0", "optim.lr=1e-3")
    entropies = [float(one_step(learner, batch_of())[0].entropy.mean()) for _ in range(3)]
    assert entropies == sorted(entropies)


def test_a_critic_learns_the_outcome_and_leaves_the_policy_alone():
    """GAE with lambda = 1 is return - value. The policy's update does not change the critic's
    weights, and vice versa."""
    settings = [
        "objective.preset=ppo",
        "objective.lam=1.0",
        "objective.critic.lr=1e-2",
        "objective.normalise=none",
    ]
    learner = learner_of(*settings)
    batch, losses = batch_of(), []
    for step in range(6):
        scored, metrics, _ = one_step(learner, batch)
        losses.append(metrics["train/value_loss"])
        if step == 0:
            assert (scored.value == 0).all()
            assert torch.equal(
                scored.advantage[batch.trainable], batch.outcome[batch.segment][batch.trainable]
            )
    assert losses[-1] < 0.5 * losses[0]
    named = dict(learner.model.named_parameters())
    assert not any(
        parameter is other
        for parameter in learner.critic.values.parameters()
        for other in named.values()
    )


def test_explained_variance_by_hand():
    """Var(R) = 1/4 and Var(R - V) = 1/16 for V = R / 2. Equal returns leave nothing to explain,
    whatever their rounding."""
    batch = batch_of()
    target = torch.where(batch.segment % 2 == 0, 1.0, 0.0)
    mask = batch.trainable & (torch.cumsum(batch.trainable, 0) % 2 == 0)
    batch = batch.replace(trainable=mask, value=target / 2, value_target=target)
    assert explained_variance(batch) == pytest.approx(0.75)
    same = torch.full_like(target, 0.7)
    noise = 1e-7 * torch.randn(len(same), generator=torch.Generator().manual_seed(0))
    assert explained_variance(batch.replace(value_target=same)) is None
    assert explained_variance(batch.replace(value_target=same + noise)) is None
    assert explained_variance(batch.replace(value_target=0 * same, value=0 * same)) is None


def test_an_unprotected_value_term_excludes_rejected_slots():
    """A gate on new / rollout that rejects everything leaves the critic nothing to learn from."""
    gate = 'correction.gates=[{statistic="trainer_prob",low=0.999999,ratio="new/rollout"}]'
    for protect, learns in (('["kl","entropy","value"]', True), ('["kl","entropy"]', False)):
        learner = learner_of("objective.preset=ppo", gate, f"correction.protect={protect}")
        assert (one_step(learner, batch_of())[1]["train/value_loss"] > 0) == learns


def test_the_reference_is_frozen_and_its_kl_pulls_back():
    """A strong KL term keeps the policy nearer to its start than no KL term."""
    moved = {}
    for coef in (0.0, 5.0):
        overrides = [f"objective.kl.coef={coef}", "optim.lr=1e-3", "replay.mode=off"]
        reference = make("qwen3_moe").requires_grad_(False)
        prepare_for_training(reference, torch.device("cpu"))
        learner = learner_of(*overrides, reference=reference)
        before = {n: p.clone() for n, p in reference.named_parameters()}
        for _ in range(4):
            scored, metrics, _ = one_step(learner, batch_of().replace(routing=None))
        moved[coef] = float((scored.logp_old - scored.logp_ref)[scored.trainable].abs().mean())
        assert all(torch.equal(before[n], p) for n, p in reference.named_parameters())
        assert ("train/kl" in metrics) == (coef > 0)
    assert 0 < moved[5.0] < 0.9 * moved[0.0]


@pytest.mark.parametrize(
    ("live", "fixed"),
    [
        (["correction.preset=pg-tis", "objective.preset=reinforce"], ["correction.preset=tis"]),
        (
            ["correction.preset=opsm", "objective.preset=reinforce"],
            [
                'correction.gates=[{statistic="k1",aggregate="mean",scope="sequence",'
                'when="negative",high=0.1}]'
            ],
        ),
    ],
    ids=["weight", "gate"],
)
def test_live_corrections_equal_fixed_ones_before_the_policy_moves(live, fixed):
    """With one minibatch new is old, so weights and gates of new / rollout are those of old /
    rollout."""
    after = []
    for overrides in (live, [*fixed, "objective.preset=reinforce"], ["objective.preset=reinforce"]):
        learner = learner_of(*overrides)
        batch = compute_advantages(learner.score(batch_of()), learner.config.objective)
        old = batch.logp_rollout if batch.logp_old is None else batch.logp_old
        applied = reweight(
            old,
            batch.logp_rollout,
            batch.trainable,
            learner.config.correction.fixed_part,
            segment=batch.segment,
            advantage=batch.advantage,
        )
        metrics = learner.step(batch.replace(weight=applied.weight, keep=applied.keep)).metrics
        after.append(
            (metrics["train/grad_norm"], next(learner.model.parameters()).detach().clone())
        )
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-5)
    torch.testing.assert_close(after[0][1], after[1][1])
    assert after[0][0] != pytest.approx(after[2][0], rel=1e-2)  # and not what no correction gives


def test_score_centering_equals_the_written_out_step():
    """The step is -A (log p_a - sum over the vocabulary of q log p) by plain autograd on the stock
    model, sample by sample."""
    batch = batch_of().replace(routing=None)
    q = torch.randn(batch.num_slots, VOCAB, generator=torch.Generator().manual_seed(1)).log_softmax(
        -1
    )
    order = q.argsort(descending=True)
    batch = batch.replace(top_ids=order.int(), top_logp_rollout=q.gather(-1, order))
    settings = [
        "correction.preset=score-centering",
        "correction.centering=support",
        "objective.preset=reinforce",
    ]
    learner = learner_of("replay.mode=off", *settings, "train.tokens_per_micro_batch=30")
    _, metrics, _ = one_step(learner, batch)
    assert metrics["train/head_mass"] == pytest.approx(1, abs=1e-5)

    model, total, bounds = make("qwen3_moe"), torch.zeros(()), batch.cu_seqlens.tolist()
    for s, (a, b) in enumerate(itertools.pairwise(bounds)):
        logp = (
            model(input_ids=batch.input_ids[None, a:b], use_cache=False).logits[0].log_softmax(-1)
        )
        centred = logp.gather(-1, batch.target_ids[a:b, None])[:, 0] - (q[a:b].exp() * logp).sum(-1)
        total = total - (batch.outcome[s] * centred)[batch.trainable[a:b]].sum() / int(
            batch.trainable.sum()
        )
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_scoring_returns_the_likeliest_tokens_of_both_sides():
    """It does so only if the batch has top_ids; compared with the stock model's whole
    distribution."""
    batch = batch_of(temperature=0.7).replace(routing=None)
    assert learner_of("replay.mode=off").score(batch).trainer_top_ids is None
    ids = torch.randint(
        0,
        VOCAB,
        (batch.num_slots, 5),
        generator=torch.Generator().manual_seed(2),
        dtype=torch.int32,
    )
    asked = batch.replace(top_ids=ids, top_logp_rollout=torch.full(ids.shape, -2.0))
    scored = learner_of("replay.mode=off", "train.tokens_per_micro_batch=30").score(asked)
    model = make("qwen3_moe")
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        logp = (
            model(input_ids=batch.input_ids[None, a:b], use_cache=False).logits[0] / 0.7
        ).log_softmax(-1)
        mask = batch.trainable[a:b]
        trainer_top_ids, trainer_top_logp = (
            scored.trainer_top_ids[a:b][mask].long(),
            scored.trainer_top_logp[a:b][mask],
        )
        torch.testing.assert_close(
            trainer_top_logp, logp.topk(5).values[mask], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            trainer_top_logp, logp[mask].gather(-1, trainer_top_ids), atol=1e-5, rtol=1e-5
        )
        expected = logp.gather(-1, ids[a:b].long())[mask]
        torch.testing.assert_close(scored.top_logp_old[a:b][mask], expected, atol=1e-5, rtol=1e-5)
    assert scored.trainer_top_ids.dtype == torch.int32
    assert (scored.top_logp_old[~batch.trainable] == 0).all()


def test_bypass_refuses_routes_of_other_tokens_before_the_update():
    learner = learner_of("correction.preset=ppo-is", "replay.min_agreement=0.9")
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    with pytest.raises(RoutingError, match="agree in"):
        one_step(learner, batch_of())
    assert all(torch.equal(before[n], p) for n, p in learner.model.named_parameters())
