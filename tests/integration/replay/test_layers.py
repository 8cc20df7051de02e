"""Models that are MoE, and the decoder layer of each router."""

from __future__ import annotations

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
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import Routers, RoutingError, is_moe, require_moe
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


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


def test_a_dense_model_is_refused_with_a_hint() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    with pytest.raises(UsageError, match=r"LlamaForCausalLM.*replay\.mode=off"):
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


@pytest.mark.parametrize("family", TABLE)
def test_every_family_passes_the_preflight(family: str) -> None:
    require_moe(TABLE[family].config())


def test_prediction_heads_are_not_bound(model: PreTrainedModel) -> None:
    spare = build("qwen3_moe", seed=3)
    model.model.layers.append(
        spare.model.layers[0]
    )  # index 3 of a model with 3 layers, where checkpoints keep heads
    model.mtp = nn.ModuleList([spare.model.layers[1]])
    assert bind_routers(model).layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.3.mlp.gate", 3),
        ("model.language_model.layers.12.block_sparse_moe.gate", 12),
        ("base_model.model.model.layers.0.mlp.router", 0),
        ("gate", None),
    ],
)
def test_decoder_index(path: str, layer: int | None) -> None:
    assert decoder_index(path) == layer


def test_two_routers_of_one_layer_are_refused(model: PreTrainedModel) -> None:
    model.model.layers[0].second = build("qwen3_moe", seed=3).model.layers[0].mlp
    with pytest.raises(RoutingError, match="layer 0 has two routers"):
        bind_routers(model)


