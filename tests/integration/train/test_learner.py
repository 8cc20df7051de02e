"""The learner against the same step written out by hand on the stock model, and its options against
each other."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

from onepolicy.build.learner import build_critic
from onepolicy.config import UsageError, resolve
from onepolicy.correct.reweight import reweight
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_advantages
from onepolicy.replay.checks import RoutingError
from onepolicy.train import pack
from onepolicy.train.activation_checkpointing import checkpoint_activations
from onepolicy.train.critic import explained_variance
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from support.learner_steps import BASE, batch_of, learner_of, one_step
from support.models import VOCAB, make
from support.plain_forward import each_sample, of_targets

REUSE, NO_REUSE = (f"train.reuse_scoring_forward={value}" for value in ("true", "false"))
CHECKPOINTING = "train.activation_checkpointing=true"
BYPASS, ENTROPY = "correction.preset=ppo-is", "objective.entropy_coef=0.1"


def weights_of(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def equal(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def step_of(*settings, batch=None):
    batch = batch_of() if batch is None else batch
    return one_step(learner_of(*settings), batch)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_step_equals_the_written_out_one():
    """The step is -sum(w A logp)/slots by plain autograd, sample by sample on the stock model, then
    torch's AdamW."""
    batch = batch_of(temperature=0.7)
    weight = torch.rand(batch.num_slots, generator=torch.Generator().manual_seed(5))
    learner = learner_of("replay.mode=off")
    scored, metrics, after = one_step(learner, batch.replace(routing=None), weight)

    model, total = make("qwen3_moe"), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    for s, (part, whole) in enumerate(each_sample(model, batch, 0.7)):
        logp, mask = of_targets(whole, batch, part), batch.trainable[part]
        close(scored.logp_old[part][mask], logp.detach()[mask])
        total = total - (weight[part] * batch.outcome[s] * logp)[mask].sum()
    (total / int(batch.trainable.sum())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    before = weights_of(model)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        # Adam's first step is the sign of the gradient: noise decides near 0
        sure = gradients[name].abs() > 1e-5
        moved, expected = after[name] - before[name], parameter - before[name]
        torch.testing.assert_close(moved[sure], expected[sure], atol=1e-4, rtol=1e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("objective", ["", BYPASS, "objective.preset=gspo", ENTROPY])
def test_options_that_must_not_change_a_bit(objective):
    """Checkpointed activations, and (with a scoring forward) its reuse."""
    own, plain, options = [objective] if objective else [], [NO_REUSE], [CHECKPOINTING, REUSE]
    if objective == BYPASS:
        plain, options = [], [CHECKPOINTING]
    _, expected, weights = step_of(*own, *plain)
    for option in options:
        _, metrics, found = step_of(*own, option)
        assert metrics | {"time/score_saved": 0} == expected | {"time/score_saved": 0}
        assert equal(weights, found)


def test_a_step_of_one_micro_batch_has_one_forward(subtests):
    for settings, forwards in (
        ((), 1),
        ((NO_REUSE,), 2),
        ((CHECKPOINTING,), 2),
        (("objective.num_minibatches=2",), 1 + 2),
        (("train.tokens_per_micro_batch=50",), 2 + 2),
        (("train.tokens_per_micro_batch=50", REUSE), 2),
        ((BYPASS,), 1),
    ):
        with subtests.test(settings=settings):
            learner, calls = learner_of(*settings), []
            learner.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            one_step(learner, batch_of())
            assert len(calls) == forwards


def test_micro_batches_add_up():
    _, whole, _ = step_of()
    scored, parts, _ = step_of("train.tokens_per_micro_batch=20")
    for name in ("train/loss", "train/grad_norm"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4)
    close(scored.logp_old, learner_of().score(batch_of()).logp_old)


def test_replay_acts_in_score_and_update_and_keeps_native_routes():
    batch, learner = batch_of(), learner_of()
    scored, without = learner.score(batch), learner.scorer.score(batch, replay=False)
    assert (scored.logp_old - without.logp_old).abs().max() > 1e-3
    assert not torch.equal(scored.routing_native.ids, batch.routing.ids)
    own = batch.replace(routing=without.routing_native)  # replayed: no difference to a bit
    assert torch.equal(learner.score(own).logp_old, without.logp_old)
    assert not equal(step_of()[2], step_of("replay.mode=off")[2])


def test_minibatches_move_the_policy_between_them():
    assert step_of()[1]["train/ratio_dev"] == 0.0
    assert step_of("objective.num_minibatches=2")[1]["train/ratio_dev"] > 0.0


def test_rates_of_warm_up_and_of_linear_decay():
    def rates(count, *settings, version=0, updates=0):
        learner = learner_of(*settings)
        learner.version, learner.updates = version, updates
        return [one_step(learner, batch_of())[1]["train/lr"] for _ in range(count)]

    warm_up = rates(5, "optim.warmup_steps=3")
    assert warm_up == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    decay = ("optim.warmup_steps=1", "optim.lr_decay=linear", "steps=2")
    found = rates(2, *decay, "objective.num_minibatches=2")  # of the last of a step's two updates
    assert found == pytest.approx([0.01 * 3 / 4, 0.01 * 1 / 4])
    # a fork after 2 of 3 steps, of a run with four minibatches each
    forked = rates(1, "optim.lr_decay=linear", "steps=3", version=2, updates=8)
    assert forked == pytest.approx([0.01 / 3])


def test_checkpointing_leaves_out_what_layers_draw_in_train_mode():
    """Dropout inside of a layer is off. A layer of OPT's own dropout would be on."""
    config = resolve(BASE, [CHECKPOINTING])
    model = make("qwen3_moe")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    learner = LocalLearner(PolicyScorer(model, config, routers=None))
    assert all(layer.training for layer in model.model.layers)  # or nothing is checkpointed
    first, second = (learner.scorer.score(batch_of(), replay=False).logp_old for _ in range(2))
    assert torch.equal(first, second)
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 2, "word_embed_proj_dim": 16}
    opt = AutoModelForCausalLM.from_config(OPTConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    with pytest.raises(UsageError, match=r"OPTDecoder has dropout=0\.1 from the config"):
        checkpoint_activations(opt)
    model.supports_gradient_checkpointing = False
    with pytest.raises(UsageError, match="checkpointing: transformers has none"):
        checkpoint_activations(model)


def test_checkpointing_recomputes_the_critics_layers_too(tmp_path):
    model = make("qwen3_moe")
    model.save_pretrained(tmp_path)
    layers, gradients = [], []
    for setting in (CHECKPOINTING, "train.activation_checkpointing=false"):
        config = resolve(BASE, ["objective.preset=ppo", f"model.path={tmp_path}", setting])
        critic = build_critic(config.model, config, torch.device("cpu"))
        critic.values.backbone.layers[0].mlp.register_forward_pre_hook(
            lambda *_, place=setting: layers.append(place)
        )
        critic.values(batch_of()).sum().backward()
        gradients.append([p.grad for p in critic.values.parameters()])
    assert [layers.count(each) for each in dict.fromkeys(layers)] == [2, 1]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_dense_model_trains_without_routers():
    learner = learner_of("replay.mode=off", routed=False, name="qwen3_dense")
    scored, metrics, _ = one_step(learner, dataclasses.replace(batch_of(), routing=None))
    assert scored.routing_native is None
    assert metrics["train/grad_norm"] > 0


def test_bypass_measures_the_numbers_of_scoring():
    """With one minibatch, logp_old, entropy and the trainer's own routes are those of score(), and
    no forward scores."""
    scored = learner_of().score(batch_of())
    learner = learner_of(BYPASS)
    left_out, metrics, _ = one_step(learner, batch_of())
    assert left_out.logp_old is None
    assert metrics["time/score_saved"] > 0
    for name in ("logp_old", "entropy", "gate_mass"):
        assert torch.equal(getattr(learner.scored, name), getattr(scored, name)), name
    assert torch.equal(learner.scored.routing_native.ids, scored.routing_native.ids)


def test_entropy_bonus_raises_the_entropy():
    learner = learner_of("objective.entropy_coef=10.0", "optim.lr=1e-3")
    entropies = [float(one_step(learner, batch_of())[0].entropy.mean()) for _ in range(3)]
    assert entropies == sorted(entropies)


def test_a_critic_learns_the_outcome_and_leaves_the_policy_alone():
    """GAE with lambda = 1 is return - value. The policy's update does not change the critic's
    weights, and vice versa."""
    ppo = ["objective.preset=ppo", "objective.lam=1.0", "objective.critic.lr=1e-2"]
    learner = learner_of(*ppo, "objective.normalise=none")
    batch, losses = batch_of(), []
    for step in range(6):
        scored, metrics, _ = one_step(learner, batch)
        losses.append(metrics["train/value_loss"])
        if step == 0:
            mask = batch.trainable
            assert (scored.value == 0).all()
            assert torch.equal(scored.advantage[mask], batch.outcome[batch.segment][mask])
    assert losses[-1] < 0.5 * losses[0]
    critics = set(map(id, learner.critic.values.parameters()))
    assert not critics & set(map(id, learner.model.parameters()))


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
    for equals in (same, same + noise):
        assert explained_variance(batch.replace(value_target=equals)) is None
    assert explained_variance(batch.replace(value_target=0 * same, value=0 * same)) is None


def test_an_unprotected_value_term_excludes_rejected_slots():
    """A gate on new / rollout that rejects everything leaves the critic nothing to learn from."""
    gate = 'correction.gates=[{statistic="trainer_prob",low=0.999999,ratio="new/rollout"}]'
    for protect, learns in (('["kl","entropy","value"]', True), ('["kl","entropy"]', False)):
        _, metrics, _ = step_of("objective.preset=ppo", gate, f"correction.protect={protect}")
        assert (metrics["train/value_loss"] > 0) == learns


def test_the_reference_is_frozen_and_its_kl_pulls_back():
    """A strong KL term keeps the policy nearer to its start than no KL term."""
    moved = {}
    for coef in (0.0, 5.0):
        overrides = [f"objective.kl.coef={coef}", "optim.lr=1e-3", "replay.mode=off"]
        reference = make("qwen3_moe").requires_grad_(False)
        prepare_for_training(reference, torch.device("cpu"))
        learner, before = learner_of(*overrides, reference=reference), weights_of(reference)
        for _ in range(4):
            scored, metrics, _ = one_step(learner, batch_of().replace(routing=None))
        moved[coef] = float((scored.logp_old - scored.logp_ref)[scored.trainable].abs().mean())
        assert equal(before, weights_of(reference))
        assert ("train/kl" in metrics) == (coef > 0)
    assert 0 < moved[5.0] < 0.9 * moved[0.0]


@pytest.mark.parametrize(
    ("live", "fixed"),
    [
        ("preset=pg-tis", "preset=tis"),
        (
            "preset=opsm",
            'gates=[{statistic="k1",aggregate="mean",scope="sequence",when="negative",high=0.1}]',
        ),
    ],
)
def test_live_corrections_equal_fixed_ones_before_the_policy_moves(live, fixed):
    """With one minibatch new is old, so weights and gates of new / rollout are those of old /
    rollout."""
    norms, first = [], []
    for correction in ([live], [fixed], []):
        settings = [f"correction.{setting}" for setting in correction]
        learner = learner_of(*settings, "objective.preset=reinforce")
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
        norms.append(metrics["train/grad_norm"])
        first.append(next(learner.model.parameters()).detach().clone())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    torch.testing.assert_close(first[0], first[1])
    assert norms[0] != pytest.approx(norms[2], rel=1e-2)  # and not what no correction gives


def test_score_centering_equals_the_written_out_step():
    """The step is -A (log p_a - sum over the vocabulary of q log p) by plain autograd on the stock
    model, sample by sample."""
    batch = batch_of().replace(routing=None)
    q = torch.randn(batch.num_slots, VOCAB, generator=torch.Generator().manual_seed(1))
    q = q.log_softmax(-1)
    order = q.argsort(descending=True)
    batch = batch.replace(top_ids=order.int(), top_logp_rollout=q.gather(-1, order))
    centering = ["correction.preset=score-centering", "objective.preset=reinforce"]
    small = "train.tokens_per_micro_batch=30"
    _, metrics, _ = step_of("replay.mode=off", *centering, small, batch=batch)
    assert metrics["train/head_mass"] == pytest.approx(1, abs=1e-5)

    model, total = make("qwen3_moe"), torch.zeros(())
    for s, (part, logp) in enumerate(each_sample(model, batch)):
        centred = of_targets(logp, batch, part) - (q[part].exp() * logp).sum(-1)
        total = total - (batch.outcome[s] * centred)[batch.trainable[part]].sum()
    (total / int(batch.trainable.sum())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_scoring_returns_the_likeliest_tokens_of_both_sides():
    """It does so only if the batch has top_ids; compared with the stock model's whole
    distribution."""
    batch = batch_of(temperature=0.7).replace(routing=None)
    assert learner_of("replay.mode=off").score(batch).trainer_top_ids is None
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (batch.num_slots, 5), generator=generator, dtype=torch.int32)
    asked = batch.replace(top_ids=ids, top_logp_rollout=torch.full(ids.shape, -2.0))
    scored = learner_of("replay.mode=off", "train.tokens_per_micro_batch=30").score(asked)
    for part, logp in each_sample(make("qwen3_moe"), batch, 0.7):
        mask = batch.trainable[part]
        found = scored.trainer_top_logp[part][mask]
        close(found, logp.topk(5).values[mask])
        close(found, logp[mask].gather(-1, scored.trainer_top_ids[part][mask].long()))
        close(scored.top_logp_old[part][mask], logp.gather(-1, ids[part].long())[mask])
    assert scored.trainer_top_ids.dtype == torch.int32
    assert (scored.top_logp_old[~batch.trainable] == 0).all()


def test_bypass_refuses_routes_of_other_tokens_before_the_update():
    learner = learner_of(BYPASS, "replay.min_agreement=0.9")
    before = weights_of(learner.model)
    with pytest.raises(RoutingError, match="agree in"):
        one_step(learner, batch_of())
    assert equal(before, weights_of(learner.model))


@pytest.mark.parametrize("of_minibatch", [0, 1, 3])
def test_bypass_refuses_wrong_routes_of_any_sample_before_its_own_minibatch(of_minibatch):
    """The routers' own routes, but for one sample. Weights that have moved a little choose nearly
    the same, so what they choose tells wrong routes in later minibatches too."""
    settings = BYPASS, "replay.min_agreement=0.8", "objective.num_minibatches=4", "optim.lr=1e-5"
    learner, batch = learner_of(*settings), batch_of()
    right = learner.scorer.score(batch, replay=False).routing_native
    _, metrics, _ = one_step(learner, batch.replace(routing=right))
    assert learner.updates == 4
    assert metrics["train/grad_norm"] > 0

    samples = pack.minibatches(batch, 4)[of_minibatch]
    longest = max(samples, key=lambda sample: len(batch.slots_of([sample])))
    slots, ids = batch.slots_of([longest]), right.ids.clone()
    ids[slots] = batch.routing.ids[slots]
    wrong, learner = (
        batch.replace(routing=dataclasses.replace(right, ids=ids)),
        learner_of(*settings),
    )
    with pytest.raises(RoutingError, match="agree in") as refused:
        one_step(learner, wrong)
    assert learner.updates == of_minibatch
    for said in (
        f"earlier minibatches of the step ({of_minibatch})",
        f"counted within minibatch {of_minibatch + 1}",
    ):
        assert (said in str(refused.value)) == (of_minibatch > 0)


def test_minibatches_that_replay_nothing_of_the_engine_are_not_compared():
    """Routes that are only measured may be others once the weights have moved."""
    learner = learner_of(BYPASS, "replay.mode=off", "objective.num_minibatches=4")
    one_step(learner, batch_of())
    assert learner.updates == 4
