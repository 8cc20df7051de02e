"""`lm_head = float32`: a projection of float32 weights and hidden states, in engine and learner,
tied or not."""

import asyncio
import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from onepolicy.build.components import build_components
from onepolicy.config import HFEngineConfig, ModelConfig, RolloutConfig, UsageError, resolve
from onepolicy.models.fp32_head import Fp32Head, install_fp32_head, load_weights
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.rollout.collect import collect_rollouts
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.vllm.start import check_head_dtype
from onepolicy.train.forward import forward
from onepolicy.train.pack import pack
from onepolicy.train.rescore import variant_scorer
from onepolicy.types import Sampling
from support.learner_steps import batch_of, learner_of, one_step
from support.metrics import rows, timeless
from support.models import CONFIGS
from support.replay_models import same_bits

BF16 = HFEngineConfig(dtype="bfloat16", lm_head="float32", max_num_seqs=4)


def model_of(*, tied, seed=0):
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.tie_word_embeddings = tied
    return AutoModelForCausalLM.from_config(config).eval()


class OneLogit(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        self.head.weight.data = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)

    def get_output_embeddings(self):
        return self.head


def test_by_hand():
    """1 + 2^-8 is halfway between two bfloat16 numbers and is rounded to 1. float32 represents
    it."""
    model, hidden = OneLogit(), torch.ones(1, 2, dtype=torch.bfloat16)
    assert model.head(hidden).item() == 1.0
    Fp32Head(model, field="x")
    assert model.head(hidden).dtype == torch.float32
    assert model.head(hidden).item() == 1.00390625
    assert list(model.state_dict()) == ["head.weight"]
    assert model.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_projects_unrounded_weights_also_after_a_sync(tied):
    """Logits equal F.linear of the bfloat16 layers' output and the given weights in float32, bit
    for bit."""
    engine = HFEngine(model_of(tied=tied), BF16, return_routes=True, max_len=32)
    seen = []
    head = engine.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))

    def projected(weight):
        seen.clear()
        asyncio.run(engine.generate([3, 4, 5], Sampling(1.0, 4), seed=0))
        assert len(seen) == 4
        for hidden, out in seen:
            assert hidden.dtype == torch.bfloat16
            assert torch.equal(out, nn.functional.linear(hidden.float(), weight))

    projected(model_of(tied=tied).get_output_embeddings().weight)
    other = model_of(tied=tied, seed=1)
    asyncio.run(engine.load_weights(other.state_dict().items(), 1))
    projected(other.get_output_embeddings().weight)
    assert torch.equal(head.weight, other.get_output_embeddings().weight.bfloat16())
    assert (engine.model.get_input_embeddings().weight is head.weight) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_takes_new_weights_unrounded(tied):
    model, other = model_of(tied=tied), model_of(tied=tied, seed=1)
    install_fp32_head(model, torch.bfloat16, field="rollout.engine.lm_head", copy=True)
    load_weights(model, other.state_dict().items())
    hidden, weight = torch.randn(3, 64), other.get_output_embeddings().weight
    assert torch.equal(model.get_output_embeddings()(hidden), nn.functional.linear(hidden, weight))
    assert torch.equal(model.get_output_embeddings().weight, weight.bfloat16())


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_bfloat16_learner_reach_the_parameter(tied):
    batch = batch_of()
    ours, theirs = (model_of(tied=tied).to(torch.bfloat16) for _ in range(2))
    install_fp32_head(ours, torch.bfloat16, field="model.lm_head")
    weight = theirs.get_output_embeddings().weight
    theirs.lm_head = nn.Identity()  # the same written out around the model's own layers
    for model in (ours, theirs):
        prepare_for_training(model, torch.device("cpu"))
    theirs.lm_head.forward = lambda hidden: nn.functional.linear(hidden.float(), weight.float())
    for model in (ours, theirs):
        forward(model, batch).logp.sum().backward()
    embeddings, expected = (m.get_input_embeddings().weight for m in (ours, theirs))
    assert torch.equal(ours.get_output_embeddings().weight.grad, weight.grad)
    assert torch.equal(embeddings.grad, expected.grad)
    assert (expected is weight) == tied
    assert weight.grad.dtype == torch.bfloat16


def test_options_do_not_change_a_bit_of_it(subtests):
    settings = ["train.autocast=bfloat16", "model.lm_head=float32"]

    def after(*overrides, headed=True):
        learner = learner_of(*overrides)
        if headed:
            Fp32Head(learner.model, field="model.lm_head")
        return one_step(learner, batch_of())[2]

    plain = after(*settings)
    for option in ("train.reuse_scoring_forward=true", "train.activation_checkpointing=true"):
        with subtests.test(option):
            assert same_bits(after(*settings, option), plain)
    without = after("train.autocast=bfloat16", headed=False)
    assert not torch.equal(plain["lm_head.weight"], without["lm_head.weight"])


