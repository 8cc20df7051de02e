"""Models whose head rules tokens out: their log-probability is -inf, and no number computed from it
is NaN."""

import math

import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.correct.current_policy import centered_score
from onepolicy.correct.presets import preset
from onepolicy.engine_check.checks import HOT_TEMPERATURE, check_support, check_temperature
from onepolicy.models import prepare
from onepolicy.train.forward import entropy_of
from support.learner_steps import batch_of, learner_of, one_step
from support.models import VOCAB, make

LOWEST = torch.finfo(torch.float32).min
BANNED = 2


def test_entropy_of_a_row_by_hand():
    """The probabilities are 1/2, 1/4, 1/4 and one token is ruled out: 1/2 ln 2 + 2 * 1/4 ln 4."""
    row = torch.tensor([[0.5, 0.25, 0.0, 0.25]]).log()
    assert row[0, 2] == -math.inf
    assert float(entropy_of(row)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4), rel=1e-6)
    assert float(entropy_of(torch.tensor([[1.0, 0.0]]).log())) == 0.0


def test_entropy_and_gradient_ignore_the_ruled_out_token(subtests):
    start = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    scale = torch.linspace(-3, 3, 5)  # of both signs, and larger than 1
    for low, heat in ((-math.inf, 1.0), (LOWEST, 1.0), (LOWEST, 0.5), (-1e30, 0.7)):
        with subtests.test(low=low, heat=heat):
            kept = start.clone().requires_grad_()
            column = torch.full((5, 1), low)
            whole = torch.cat([start[:, :3], column, start[:, 3:]], 1).requires_grad_()
            tempered = kept / heat
            plain = -(tempered.softmax(-1) * tempered.log_softmax(-1)).sum(-1)
            (scale * plain).sum().backward()
            found = entropy_of(torch.log_softmax(whole / heat, -1))
            (scale * found).sum().backward()
            torch.testing.assert_close(found, plain)
            torch.testing.assert_close(whole.grad[:, [0, 1, 2, 4, 5, 6, 7]], kept.grad)
            assert not whole.grad[:, 3].any()


def test_gradient_of_the_entropy_is_its_slope():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 6, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: entropy_of(z.log_softmax(-1)), logits)


def test_a_logit_that_is_nan_is_not_hidden():
    assert entropy_of(torch.tensor([[math.nan, 0.0]])).isnan().all()


def banned(learner, low=-math.inf):
    """Let the model's head rule one token out, as Chameleon's does with image tokens."""

    def rule_out(module, inputs, out):
        out.logits[..., BANNED] = low
        return out

    learner.model.register_forward_hook(rule_out)
    return learner


def allowed(batch):
    """Return a batch without the ruled-out token."""
    targets = torch.where(batch.target_ids == BANNED, BANNED + 1, batch.target_ids)
    return batch.replace(target_ids=targets)


@pytest.mark.parametrize(
    "option", ["train.reuse_scoring_forward=true", "train.activation_checkpointing=true"]
)
@pytest.mark.parametrize(("low", "heat"), [(-math.inf, 1.0), (LOWEST, 0.7)])
def test_a_learner_step_with_an_entropy_bonus(option, low, heat):
    learner = banned(learner_of("objective.entropy_coef=0.01", option), low)
    scored, metrics, after = one_step(learner, allowed(batch_of(heat)))
    entropy = scored.entropy[scored.trainable]
    assert entropy.isfinite().all()
    assert 0 < float(entropy.max()) <= math.log(VOCAB - 1) + 1e-4
    assert math.isfinite(metrics["train/grad_norm"])
    assert all(parameter.isfinite().all() for parameter in after.values())


def test_score_centering_excludes_tokens_that_neither_side_samples():
    config = preset("score-centering")
    logits = torch.tensor([[0.3, -0.2, 0.1]]).requires_grad_()
    head = torch.log_softmax(logits, -1)
    rollout = torch.log_softmax(torch.tensor([[0.1, 0.0, 0.2]]), -1)
    centered_score(head, rollout, config).sum().backward()
    wide = torch.tensor([[0.3, -0.2, 0.1, -math.inf]]).requires_grad_()
    beside = torch.cat([rollout, torch.full((1, 1), -math.inf)], 1)
    centre = centered_score(torch.log_softmax(wide, -1), beside, config)
    centre.sum().backward()
    assert centre.isfinite().all()
    torch.testing.assert_close(wide.grad[:, :3], logits.grad)


def test_a_family_that_packs_wrongly_is_refused_with_any_head(monkeypatch):
    """Beside the lowest float32 the spread of the logits is infinite, and every difference is 0 of
    it."""
    model = make("qwen3_dense")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    model.lm_head.bias.data[3:9] = LOWEST
    packed = prepare._packed_logits
    monkeypatch.setattr(prepare, "_packed_logits", lambda *a: packed(*a).roll(1, 0))
    with pytest.raises(UsageError, match="cannot be trained packed"):
        prepare.prepare_for_training(model, torch.device("cpu"))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e30])
def test_damaged_weights_are_no_fault_of_the_family(value):
    model = make("qwen3_dense")
    for parameter in model.parameters():
        parameter.data.fill_(value)
    with pytest.raises(UsageError, match="its weights are damaged"):
        prepare.prepare_for_training(model, torch.device("cpu"))


def test_sizes_that_do_not_fit_are_named():
    """As a config.json of another family leaves them."""
    model = make("qwen3_dense")
    norm = model.model.layers[0].self_attn.q_norm
    norm.weight = torch.nn.Parameter(torch.ones(2 * len(norm.weight)))
    with pytest.raises(UsageError, match=r"cannot compute with the sizes in its config\.json"):
        prepare.prepare_for_training(model, torch.device("cpu"))


def sound():
    """Return a learner and a batch in which the engine agrees with it on every token."""
    learner = learner_of("replay.mode=off")
    batch = learner.scorer.score(batch_of(HOT_TEMPERATURE).replace(routing=None), replay=False)
    return learner, batch.replace(logp_rollout=batch.logp_old)


def test_the_test_of_draws_fails_on_a_nan_entropy():
    learner, batch = sound()
    drawn = batch.replace(entropy=-batch.logp_old)  # the tokens are exactly as likely as draws
    assert check_temperature(learner.scorer, drawn, limit=1.0).passed
    spoiled = drawn.replace(entropy=drawn.entropy * math.nan)
    broken = check_temperature(learner.scorer, spoiled, limit=1.0)
    assert broken.passed is False
    assert "entropy is not finite" in broken.found


def test_the_tests_of_temperature_and_support_fail_on_a_nan_trainer():
    learner, batch = sound()
    assert check_support(learner.scorer, (batch,)).passed is not False
    learner.model.lm_head.weight.data[7] = math.nan
    scored = learner.scorer.score(batch, replay=False)
    for limit in (None, 1.0):
        assert check_temperature(learner.scorer, scored, limit).passed is False
    assert check_support(learner.scorer, (batch,)).passed is False
