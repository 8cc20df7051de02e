"""What fits on a GPU is known before weights are loaded. The GPU's memory is given here."""

import json

import pytest
import torch
from transformers import AutoConfig

from onepolicy.build import room
from onepolicy.build.room import (
    DeviceMemory,
    fit_max_len,
    micro_batch_bytes,
    settle_max_len,
    share_beside_learner,
    sizes_of,
)
from onepolicy.config import ModelConfig, UsageError, VLLMEngineConfig, resolve
from onepolicy.models.empty import empty_model
from onepolicy.rollout.vllm.memory import GPU_SHARE, memory_args
from onepolicy.train.memory import rank_state, read_sizes, route_bytes
from support.engine_runs import prompts, ragged, run
from support.invariant_models import engine_of
from support.recurrent_models import hybrid

CONTEXT, VOCAB = 40960, 151936
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
PARAMETERS = 596_049_920
CHUNK = 1728  # slots whose float32 logits are 1 GiB
PER_TOKEN = 28 * 2 * 8 * 128 * 2  # 114,688 bytes in bfloat16
MICRO_BATCH = 30_000_000_000
"""What a micro-batch takes is given too: its dry run takes seconds."""
TREE = {"out": "unused", "steps": 1, "task": {"kind": "chain"}}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    return ModelConfig(path=str(tmp_path))


def on_gpu(monkeypatch, *, free, total=80e9):
    monkeypatch.setattr(room, "parse_device", lambda _: torch.device("cuda"))
    memory = DeviceMemory(int(free), int(total))
    monkeypatch.setattr(
        room, "device_memory", lambda device: memory if device.type == "cuda" else None
    )

    def given(config, model, vocab, *, longest, trains):
        if trains:
            return MICRO_BATCH
        return micro_batch_bytes(config, model, vocab, longest=longest, trains=False)

    monkeypatch.setattr(room, "micro_batch_bytes", given)


def recipe(*settings):
    return resolve(TREE | {"model": {"path": "unused"}}, list(settings))


def test_sizes_are_those_of_the_model(model):
    sizes = read_sizes(empty_model(model))
    assert (sizes.total, sizes.cached * 2, sizes.vocab) == (PARAMETERS, PER_TOKEN, VOCAB)
    assert route_bytes(sizes) == 0


def test_the_plainest_recipe_gets_the_cache_that_fits(model, monkeypatch):
    """The model's whole context would take 301 GB."""
    on_gpu(monkeypatch, free=80e9)
    fits = fit_max_len(recipe(), model, CONTEXT, trains=True)
    room_left = 80e9 - 8e9 - 18 * PARAMETERS - MICRO_BATCH
    assert fits == room_left // (64 * PER_TOKEN) // 64 * 64
    assert 4000 < fits < 5000
    assert fit_max_len(recipe(), model, CONTEXT, trains=False) > fits
    few = recipe("rollout.engine.max_num_seqs=1", "train.tokens_per_micro_batch=40960")
    assert fit_max_len(few, model, CONTEXT, trains=True) == CONTEXT


def test_a_sample_that_is_longer_than_a_micro_batch_has_its_activations(model, monkeypatch):
    """It is never split. A slot beyond a micro-batch takes cache and activations."""
    on_gpu(monkeypatch, free=80e9)
    few = recipe("rollout.engine.max_num_seqs=1")
    fits = fit_max_len(few, model, CONTEXT, trains=True)
    beyond = 80e9 - 8e9 - 18 * PARAMETERS - MICRO_BATCH - 16_384 * PER_TOKEN
    longest = 16_384 + beyond // (PER_TOKEN + MICRO_BATCH // 16_384)
    assert fits == longest // 64 * 64
    assert 16_384 < fits < CONTEXT