@pytest.mark.full
def test_a_bfloat16_copy_comes_nearer_to_the_trainer(policy):
    """The engine's arithmetic with the setting has a smaller median gap to a float32 trainer than
    without it, on the same tokens."""
    tree = {"out": "x", "steps": 1, "model": {"path": str(policy)}, "train": {"threads": 1}}
    tree |= {"task": {"kind": "chain", "ops": 2}, "rollout": {"sampling": {"max_tokens": 20}}}
    tree["log"] = {"tensorboard": False, "report": False}
    parts, _ = build_components(resolve(tree))

    async def sampled():
        given = parts.engine, parts.environment, parts.config.rollout, parts.sampling
        how = {"step": 0, "seed": 0, "route_spec": parts.route_spec}
        groups, _ = await collect_rollouts(*given, **how)
        return pack(compute_outcomes(groups, parts.config.objective))

    exact = parts.learner.scorer.score(asyncio.run(sampled()), replay=False)
    gaps = []
    for lm_head in ("same", "float32"):
        rollout = RolloutConfig(engine=BF16.model_copy(update={"lm_head": lm_head}))
        model = load_engine_copy(ModelConfig(path=str(policy)), rollout, torch.device("cpu"))
        scored = variant_scorer(parts.learner.scorer, model=model).score(exact, replay=False)
        gaps.append((exact.logp_old - scored.logp_old)[exact.trainable].abs().median())
    assert gaps[1] < 0.6 * gaps[0]


def test_lora_is_accepted_on_the_layers_and_refused_on_the_head():
    from peft import LoraConfig, get_peft_model

    body = get_peft_model(model_of(tied=False), LoraConfig(target_modules=["q_proj"]))
    install_fp32_head(body, torch.bfloat16, field="model.lm_head")
    body(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    assert all(p.grad is not None for name, p in body.named_parameters() if "lora_A" in name)
    head = get_peft_model(model_of(tied=False), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(UsageError, match=r"model\.lm_head: .* not a plain linear layer"):
        install_fp32_head(head, torch.bfloat16, field="model.lm_head")


def test_a_model_that_rounds_its_logits_is_refused(monkeypatch):
    model = model_of(tied=False)
    plain = model.forward

    def rounding(**arguments):
        out = plain(**arguments)
        out.logits = out.logits.bfloat16()
        return out

    monkeypatch.setattr(model, "forward", rounding)
    words = r"rollout\.engine\.lm_head: .* returns logits in torch.bfloat16"
    with pytest.raises(UsageError, match=words):
        HFEngine(model, BF16, return_routes=False, max_len=32)


def test_a_float32_engine_with_a_float32_head_gives_the_same_numbers():
    def sampled(lm_head):
        config = HFEngineConfig(dtype="float32", lm_head=lm_head)
        engine = HFEngine(model_of(tied=False), config, return_routes=True, max_len=32)
        return asyncio.run(engine.generate([3, 4, 5], Sampling(1.0, 8), seed=0))

    plain, headed = sampled("same"), sampled("float32")
    assert torch.equal(plain.token_ids, headed.token_ids)
    assert torch.equal(plain.logp, headed.logp)


def test_a_vllm_that_rounds_the_logits_is_refused():
    exact, rounded = ["torch.float32"], ["torch.bfloat16"]
    check_head_dtype([exact])
    for found in ([rounded], [["None"]], [[]], [exact, rounded]):
        with pytest.raises(UsageError, match=r"rollout\.engine\.lm_head: .* in .*48390"):
            check_head_dtype(found)


@pytest.mark.slow
def test_resume_and_fork_and_checkpoints(train, tmp_path):
    from onepolicy.cli import main

    settings = ["model.dtype=bfloat16", "model.lm_head=float32", "rollout.engine.lm_head=float32"]
    whole = train("whole", *settings)
    half = train("half", *settings, "steps=2")
    assert main(["train", "--resume", str(half), "steps=4"]) == 0
    assert [timeless(row) for row in rows(half)[-2:]] == [timeless(row) for row in rows(whole)[-2:]]
    saved = AutoModelForCausalLM.from_pretrained(whole / "checkpoints" / "step_00004")
    assert saved.lm_head.weight.dtype == torch.bfloat16
    fork = ["--from", f"{whole}/2", f"out={tmp_path / 'fork'}", "steps=3", "model.lm_head=same"]
    assert main(["train", *fork]) == 0
