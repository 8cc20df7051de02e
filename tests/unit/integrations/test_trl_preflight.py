"""What `attach` says of a TRL trainer's sampling. The trainer is a stand-in with its attributes."""

from types import SimpleNamespace

import pytest

import onepolicy as op
from onepolicy.integrations.trl import preflight
from onepolicy.integrations.trl.preflight import METHODS, check_trainer
from onepolicy.integrations.trl.settings import TrlSettings

TIS = op.preset("tis")
WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "temperature": 1.0}
OWN = {"rollout_func": None}
TOOLS = OWN | {"tools": [print]}
FUNCTION = {"rollout_func": print}
VLLM = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}


class GRPOTrainer(SimpleNamespace):
    """A stand-in: the checks go by this name."""

    accelerator = SimpleNamespace(num_processes=1)


class RLOOTrainer(SimpleNamespace):
    """A stand-in: the checks go by this name."""

    accelerator = SimpleNamespace(num_processes=1)


class GRPOConfig(SimpleNamespace):
    """A stand-in: errors name it."""


class RLOOConfig(SimpleNamespace):
    """A stand-in: errors name it."""


def trainer(kind=GRPOTrainer, config=GRPOConfig, kwargs=None, model=None, regex=None, **changes):
    """Return a trainer. Its generation config is that of TRL: its own settings, then `kwargs`."""
    args = config(torch_compile=False, steps_per_generation=1, gradient_accumulation_steps=1)
    args.generation_kwargs, args.vllm_structured_outputs_regex = kwargs, regex
    more = dict.fromkeys(METHODS) | WHOLE | {"loss_type": "grpo", "use_vllm": False}
    more |= {"router_aux_loss_coef": 0.0, "aux_loss_enabled": False, "num_iterations": 1}
    more |= {"use_transformers_continuous_batching": False}
    more |= {"model": SimpleNamespace(generation_config=SimpleNamespace(**model or {}))}
    made = kind(**({"args": args} | more | changes))
    own = {name: getattr(made, name) for name in WHOLE} | (kwargs or {})
    made.generation_config = SimpleNamespace(**own)
    return made


def refused(*given, correction=TIS, **changes) -> str:
    with pytest.raises(op.UsageError) as error:
        check_trainer(trainer(*given, **changes), TrlSettings(correction=correction))
    return str(error.value)


CUT = [  # what samples, the change, its words and those of its mend
    (TOOLS, {"top_p": 0.8}, "GRPOConfig(top_p=0.8)", "set GRPOConfig(top_p=1)"),
    (TOOLS, {"top_k": 5}, "GRPOConfig(top_k=5)", "set GRPOConfig(top_k=0)"),
    (TOOLS, {"min_p": 0.1}, "GRPOConfig(min_p=0.1)", "set GRPOConfig(min_p=0)"),
    (OWN, {"repetition_penalty": 1.1}, "repetition_penalty=1.1", "repetition_penalty=1)"),
    (OWN, {"kwargs": {"typical_p": 0.5}}, '"typical_p"]=0.5', 'generation_kwargs["typical_p"]=1'),
    (VLLM, {"kwargs": {"top_p": 0.5}}, 'generation_kwargs["top_p"]=0.5', '["top_p"]=1'),
    (VLLM, {"kwargs": {"logit_bias": {3: 5.0}}}, '"logit_bias"]={3: 5.0}', "=None"),
    (VLLM, {"min_p": 0.1}, "GRPOConfig(min_p=0.1)", "min_p=0"),
    (VLLM, {"regex": "a+"}, "GRPOConfig(vllm_structured_outputs_regex='a+')", "=None"),
    (FUNCTION, {"kwargs": {"presence_penalty": 0.5}}, '"presence_penalty"]=0.5', "=0"),
    (OWN, {"kwargs": {"temperature": 0.5}}, '"temperature"]=0.5', 'kwargs["temperature"]=1'),
    (OWN, {"kwargs": {"do_sample": False}}, '"do_sample"]=False', "=True"),
    (OWN, {"kwargs": {"min_new_tokens": 9}}, '"min_new_tokens"]=9', "=0"),
    (OWN, {"model": {"eta_cutoff": 3e-4}}, "model.generation_config.eta_cutoff = 0.0003", "= 0"),
]


@pytest.mark.parametrize(("sampler", "change", "found", "mend"), CUT)
def test_sampling_that_is_not_the_scored_distribution(sampler, change, found, mend):
    """It is refused beside a correction, in the caller's spelling, and else noted."""
    text = refused(**sampler | change)
    assert "whole distribution sampled" in text
    cuts = any(name in text.partition(";")[0] for name in ("top_p", "top_k", "min_p"))
    assert any(words in text for words in ("not with tools", "vLLM returns the tokens")) == cuts
    assert found in text
    assert mend in text.partition("temperature, so every ratio would be wrong")[2]
    report = check_trainer(trainer(**sampler | change), TrlSettings())
    (note,) = [note for note in report.notes if "cut or changed" in note]
    assert found in note
    assert mend in note