def test_layers_of_different_width_are_refused(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = build("qwen3_moe", num_experts=12).model.layers[1].mlp
    with pytest.raises(RoutingError, match="layer 1 chooses 3 of 12"):
        bind_routers(model)


# --- which layers, of the published models --------------------------------------------------------

_NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_KIND = {"M": "linear_attention", "E": "moe", "*": "full_attention"}


def _nemotron() -> PreTrainedConfig:
    kinds = [_KIND[letter] for letter in _NEMOTRON_3_NANO]
    return NemotronHConfig(layers_block_type=kinds, n_routed_experts=128, num_experts_per_tok=6)


def _deepseek(dense: int) -> PreTrainedConfig:
    return DeepseekV3Config(num_hidden_layers=61, first_k_dense_replace=dense, n_routed_experts=256)


GOLDEN = {
    "Qwen3-30B-A3B": (lambda: Qwen3MoeConfig(num_hidden_layers=48, num_experts=128), range(48)),
    "DeepSeek-V3": (lambda: _deepseek(3), range(3, 61)),
    "Kimi-K2": (lambda: _deepseek(1), range(1, 61)),
    "GLM-4.5": (lambda: Glm4MoeConfig(num_hidden_layers=92, first_k_dense_replace=3), range(3, 92)),
    "GLM-4.5-Air": (
        lambda: Glm4MoeConfig(num_hidden_layers=46, first_k_dense_replace=1),
        range(1, 46),
    ),
    "gpt-oss-120b": (lambda: GptOssConfig(num_hidden_layers=36), range(36)),
    "Nemotron-3-Nano": (
        _nemotron,
        [i for i, letter in enumerate(_NEMOTRON_3_NANO) if letter == "E"],
    ),
    "Qwen3-Next-80B-A3B": (lambda: Qwen3NextConfig(num_hidden_layers=48), range(48)),
    "Qwen3.5-35B-A3B": (lambda: Qwen3_5MoeTextConfig(num_hidden_layers=40), range(40)),
    "Qwen3 every second, one dense": (
        lambda: Qwen3MoeConfig(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3]),
        [1, 5, 7],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_layer_maps(name: str) -> None:
    """The models have their real depth, on the meta device."""
    make, expected = GOLDEN[name]
    config = make()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert bind_routers(model).layers == tuple(expected)
    assert moe_layers_of(config) in (tuple(expected), None)


@pytest.mark.parametrize("family", TABLE)
def test_the_config_tells_the_same_layers(family: str) -> None:
    told = moe_layers_of(TABLE[family].config())
    assert told in (tuple(sorted(set(TABLE[family].layers))), None)
    if "dense" in str(TABLE[family].options) or len(TABLE[family].layers) < 3:
        assert told is not None or family == "longcat_flash"


# --- routes of an engine: a column per decoder layer, or per MoE layer ----------------------------


@pytest.fixture
def dense_first() -> tuple[Routers, torch.Tensor]:
    routers = bind_routers(build("deepseek_v3"))  # MoE layers 1 and 2 of 3
    return routers, torch.rand(5, 2, 8, generator=torch.Generator().manual_seed(0)).argsort(-1)[
        ..., :2
    ].int()


@pytest.mark.parametrize("axis", ["moe", "all", None])
def test_both_axes_give_the_same_trace(
    dense_first: tuple[Routers, torch.Tensor], axis: str | None
) -> None:
    routers, ids = dense_first
    everywhere = torch.cat(
        [torch.zeros(5, 1, 2, dtype=ids.dtype), ids], 1
    )  # zeros for the dense layer
    for given in [ids] * (axis != "all") + [everywhere] * (axis != "moe"):
        trace = routers.trace_from(given, axis=axis)
        assert torch.equal(trace.ids, ids.to(torch.uint8))
        assert (trace.layers, trace.num_experts) == ((1, 2), 8)
        assert trace.valid.all()


def test_other_counts_name_both(dense_first: tuple[Routers, torch.Tensor]) -> None:
    routers, ids = dense_first
    for wrong, axis in (
        (ids[:, :1], None),
        (ids.repeat(1, 2, 1), None),
        (ids, "all"),
        (ids.repeat(1, 2, 1)[:, :3], "moe"),
    ):
        with pytest.raises(
            UsageError,
            match=rf"routes have {wrong.shape[1]} layers.*3 decoder layers, 2 of them MoE \(1..2",
        ):
            routers.trace_from(wrong, axis=axis)


def test_a_shifted_axis_is_refused(dense_first: tuple[Routers, torch.Tensor]) -> None:
    routers, ids = dense_first
    shifted = torch.cat([ids, torch.zeros(5, 1, 2, dtype=ids.dtype)], 1)
    with pytest.raises(UsageError, match="dense layer 0 has routes"):
        routers.trace_from(shifted)


def test_rows_without_routes_are_not_valid(dense_first: tuple[Routers, torch.Tensor]) -> None:
    routers, ids = dense_first
    ids[3, 1] = -1
    assert routers.trace_from(ids).valid.tolist() == [True, True, True, False, True]
    asked = torch.tensor([False, True, True, True, True])
    assert routers.trace_from(ids, valid=asked).valid.tolist() == [False, True, True, False, True]


@pytest.mark.parametrize("axis", ["moe", "all", None])
@pytest.mark.parametrize("gone", [[0], [3], [0, 1, 4], [1, 2, 3, 4]])
def test_rows_without_routes_are_never_read(
    dense_first: tuple[Routers, torch.Tensor], axis: str | None, gone: list[int]
) -> None:
    """This includes a dense layer's column: an engine's -1 there, or its leftovers in rows that the
    caller marks invalid."""
    routers, ids = dense_first
    captured = torch.ones(5, dtype=torch.bool).index_fill(0, torch.tensor(gone), False)
    everywhere = torch.cat([torch.zeros(5, 1, 2, dtype=ids.dtype), ids], 1)
    for given in [ids] * (axis != "all") + [everywhere] * (axis != "moe"):
        for filler, valid in ((-1, None), (-1, captured), (99, captured)):
            rows = given.masked_fill(~captured[:, None, None], filler)
            trace = routers.trace_from(rows, axis=axis, valid=valid)
            assert torch.equal(trace.valid, captured)
            assert torch.equal(trace.ids[captured], ids[captured].to(torch.uint8))


def test_a_shifted_axis_is_refused_despite_rows_without_routes(
    dense_first: tuple[Routers, torch.Tensor],
) -> None:
    routers, ids = dense_first
    shifted = torch.cat([ids, torch.zeros(5, 1, 2, dtype=ids.dtype)], 1)
    shifted[:2] = -1
    with pytest.raises(UsageError, match="dense layer 0 has routes, first at row 3"):
        routers.trace_from(shifted)


def test_a_capture_of_nothing_is_refused(dense_first: tuple[Routers, torch.Tensor]) -> None:
    routers, ids = dense_first
    for columns in (2, 3):
        with pytest.raises(UsageError, match="-1 in all 5 rows: the engine captured nothing"):
            routers.trace_from(torch.full((5, columns, 2), -1))
    some = torch.tensor([True, False, False, True, True])
    with pytest.raises(UsageError, match="-1 in all 3 rows"):
        routers.trace_from(ids.masked_fill(some[:, None, None], -1), valid=some)
    ids[:, 1] = -1
    with pytest.raises(
        UsageError, match="layer 2 are -1 in all 5 rows: the engine did not capture it"
    ):
        routers.trace_from(ids)
    nothing = routers.trace_from(ids, valid=torch.zeros(5, dtype=torch.bool))  # says so itself
    assert not nothing.valid.any()
    assert len(routers.trace_from(ids[:0])) == 0


def test_wide_ids_are_not_wrapped(dense_first: tuple[Routers, torch.Tensor]) -> None:
    """256 + 3 would be expert 3 in a byte."""
    routers, ids = dense_first
    ids[2, 1, 0] = 259
    with pytest.raises(UsageError, match=r"outside 0..7 at layer 2, row 2: \[259"):
        routers.trace_from(ids)


def test_two_routers_per_layer_have_no_axis_of_decoder_layers() -> None:
    routers = bind_routers(TABLE["jetmoe"].model())
    assert routers.trace_from(torch.ones(2, 6, 2, dtype=torch.int32)).layers == (0, 0, 1, 1, 2, 2)
    with pytest.raises(UsageError, match="two routers in one layer"):
        routers.trace_from(torch.ones(2, 3, 2, dtype=torch.int32))
