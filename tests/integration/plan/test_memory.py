"""Planned models are the real ones, and the predicted memory of a step is that of a real step."""

import json

import plan as benchmark
import pytest
import torch
from transformers import AutoModelForCausalLM

from onepolicy.cli import main
from onepolicy.config import HFEngineConfig, ModelConfig, UsageError, resolve
from onepolicy.config.policy import PolicyConfig
from onepolicy.invariant import ops
from onepolicy.models import experts, layer_kinds
from onepolicy.plan.dims import read_dims, read_hf_config
from onepolicy.plan.engine_memory import embedded_cache_bytes, engine_weights
from onepolicy.plan.hardware import parse_cluster
from onepolicy.plan.planner import Planner
from onepolicy.rollout.copies import quantise_policy
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.tiny.model import make_model
from onepolicy.train import dry_run, fake_kernels, memory, streamed_adamw
from onepolicy.train.dry_run import DryRunModel, MicroBatchShape
from onepolicy.train.memory import FLOAT32, route_bytes
from support.engine_runs import prompts, ragged, run
from support.families import TABLE
from support.invariant_models import engine_of as on_policy_engine
from support.models import CONFIGS, changed, make
from support.paths import ROOT
from support.recurrent_models import hybrid

TREE = {"out": "unused", "steps": 1, "model": {"path": "unused"}, "task": {"kind": "chain"}}
# parameters as their makers count them; DeepSeek's card counts 58 * 256 selection biases too, which
# are buffers here
FACTS = {  # parameters, billions that are active, elements in the KV cache, bytes of routes
    "Qwen3-30B-A3B": (30_532_122_624, 3.3, 98_304, 384),
    "Qwen3-235B-A22B": (235_093_634_560, 22, 192_512, 752),
    "DeepSeek-V3": (671_026_419_200 - 58 * 256, 37, 70_272, 464),
}


def dry_model(config, dtype=torch.bfloat16, *, cpu=True, **more):
    return DryRunModel(config, dtype=dtype, cpu=cpu, **more)


def dims_of(config):
    return read_dims(dry_model(config).model, "it")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FACTS)
def test_known_models_are_counted_exactly(name):
    total, active, cached, routes = FACTS[name]
    dims = dims_of(read_hf_config(ModelConfig(path=name)))
    assert dims.total == total
    assert dims.active / 1e9 == pytest.approx(active, rel=0.02)
    assert 2 * dims.kv_elements(1) == cached
    assert route_bytes(dims) == routes


def test_hub_ids_of_shipped_models_need_no_download():
    assert read_hf_config(ModelConfig(path="deepseek-ai/DeepSeek-V3")).num_hidden_layers == 61


def test_windows_of_a_family_that_alternates():
    dims = dims_of(CONFIGS["gpt_oss"])
    assert [a.window for a in dims.attention] == [8, None, 8]
    assert dims.kv_elements(100) == 2 * 2 * 16 * (8 + 100 + 8)
    mixtral = dims_of(changed("mixtral", sliding_window=8))  # no list of kinds: all layers have it
    assert {a.window for a in mixtral.attention} == {8}


def test_a_dense_model_has_no_experts():
    dims = dims_of(CONFIGS["qwen3_dense"])
    assert (dims.experts, dims.routed, dims.active) == (0, 0, dims.total)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layers", "checkpointing"),
    [("qwen3_moe", 4, False), ("deepseek_v3", 4, True), ("gpt_oss", 5, False)],
)
def test_the_first_layers_predict_all_of_them(name, layers, checkpointing, monkeypatch):
    config, micro = changed(name, num_hidden_layers=layers), MicroBatchShape((30, 30), (20, 20))
    whole = dry_model(config, cpu=False).micro_batch_memory(micro, checkpointing=checkpointing)
    monkeypatch.setattr(dry_run, "ALL_LAYERS", 2)
    part = dry_model(config, cpu=False).micro_batch_memory(micro, checkpointing=checkpointing)
    assert part.saved == whole.saved
    assert part.peak == pytest.approx(whole.peak, rel=0.02)


