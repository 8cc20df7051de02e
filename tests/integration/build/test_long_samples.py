"""Samples that would be computed otherwise than the model's own, or than the engine's, are refused
by their length before weights are loaded."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PhimoeConfig, Qwen2MoeConfig

from onepolicy.build.components import load_tokenizer_and_max_len
from onepolicy.build.measure import measure_config
from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.load import read_config
from onepolicy.models.long_samples import check_long_samples, constant_rope_length
from onepolicy.rollout.hf.prepare import needs_static_batch
from support.models import BASE, CONFIGS, changed, make
from support.planted_engine import SETTINGS

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
LONGROPE |= {"original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LAYERS = {"full_attention": LONGROPE, "sliding_attention": PLAIN}
SLIDING = {"sliding_window": 32, "num_experts_per_tok": 2}
REFUSED = {
    "longrope": (changed("qwen3_moe", rope_parameters=LONGROPE), 64, "rotary frequencies"),
    "longrope of a layer type": (
        Gemma3TextConfig(**BASE, head_dim=16, rope_parameters=LAYERS),
        64,
        "rotary frequencies",
    ),
    "phimoe": (PhimoeConfig(**BASE, num_local_experts=4, **SLIDING), 32, "its mask alone"),
    "qwen2_moe": (
        Qwen2MoeConfig(**BASE, num_experts=4, use_sliding_window=True, **SLIDING),
        32,
        "its mask alone",
    ),
}


def test_longer_samples_are_refused_and_no_others(tmp_path, subtests):
    for name, (config, longest, words) in REFUSED.items():
        with subtests.test(name):
            config.save_pretrained(tmp_path)
            model = ModelConfig(path=str(tmp_path))
            check_long_samples(model, read_config(model), longest)
            for setting in ((), (f"rollout.engine.max_len={longest + 1}",)):
                given = measure_config({}, [f"model.path={tmp_path}", *SETTINGS, *setting], None)
                with pytest.raises(UsageError, match=words) as error:
                    load_tokenizer_and_max_len(given, model)
                assert f"set rollout.engine.max_len = {longest} or less" in str(error.value)


@pytest.mark.parametrize("name", [*CONFIGS, "qwen2_moe without a window"])
def test_families_that_attend_as_the_model_does(name, tmp_path):
    """mixtral and gpt_oss have a window of 8 tokens."""
    plain = Qwen2MoeConfig(**BASE, num_experts=4, sliding_window=32)
    CONFIGS.get(name, plain).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    check_long_samples(model, read_config(model), 256)


def test_a_long_sample_changes_the_short_one_beside_it():
    """That is what the check refuses: one position above 63 gives all others the long factors."""
    model = make("qwen3_moe", rope_parameters=LONGROPE)
    assert needs_static_batch(model)
    ids, places = torch.arange(6)[None] + 3, torch.arange(6)[None]
    with torch.no_grad():
        alone, beside = (
            model.model.rotary_emb(model.model.embed_tokens(ids), torch.cat([places, more], 1))[0]
            for more in (places, places + 64)
        )
    assert not torch.equal(alone[:, :6], beside[:, :6])


def test_frequencies_of_a_layer_type_run_in_static_batches():
    config = REFUSED["longrope of a layer type"][0]
    assert needs_static_batch(AutoModelForCausalLM.from_config(config))


def test_dynamic_scaling_begins_above_the_context():
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert constant_rope_length(changed("qwen3_moe", rope_parameters=dynamic)) == 256
    assert constant_rope_length(CONFIGS["qwen3_moe"]) is None
