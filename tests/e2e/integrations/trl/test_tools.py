"""Routes in TRL's tool loop, which calls the sampler once per turn with the whole path so far.

The model cannot call tools, so its answers are parsed as calls here; the loop is TRL's own.
"""

from __future__ import annotations

import pytest
from datasets import Dataset

import onepolicy.integrations.trl as op_trl
from onepolicy.integrations.trl.adapter import ROUTES, sampled
from support.trl.tiny import EOS, make_trainer, train, watched

pytestmark = pytest.mark.trl
RESULT = [30, 31, 32]  # tokens of a tool's reply


def lookup() -> str:
    """Return a reply."""
    return "w28 w29 w30"


def parsed(tokenizer, ids, prefix=None, tools=None):
    """Return a completion as a message; a call of the tool unless it is long or has ended."""
    message = {"role": "assistant", "content": tokenizer.decode(ids)}
    if len(ids) < 4 or ids[-1] != EOS:
        call = {"name": "lookup", "arguments": {}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", parsed)
    made = make_trainer(tmp_path, max_completion_length=20, generation_kwargs={"max_new_tokens": 6})
    tokenizer = made.processing_class
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.response_template = "parsed"
    questions = [[{"role": "user", "content": "w1 w2 w3"}], [{"role": "user", "content": "w4 w5"}]]
    made.train_dataset = Dataset.from_dict({"prompt": questions * 8})
    made.tools = made._standalone_tools = [lookup]
    made._get_tool_suffix_ids = lambda messages: RESULT
    made.reward_funcs = [lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]]
    return made


def test_each_path_gets_the_routes_of_its_last_call(trainer):
    op_trl.attach(trainer, native_every=1)
    seen = watched(trainer)
    for row in train(trainer):
        assert row["tools/call_frequency"] > 0
        assert row["replay/missing_samples"] == 0
        assert row["mismatch/k3"] < 1e-9  # own model, own routes: of wrong rows it would not be
        assert row["routing/agreement"] > 0.99
    for inputs in seen:
        assert not inputs["tool_mask"].bool().all()
        tools = (inputs["tool_mask"] == 0) & inputs["completion_mask"].bool()
        assert (sampled(inputs)[tools] == 0).all()
        lengths = (inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)).tolist()
        assert [len(trace) + 1 for trace in inputs[ROUTES]] == lengths
