"""The embedded engine's continuous batch with recurrent layers: a row carries its own state."""

import copy

import pytest
import torch

from onepolicy.config import Fp8, Fp8Weight, HFEngineConfig, Int8, UsageError
from onepolicy.models.cache_size import state_bytes
from onepolicy.models.prepare import (
    has_one_per_layer,
    prepare_for_training,
    recurrent_layers,
    unknown_layers,
)
from onepolicy.models.recurrent import layers
from onepolicy.models.recurrent.segments import Row
from onepolicy.rollout.copies import quantise_policy
from onepolicy.rollout.hf import forward
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.hf.static_batch import StaticBatch
from onepolicy.types import Sampling
from support.engine_runs import check_against_stock, engine_of, prompts, ragged, run
from support.models import make
from support.recurrent_models import FAMILIES, MOE, hybrid

SHORT = 15  # tokens of a prompt, at most: random weights amplify rounding along a path


def engine(family, **settings):
    model = hybrid(family)
    return engine_of(model, return_routes=family in MOE, max_len=100, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_logp_and_routes_are_the_stock_models(family):
    """Nine ragged requests on four rows, two of them siblings, with rows that are compacted."""
    paths = prompts(8, 3, SHORT)
    requests = ragged([*paths, paths[0]], spread=8)
    tested = engine(family)
    assert isinstance(tested.batch, ContinuousBatch)
    check_against_stock(hybrid(family), requests, run(tested, requests))


def test_recurrent_layers_are_found_however_often_they_are_installed():
    model = hybrid(FAMILIES[0])
    count = layers.install_recurrent(model)
    assert count == sum(isinstance(each, layers.Recurrent) for each in model.modules()) > 0
    assert layers.install_recurrent(model) == count
    attention = make("qwen3_moe")
    assert layers.install_recurrent(attention) == 0
    assert state_bytes(attention) == 0


def fed_tokens(monkeypatch):
    """Return a list that gets the number of tokens of every prefill."""
    counts, own = [], forward.CachedForward.prefill

    def prefill(self, tokens, spans):
        counts.append(sum(span.stop - span.start for span in spans))
        return own(self, tokens, spans)

    monkeypatch.setattr(forward.CachedForward, "prefill", prefill)
    return counts


def test_siblings_fork_the_state_after_the_prompt(monkeypatch):
    tested = engine("qwen3_5_moe_text")
    counts = fed_tokens(monkeypatch)
    (path,) = prompts(1, 12, 13)
    requests = [(path, Sampling(1.0, 6), seed) for seed in range(4)]
    done = run(tested, requests)
    check_against_stock(hybrid("qwen3_5_moe_text"), requests, done)
    assert counts == [12]
    assert len({tuple(c.token_ids.tolist()) for c in done}) > 1


def test_a_turn_goes_on_from_the_state_at_the_end_of_the_last(monkeypatch):
    tested = engine("nemotron_h")
    counts = fed_tokens(monkeypatch)
    (path,) = prompts(1, 12, 13)
    fed = []
    for turn in range(3):
        requests = [(path, Sampling(1.0, 5), turn)]
        done = run(tested, requests)
        check_against_stock(hybrid("nemotron_h"), requests, done)
        fed.append(counts.pop())
        path = [*path, *done[0].token_ids.tolist(), 7, 8]
    assert fed == [12, 3, 3]  # the last sampled token and two of the environment's


def test_a_part_of_a_row_is_no_state_to_go_on_from(monkeypatch):
    """A prompt that leaves the row's path before its end is fed whole."""
    tested = engine("nemotron_h")
    counts = fed_tokens(monkeypatch)
    (path,) = prompts(1, 12, 13)
    run(tested, [(path, Sampling(1.0, 5), 0)])
    requests = [([*path, 60, 5], Sampling(1.0, 5), 1), (path, Sampling(1.0, 5), 1)]
    check_against_stock(hybrid("nemotron_h"), requests, run(tested, requests))
    assert counts == [12, 26]


def test_a_long_prompt_is_prefilled_in_pieces(monkeypatch):
    monkeypatch.setattr(forward, "MAX_TOKENS", 7)
    requests = ragged(prompts(3, 20, 24), spread=5)
    check_against_stock(hybrid("bamba"), requests, run(engine("bamba"), requests))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("qwen3_next", Int8()),
        ("nemotron_h", Fp8()),
        ("kimi_linear", Fp8Weight()),
        ("lfm2_moe", Int8()),
        ("bamba", Int8()),
    ],
    ids=str,
)
def test_logp_and_routes_are_those_of_the_quantised_model(family, quant):
    """Projections of recurrent layers are quantised; convolutions, decays and states are not."""
    whole, requests = hybrid(family), ragged(prompts(4, 3, SHORT), spread=8)
    quantise_policy(whole, quant)
    config = HFEngineConfig(dtype="float32", max_num_seqs=3)
    routed = family in MOE
    tested = HFEngine(hybrid(family), config, return_routes=routed, max_len=64, quant=quant)
    assert isinstance(tested.batch, ContinuousBatch)
    check_against_stock(whole, requests, run(tested, requests))


