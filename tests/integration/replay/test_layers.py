"""Models that are MoE, and the decoder layer of each router."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import Routers, is_moe, require_moe
from onepolicy.replay.layers import decoder_index, moe_layers_of
from support.families import TABLE
from support.replay_models import FAMILIES, build

TINY_LLAMA = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def test_a_dense_model_is_refused_with_a_hint() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    hint = r'replay\.mode=off.*attach\(trainer, replay="off"\)'
    with pytest.raises(UsageError, match=f"LlamaForCausalLM.*{hint}"):
        bind_routers(model)
    with pytest.raises(UsageError, match=r"'llama'.*replay\.mode=off"):
        require_moe(model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_is_recognised_by_the_config(family: str) -> None:
    config = FAMILIES[family]()
    assert is_moe(config)
    require_moe(config)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config.to_dict():
            setattr(config, name, 0)
    assert not is_moe(config)


def test_prediction_heads_are_not_bound(model) -> None:
    spare = build("qwen3_moe", seed=3)
    # Index 3 of a model with 3 layers, where checkpoints keep heads.
    model.model.layers.append(spare.model.layers[0])
    model.mtp = nn.ModuleList([spare.model.layers[1]])
    assert bind_routers(model).layers == (0, 1, 2)


def test_decoder_index() -> None:
    assert decoder_index("model.layers.3.mlp.gate") == 3
    assert decoder_index("model.language_model.layers.12.block_sparse_moe.gate") == 12
    assert decoder_index("gate") is None


# --- which layers, of the published models --------------------------------------------------------

NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}

GOLDEN = {
    "Qwen3-30B-A3B": (Qwen3MoeConfig(num_hidden_layers=48, num_experts=128), range(48)),
    "DeepSeek-V3": (
        DeepseekV3Config(num_hidden_layers=61, first_k_dense_replace=3, n_routed_experts=256),
        range(3, 61),
    ),
    "GLM-4.5-Air": (Glm4MoeConfig(num_hidden_layers=46, first_k_dense_replace=1), range(1, 46)),
    "gpt-oss-120b": (GptOssConfig(num_hidden_layers=36), range(36)),
    "Nemotron-3-Nano": (
        NemotronHConfig(
            layers_block_type=[KINDS[letter] for letter in NEMOTRON_3_NANO],
            n_routed_experts=128,
            num_experts_per_tok=6,
        ),
        [i for i, letter in enumerate(NEMOTRON_3_NANO) if letter == "E"],
    ),
    "Qwen3-Next-80B-A3B": (Qwen3NextConfig(num_hidden_layers=48), range(48)),
    "Qwen3.5-35B-A3B": (Qwen3_5MoeTextConfig(num_hidden_layers=40), range(40)),
    "Qwen3 every second, one dense": (
        Qwen3MoeConfig(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3]),
        [1, 5, 7],
    ),
}


IN_GATE = ("Nemotron-3-Nano", "Qwen3 every second, one dense")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.full) for name in GOLDEN],
)
def test_golden_layer_maps(name: str) -> None:
    """The models have their real depth, on the meta device."""
    config, expected = GOLDEN[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert bind_routers(model).layers == tuple(expected)
    assert moe_layers_of(config) in (tuple(expected), None)


@pytest.mark.parametrize("family", TABLE)
def test_the_config_tells_the_same_layers(family: str) -> None:
    config = TABLE[family].config()
    require_moe(config)
    told = moe_layers_of(config)
    assert told in (tuple(sorted(set(TABLE[family].layers))), None)
    if "dense" in str(TABLE[family].options) or len(TABLE[family].layers) < 3:
        assert told is not None or family == "longcat_flash"


# --- routes of an engine: a column per decoder layer, or per MoE layer ----------------------------

IDS = torch.rand(5, 2, 8, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2].int()
ZEROS = torch.zeros(5, 1, 2, dtype=IDS.dtype)  # of a dense layer
EVERYWHERE, SHIFTED = torch.cat([ZEROS, IDS], 1), torch.cat([IDS, ZEROS], 1)
SOME = torch.tensor([True, False, False, True, True])
BY_AXIS = [("moe", IDS), (None, IDS), ("all", EVERYWHERE), (None, EVERYWHERE)]


@pytest.fixture(scope="module")
def dense_first() -> Routers:
    return bind_routers(build("deepseek_v3"))  # MoE layers 1 and 2 of 3


def _with(ids: torch.Tensor, at: Any, value: int) -> torch.Tensor:
    out = ids.clone()
    out[at] = value
    return out


def _counts(columns: int) -> str:
    return rf"routes have {columns} layers.*3 decoder layers, 2 of them MoE \(1..2"


REFUSED = [
    (IDS[:, :1], {}, _counts(1)),
    (IDS.repeat(1, 2, 1), {}, _counts(4)),
    (IDS, {"axis": "all"}, _counts(2)),
    (EVERYWHERE, {"axis": "moe"}, _counts(3)),
    (SHIFTED, {}, "dense layer 0 has routes"),
    (_with(SHIFTED, slice(2), -1), {}, "dense layer 0 has routes, first at row 3"),
    (_with(IDS, ..., -1), {}, "-1 in all 5 rows: the engine captured nothing"),
    (_with(EVERYWHERE, ..., -1), {}, "-1 in all 5 rows: the engine captured nothing"),
    (_with(IDS, SOME, -1), {"valid": SOME}, "-1 in all 3 rows"),
    (_with(IDS, (slice(None), 1), -1), {}, "layer 2 are -1 in all 5 rows: the engine did not"),
    (_with(IDS, (2, 1, 0), 259), {}, r"outside 0..7 at layer 2, row 2: \[259"),  # 3 in a byte
    ([[[0]]], {}, "routes are list"),
    (IDS.bool(), {}, "dtype torch.bool"),
    (IDS, {"valid": torch.ones(5)}, "dtype torch.float32, expected bool"),
    (IDS, {"valid": SOME[:, None]}, r"shape \(5, 1\)"),
]


def test_routes_that_do_not_fit_are_refused(dense_first: Routers, subtests) -> None:
    for ids, options, words in REFUSED:
        with subtests.test(words), pytest.raises(UsageError, match=words):
            dense_first.trace_from(ids, **options)


def test_both_axes_give_the_same_trace(dense_first: Routers) -> None:
    for axis, given in BY_AXIS:
        trace = dense_first.trace_from(given, axis=axis)
        assert torch.equal(trace.ids, IDS.to(torch.uint8))
        assert (trace.layers, trace.num_experts) == ((1, 2), 8)
        assert trace.valid.all()


def test_rows_without_routes_are_not_valid(dense_first: Routers) -> None:
    ids = _with(IDS, (3, 1), -1)
    assert dense_first.trace_from(ids).valid.tolist() == [True, True, True, False, True]
    found = dense_first.trace_from(ids, valid=torch.arange(5) > 0)
    assert found.valid.tolist() == [False, True, True, False, True]
    nothing = torch.zeros(5, dtype=torch.bool)  # says so itself
    assert not dense_first.trace_from(_with(IDS, (slice(None), 1), -1), valid=nothing).valid.any()
    assert len(dense_first.trace_from(IDS[:0])) == 0


def test_rows_without_routes_are_never_read(dense_first: Routers, subtests) -> None:
    """This includes a dense layer's column: an engine's -1 there, or its leftovers in rows that the
    caller marks invalid."""
    for gone, (axis, given) in itertools.product(([0], [3], [0, 1, 4], [1, 2, 3, 4]), BY_AXIS):
        captured = torch.ones(5, dtype=torch.bool).index_fill(0, torch.tensor(gone), False)
        for filler, valid in ((-1, None), (-1, captured), (99, captured)):
            with subtests.test(gone=gone, axis=axis, columns=given.shape[1], filler=filler):
                trace = dense_first.trace_from(
                    _with(given, ~captured, filler), axis=axis, valid=valid
                )
                assert torch.equal(trace.valid, captured)
                assert torch.equal(trace.ids[captured], IDS[captured].to(torch.uint8))


def test_two_routers_per_layer_have_no_axis_of_decoder_layers() -> None:
    routers = bind_routers(TABLE["jetmoe"].model())
    assert routers.trace_from(torch.ones(2, 6, 2, dtype=torch.int32)).layers == (0, 0, 1, 1, 2, 2)
    with pytest.raises(UsageError, match="two routers in one layer"):
        routers.trace_from(torch.ones(2, 3, 2, dtype=torch.int32))
