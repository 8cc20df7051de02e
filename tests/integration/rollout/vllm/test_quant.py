"""rollout.quant with vLLM: its arguments, the settings that are refused, and the check that its
experts really are codes."""

import asyncio
import sys

import pytest
import torch
from torch import nn

from onepolicy.build.measure import build_engine_and_scorer
from onepolicy.config import Fp8, Int8, ModelConfig, UsageError, VLLMEngineConfig, resolve
from onepolicy.config.load import resolve_as
from onepolicy.config.serve import ServeConfig
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm import serve
from onepolicy.rollout.vllm.quant import PartTensors, measure_part_tensors, part_sizes
from onepolicy.rollout.vllm.start import engine_args, start_llm_engine
from support.fake_vllm import engine_of, make_checkpoints, serving

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
ASKED = {"max_len": 96, "top_logprobs": 32, "return_routes": True, "trust_remote_code": False}
IGNORED = ["*.gate", "*.gate.*", "*.router", "*.router.*"]
IGNORED += ["*.shared_expert_gate", "*.shared_expert_gate.*"]


def arguments(quant):
    return engine_args(VLLMEngineConfig(), "/models/m", cpu=False, quant=quant, **ASKED)


def test_only_the_engines_arguments_change():
    plain = arguments(None)
    assert "quantization" not in plain
    kept = {"quantization_config": {"ignore": IGNORED}}
    assert arguments(Fp8()) == plain | {"quantization": "fp8_per_channel"} | kept
    assert arguments(Int8()) == plain | {"quantization": "int8_per_channel_weight_only"}


def test_a_server_is_started_with_the_same_arguments():
    config = resolve_as(ServeConfig, {}, ["quant=fp8", "max_num_seqs=7"])
    assert (config.quant, config.max_num_seqs) == (Fp8(), 7)
    line = serve.command_line(arguments(config.quant), "127.0.0.1", 8000)
    at = line.index("--quantization")
    assert line[at : at + 2] == ["--quantization", "fp8_per_channel"]
    assert '"*.gate"' in line[line.index("--quantization-config") + 1]


def test_the_cpu_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    reason = r"rollout\.quant: (fp8|int8) with vLLM needs a GPU: .*kind = hf"
    with pytest.raises(UsageError, match=reason):
        start_llm_engine(VLLMEngineConfig(), "/nowhere", cpu=True, quant=Int8(), **ASKED)
    options = {"max_len": 96, "vocab": 32, "return_routes": True, "cpu": True}
    with pytest.raises(UsageError, match=reason):
        serve.run_server(ServeConfig(quant=Fp8()), "/nowhere", **options)
    scorer = "onepolicy.build.measure.build_scorer"
    monkeypatch.setattr(scorer, lambda *a: pytest.fail("loaded a model first"))
    given = [f"out={tmp_path / 'run'}", "rollout.engine.kind=vllm", "rollout.quant=fp8"]
    given += ["train.device=cpu"]
    with pytest.raises(UsageError, match=reason):
        build_engine_and_scorer(resolve(MINIMAL, given), ModelConfig(path="/nowhere"), 96)


def test_versions_that_were_not_read_are_refused():
    vllm_quant.check_quant_version(None, "0.29.1")
    vllm_quant.check_quant_version(Fp8(), "0.30.0")
    with pytest.raises(UsageError, match=r"rollout\.quant: vllm 0\.29\.1 was not read"):
        vllm_quant.check_quant_version(Fp8(), "0.29.1")


def test_settings_that_vllm_cannot_start_with_are_named():
    message = "did not start with int8_per_channel_weight_only: no kernel$"
    with pytest.raises(UsageError, match=message), vllm_quant.name_setting_in_errors(Int8()):
        raise NotImplementedError("no kernel\nfor this")
    with pytest.raises(NotImplementedError), vllm_quant.name_setting_in_errors(None):
        raise NotImplementedError("of a bfloat16 engine")