def test_a_dry_run_leaves_the_model_as_it_was():
    model = dry_model(CONFIGS["qwen3_moe"], torch.float32)
    how = {"checkpointing": True, "entropy_graph": False, "first": False}
    first = model._run_uncached(MicroBatchShape((10,), (5,)), 1, **how)
    assert len(model._layer_list) == 3
    assert experts.sort_by_expert is fake_kernels.REAL_SORT_BY_EXPERT
    assert not model.model.is_gradient_checkpointing
    assert model._run_uncached(MicroBatchShape((10,), (5,)), 1, **how) == first


@pytest.mark.full
def test_samples_add_up_and_only_projected_slots_have_logits():
    model = dry_model(CONFIGS["qwen3_dense"], torch.float32, cpu=False)
    one, two, three = (
        model.micro_batch_memory(MicroBatchShape((40,) * n, (30,) * n), checkpointing=False)
        for n in (1, 2, 3)
    )
    assert one.for_samples(3, two).saved == pytest.approx(three.saved)
    assert one.for_samples(3, two).peak == pytest.approx(three.peak, rel=0.02)
    assert model.micro_batch_memory(MicroBatchShape((40,), (1,)), checkpointing=False).logits == 0


@pytest.mark.full
@pytest.mark.parametrize("slots", [8192, 16384])
def test_attention_beside_sinks_keeps_no_scores(slots):
    """In gpt-oss's width one layer's scores of one sample of 8k were 17 GB in float32."""
    config = changed(
        "gpt_oss",
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
    )
    model = dry_model(config, cpu=False)
    memory = model.micro_batch_memory(MicroBatchShape((slots,), (1,)), checkpointing=True)
    queries = slots * 64 * 64 * 2
    assert memory.peak < 20 * queries  # 1.3 GB at 8k: it grows with the slots, not their square


def wide(vocabulary, name="qwen3_dense", **changes):
    return changed(name, vocab_size=vocabulary, num_hidden_layers=1, **changes)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_in_chunks_are_less_than_3_gb_at_32k_slots(dtype):
    """Of Qwen3's vocabulary, as a share of the peak and beyond all other tensors of a step."""
    micro, few = MicroBatchShape((32_768,), (32_768,)), MicroBatchShape((32_768,), (64,))
    config = wide(151_936, hidden_size=1024)
    chunked, whole = (
        dry_model(config, dtype, cpu=False, logits_chunk=chunk) for chunk in (None, 0)
    )
    assert whole.micro_batch_memory(micro, checkpointing=False).logits > 50e9
    peak = chunked.micro_batch_memory(micro, checkpointing=False).peak
    without = chunked.micro_batch_memory(few, checkpointing=False).saved
    weight_gradients = 2 * 151_936 * 1024 * dtype.itemsize  # the sum, and that of one chunk
    assert peak - without - weight_gradients < 3e9


@pytest.mark.full
def test_logits_in_chunks_grow_until_a_chunk_is_full():
    model = dry_model(wide(8192), torch.float32, cpu=False, logits_chunk=64)
    half, full, more = (
        model.micro_batch_memory(MicroBatchShape((512,), (n,)), checkpointing=False).peak
        for n in (32, 65, 512)
    )
    table = 4 * 32 * 8192
    assert full - half > 2 * table
    assert more - full < table


@pytest.mark.full
@pytest.mark.parametrize("samples", [3, 40])
def test_the_planner_extrapolates_logits_in_chunks(samples, tmp_path):
    wide(8192).save_pretrained(tmp_path)
    settings = [f"model.path={tmp_path}", "train.logits_chunk=256"]
    config = resolve(TREE, [*settings, "rollout.sampling.max_tokens=40"])
    made = Planner(config, config.model, parse_cluster("1xH100"), prompt=20)
    found = made._micro_batch_memory(samples, config, exact=False)
    micro = MicroBatchShape((59,) * samples, (40,) * samples)
    exact = made._model(config).micro_batch_memory(micro, checkpointing=False)
    assert found.peak == pytest.approx(exact.peak, rel=0.03)
    assert found.saved == pytest.approx(exact.saved, rel=0.03)


