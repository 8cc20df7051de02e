"""Every MoE causal LM of transformers as a tiny random model, from the table in families.toml.

Three layers of width 32 where the family allows it. Selection biases, routed scales other than 1,
dense layers and sliding windows shorter than the sequence wherever the family has them.
`discover()` lists the families of the installed transformers: one that an upgrade adds is in none
of the tables and fails the completeness test. Those of NEWEST are listed in family_lists.json.
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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


NEWEST = "5.24.0"
"""Version whose families are all in the tables; the pinned one has some of them not yet."""
MODELS = Path(transformers.__file__).parent / "models"


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
VISION = {  # models of images and text, tested on text -> the family whose options their text has
    "aria": "aria_text",
    "gemma4": "gemma4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral_large4": "mistral4",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen4_exp": "qwen4_exp_text",
    "unlimited_ocr": "deepseek_v2",
}
NO_CAUSAL_LM = {  # modules with routed experts but no causal LM class to bind
    "deepseek_ocr2": "image to text",
    "diffusion_gemma": "denoises blocks",
    "ernie4_5_vl_moe": "image and video to text",
    "glm4v_moe": "image to text",
    "glm5_next": "image to text",
    "granite_docling": "image to text",
    "hy_v4_vl": "image and video to text",
    "mistral_large4": "image to text",
    "muse_spark": "image and audio to text",
    "nllb_moe": "encoder-decoder",
    "openai_privacy_filter": "token classification",
    "qwen3_omni_moe": "speech, image and video to text",
    "qwen3_vl_moe": "image and video to text",
    "step3p7": "image to text",
    "switch_transformers": "encoder-decoder",
    "unlimited_ocr": "image to text",
    "vitpose_backbone": "image backbone",
}
_EXPERTS = re.compile(
    r"\b((moe_)?num_experts|num_local_experts|n_routed_experts)\b|^class "
    r"\w*(Experts|MoE|Router|Moe\w*Block)\(",
    re.MULTILINE,
)
CAUSAL_LM = re.compile(r"^class (\w+ForCausalLM)\(", re.MULTILINE)


TINY_VISION = {
    **{"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "head_dim": 8},
    **{"depth": 1, "num_hidden_layers": 1, "deepstack_visual_indexes": [0]},
    **{"num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
}


def vision_model(name: str) -> PreTrainedModel:
    """Return a tiny model of VISION with random weights; its image encoder is not used."""
    text: Any = dict(TABLE[VISION[name]].options)
    if f"{name}_text" in CONFIG_MAPPING:
        text = AutoConfig.for_model(f"{name}_text", **text)
    config = AutoConfig.for_model(name, text_config=text)
    for part in ("vision_config", "audio_config"):
        encoder = getattr(config, part, None)
        for key, value in TINY_VISION.items():
            if hasattr(encoder, key):
                setattr(encoder, key, value)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    perturb(model)
    return model


def there(name: str) -> bool:
    """Return whether the installed transformers has a file for the models of this folder."""
    return (MODELS / name / f"modeling_{name}.py").is_file()


def borrowing() -> set[str]:
    """Return the model types that are computed by the causal LM class of a family of the table."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = {names.get(name) for name in TABLE if there(folder(name))}
    return {name for name, used in names.items() if used in classes and not there(folder(name))}


def discover(models: Path = MODELS) -> tuple[set[str], set[str]]:
    """Return the model folders of a transformers, by default the installed one, that name experts:
    (with a causal LM class, without one)."""
    with_lm, without = set(), set()
    for path in sorted(models.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if _EXPERTS.search(source):
            (with_lm if CAUSAL_LM.search(source) else without).add(path.parent.name)
    return with_lm, without


def folder(model_type: str) -> str:
    """Return the folder under transformers/models: text halves of multimodal models are in their
    parents' folders."""
    return model_type.removesuffix("_text")