def test_an_engine_that_evaluates_has_weights_and_a_cache_of_its_own(model, monkeypatch):
    on_gpu(monkeypatch, free=80e9)
    two = "rollout.quant=int8", "eval.every=10"
    room_left = 80e9 - 8e9 - 20 * PARAMETERS - MICRO_BATCH
    fits = fit_max_len(recipe(*two), model, CONTEXT, trains=True)
    assert fits == room_left // (2 * 64 * PER_TOKEN) // 64 * 64
    alone = fit_max_len(recipe(), model, CONTEXT, trains=True)
    for one in ((two[0], "eval.every=0"), (*two, "eval.quantised=true")):
        assert fit_max_len(recipe(*one), model, CONTEXT, trains=True) == alone
    with pytest.raises(
        UsageError, match=r"4096 tokens of two engines .*= 64 sequences take 60\.1 GB"
    ):
        fit_max_len(recipe(*two, "rollout.engine.max_len=4096"), model, CONTEXT, trains=True)


def test_on_policy_attention_keeps_its_weights(model, monkeypatch):
    """Float32, 16 heads, of 28 layers and two more of the layer that computes."""
    on_gpu(monkeypatch, free=80e9)
    own = "numerics=on-policy", "rollout.engine.dtype=float32"
    room_left = 80e9 - 8e9 - 20 * PARAMETERS - MICRO_BATCH
    cache = 64 * 2 * PER_TOKEN
    for more, layers in (((), 28), (("train.activation_checkpointing=true",), 1)):
        fits = fit_max_len(recipe(*own, *more), model, CONTEXT, trains=True)
        assert fits == room_left // (cache + 16_384 * 4 * 16 * (layers + 2)) // 64 * 64 < 2048
    few = "rollout.engine.max_num_seqs=1", "train.tokens_per_micro_batch=1024"
    single = recipe(*own, *few, "rollout.engine.max_len=4096")
    needed = 4e9 + 20 * PARAMETERS + MICRO_BATCH * 4 + 4096 * 2 * PER_TOKEN
    on_gpu(monkeypatch, free=needed + 1e6)  # samples may be shorter, as those of a run that resumes
    assert fit_max_len(single, model, CONTEXT, trains=True) == 4096
    on_gpu(monkeypatch, free=1e9)
    with pytest.raises(UsageError, match=r"and [\d.]+ GB of attention weights"):
        fit_max_len(recipe(*own, *few), model, CONTEXT, trains=True)


