"""Model folders of strangers: a kilobyte of JSON neither fills the memory nor ends in a traceback,
and no kernel of the hub is fetched for it."""

import json
import os

import pytest
import torch
import transformers.integrations.hub_kernels as hub_kernels
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onepolicy import chat_templates
from onepolicy.bounded import GIB, Limits
from onepolicy.chat_templates import render_chat
from onepolicy.config import ModelConfig, UsageError, resolve
from onepolicy.models import foreign
from onepolicy.models.load import context_length, load_model, load_tokenizer, read_config
from onepolicy.plan.hardware import parse_cluster
from onepolicy.plan.planner import Planner
from support.engine_runs import engine_of
from support.fake_vllm import make_checkpoints
from support.scripted_engine import HERMES, make_tokenizer, tokenizer_of
from support.waiting import patience

CPU = torch.device("cpu")
QUESTION = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_checkpoints(folder)
    make_tokenizer("0123456789").save_pretrained(folder / "0")
    return folder / "0"


@pytest.fixture
def change(base, tmp_path):
    """Return a function that makes a folder with other values in a JSON file."""

    def changed(values, file="config.json"):
        for path in base.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        path = tmp_path / file
        if isinstance(values, bytes):
            path.write_bytes(values)
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return ModelConfig(path=str(tmp_path))

    return changed


def read_all(model):
    context_length(read_config(model))
    load_tokenizer(model)
    load_model(model, torch.float32, CPU)


CONFIGS = [
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected 1 to 512"),
    (  # its config makes a list of them
        {"model_type": "qwen3", "num_hidden_layers": 10**9},
        "num_hidden_layers is 1000000000; expected 1 to 512",
    ),
    (
        {"vocab_size": 2**24},
        r"makes tensors of .* the largest of shape \[16777216, 8\], but its files",
    ),
    ({"vocab_size": 10**9}, "vocab_size is 1000000000; expected 1 to 16777216"),
    ({"hidden_size": 10**30}, r"hidden_size is 1000.*; expected 1 to 1048576"),
    ({"text_config": {"hidden_size": -1}}, "hidden_size is -1; expected 1 to"),
    ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1; expected 0 to"),
    ({"num_experts": 10**9}, "num_experts is 1000000000; expected 0 to"),
    ({"moe_intermediate_size": 10**6, "intermediate_size": 10**6}, "makes tensors of"),
    ({"num_experts_per_tok": 10**6}, "num_experts_per_tok is 1000000; expected 1 to"),
    ({"num_experts_per_tok": -1}, "num_experts_per_tok is -1"),
    ({"head_dim": 2**20}, "makes tensors of"),
    ({"head_dim": 2**62}, "head_dim is 4611686018427387904; expected 1 to"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0; expected 1 to"),
    ({"rope_scaling": {"rope_type": "x", "factor": "x"}}, "cannot read the"),
    ({"hidden_act": "os.system"}, "cannot read the weights"),
    ({"model_type": []}, "cannot read the config"),
    ({"max_position_embeddings": 10**9}, "is 1000000000; .* at most 16,777,216"),
    ({"max_position_embeddings": 1e400}, "max_position_embeddings|cannot read the config"),
    ({"num_labels": 10**5}, "num_labels is 100000; expected at most 10000"),
    ({"text_config": {"num_labels": 10**400}}, r"num_labels is 1000.*; expected at most 10000"),
    ({"quantization_config": [1]}, "cannot read|quantization"),
    ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files names other configs"),
    (b"[" * 100_000, "cannot read the config"),
]


def test_a_group_size_of_minus_one_is_no_width(change):
    """GPTQ and AWQ write it for one scale a channel."""
    stored = {"quant_method": "awq", "bits": 4, "group_size": -1, "q_group_size": -1}
    foreign.check_counts(change({"quantization_config": stored}))


@pytest.mark.parametrize(("values", "said"), CONFIGS)
def test_a_damaged_config_is_named(change, values, said):
    with pytest.raises(UsageError, match=said):
        read_all(change(values))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_key_value_heads": 0}, "cannot read the config of"),
        ({"head_dim": 3}, "cannot read the config of"),
        ({"max_position_embeddings": -3}, "max_position_embeddings in config.json is -3"),
    ],
)
def test_a_plan_for_a_damaged_config_names_it(change, values, said):
    """Sizes that do not fit together are seen only as the model is built, or in its dry run."""
    model = {"path": change(values).path}
    config = resolve({"out": "x", "steps": 1, "task": {"kind": "chain"}, "model": model})

    def plan():
        made = Planner(config, config.model, parse_cluster("1xH100"), prompt=20, response=20)
        made.evaluate_split(made.possible_splits()[0])

    with pytest.raises(UsageError, match=said):
        plan()


