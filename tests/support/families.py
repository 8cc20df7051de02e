"""Every MoE causal LM of the pinned transformers as a tiny random model, from the table in
families.toml.

Three layers of width 32 where the family allows it. Selection biases, routed scales other than 1,
dense layers and sliding windows shorter than the sequence wherever the family has them.
`discover()` lists the families of the installed transformers: one that an upgrade adds is in none
of the tables and fails the completeness test.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """One tiny model."""

    model_type: str
    scoring: str  # how it turns scores into weights
    options: dict[str, Any]  # of its config
    layers: tuple[int, ...]  # decoder index of its routers
    second: dict[str, Any] = field(default_factory=dict)  # what the second run changes
    train: bool = True  # False: routes only in eval mode
    note: str = ""

    def config(self, **changes: Any) -> PreTrainedConfig:
        if self.model_type not in CONFIG_MAPPING:
            pytest.skip(f"transformers has no {self.model_type} yet")
        return AutoConfig.for_model(self.model_type, **{**self.options, **changes})

    def model(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        experts: str | None = None,
        seed: int = 0,
        **changes: Any,
    ) -> PreTrainedModel:
        """Return a model with random weights, decided routers, and selection biases that change
        choices."""
        torch.manual_seed(seed)
        config, options = self.config(**changes), model_options(dtype, experts)
        if self.model_type == "mistral4":  # has a causal LM class that the auto class does not know
            model = transformers.Mistral4ForCausalLM._from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
        perturb(model)
        return model.train(self.train)


def model_options(dtype: torch.dtype, experts: str | None = None) -> dict[str, Any]:
    """Return the arguments of `from_config` as the installed transformers takes them.

    experts: the kind of experts; before 5.0 there is one, a loop over modules.
    """
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if release < (4, 56):
        return {"torch_dtype": dtype}
    if release < (5, 0) or experts is None:
        return {"dtype": dtype}
    return {"dtype": dtype, "experts_implementation": experts}


def perturb(model: PreTrainedModel) -> None:
    """Give the model decided routers, selection biases that change choices, and hash tables that
    name different experts."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                tensor.copy_(torch.rand(len(tensor), experts).argsort(-1)[:, : tensor.shape[1]])
            elif _BIAS.search(name):
                tensor.normal_(std=0.3)
            elif name.endswith("balancing_biases"):  # of probabilities, not of sigmoids
                tensor.normal_(std=0.05)
            elif name.endswith("per_expert_scale"):
                tensor.uniform_(0.5, 1.5)
            elif "norm" not in name and tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(std=0.2)


_BIAS = re.compile(r"correction_bias|expert_bias|(router|gate)\.bias$")

BASE = {
    **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 24},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
}


def _load() -> dict[str, Family]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    parts, table = rows.pop("parts"), {}
    for name, row in rows.items():
        without = row.pop("without", [])
        options = {} if without == "all" else {k: v for k, v in BASE.items() if k not in without}
        for part in row.pop("parts", []):
            options |= parts[part]
        options |= row.pop("options", {})
        table[name] = Family(
            name, options=options, layers=tuple(row.pop("layers", (0, 1, 2))), **row
        )
    return table


TABLE = _load()

REFUSED = {"doge": "its router mixes the tokens of a batch"}
NO_EXPERTS = ("bamba",)  # modules that name experts without having any
NO_CAUSAL_LM = {  # modules with routed experts but no causal LM class to bind
    "deepseek_ocr2": "image to text",
    "diffusion_gemma": "denoises blocks",
    "ernie4_5_vl_moe": "image and video to text",
    "glm4v_moe": "image to text",
    "glm5_next": "image to text",
    "nllb_moe": "encoder-decoder",
    "openai_privacy_filter": "token classification",
    "qwen3_omni_moe": "speech, image and video to text",
    "qwen3_vl_moe": "image and video to text",
    "step3p7": "image to text",
    "switch_transformers": "encoder-decoder",
    "vitpose_backbone": "image backbone",
}
_EXPERTS = re.compile(
    r"\b((moe_)?num_experts|num_local_experts|n_routed_experts)\b|^class "
    r"\w*(Experts|MoE|Router|Moe\w*Block)\(",
    re.MULTILINE,
)
_CAUSAL_LM = re.compile(r"^class \w+ForCausalLM\(", re.MULTILINE)


def discover() -> tuple[set[str], set[str]]:
    """Return the model folders of the installed transformers that name experts: (with a causal LM
    class, without one)."""
    with_lm, without = set(), set()
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if _EXPERTS.search(source):
            (with_lm if _CAUSAL_LM.search(source) else without).add(path.parent.name)
    return with_lm, without


def folder(model_type: str) -> str:
    """Return the folder under transformers/models: text halves of multimodal models are in their
    parents' folders."""
    return model_type.removesuffix("_text")