def test_weights_that_older_tokens_are_scored_under_are_counted(model):
    own = "numerics=on-policy", "rollout.engine.dtype=float32", "rollout.max_staleness=2"
    sizes = read_sizes(empty_model(model))
    for settings, others in ((own, 2 * 4 * PARAMETERS), (own[2:], 0)):
        assert rank_state(sizes, recipe(*settings), 1, cpu=False).others == others


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "qwen3_next"])
def test_a_model_that_draws_numbers_or_cannot_be_run_dry_still_fits(kind, tmp_path):
    """The trainer takes the first two; what fake tensors cannot do counts the logits alone."""
    config = AutoConfig.for_model(kind).to_dict() | {"model_type": kind}
    text = config.get("text_config") or config
    text |= {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "n_layer": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = recipe("train.tokens_per_micro_batch=64", "model.dtype=bfloat16")
    model = ModelConfig(path=str(tmp_path))
    found = micro_batch_bytes(small, model, 512, longest=64, trains=True)
    assert found >= 12 * 64 * 512
    if kind == "gpt2":  # its dropout is not what the trainer computes
        assert found > 2 * 12 * 64 * 512


@pytest.mark.parametrize("layers", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_micro_batch_is_that_of_the_dry_run(model, tmp_path, layers):
    """Without activation checkpointing every layer keeps its own (tests/integration/gpu)."""
    changed = QWEN3_06B | {"num_hidden_layers": layers, "vocab_size": 512, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    given = {"trains": True, "vocab": 512, "longest": 256}
    small = recipe("train.tokens_per_micro_batch=256", "model.dtype=bfloat16")
    kept = micro_batch_bytes(small, model, **given)
    again = recipe(
        "train.tokens_per_micro_batch=256",
        "model.dtype=bfloat16",
        "train.activation_checkpointing=true",
    )
    assert micro_batch_bytes(again, model, **given) < 0.8 * kept
    assert micro_batch_bytes(small, model, **given | {"trains": False}) == 12 * 256 * 512 < kept
    short = micro_batch_bytes(small, model, **given | {"longest": 32})
    assert short == pytest.approx(kept, rel=0.1)  # no table of scores is kept
    longer = micro_batch_bytes(small, model, **given | {"longest": 512})
    assert longer == pytest.approx(2 * kept, rel=0.1)  # a sample is never split
    autocast = recipe("train.tokens_per_micro_batch=256", "train.autocast=bfloat16")
    assert 1.2 * kept < micro_batch_bytes(autocast, model, **given) < 3 * kept
    layer = kept / layers / 256  # bytes of a slot: inputs, heads, feed-forward widths in 16 bits
    assert 20_000 < layer < 80_000


def test_moments_on_the_host_leave_more_room(model, monkeypatch):
    """On the GPU are three buckets, each the embedding, with 8 bytes of moments an element."""
    on_gpu(monkeypatch, free=80e9)
    room_left = 80e9 - 8e9 - 10 * PARAMETERS - 24 * VOCAB * 1024 - MICRO_BATCH
    fits = fit_max_len(recipe("optim.state=host"), model, CONTEXT, trains=True)
    assert fits == room_left // (64 * PER_TOKEN) // 64 * 64


def test_adapters_leave_the_room_of_gradients_and_moments(model, monkeypatch):
    """Frozen weights have neither. A layer has 4 * 1024 + 2 * 2048 + 2 * 1024 inputs and outputs of
    attention and 3 * (1024 + 3072) of its dense part, each with 16 float32 numbers in A or B; and
    these have a gradient and two moments."""
    on_gpu(monkeypatch, free=80e9)
    pytest.importorskip("peft")
    adapters = 28 * 16 * (4 * 1024 + 2 * 2048 + 2 * 1024 + 3 * (1024 + 3072))
    fits = fit_max_len(recipe("train.lora.rank=16"), model, CONTEXT, trains=True)
    room_left = 80e9 - 8e9 - 6 * PARAMETERS - 16 * adapters - MICRO_BATCH
    assert fits == room_left // (64 * PER_TOKEN) // 64 * 64


def test_states_of_a_hybrid_are_counted_once_a_sequence(tmp_path, monkeypatch):
    """They do not grow with the sequence."""
    hybrid("qwen3_5_text").save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    sizes = read_sizes(empty_model(model))
    assert sizes.states > 0
    per_token = sizes.cached * 2
    seqs = 1000
    settings = f"rollout.engine.max_num_seqs={seqs}", "replay.mode=off", "rollout.engine.max_len=64"
    learner = 18 * sizes.total + MICRO_BATCH
    for more, fits in ((64 * per_token * seqs, True), (64 * per_token * seqs - seqs, False)):
        free = int(0.05 * 80e9) + learner + seqs * sizes.states + more + 1
        on_gpu(monkeypatch, free=free)
        if fits:
            assert fit_max_len(recipe(*settings), model, 128, trains=True) == 64
        else:
            with pytest.raises(UsageError, match="max_len: 64 tokens"):
                fit_max_len(recipe(*settings), model, 128, trains=True)


def test_open_chunks_of_on_policy_rows_are_states_too():
    engine = engine_of(hybrid("qwen3_5_text"), max_num_seqs=1, max_len=40)
    run(engine, ragged(prompts(1, 3, 9)))
    with torch.device("meta"):
        empty = hybrid("qwen3_5_text")
    fast = sizes_of(empty, recipe()).states
    counted = sizes_of(empty, recipe("numerics=on-policy", "rollout.engine.dtype=float32")).states
    assert counted == sum(table.nbytes for table in engine.batch.cache.states.values()) > 2 * fast


def test_a_length_that_does_not_fit_is_refused_with_the_arithmetic(model, monkeypatch):
    on_gpu(monkeypatch, free=80e9)
    asked = recipe(f"rollout.engine.max_len={CONTEXT}")
    with pytest.raises(UsageError, match=r"max_len: 40960 tokens .* 300\.6 GB .*114,688 bytes"):
        fit_max_len(asked, model, CONTEXT, trains=True)
    on_gpu(monkeypatch, free=20e9)
    with pytest.raises(UsageError, match=r"has 0\.0 GB for it: 20\.0 GB free"):
        fit_max_len(recipe(), model, CONTEXT, trains=True)


def test_the_length_that_was_fitted_is_a_setting_of_the_run(model, monkeypatch):
    """A resumed run finds other memory free, and samples sequences of the same length."""
    on_gpu(monkeypatch, free=80e9)
    notes = []
    config = settle_max_len(recipe(), model, notes.append)
    fits = fit_max_len(recipe(), model, CONTEXT, trains=True)
    assert config.rollout.engine.max_len == fits
    assert f"rollout.engine.max_len = {fits}" in notes[0]
    on_gpu(monkeypatch, free=77e9)  # no more would fit a new run, but half of what is kept back
    assert fit_max_len(recipe(), model, CONTEXT, trains=True) < fits
    assert settle_max_len(config, model, notes.append, resumes=True) == config
    assert len(notes) == 1
    on_gpu(monkeypatch, free=70e9)
    with pytest.raises(UsageError, match=rf"max_len: {fits} .* keeps the length that it began"):
        settle_max_len(config, model, notes.append, resumes=True)


def test_a_length_is_settled_for_the_embedded_engine_only(model, monkeypatch):
    on_gpu(monkeypatch, free=80e9)
    few = recipe("rollout.engine.max_num_seqs=1", "train.tokens_per_micro_batch=40960")
    server = recipe("rollout.engine.kind=vllm-server")
    assert settle_max_len(server, model, pytest.fail) == server
    assert settle_max_len(few, model, pytest.fail).rollout.engine.max_len == CONTEXT


def test_nothing_changes_on_a_cpu_and_for_engines_elsewhere(model, monkeypatch):
    assert fit_max_len(recipe("train.device=cpu"), model, CONTEXT, trains=True) == CONTEXT
    on_gpu(monkeypatch, free=1e9)
    server = recipe("rollout.engine.kind=vllm-server")
    assert fit_max_len(server, model, CONTEXT, trains=True) == CONTEXT
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert share_beside_learner(recipe(), model, cpu, trains=True) == 1
    assert share_beside_learner(server, model, cuda, trains=True) == 1


def test_vllm_beside_the_learner_asks_for_what_is_left(model, monkeypatch):
    """vLLM refuses to start unless its share is free, and the learner is there first."""
    own, device = recipe("rollout.engine.kind=vllm"), torch.device("cuda")
    on_gpu(monkeypatch, free=76e9)
    awake = recipe("rollout.engine.kind=vllm", "rollout.engine.enable_sleep_mode=false")
    share = share_beside_learner(awake, model, device, trains=True)
    assert share == (76e9 - 12 * PARAMETERS - MICRO_BATCH) / 80e9
    asleep = share_beside_learner(own, model, device, trains=True)  # while the learner works
    assert asleep == (76e9 - 8 * PARAMETERS) / 80e9
    measured = share_beside_learner(own, model, device, trains=False)
    assert measured == (76e9 - 12 * CHUNK * VOCAB) / 80e9
    arguments = memory_args(own.rollout.engine, cpu=False, share=GPU_SHARE * share)
    used = GPU_SHARE * share
    assert arguments == {"kv_cache_memory_bytes": None, "gpu_memory_utilization": used}
    assert used * 80e9 < 76e9
    two = "rollout.quant=int8", "eval.every=1", "rollout.engine.max_len=64"
    also = recipe("rollout.engine.kind=vllm", *two)
    beside = 2 * PARAMETERS + 64 * 64 * PER_TOKEN
    assert share_beside_learner(also, model, device, trains=True) == asleep - beside / 80e9
    on_gpu(monkeypatch, free=10e9)
    with pytest.raises(UsageError, match=r"10\.0 of 80\.0 GB are free"):
        share_beside_learner(awake, model, device, trains=True)


def test_settings_win_and_a_cpu_keeps_its_cache():
    given = VLLMEngineConfig(kv_cache_gib=2, gpu_memory_utilization=0.5)
    expected = {"kv_cache_memory_bytes": 2**31, "gpu_memory_utilization": 0.5}
    assert memory_args(given, cpu=False) == expected
    assert memory_args(VLLMEngineConfig(), cpu=True) == {"kv_cache_memory_bytes": 2**30}
