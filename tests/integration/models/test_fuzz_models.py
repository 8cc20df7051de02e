"""Damaged model folders, adapters and indices: loaded and computed, or refused as UsageError."""

import json
import struct
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

from onepolicy import tokenizer_trial
from onepolicy.bounded import StoppedError
from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.load import context_length, load_model, load_tokenizer, read_config
from onepolicy.models.prepare import prepare_for_training
from support.fake_vllm import make_checkpoints
from support.fuzz import HEAVY, JUNK, survives
from support.processes import ends_in_fork
from support.scripted_engine import make_tokenizer

CPU = torch.device("cpu")
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
FAMILIES = ["llama", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "gemma3"]
FAMILIES += ["qwen3_next", "granitemoe", "phimoe", "glm4_moe", "bamba", "mamba", "gpt2", "t5", "x"]
ADDED = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil--x.Model"},
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4},
    "layer_types": ["full_attention", "sliding_attention", "linear_attention"],
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float8_e4m3fn",
    "dtype": "int8",
    "text_config": {},
    "vision_config": {"model_type": "clip_vision_model"},
    "sliding_window": 1,
    "tie_word_embeddings": True,
    "transformers_version": "99.0",
    "use_cache": "x",
    "is_encoder_decoder": True,
    "pruned_heads": {"0": [0]},
    "num_labels": 10**6,
    "id2label": {"a": 1},
    "pad_token_id": 10**9,
    "eos_token_id": [1, "x"],
    "chat_template": "{{ 1/0 }}",
    "tokenizer_class": "os.system",
    "extra_special_tokens": {"x": 3},
    "model_max_length": -1,
    "padding_side": "middle",
    "added_tokens_decoder": {"-1": {"content": "x"}, "x": "y"},
    "weight_map": {"a": "/etc/passwd"},
}
"""Keys that code of transformers obeys, put into whichever file of JSON."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    make_checkpoints(made)
    make_tokenizer("0123456789").save_pretrained(made / "0")
    with suppress(FileNotFoundError):
        (made / "0" / INDEX).unlink()
    return made / "0"


@pytest.fixture
def rewritten(folder, tmp_path):
    """Return a function that reads a model of other files, and the whole ones."""
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data)

    def read(given):
        for name, data in given.items():
            (tmp_path / name).write_bytes(data)
        tokenizer_trial._try_once.cache_clear()
        try:
            read_whole(tmp_path)
        finally:
            for name in given:
                (tmp_path / name).unlink()
                if name in whole:
                    (tmp_path / name).write_bytes(whole[name])

    return read, whole


def read_whole(path):
    model = ModelConfig(path=str(path))
    context_length(read_config(model))
    if (path / "tokenizer.json").exists():
        load_tokenizer(model)
    prepare_for_training(load_model(model, torch.float32, CPU), CPU)


def in_fork(task, arguments, limits):
    """Stand in for `bounded.stream` of a task without messages: in a fork, which is quick."""
    if ends_in_fork(task, arguments, 5, limits.memory):
        raise StoppedError("its reader died")
    return iter(())


def in_json(damage, data):
    """Return a file of JSON with damage in its bytes or its tree, or with a key that is obeyed."""
    if damage.random.random() < 0.2:
        return damage.data(data)
    tree = json.loads(data)
    if damage.random.random() < 0.4:
        key = damage.random.choice(list(ADDED))
        tree[key] = damage.random.choice([ADDED[key], ADDED[key], damage.random.choice(JUNK)])
        if damage.random.random() < 0.3:
            tree["model_type"] = damage.random.choice(FAMILIES)
    if damage.random.random() < 0.8:
        tree = damage.tree(tree)
    return json.dumps(tree).encode()


def in_weights(damage, data):
    """Return safetensors bytes with damage in a header that is framed right, or anywhere."""
    if damage.random.random() < 0.3:
        return damage.data(data)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(damage.tree(json.loads(data[8 : 8 + size]))).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


INPUTS = [pytest.param(200, id="fast"), pytest.param(HEAVY, id="slow", marks=pytest.mark.slow)]


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_model_folders(rewritten, inputs):
    read, whole = rewritten
    names = ["config.json"] * 4 + [WEIGHTS, INDEX, "generation_config.json"]
    index = {"metadata": {}, "weight_map": {"lm_head.weight": WEIGHTS}}
    whole[INDEX] = json.dumps(index).encode()

    def make(damage):
        name = damage.random.choice(names)
        change = in_weights if name == WEIGHTS else in_json
        return {name: change(damage, whole[name])}

    survives("model folder", inputs, make, read, lambda _: None, UsageError)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("inputs", INPUTS)
def test_tokenizers(rewritten, inputs, monkeypatch):
    monkeypatch.setattr("onepolicy.bounded.stream", in_fork)
    read, whole = rewritten
    names = [name for name in whole if "token" in name]

    def make(damage):
        name = damage.random.choice(names)
        return {name: in_json(damage, whole[name])}

    survives("model tokenizer", inputs, make, read, lambda _: None, UsageError)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_adapters(folder, tmp_path, inputs):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2, "lora_alpha": 4}
    header |= {"base_model_name_or_path": str(folder), "task_type": "CAUSAL_LM"}
    header |= {"layers_to_transform": [0], "rank_pattern": {}, "modules_to_save": None}
    tensors = {name.format("A"): torch.ones(2, 8), name.format("B"): torch.ones(16, 2)}
    weights = tmp_path / "adapter_model.safetensors"
    save_file(tensors, weights)
    whole = {weights.name: weights.read_bytes()}
    whole["adapter_config.json"] = json.dumps(header).encode()

    def make(damage):
        place = damage.random.choice(["adapter_config.json"] * 2 + [weights.name])
        change = in_weights if place == weights.name else in_json
        return {place: change(damage, whole[place])}

    def read(given):
        for place, data in (whole | given).items():
            (tmp_path / place).write_bytes(data)
        load_model(ModelConfig(path=str(tmp_path)), torch.float32, CPU)

    survives("model adapter", inputs, make, read, lambda _: None, UsageError)