def test_a_family_that_reads_weights_past_their_layers_is_not_quantised():
    with pytest.raises(UsageError, match="JambaForCausalLM reads weights past their layers"):
        quantise_policy(hybrid("jamba"), Int8())


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "jamba", "kimi_linear", "lfm2"])
def test_states_are_as_large_as_counted(family):
    tested = engine(family, max_num_seqs=1)
    run(tested, [(prompts(1, 5, 6)[0], Sampling(1.0, 2), 0)])
    held = tested.batch.cache.states.values()
    with torch.device("meta"):
        empty = hybrid(family)
    assert state_bytes(empty) == sum(t.numel() * t.element_size() for t in held)


def test_a_state_of_unknown_operators_runs_on_the_models_own_cache(monkeypatch, caplog):
    """Of the operators the scan alone is unknown, so the cache would lose its state."""
    monkeypatch.setattr(layers, "MADE", {})
    monkeypatch.delitem(layers.OPERATORS, "torch_chunk_gated_delta_rule")
    tested = engine("qwen3_5_text", max_num_seqs=2)
    assert isinstance(tested.batch, StaticBatch)
    assert "gives other logits than its own" in caplog.text
    requests = [(path, Sampling(1.0, 5), seed) for seed, path in enumerate(prompts(2, 9, 10))]
    check_against_stock(hybrid("qwen3_5_text"), requests, run(tested, requests))


def test_a_layer_that_decodes_a_token_otherwise_is_found(monkeypatch):
    """Whole pieces go on from the state, single tokens do not."""
    own = layers.OPERATORS["torch_chunk_gated_delta_rule"]

    def forgets(row, *args, **arguments):
        if row.segments.lengths == (1,):
            row = Row(row.segments)
        return own(row, *args, **arguments)

    monkeypatch.setitem(layers.OPERATORS, "torch_chunk_gated_delta_rule", forgets)
    assert isinstance(engine("qwen3_5_text").batch, StaticBatch)


def test_a_model_of_a_hybrid_family_may_be_all_attention():
    config = hybrid("qwen3_5_text").config
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = type(hybrid("qwen3_5_text"))(config).eval()
    assert recurrent_layers(model) == ""
    prepare_for_training(model, torch.device("cpu"))
    config.layer_types = None  # then its family decides
    assert recurrent_layers(model) == "recurrent"


def test_layers_without_exactly_one_known_mixer_are_not_taken_for_known(caplog):
    """Its name says `linear_attention`, as others do; its operators decide."""
    model = hybrid("qwen3_5_text")
    assert has_one_per_layer(model)
    assert unknown_layers(model) == ""
    second = copy.deepcopy(model.model.layers[0].linear_attn)
    model.model.layers[0].second_mixer = second
    assert not has_one_per_layer(model)
    model.config.layer_types = ["linear_attention", "full_attention", "other_attention"]
    assert unknown_layers(model) == "linear_attention"
    model.model.layers[0].second_mixer = None
    model.model.layers[2].linear_attn = torch.nn.Identity()
    assert unknown_layers(model) == "other_attention"
    with pytest.raises(UsageError, match="has other_attention layers, whose operators"):
        prepare_for_training(model, torch.device("cpu"))
    assert isinstance(engine_of(model, return_routes=False, max_len=100).batch, StaticBatch)
    assert "does not know the operators of its other_attention layers" in caplog.text