@pytest.mark.parametrize("quant", ["int8", "fp8", "fp8-weight", "simulated"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_quantised_weights_take_the_engines_reported_bytes(name, quant):
    own = resolve(TREE, [f"rollout.quant={quant}"])
    dims = dims_of(CONFIGS[name])
    weights = engine_weights(dims, own, CONFIGS[name])
    sizes = quantise_policy(make(name, dtype=torch.bfloat16), own.rollout.quant).sizes()
    parts = {part.part: part for part in sizes.parts}
    assert weights.total == sum(part.bytes_after for part in parts.values())
    assert weights.embedding == parts["embeddings"].bytes_after
    assert 0 < weights.routed <= parts["experts"].bytes_after


def test_vllms_int8_is_of_experts_only():
    dims = dims_of(CONFIGS["qwen3_moe"])
    own = resolve(TREE, ["rollout.quant=int8", "rollout.engine.kind=vllm"])
    weights = engine_weights(dims, own, CONFIGS["qwen3_moe"])
    assert weights.total - weights.routed == 2 * (dims.total - dims.routed)
    assert weights.routed < 1.4 * dims.routed


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_kv_cache_takes_its_predicted_bytes(name):
    config = HFEngineConfig(dtype="bfloat16", max_num_seqs=3)
    engine = HFEngine(make(name), config, return_routes=True, max_len=40)
    run(engine, ragged(prompts(2)))
    cache = engine.batch.forward.cache
    found = sum(t.nbytes for t in (*cache.keys.values(), *cache.values.values(), cache.routes))
    own = resolve(TREE, ["rollout.engine.max_num_seqs=3", "rollout.engine.max_len=40"])
    dims = dims_of(CONFIGS[name])
    assert embedded_cache_bytes(dims, own, parse_cluster("1xcpu")) == found


def copies_of(weights):
    """Return the float32 copies that weights keep. Those of one layer's projections are joined."""
    holders = {}
    for weight in weights:
        weight = getattr(getattr(weight, ops.KEPT, None), "whole", weight)
        holders[id(weight)] = getattr(weight, ops.KEPT, None)
    return [kept.values for kept in holders.values() if kept is not None]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_dense"])
@pytest.mark.parametrize("lm_head", ["same", "float32"])
def test_copies_in_float32_of_an_on_policy_engine_are_counted(name, lm_head):
    """All that multiplies, beside the weights: 6 bytes a parameter in place of 2."""
    engine = on_policy_engine(make(name, dtype=torch.bfloat16), max_len=40, lm_head=lm_head)
    run(engine, ragged(prompts(2)))
    weights = dict(engine.model.named_parameters())
    kept = copies_of(weights.values())
    if lm_head == "float32":
        kept += engine._head._copies.values()
    own = resolve(TREE, ["numerics=on-policy", "model.dtype=bfloat16", f"model.lm_head={lm_head}"])
    planned = engine_weights(dims_of(CONFIGS[name]), own, CONFIGS[name])
    held = sum(each.nbytes for each in (*weights.values(), *kept))
    assert held > 2.5 * sum(each.nbytes for each in weights.values())
    if name == "deepseek_v3":  # its router converts its weight itself, so no copy of that is kept
        held += FLOAT32 * sum(w.numel() for n, w in weights.items() if n.endswith("gate.weight"))
    assert planned.total == held
    # a forward of all experts reads no rounded weight that has a copy
    assert planned.bytes_read(1.0, converts=True) < planned.total
    fast = engine_weights(dims_of(CONFIGS[name]), resolve(TREE, []), CONFIGS[name])
    assert planned.bytes_read(1.0, converts=True) > 1.5 * fast.bytes_read(1.0, converts=True)


@pytest.mark.parametrize("numerics", ["fast", "on-policy"])
def test_rows_of_a_hybrid_take_their_predicted_bytes(numerics):
    """States in recurrent layers, keys and values in the others; on-policy an open chunk too."""
    model = hybrid("qwen3_5_moe_text")
    engine = on_policy_engine(model, max_len=40, max_num_seqs=3)
    if numerics == "fast":
        config = HFEngineConfig(dtype="float32", max_num_seqs=3)
        engine = HFEngine(hybrid("qwen3_5_moe_text"), config, return_routes=True, max_len=40)
    run(engine, ragged(prompts(2, 3, 9)))
    cache = engine.batch.forward.cache
    held = (*cache.keys.values(), *cache.values.values(), cache.routes, *cache.states.values())
    own = resolve(TREE, ["rollout.engine.max_num_seqs=3", "rollout.engine.max_len=40"])
    dry = dry_model(model.config, torch.float32, invariant=numerics == "on-policy")
    found = embedded_cache_bytes(read_dims(dry.model, "it"), own, parse_cluster("1xcpu"))
    assert found == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("name", ["nemotron_h", "jamba", "lfm2", "falcon_h1", "kimi_linear"])
def test_layers_without_attention_have_states_and_no_keys(name):
    dims = dims_of(hybrid(name).config)
    assert dims.states > 0
    assert all(layer.cached for layer in dims.attention) == (name == "falcon_h1")
    micro = MicroBatchShape((40, 20), (40, 20))
    assert dry_model(hybrid(name).config).micro_batch_memory(micro, checkpointing=False).saved > 0


def test_layers_that_nobody_knows_are_not_planned(monkeypatch):
    monkeypatch.delitem(layer_kinds.LAYER_KINDS, "linear_attention")
    with pytest.raises(UsageError, match="linear_attention layers, whose memory and time"):
        dims_of(hybrid("qwen3_5_text").config)


def test_families_with_other_names_for_their_dimensions():
    gemma, aria = (dims_of(TABLE[name].config()) for name in ("gemma4_text", "aria_text"))
    assert [a.cached for a in gemma.attention] == [2 * 2 * 8, 2 * 2 * 512, 2 * 2 * 512]
    assert (gemma.experts, gemma.top_k) == (8, 3)
    assert (aria.experts, aria.top_k, aria.moe_layers) == (8, 3, 3)


def test_families_that_cannot_be_run_dry_are_refused():
    micro = MicroBatchShape((9,), (4,))
    for name, words in [("dbrx", "makes shapes of its"), ("mistral4", "makes no causal LM")]:
        with pytest.raises(UsageError, match=words):
            dry_model(TABLE[name].config()).micro_batch_memory(micro, checkpointing=False)


FULL, SLOW = [pytest.mark.full], [pytest.mark.slow]
ON_POLICY = {"numerics": "on-policy"}
RANKS = {"ranks": 2, "checkpointing": True}
PREDICTED = [
    *(
        ("tiny", {"micro_batches": n, "checkpointing": c}, FULL)
        for n, c in [(1, False), (2, False), (2, True)]
    ),
    # with adapters: no gradients of the frozen weights, nor activations that only these would need
    *(("tiny", {"micro_batches": n, "checkpointing": n == 1, "lora": 8}, FULL) for n in (1, 2)),
    ("tiny", {"dtype": "bfloat16"}, FULL),
    ("tiny", {"samples": 2, "dtype": "float32", **ON_POLICY}, FULL),
    *(("tiny", {"samples": 8, "dtype": d, **ON_POLICY}, SLOW) for d in ("float32", "bfloat16")),
    *(("big", {"checkpointing": c}, SLOW) for c in (False, True)),  # 200 million parameters
    *(
        (name, {"ranks": 2, "checkpointing": c, "compute": compute}, [pytest.mark.process, *SLOW])
        for name in ("tiny", "big")
        for c, compute in [(False, "same"), (True, "bfloat16")]
    ),
    # layer 0 is recomputed when nearly all gradients exist
    *(
        ("tiny", {**RANKS, "micro_batches": 1, "state": state}, [pytest.mark.process, *SLOW])
        for state in ("device", "host")
    ),
]


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(n, case, marks=m, id=f"{n} {case}") for n, case, m in PREDICTED]
)
def test_predicted_memory_is_that_of_a_step(name, case):
    """On ranks: of the first of them."""
    within_5_percent(benchmark.Case(**case), name)


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["fast", "on-policy"])
def test_predicted_memory_of_a_hybrid(numerics, monkeypatch):
    policy = PolicyConfig(recurrent=3)
    monkeypatch.setitem(benchmark.MODELS, "hybrid", lambda: make_model(policy, 60).eval())
    within_5_percent(benchmark.Case(samples=8, numerics=numerics, dtype="float32"), "hybrid")