@pytest.mark.parametrize(
    ("sampler", "change", "words"),
    [
        (OWN, {"top_p": 0.8}, "over the tokens that they left"),
        (OWN, {"kwargs": {"min_p": 0.1}}, "over the tokens that they left"),
        (FUNCTION, {"top_k": 5}, 'those of rollout_func, under the key "supports"'),
        (VLLM, {"top_p": 0.8, "top_k": 20}, "over the tokens that they left"),
        (VLLM, {"kwargs": {"top_k": 20}}, "over the tokens that they left"),
    ],
)
def test_cut_sampling_whose_supports_are_had(sampler, change, words):
    report = check_trainer(trainer(**sampler | change), TrlSettings(correction=TIS))
    assert [note for note in report.notes if "cut or changed" in note] == []
    (note,) = [note for note in report.notes if "cut the sampling" in note]
    assert words in note


def limited(most):
    config = SimpleNamespace(max_logprobs=most, enable_return_routed_experts=True)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
    return {"vllm_mode": "colocate", "vllm_generation": SimpleNamespace(llm=llm), "top_k": 20}


def test_vllm_returns_enough_likeliest_tokens():
    """Twice top_k and 16 for ties; vLLM's default is 20, -1 is no limit."""
    cut = VLLM | {"top_p": 0.8}
    text = refused(**cut | limited(20))
    assert "56 log-probabilities a token are needed and this vLLM returns 20" in text
    for enough in (56, -1):
        check_trainer(trainer(**cut | limited(enough)), TrlSettings(correction=TIS))


NEUTRAL = {"top_p": 1.0, "top_k": -1, "num_beams": 1, "bad_words": [], "min_tokens": 1}


@pytest.mark.parametrize("sampler", [OWN, FUNCTION, VLLM])
def test_sampling_that_is_whole_has_no_line(sampler):
    """A model's own config yields to what TRL sets itself."""
    chosen = {"model": {"top_p": 0.8, "top_k": 20, "typical_p": 1.0}}
    whole = trainer(kwargs=NEUTRAL | {"temperature": 1.0}, **sampler | chosen)
    report = check_trainer(whole, TrlSettings(correction=TIS))
    assert "cut or changed" not in str(report)


@pytest.mark.parametrize("replay", ["r3", "off"])
@pytest.mark.parametrize("kwargs", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_beams_and_drafts_are_refused_by_name(replay, kwargs):
    ((name, value),) = kwargs.items()
    words = f'tokens drawn one by one: generation_kwargs\\["{name}"\\]={value}'
    with pytest.raises(op.UsageError, match=words):
        check_trainer(trainer(kwargs=kwargs), TrlSettings(replay=replay))
    draft = {"prompt_lookup_num_tokens": 3}
    check_trainer(trainer(kwargs=draft, **VLLM), TrlSettings())  # vLLM checks drafts itself


def test_an_error_names_the_settings_of_its_trainer():
    loss = {"aux_loss_enabled": True, "router_aux_loss_coef": 0.01, "top_p": 0.5}  # so no supports
    text = refused(RLOOTrainer, RLOOConfig, correction=op.preset("seq-tis"), **loss)
    assert "build the trainer with RLOOConfig(router_aux_loss_coef=0.0)" in text
    assert "RLOOConfig(top_p=0.5)" in text
    assert "GRPO" not in text


def test_a_trl_without_the_settings_of_the_router_loss():
    old = trainer()
    del old.router_aux_loss_coef, old.aux_loss_enabled
    with pytest.raises(op.UsageError, match=r"no router_aux_loss_coef, .*; install trl 1\.16\.0"):
        check_trainer(old, TrlSettings())
    check_trainer(old, TrlSettings(replay="off"))


@pytest.mark.parametrize(("installed", "lines"), [("1.13.0", 1), ("1.16.0", 0), (None, 0)])
def test_a_version_that_nobody_tested_is_noted(monkeypatch, installed, lines):
    monkeypatch.setattr(preflight, "_installed_version", lambda: installed)
    notes = check_trainer(trainer(), TrlSettings()).notes
    assert sum("TRL 1.13.0 is untested; 1.16.0 is tested" in note for note in notes) == lines


def test_a_correction_over_the_step_needs_one_generation_a_step():
    args = GRPOConfig(torch_compile=False, steps_per_generation=1, gradient_accumulation_steps=4)
    args.generation_kwargs = args.vllm_structured_outputs_regex = None
    words = refused(correction=op.preset("m2po"), **OWN, args=args)
    assert "gradient_accumulation_steps 4, steps_per_generation 1" in words