def test_sequences_that_no_machine_has_room_for_are_named(change):
    model = load_model(change({"max_position_embeddings": 2**24}), torch.float32, CPU)
    with pytest.raises(UsageError, match="65,536 sequences of 16,777,216 tokens need more"):
        engine_of(model, max_num_seqs=2**16, max_len=2**24)


def test_a_config_that_fills_the_memory_is_stopped(change, monkeypatch):
    monkeypatch.setattr("onepolicy.models.foreign.CONFIG_MEMORY", 2**26)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: bytearray(2**28))
    with pytest.raises(UsageError, match=r"the config of .* needs more memory than any model's"):
        read_config(change({}))
    bytearray(2**28)  # the limit is gone


@pytest.mark.process
@pytest.mark.parametrize(
    ("values", "file"),
    [
        (b"[" * 100_000, "tokenizer.json"),
        (b"[]", "tokenizer_config.json"),
        ({"tokenizer_class": 7}, "tokenizer_config.json"),
        ({"eos_token": {"__type": "AddedToken", "content": ["x"]}}, "tokenizer_config.json"),
    ],
)
def test_a_damaged_tokenizer_is_named(change, values, file):
    with pytest.raises(UsageError, match=r"model\.path: "):
        load_tokenizer(change(values, file))


REPLACE = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
BATCH = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
PADDING = BATCH | {"pad_token": "0", "strategy": {"Fixed": 10**6}}
WHITESPACE = {"type": "Split", "behavior": "Isolated", "invert": False}
LONG_WORD = {"type": "WordLevel", "vocab": {"x" * 5000: 0}, "unk_token": "x" * 5000}
TOKENIZERS = [
    ({"normalizer": {"type": "Prepend", "prepend": "1" * 10**5}}, "makes .* tokens of"),
    ({"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 20}}, "make a text 1,048,576"),
    ({"decoder": {"type": "Sequence", "decoders": [REPLACE] * 20}}, "make a text 1,048,576 times"),
    ({"padding": PADDING}, "makes 1,000,000 tokens of"),
    ({"padding": PADDING | {"strategy": {"Fixed": 10**12}}}, "memory that it may take"),
    ({"pre_tokenizer": WHITESPACE | {"pattern": {"Regex": r"(.*)*(.*)*(.*)*\d\z"}}}, "died"),
    ({"pre_tokenizer": WHITESPACE | {"pattern": {"Regex": "("}}}, "cannot be read"),
    ({"model": LONG_WORD, "added_tokens": []}, "decodes .* bytes to"),
]


@pytest.mark.few(3)
@pytest.mark.process
@pytest.mark.parametrize(("values", "said"), TOKENIZERS)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.4.0.0.json"])
def test_a_tokenizer_that_takes_much_ends_its_child_only(base, change, file, values, said, capfd):
    tree = json.loads((base / "tokenizer.json").read_text()) | values
    model = change(json.dumps(tree).encode(), file)
    with pytest.raises(UsageError, match=rf"model\.path: .*{file}: .*{said}"):
        load_tokenizer(model)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["kernels-community/flash-attn", "someone/kernel:f"])
def test_a_config_fetches_no_kernel(change, monkeypatch, name):
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: pytest.fail("fetched"))
    model = change({"_attn_implementation": name, "attn_implementation": name})
    assert load_model(model, torch.float32, CPU).config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_of_holes_is_not_read(change, tmp_path, file):
    """The limits of a tokenizer's trial would grow with it."""
    model = change({})
    with (tmp_path / file).open("ab") as made:
        made.truncate(2**40)
    for load in (read_config, load_tokenizer, lambda model: load_model(model, torch.float32, CPU)):
        with pytest.raises(UsageError, match=rf"{file}: is 1,024 GiB long, nearly all of it holes"):
            load(model)


def test_weights_are_those_of_the_folder_and_never_unpickled(change, tmp_path):
    """Files that transformers would take instead: of another kind, elsewhere, in a subfolder."""
    model = change({"transformers_weights": "../other/model.safetensors"})
    expected = r"transformers_weights is '\.\./other/.*; remove it from config\.json"
    with pytest.raises(UsageError, match=expected):
        read_config(model)
    change({})
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bin")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "weights.bin")}))
    with pytest.raises(UsageError, match=r"names 'weights\.bin', which is no \.safetensors file"):
        load_model(model, torch.float32, CPU)
    index.unlink()
    change({"vocab_size": 2**24})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="its files hold 0 bytes"):
        load_model(model, torch.float32, CPU)


