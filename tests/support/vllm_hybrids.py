"""A tiny random hybrid in vLLM's CPU build: k3 without and with replay, before and after an update.

python -m support.vllm_hybrids FAMILY FOLDER    # one line of JSON: the result of `updated`
"""

import asyncio
import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

from onepolicy.config import ModelConfig, VLLMEngineConfig
from onepolicy.models.load import load_model, read_config
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.sync.push import checked_push
from onepolicy.train.forward import forward
from onepolicy.types import Sampling
from support.invariant_models import batch_of
from support.vllm_engines import MAX_LEN, VOCAB, FakeLearner, play, prompts

CPU = torch.device("cpu")
SIZE = {
    **{"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": MAX_LEN, "num_experts_per_tok": 2, "initializer_range": 0.1},
    **{"bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1},
}
DELTA = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 32, "num_experts": 8},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},  # vLLM has no 32
}
FAMILIES = {
    "qwen3_next": Qwen3NextConfig(**SIZE, **DELTA, intermediate_size=64),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**SIZE, **DELTA),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SIZE,
        **{"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 32},
        **{"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 8},
        **{"shared_intermediate_size": 32, "position_embedding_type": "rope"},
        **{"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
        **{"mamba_expand": 2, "mamba_chunk_size": 32},
    ),
}
ENGINE = VLLMEngineConfig(
    dtype="bfloat16", max_num_seqs=16, kv_cache_gib=0.25, enable_prefix_caching=False
)
TORCHVISION = {
    "torchvision/__init__.py": "",
    "torchvision/io.py": "ImageReadMode = decode_image = None\n",
    "torchvision/transforms/__init__.py": (
        "import enum\n"
        "kinds = 'NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS'\n"
        "InterpolationMode = enum.Enum('InterpolationMode', kinds)\n"
    ),
    "torchvision/transforms/functional.py": "pil_to_tensor = None\n",
    "torchvision/transforms/v2/__init__.py": "",
    "torchvision/transforms/v2/functional.py": "",
    "torchvision-0.26.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.26.0\n"
    ),
}
"""Files of a package by the name of torchvision, which vLLM's Qwen3.5 imports for its images."""


def write_torchvision(folder: Path) -> None:
    for name, text in TORCHVISION.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@torch.no_grad()
def shake(model):
    """Change every weight a little; norms and biases are no longer those of a fresh model."""
    for parameter in model.parameters():
        parameter += 0.02 * torch.randn_like(parameter)


def scored(trained, routers, batch):
    """Return k3 without and with replay, and the share of (slot, layer) with other experts."""
    with torch.no_grad():
        with routers.record() as tape:
            without = forward(trained, batch).logp
        with routers.replay(batch.routing, check=False):
            replayed = forward(trained, batch).logp
    ours, theirs = (ids.long().sort(-1).values for ids in (tape.trace().ids, batch.routing.ids))
    found = []
    for logp in (without, replayed):
        log_ratio = (logp - batch.logp_rollout)[batch.trainable]
        found.append(float((log_ratio.exp() - 1 - log_ratio).mean()))
    return *found, float((ours != theirs).any(-1).float().mean())


def updated(family, folder):
    """Return `scored` before and after an update of the weights of a model made in `folder`."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(FAMILIES[family])
    shake(made)
    made.save_pretrained(folder)
    source = ModelConfig(path=str(folder))
    trained = load_model(source, torch.float32, CPU)
    prepare_for_training(trained, CPU)
    routers = bind_routers(trained)
    rules = RouteSpec(routers.layers, routers.num_experts, routers.top_k, "error")
    hf = read_config(source)
    engine = VLLMEngine(source, hf, ENGINE, route_spec=rules, max_len=MAX_LEN, cpu=True)
    asyncio.run(checked_push(FakeLearner(trained), engine, vocab=VOCAB))  # the same weights
    requests = [(prompt, Sampling(1.0, 48), i) for i, prompt in enumerate(prompts(8))]
    found = []
    for version in range(2):
        done = play(engine, requests)
        for (prompt, _, _), each in zip(requests, done, strict=True):
            assert len(each.routing) == len(prompt) + len(each.token_ids) - 1
            assert each.routing.valid.all()
        found.append(scored(trained, routers, batch_of(requests, done)))
        shake(trained)
        asyncio.run(engine.load_weights(trained.state_dict().items(), version + 1))
    return found


if __name__ == "__main__":
    print(json.dumps(updated(*sys.argv[1:])))
