"""Open a transformers causal LM and its tokenizer, with every check that needs no weights made first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from httpx2 import TransportError  # what huggingface_hub asks with
from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.constants import CONFIG_NAME, ENDPOINT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.present import check_model

# What transformers lets through for a file that is damaged or of another model.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    UnpicklingError,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # names of settings


def parse_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"train.device: {name!r} is not a torch device; use auto, cpu, cuda or cuda:0"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"train.device: {name!r} is not supported; use auto, cpu, cuda or cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"train.device: {name!r}, but torch sees no CUDA device; use auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"train.device: {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use cuda:0"
        )
    return device


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's config. Raises UsageError for a folder or hub id that holds none."""
    check_model(model.path)
    _check_reachable(model.path)
    with _reading("the config", model):
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)


def _check_reachable(path: str) -> None:
    """UsageError, after one attempt, if the hub cannot be reached for a model that is not in its cache.

    transformers would ask five more times with growing pauses, 40 s in all, and print every attempt.
    """
    if (
        Path(path).exists()
        or is_offline_mode()
        or isinstance(try_to_load_from_cache(path, CONFIG_NAME), str)
    ):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME))
    except TransportError as error:
        raise UsageError(
            f"model.path: there is no folder {path}, and {ENDPOINT} cannot be reached for a model of that name "
            f"({error}); give a folder, or run `hf download {path}` where there is a network"
        ) from None
    except (HfHubHTTPError, HFValidationError):  # transformers says what that means
        return


def context_length(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().max_position_embeddings)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UsageError for one that is missing, damaged, never stops, or of another model."""
    with _reading("the tokenizer", model):
        tokenizer = AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
    vocabulary = tokenizer.get_vocab()
    if (
        vocabulary.keys() <= tokenizer.get_added_vocab().keys()
    ):  # what transformers builds where no file is
        raise UsageError(
            f"model.path: {model.path} has no tokenizer files; save the model's tokenizer there as well"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"model.path: the tokenizer of {model.path} has no eos token, so no completion could ever stop"
        )
    size, largest = read_config(model).get_text_config().vocab_size, max(vocabulary.values())
    if largest >= size:
        raise UsageError(
            f"model.path: the tokenizer of {model.path} has token ids up to {largest}, but the model's vocab_size is "
            f"{size}; use the tokenizer the model was trained with"
        )
    return tokenizer


def load_model(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Weights in `dtype` on `device`, in eval mode. An incomplete checkpoint is an error, not random weights."""
    opened: Any
    _refuse_foreign_files(Path(model.path))
    with _reading("the weights", model):
        opened = AutoModelForCausalLM.from_pretrained(
            model.path,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,  # the other format is a pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are an error below, with a name
        )
    loaded, info = opened
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise UsageError(
            f"model.path: {name} in {model.path} has shape {list(found)}, but its config.json makes it {list(wanted)}; "
            "restore the file that was changed"
        )
    if info["missing_keys"]:
        raise UsageError(
            f"model.path: {model.path} lacks weights, first {sorted(info['missing_keys'])[0]}"
        )
    return loaded.to(device).eval()


def _refuse_foreign_files(folder: Path) -> None:
    """UsageError for an index that names a file outside of its folder, or leaves out one that transformers prefers."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"model.path: {index} is damaged: {error!r}") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise UsageError(
                f"model.path: {index} names {file!r}, which is not a file of this folder"
            )
    if SAFE_WEIGHTS_NAME not in files and (folder / SAFE_WEIGHTS_NAME).is_file():
        raise UsageError(
            f"model.path: {folder} has a {SAFE_WEIGHTS_NAME} that its {SAFE_WEIGHTS_INDEX_NAME} does not name, and "
            "transformers would load that one; move it or the index out of the folder"
        )


def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as a checkpoint opened in `dtype` has it, unlike `model.to`: what is not in a checkpoint (rotary
    frequencies) keeps its precision, and so does what the family wants in float32 (selection biases of routers)."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(
                dtype if kept.isdisjoint(name.split(".")) else torch.float32
            )
    return model


def layer_prefix(name: str) -> str:
    """`model.layers.3.` of a tensor of that layer; the name of one that is in none."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else name


def empty_model(model: ModelConfig) -> PreTrainedModel:
    """On the meta device: names, shapes and config without weights."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            read_config(model),
            trust_remote_code=model.trust_remote_code,
            dtype=getattr(torch, model.dtype),
        )
    empty.config.architectures = [type(empty).__name__]
    empty.config.dtype = getattr(torch, model.dtype)
    return empty


@contextmanager
def _reading(what: str, model: ModelConfig) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"model.path: cannot read {what} of {model.path!r}: {reason}") from error
