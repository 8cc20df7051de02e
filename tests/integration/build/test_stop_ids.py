"""A response ends with every token that the model's generation_config.json names."""

import json
import os
import shutil

import pytest
import torch

from onepolicy.build import components
from onepolicy.build.measure import build_measure_components, measure_config
from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.load import load_model, load_tokenizer, read_stops
from onepolicy.run import eval_command
from support.planted_engine import SETTINGS

EOS, PAD = 1, 0


@pytest.fixture
def model(policy, tmp_path):
    """Return a function that makes the policy with other end tokens."""

    def made(stops, name="model"):
        folder = shutil.copytree(policy, tmp_path / name)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return ModelConfig(path=str(folder))

    return made


@pytest.mark.parametrize(
    ("stops", "found"),
    [
        ([EOS, PAD], (EOS, PAD)),
        ([PAD, EOS], (EOS, PAD)),
        (PAD, (EOS, PAD)),
        (None, (EOS,)),
        ([EOS, 7], (EOS,)),  # plain text: a default of the family's config
        ([EOS, 10**9, "x"], (EOS,)),
    ],
)
def test_stop_ids(model, stops, found):
    made = model(stops)
    assert read_stops(made, load_tokenizer(made)) == found


def test_without_a_file_and_with_a_damaged_one(model):
    made = model([[PAD]])
    tokenizer = load_tokenizer(made)
    with pytest.raises(UsageError, match=r"cannot read generation_config\.json of"):
        read_stops(made, tokenizer)
    os.remove(f"{made.path}/generation_config.json")
    assert read_stops(made, tokenizer) == (EOS,)


def saved_again(made, folder):
    """Return the model as a checkpoint holds it."""
    load_model(made, torch.float32, torch.device("cpu")).save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("stops", "found"),
    [([EOS, PAD], (EOS, PAD)), (PAD, (EOS, PAD)), (7, (EOS,)), (None, (EOS,))],
)
def test_a_checkpoint_of_a_model_without_the_file_has_the_same(model, stops, found, tmp_path):
    made = model(None)
    tokenizer = load_tokenizer(made)
    os.remove(f"{made.path}/generation_config.json")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text()) | {"eos_token_id": stops}
    path.write_text(json.dumps(config))
    assert read_stops(made, tokenizer) == found
    assert read_stops(saved_again(made, tmp_path / "saved"), tokenizer) == found
    del config["eos_token_id"]  # the family's default is not the model's
    path.write_text(json.dumps(config))
    assert read_stops(made, tokenizer) == (EOS,)


@pytest.mark.parametrize("odd", [{"temperature": 0.9, "top_p": 0.6}, {"pad_token_id": -1}])
def test_settings_that_transformers_would_not_save_lose_all_but_their_ids(model, odd, tmp_path):
    made = model([EOS, PAD])
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [EOS, PAD], "bos_token_id": 2} | odd))
    again = saved_again(made, tmp_path / "saved")
    assert read_stops(again, load_tokenizer(made)) == (EOS, PAD)
    kept = json.loads((tmp_path / "saved" / path.name).read_text())
    del kept["transformers_version"]
    assert kept == {"eos_token_id": [EOS, PAD], "bos_token_id": 2}


def test_an_adapter_has_those_of_its_base(model, tmp_path):
    base, adapter = model([EOS, PAD]), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base.path}))
    assert read_stops(ModelConfig(path=str(adapter)), load_tokenizer(base)) == (EOS, PAD)


def test_train_measure_and_eval_stop_there_and_a_dialogue_at_eos_alone(model, monkeypatch):
    made = model([EOS, PAD])
    config = measure_config({}, [f"model.path={made.path}", *SETTINGS], None)
    parts, tokenizer = build_measure_components(config)
    assert parts.sampling.stop == (EOS, PAD)
    seen = []
    monkeypatch.setattr(
        eval_command, "_evaluate_with_bar", lambda *given: seen.append(given[-1]) or {}
    )
    eval_command.evaluate_model(config, None, None)
    assert seen == [(EOS, PAD)]
    dialogue = object()
    assert components.stop_ids(dialogue, made, tokenizer) == (EOS,)