@pytest.mark.full
def test_predicted_memory_with_logits_in_chunks(monkeypatch):
    model = lambda: AutoModelForCausalLM.from_config(wide(16_384, "qwen3_moe")).eval()  # noqa: E731
    monkeypatch.setitem(benchmark.MODELS, "wide", model)
    case, whole = (benchmark.Case(samples=8, logits_chunk=chunk) for chunk in (16, 0))
    within_5_percent(case, "wide")
    less, more = (benchmark.predicted("wide", each).device for each in (case, whole))
    assert less < 0.9 * more


@pytest.mark.slow
@pytest.mark.parametrize("state", ["host", pytest.param("8bit", marks=pytest.mark.envs)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predicted_memory_of_states_elsewhere(state, dtype, monkeypatch):
    """In buckets of a third of the policy."""
    for module in (streamed_adamw, memory):
        monkeypatch.setattr(module, "BUCKET_BYTES", 12 * 1_200_000)
    within_5_percent(benchmark.Case(state=state, dtype=dtype), "tiny")


def within_5_percent(case, name):
    guess, found = benchmark.predicted(name, case), benchmark.measured(name, case)
    assert guess.device == pytest.approx(found.device, rel=0.05)
    assert guess.host == pytest.approx(found.host, rel=0.01)


def test_command_prints_a_plan_and_writes_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    changed("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    command = ["plan", str(ROOT / "recipes" / "quickstart.toml"), f"model.path={tmp_path}"]
    command += ["train.reuse_scoring_forward=false", "steps=45", "checkpoint.keep=2"]
    command += ["--cluster", "1xcpu"]
    assert main([*command, "--json", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    assert "decode_efficiency" not in text
    words = ["1 learner rank", "activations", "rollout: decode", "bottleneck", "--constants"]
    words += ["2 bytes a token", "of the 2 that the run keeps", "micro-batches of 12,192 slots"]
    assert [each for each in words if each not in text] == []
    text = (tmp_path / "plan.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity, which are no JSON
    assert found["chosen"]["engine"]["room"] is None
    assert found["chosen"]["fits"] is True
    assert found["work"]["response"] == 80
    assert found["chosen"]["learner_bytes"]["routes"] == 96 * 127 * 2  # of one forward
    assert found["constants"]["flops"]["origin"] == "measured"
    assert main([*command, "--constants", "--constant", "decode_efficiency=0.51"]) == 0
    rows = [line.strip(" │").split() for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row for row in rows if row}
    assert [name for name in found["constants"] if name not in table] == []
    assert "measured" in table["flops"]
    assert table["decode_efficiency"][2] == "0.51"
    assert "given" in table["decode_efficiency"]


def test_the_callers_config_stays_as_it_is():
    before = CONFIGS["qwen3_moe"].to_dict()
    dry_model(CONFIGS["qwen3_moe"])
    assert CONFIGS["qwen3_moe"].to_dict() == before
    assert CONFIGS["qwen3_moe"]._attn_implementation != "onepolicy_packed"
