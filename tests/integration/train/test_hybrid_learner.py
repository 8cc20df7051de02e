"""A learner's step of a recurrent hybrid, against losses written out sample by sample on the stock
model."""

import pytest
import torch

from onepolicy.build.learner import build_reference, build_update_parts, install_chunks
from onepolicy.config import resolve
from onepolicy.models import lora
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from onepolicy.sync.adapters import add_adapter
from onepolicy.train.activation_checkpointing import checkpoint_activations
from onepolicy.train.learner import LocalLearner
from onepolicy.train.lora import Adapter
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.update_parts import Reference
from onepolicy.types import Group
from support.families import TABLE
from support.learner_steps import BASE, batch_of, one_step, random_sample
from support.learner_steps import learner_of as policy_of
from support.models import VOCAB
from support.plain_forward import of_targets

CPU = torch.device("cpu")


def hybrid():
    """Return two layers of the gated delta rule around one of attention, all with experts."""
    sizes = {"vocab_size": VOCAB, "num_experts_per_tok": 2, "linear_conv_kernel_dim": 4}
    return TABLE["qwen3_5_moe_text"].model(max_position_embeddings=128, **sizes).eval()


def learner_of(*overrides):
    replayed = ["replay.min_agreement=0"]  # random routes agree with nothing
    config = resolve(BASE, [*replayed, *overrides, "rollout.prompts_per_step=4"])
    model, adapter = hybrid(), None
    prepare_for_training(model, CPU)
    install_chunks(model, config)
    if config.train.lora is not None:
        add_adapter(model, config.train.lora, "base", 0)
        generator = torch.Generator().manual_seed(0)
        for name, tensor in lora.adapter_tensors(model).items():
            if ".lora_B." in name:
                tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        adapter = Adapter(model, "test")
    if config.train.activation_checkpointing:
        checkpoint_activations(model)
    scorer = PolicyScorer(model, config, routers=bind_routers(model))
    return LocalLearner(scorer, parts=build_update_parts(config), adapter=adapter)


def alone(model, batch):
    """Return log-probabilities [T] of the stock model under the batch's routes."""
    routers, found = bind_routers(model), []
    for start, end in batch.cu_seqlens.unfold(0, 2, 1).tolist():
        with routers.replay(batch.routing.rows(start, end), check=False):
            logits = model(input_ids=batch.input_ids[None, start:end], use_cache=False).logits[0]
        found.append(of_targets(logits.log_softmax(-1), batch, slice(start, end)))
    return torch.cat(found)


def gradients_of_step(learner, batch):
    found = {}

    def keep(*_, **__):
        for name, parameter in learner.model.named_parameters():
            if parameter.requires_grad:
                found[name] = parameter.grad.clone()

    learner.optimizer.register_step_pre_hook(keep)
    scored, *_ = one_step(learner, batch)
    return scored, found


def test_a_step_with_replay_equals_the_written_out_one():
    """At equal weights the loss is -sum(A logp) / slots."""
    batch, model = batch_of(), hybrid()
    scored, found = gradients_of_step(learner_of(), batch)
    logp, mask = alone(model, batch), batch.trainable
    torch.testing.assert_close(scored.logp_old[mask], logp[mask].detach(), rtol=0, atol=1e-4)
    (-(scored.advantage * logp)[mask].sum() / mask.sum()).backward()
    for name, parameter in model.named_parameters():
        error = (found[name] - parameter.grad).abs().max()
        assert error <= 1e-3 * parameter.grad.abs().max(), name


def test_prompts_that_are_not_shared_are_said_once(caplog):
    learner_of()
    learner_of("train.share_prompts=false")
    (said,) = [r.getMessage() for r in caplog.records if "share_prompts" in r.getMessage()]
    assert "Qwen3_5MoeForCausalLM has recurrent layers" in said


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        ["train.activation_checkpointing=true"],
        ["train.logits_chunk=16"],
        ["train.tokens_per_micro_batch=32"],
    ],
    ids=" ".join,
)
def test_ways_to_compute_a_step_agree(settings):
    batch = batch_of()
    _, expected = gradients_of_step(learner_of(), batch)
    _, found = gradients_of_step(learner_of(*settings), batch)
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.full
def test_adapters_of_recurrent_layers_learn():
    """dL/dB = scale dL/dW A' of the merged weight W, on the stock model."""
    learner, batch = learner_of("train.lora.rank=4"), batch_of()
    layers = lora.adapted_layers(learner.model)
    path = "model.layers.0.linear_attn.in_proj_qkv"
    layer = layers[f"{path}.weight"]
    factor = lora.factors_of(layer)[0].detach().clone()
    stock = hybrid()
    merged = dict(stock.named_parameters())
    for name, tensor in learner.named_weights():
        merged[name].data.copy_(tensor)
    scored, found = gradients_of_step(learner, batch)
    logp, mask = alone(stock, batch), batch.trainable
    torch.testing.assert_close(scored.logp_old[mask], logp[mask].detach(), rtol=0, atol=1e-4)
    (-(scored.advantage * logp)[mask].sum() / mask.sum()).backward()
    gradient = stock.model.layers[0].linear_attn.in_proj_qkv.weight.grad
    expected = layer.scaling["default"] * gradient @ factor.T
    grad = found[f"{path}.lora_B.default.weight"]
    assert (grad - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_a_recurrent_reference_beside_attention_alone(tmp_path):
    """Its samples begin without a state, so the policy shares no prompts of siblings."""
    model = hybrid()
    model.save_pretrained(tmp_path)
    sample = random_sample(20, 1.0, torch.Generator().manual_seed(0))
    batch = pack([Group(0, (sample, sample))])
    settings = ["replay.mode=off", "objective.kl.coef=0.1", f"objective.kl.reference={tmp_path}"]
    scorer = policy_of(*settings).scorer
    assert scorer.batcher.micro_batch(batch, [0, 1]).shared is not None
    reference = Reference(build_reference(scorer, CPU))
    logp = reference.fill_fields(batch, scorer).logp_ref
    stock = model(input_ids=sample.tokens[None, :-1].long(), use_cache=False).logits[0]
    one = of_targets(stock.log_softmax(-1), batch, slice(0, 19))
    expected = torch.cat([one, one])
    mask = batch.trainable
    torch.testing.assert_close(logp[mask], expected[mask].detach(), rtol=0, atol=1e-4)