def test_a_pipe_is_not_opened(change, tmp_path):
    model = change({})
    os.mkfifo(tmp_path / "special_tokens_map.json.gz")
    for load in (read_config, load_tokenizer):
        with pytest.raises(UsageError, match="is neither a file nor a folder"):
            load(model)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["../tokenizer.4.0.0.json"], r"names '\.\./tokenizer.*is no tokenizer\*\.json"),
        ([["tokenizer.json"]], r"names \['tokenizer\.json'\], which is no tokenizer"),
        ("../tokenizer.4.0.0.json", r"is '\.\./tokenizer.*expected a list of this folder's files"),
        (
            {"../tokenizer.4.0.0.json": 1},
            "is .*, expected a list of this folder's files; leave it out",
        ),
        (7, "is 7, expected a list"),
    ],
)
def test_a_tokenizer_that_was_not_tried_is_not_taken(change, files, said):
    model = change({"fast_tokenizer_files": files}, "tokenizer_config.json")
    with pytest.raises(UsageError, match=f"tokenizer_config.json: fast_tokenizer_files {said}"):
        load_tokenizer(model)


ADAPTERS = [
    (b"[" * 100_000, "damaged: RecursionError"),
    (b"[]", "damaged: TypeError"),
    ({"r": 10**9}, "its rank is 1000000000, but no side of a stored matrix is above 1"),
    ({"r": 1, "rank_pattern": {"q_proj": 10**9}}, "its rank is 1000000000"),
    ({"r": 1, "base_model_name_or_path": "{itself}"}, "names itself as its base"),
    (
        {"r": 1, "target_modules": "(([^!]+)+)+!"},
        r"target_modules: '\(\(\[\^!\]\+\)\+\)\+!' may be a pattern.*; write a list",
    ),
    ({"r": 1, "rank_pattern": {"(a+)+!": 1}}, r"rank_pattern: '\(a\+\)\+!' may be a pattern"),
    ({"r": 1, "layer_replication": [[0, 1]]}, r"layer_replication: \[\[0, 1\]\] repeats layers"),
]


@pytest.mark.parametrize(("values", "said"), ADAPTERS)
def test_a_damaged_adapter_is_named(base, tmp_path, values, said):
    save_file({"a": torch.ones(1, 1)}, tmp_path / "adapter_model.safetensors")
    if isinstance(values, dict):
        plain = {"peft_type": "LORA", "target_modules": ["q_proj"]}
        tree = plain | {"base_model_name_or_path": str(base)} | values
        values = json.dumps(tree).replace("{itself}", str(tmp_path)).encode()
    (tmp_path / "adapter_config.json").write_bytes(values)
    with pytest.raises(UsageError, match=said):
        load_model(ModelConfig(path=str(tmp_path)), torch.float32, CPU)


TEMPLATES = {  # the last one ends its child
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ messages + 1 }}": "TypeError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ raise_exception('no') }}": "TemplateError: no",
    "{{ '1+' * 10**6 }}": "writes 2,000,000 characters",
    "{{ messages|tojson(indent=10**9) }}": "more than 0.25 GiB",
}
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.process
def test_a_template_that_asks_for_much_ends_its_child_only(subtests, monkeypatch):
    monkeypatch.setattr(chat_templates, "LIMITS", Limits(GIB // 4, patience(1)))
    for template, said in TEMPLATES.items():
        with subtests.test(template), pytest.raises(UsageError, match=f"roles user: .*{said}"):
            render_chat(tokenizer_of(template), QUESTION)


@pytest.mark.full
@pytest.mark.process
def test_a_template_without_end_ends_its_child_only(monkeypatch):
    monkeypatch.setattr(chat_templates, "LIMITS", Limits(GIB // 4, 1))
    with pytest.raises(UsageError, match=r"roles user: .*longer than"):
        render_chat(tokenizer_of(ENDLESS), QUESTION)


@pytest.mark.process
def test_a_child_renders_what_transformers_does():
    tokenizer = tokenizer_of(HERMES)
    schema = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}
    for prompt in (False, True, False):
        wanted = tokenizer.apply_chat_template(
            QUESTION, tools=[schema], add_generation_prompt=prompt, tokenize=False
        )
        assert render_chat(tokenizer, QUESTION, tools=[schema], prompt=prompt) == wanted