class Worker(nn.Module):
    """A worker's model in vLLM's names: one MoE layer with a shared expert, after quantisation by
    `made`."""

    def __init__(self, codes, left=()):
        super().__init__()
        shapes = {
            "model.embed_tokens.weight": (32, 8),
            "model.layers.0.self_attn.qkv_proj.weight": (16, 8),
            "model.layers.0.self_attn.q_norm.weight": (8,),
            "model.layers.0.mlp.gate.weight": (4, 8),
            "model.layers.0.mlp.shared_expert_gate.weight": (1, 8),
            "model.layers.0.linear_attn.conv1d.weight": (4, 1, 4),
            "model.layers.0.mlp.shared_expert.down_proj.weight": (8, 4),
            "model.layers.0.mlp.experts.routed_experts.w13_weight": (4, 8, 8),
            "model.layers.0.mlp.experts.routed_experts.w2_weight": (4, 8, 4),
            "model.layers.0.mlp.experts.routed_experts.w13_bias": (4, 8),
        }
        made = {"w13_weight", "w2_weight"}
        if codes == torch.float8_e4m3fn:
            made |= {"qkv_proj", "down_proj"}
        self.tensors = {}
        for name, shape in shapes.items():
            quantised = any(part in name for part in made - set(left))
            tensor = torch.zeros(shape, dtype=codes if quantised else torch.bfloat16)
            self.tensors[name] = tensor
            if quantised:
                self.tensors[f"{name}_scale"] = torch.zeros((*shape[:-1], 1))

    def named_parameters(self, *args, **kwargs):
        return iter(self.tensors.items())


def sizes(quant, model):
    parts = [PartTensors(**each) for each in measure_part_tensors(model)]
    return part_sizes(quant, parts, "bfloat16")


def test_bytes_per_part_are_those_of_the_kernels_tensors():
    found = {part.part: part for part in sizes(Fp8(), Worker(torch.float8_e4m3fn)).parts}
    weights, biases, rows = 4 * 8 * 8 + 4 * 8 * 4, 4 * 8, 4 * 8 + 4 * 8
    experts = found["experts"]
    assert (experts.parameters, experts.bytes_before) == (weights + biases, 2 * (weights + biases))
    assert experts.bytes_after == weights + 2 * biases + 4 * rows
    assert found["attention"].bytes_after == 16 * 8 + 4 * 16 + 2 * 16
    assert found["router"].parameters == 5 * 8
    assert found["shared experts"].bytes_after == 8 * 4 + 4 * 8
    for part in ("router", "embeddings", "norms"):
        assert found[part].bytes_after == found[part].bytes_before == 2 * found[part].parameters
    int8 = sizes(Int8(), Worker(torch.int8))
    after = {part.part: part.bytes_after for part in int8.parts}
    assert after["attention"] == 2 * (16 * 8 + 16)  # as it was
    assert "bytes in the engine: experts 832 to 704" in int8.describe()
    assert int8.as_json()["method"] == "int8_per_channel_weight_only"


FP8 = torch.float8_e4m3fn


def test_weights_left_in_high_precision_and_routers_in_codes_are_refused(subtests):
    coded = Worker(FP8)
    coded.tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(4, 8, dtype=FP8)
    for quant, model, message in (
        (Fp8(), Worker(FP8, left=("w2_weight",)), "left 128 weights of experts in torch.bfloat16"),
        (Fp8(), Worker(FP8, left=("qkv_proj",)), "left 144 weights of attention in torch.bf"),
        (Fp8(), Worker(torch.int8), "experts in torch.int8|attention in torch.bf"),
        (Int8(), Worker(torch.int8, left=("w13_weight", "w2_weight")), "left 384 weights of exp"),
        (Int8(), nn.Linear(4, 4), "quantises experts, which this model does not have"),
        (Fp8(), coded, "quantised routers"),
    ):
        with subtests.test(message=message), pytest.raises(UsageError, match=message):
            sizes(quant, model)


def test_a_server_must_have_the_runs_quantisation(tmp_path):
    with serving(make_checkpoints(tmp_path)) as fake:
        held = measure_part_tensors(Worker(torch.float8_e4m3fn))
        fake.told = {"dtype": "bfloat16", "head_dtypes": ["torch.bfloat16"], "held": held}

        def connect(quant):
            engine = engine_of(fake, quant=quant, dtype="bfloat16")
            with engine.client.startup_errors():
                asyncio.run(engine.connect())
            return engine

        unquantised = r"quant: fp8, but .* not quantised; .*engine serve MODEL` quant=fp8"
        with pytest.raises(UsageError, match=unquantised):
            connect(Fp8())
        fake.told |= {"quantization": "fp8_per_channel"}
        assert connect(Fp8()).caps.sizes.parts[0].part == "experts"
        fake.told |= {"held": measure_part_tensors(Worker(torch.int8))}
        with pytest.raises(UsageError, match="vLLM's fp8_per_channel left"):
            connect(Fp8())
