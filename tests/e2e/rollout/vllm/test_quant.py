"""vLLM's own quantisation, without its kernels: on the CPU it has no kernels that make or multiply
these codes, so torch does both here. The tests cover the rest: vLLM's arguments, the layers it
quantises, and its reload at a sync."""

import asyncio

import pytest
import torch

from onepolicy.config import Fp8, Int8, ModelConfig, VLLMEngineConfig
from onepolicy.models.load import load_model, read_config
from onepolicy.models.quant.formats import e4m3_rows
from onepolicy.replay.checks import check_completion
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.sync.canary import canary_logp
from onepolicy.sync.push import checked_push
from support.vllm_engines import MAX_LEN, VOCAB, FakeLearner, play, prompts, ragged, rules_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
CONFIG = VLLMEngineConfig(dtype="bfloat16", max_num_seqs=16, kv_cache_gib=0.125, block_size=32)


def scaled_fp8_quant(x, scale=None, use_per_token_if_dynamic=False, **_):
    assert scale is None
    assert use_per_token_if_dynamic
    return e4m3_rows(x)


def experts_in_torch(method, layer, x, topk_weights, topk_ids, **shared):
    """Compute the layer from its dequantised codes, with fp8 activations per token."""

    def dequantised(name):
        scale = getattr(layer, f"{name}_weight_scale", None)
        scale = getattr(layer, f"{name}_scale")[..., None] if scale is None else scale
        return getattr(layer, f"{name}_weight").float() * scale

    def seen(values):
        if layer.w13_weight.dtype != torch.float8_e4m3fn:
            return values
        codes, scale = e4m3_rows(values)
        return codes.float() * scale

    up, down = dequantised("w13"), dequantised("w2")
    inner = torch.einsum("nh,nkih->nki", seen(x.float()), up[topk_ids.long()])
    gate, value = inner.chunk(2, -1)
    inner = seen(torch.nn.functional.silu(gate) * value)
    out = torch.einsum("nki,nkhi->nkh", inner, down[topk_ids.long()])
    return (out * topk_weights[..., None]).sum(1).to(x.dtype)


@pytest.fixture(scope="module", params=[Fp8(), Int8()], ids=lambda quant: quant.format)
def quantised(request, folders):
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
    from vllm.model_executor.layers.quantization.online import fp8, int8, moe_base

    torch.set_num_threads(1)
    source = ModelConfig(path=str(folders[0]))
    hf = read_config(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_quant, "check_quant_device", lambda *_, **__: None)
        patch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)
        for where, name, backend in (
            (fp8, "select_fp8_moe_backend", Fp8MoeBackend.TRITON),
            (int8, "select_int8_moe_backend", Int8MoeBackend.TRITON),
        ):
            patch.setattr(where, name, lambda backend=backend, **_: (backend, TritonExperts))
        patch.setattr(moe_base.OnlineMoEMethodBase, "apply", experts_in_torch)
        rules = rules_of(hf)
        engine = VLLMEngine(
            source, hf, CONFIG, route_spec=rules, max_len=MAX_LEN, cpu=True, quant=request.param
        )
        yield request.param, engine, rules


@pytest.fixture(scope="module")
def learners(folders):
    return [
        FakeLearner(load_model(ModelConfig(path=str(folder)), torch.float32, torch.device("cpu")))
        for folder in folders
    ]


def int8_in_bfloat16(weight):
    """Quantise as vLLM 0.30.0 does: scale and quotient are rounded to the dtype of the weight [E,
    out, in]."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scale).round().clamp(-127, 127)


def expert_codes(model):
    found = {name: p for name, p in model.named_parameters() if name.endswith("w2_weight")}
    return {name: p.detach().clone() for name, p in found.items()}


def test_experts_are_in_codes_and_routers_are_not(quantised):
    quant, engine, _ = quantised
    parts = {part.part: part for part in engine.caps.sizes.parts}
    smaller = {name: part.bytes_after < 0.7 * part.bytes_before for name, part in parts.items()}
    assert smaller["experts"]  # with float32 scales of rows 32 and 64 wide
    assert smaller["attention"] == (quant.format == "fp8")
    router = parts["router"]
    assert router.bytes_after == router.bytes_before == 2 * router.parameters
    assert vllm_quant.METHODS[quant.format] in engine.caps.sizes.describe()


def test_a_sync_quantises_again(quantised, learners):
    """The codes are those of the synced tensors. A sync back to the first tensors restores every
    bit."""
    quant, engine, _ = quantised
    asyncio.run(checked_push(learners[0], engine, vocab=VOCAB))
    before = asyncio.run(canary_logp(engine, VOCAB))
    found = []
    for version, learner in enumerate((learners[1], learners[0])):
        asyncio.run(engine.load_weights(learner.named_weights(), version))
        found.append(asyncio.run(canary_logp(engine, VOCAB)))
        for name, codes in engine.llm.apply_model(expert_codes)[0].items():
            layer = learner.model.model.layers[int(name.split(".")[2])]
            weight = layer.mlp.experts.down_proj.detach().bfloat16()
            expected = e4m3_rows(weight)[0] if quant.format == "fp8" else int8_in_bfloat16(weight)
            assert torch.equal(codes.float(), expected.float())
    assert torch.equal(found[1], before)
    assert not torch.equal(found[0], before)


def test_its_routes_come_with_its_tokens(quantised):
    _, engine, rules = quantised
    requests = ragged(prompts(5))
    for (prompt, _, _), done in zip(requests, play(engine, requests), strict=True):
        check_completion(done, prompt, rules, "request")
