"""Loading of a transformers causal LM and its tokenizer, after all checks that need no weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.constants import CONFIG_NAME, ENDPOINT
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.quantization_config import Mxfp4Config

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.input_files import check_model_path
from onepolicy.errors import short_repr
from onepolicy.models.checksum import weights_checksum
from onepolicy.models.foreign import (
    MAX_LAYERS,
    check_counts,
    check_experts,
    memory_of_settings,
    refuse_holes_in,
    refuse_large_shapes,
)
from onepolicy.models.lora import BASE, NF4, base_path, merge_adapter, read_header
from onepolicy.tokenizer_trial import try_tokenizers

WORD_LIST = 2**20  # bytes of a list of words, at most
LONGEST = 2**24  # tokens, as of rollout.engine.max_len
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the setting's value


def parse_device(name: str) -> torch.device:
    """Return the device of train.device. Raises UsageError if it is none of this machine."""
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda")
    if name == "auto":
        return torch.device("cpu")
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
            f"train.device: {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices; use "
            "cuda:0"
        )
    return device


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the model's config. Raises UsageError for a folder or hub id that has none."""
    check_model_path(model.path)
    if not Path(model.path).exists():
        check_reachable(model.path)
    refuse_holes_in(model)
    with foreign_files("the config", model):
        check_counts(model)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
        layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {layers}; expected 1 to {MAX_LAYERS}")
        check_experts(config.get_text_config())
        # A name of the hub there would fetch and run a kernel.
        config._attn_implementation = config._experts_implementation = None
        elsewhere = getattr(config, "transformers_weights", None)
        if elsewhere is not None:  # transformers would load that file, from any folder
            raise ValueError(
                f"transformers_weights is {short_repr(elsewhere)}, which names weights in their "
                "place; remove it from config.json"
            )
    return config


def context_length(config: PreTrainedConfig) -> int:
    """Return the largest number of tokens of a sequence. Raises UsageError if it is no number."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int | float) or not 1 <= length <= LONGEST:
        raise UsageError(
            f"model.path: max_position_embeddings in config.json is {short_repr(length)}; write "
            f"the largest number of tokens of a sequence there, at most {LONGEST:,}"
        )
    return int(length)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer.

    Raises:
        UsageError: it is missing or damaged, has no eos token, or is of another model.
    """
    refuse_holes_in(model)
    with foreign_files("the tokenizer", model, limited=False):
        try_tokenizers(model.path)
    with foreign_files("the tokenizer", model):
        kind: Any = AutoTokenizer
        if _is_word_list(Path(model.path)):  # Qwen3.5's own rules would replace the file's
            kind = PreTrainedTokenizerFast
        tokenizer = kind.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    vocabulary = tokenizer.get_vocab()
    # Without a file, transformers builds a tokenizer of added tokens only.
    if vocabulary.keys() <= tokenizer.get_added_vocab().keys():
        raise UsageError(
            f"model.path: {model.path} has no tokenizer files; save the model's tokenizer there as "
            "well"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"model.path: the tokenizer of {model.path} has no eos token, so no completion could "
            "ever stop"
        )
    size, largest = read_config(model).get_text_config().vocab_size, max(vocabulary.values())
    if largest >= size:
        raise UsageError(
            f"model.path: the tokenizer of {model.path} has token ids up to {largest}, but the "
            f"model's vocab_size is {size}; use the tokenizer the model was trained with"
        )
    return tokenizer


def read_stops(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's eos, and those of generation_config.json.

    Without that file they are those of config.json, of which transformers makes it in checkpoints.
    Templates of many families end a turn with another token than the tokenizer's eos. Ids of plain
    text are left out: they are a family's default, made for another vocabulary.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    whole = model.model_copy(update={"path": _whole_model(model.path)})
    refuse_holes_in(whole)
    with foreign_files("generation_config.json", whole):
        try:
            settings = GenerationConfig.from_pretrained(whole.path)
        except OSError:  # a model need not have one
            written, _ = PreTrainedConfig.get_config_dict(whole.path)
            settings = GenerationConfig.from_model_config(written)
        named: Any = settings.eos_token_id
        if not isinstance(named, list):
            named = [named]
        return tuple(dict.fromkeys([tokenizer.eos_token_id, *filter(special.__contains__, named)]))


def _is_word_list(folder: Path) -> bool:
    """Return whether a folder's tokenizer is a list of words of no family, as make-policy's is."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        if file.stat().st_size > WORD_LIST:
            return False
        kind = json.loads(settings.read_bytes())["tokenizer_class"]
        words = json.loads(file.read_bytes())["model"]["type"] == "WordLevel"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False  # transformers explains them
    return words and kind in ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_model(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model with weights in `dtype` on `device`, in eval mode.

    An adapter's folder is its base, dequantised if it was in nf4, with the adapter merged into it.
    Raises UsageError if the checkpoint is damaged, incomplete, or has tensors of other shapes than
    its config. transformers would fill missing weights with random numbers.
    """
    opened: Any
    refuse_holes_in(model)
    adapter = Path(model.path)
    if (adapter / "adapter_config.json").is_file():
        with foreign_files("the adapter", model, limited=False):
            return cast_model(_merged(model, device), dtype).eval()
    files_of_index(Path(model.path))
    config = read_config(model)
    quantisation = dequantisation_of(model, config)
    with foreign_files("the weights", model):
        refuse_large_shapes(model, config)
    with foreign_files("the weights", model, limited=False):
        opened = AutoModelForCausalLM.from_pretrained(
            model.path,
            config=config,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,  # the other format is a pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error below, which names the tensor
            **quantisation,
        )
        loaded, info = opened
        if loaded.can_generate():
            loaded.generation_config = _without_faults(loaded.generation_config)
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise UsageError(
            f"model.path: {name} in {model.path} has shape {list(found)}, but its config.json "
            f"makes it {list(wanted)}; restore the file that was changed"
        )
    if info["missing_keys"]:
        raise UsageError(
            f"model.path: {model.path} lacks weights, first {sorted(info['missing_keys'])[0]}"
        )
    if quantisation:
        # transformers leaves these tensors in bfloat16, and saves them under patterns for names
        loaded._weight_conversions = None
        cast_model(loaded, dtype)
    return loaded.to(device).eval()


def _without_faults(settings: GenerationConfig) -> GenerationConfig:
    """Return settings that can be saved: of contradicting ones the ids of tokens alone.

    transformers only warns of those as it loads them, so no checkpoint could be written.
    """
    try:
        settings.validate(strict=True)
    except ValueError:
        ids = {name: getattr(settings, name) for name in ("eos_token_id", "bos_token_id")}
        if (settings.pad_token_id or 0) >= 0:
            ids["pad_token_id"] = settings.pad_token_id
        return GenerationConfig(**ids)
    return settings


def _merged(model: ModelConfig, device: torch.device) -> PreTrainedModel:
    _whole_model(model.path)  # refuses an adapter that is its own base
    return merge_adapter(load_base(model, device), Path(model.path))


def _whole_model(path: str) -> str:
    """Return the path of the model that an adapter is of, and any other path itself.

    Raises UsageError for an adapter that is its own base.
    """
    seen: set[Path] = set()
    while (Path(path) / "adapter_config.json").is_file():
        folder = Path(path).resolve()
        if folder in seen:
            raise UsageError(f"model.path: {path} names itself as its base; name a model there")
        seen.add(folder)
        path = base_path(Path(path))
    return path


def load_base(model: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Return the frozen weights of an adapter in float32, rounded as its run had them.

    model: the adapter. A run in bfloat16 rounded its base when it loaded it, and one with
    train.lora.base = nf4 to 4 bits. The checksum in the adapter's file is of what it had. Raises
    UsageError if the base is another one.
    """
    folder = Path(model.path)
    path, header = base_path(folder), read_header(folder)
    base = load_model(model.model_copy(update={"path": path}), torch.float32, device)
    if NF4 in header:
        from onepolicy.models.nf4 import restore_base

        restore_base(base, folder)
    trained_on = header.get(BASE)
    if trained_on in (None, weights_checksum(base.state_dict().items())):
        return base
    cast_model(base, torch.bfloat16)
    if weights_checksum(base.state_dict().items()) != trained_on:
        raise UsageError(
            f"{folder}: the weights in {path} are not those that this adapter was trained on (its "
            f"checksum of them is {trained_on}); restore them"
        )
    return cast_model(base, torch.float32)


def dequantisation_of(model: ModelConfig, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the argument that dequantises stored weights, none for a checkpoint of plain ones."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    return {"quantization_config": dequantisation(model.path, stored)}


def files_of_index(folder: Path) -> set[str]:
    """Return the files that a folder's index of weights names, none without an index.

    Raises UsageError for an index that is damaged, or not of this folder alone. It must name files
    of its folder only. If the folder has a single file of weights, which transformers prefers, it
    must name that.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return set()
    try:
        files: set[str] = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"model.path: {index} is damaged: {error!r}") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise UsageError(
                f"model.path: {index} names {file!r}, which is not a file of this folder"
            )
        if not file.endswith(".safetensors"):  # transformers would unpickle it
            raise UsageError(
                f"model.path: {index} names {file!r}, which is no .safetensors file; save the "
                "weights with model.save_pretrained"
            )
    if SAFE_WEIGHTS_NAME not in files and (folder / SAFE_WEIGHTS_NAME).is_file():
        raise UsageError(
            f"model.path: {folder} has a {SAFE_WEIGHTS_NAME} that its {SAFE_WEIGHTS_INDEX_NAME} "
            "does not name, and transformers would load that one; move it or the index out of the "
            "folder"
        )
    return files


def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the model's weights in place as a checkpoint opened in `dtype` has them; return it.

    Unlike `model.to`, it leaves tensors alone that no checkpoint has (rotary frequencies). Tensors
    that the family wants in float32 (selection biases of routers) become float32.
    """
    made: dict[str, torch.dtype] = {}
    # Some classes make tensors in float32 whatever the dtype. peft's wrapper names them otherwise.
    if dtype != torch.float32 and isinstance(model, PreTrainedModel):
        with torch.device("meta"):
            like = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
        made = {name: tensor.dtype for name, tensor in like.state_dict().items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype_of(model, name, made.get(name, dtype)))
    return model


def dtype_of(model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a checkpoint that is opened in `dtype`."""
    parts = model._keep_in_fp32_modules_strict or ()
    if any(f".{part}." in f".{name}." for part in parts):  # a part can be `gate.weight`
        return torch.float32
    return dtype


def layer_prefix(name: str) -> str:
    """Return `model.layers.3.` for a tensor of that layer, the name itself for one of no layer."""
    found = re.match(r".*?\.\d+\.", name)
    if found is None:
        return name
    return found.group()


@contextmanager
def foreign_files(part: str, model: ModelConfig, *, limited: bool = True) -> Iterator[None]:
    """Turn whatever a stranger's files make of transformers into a UsageError.

    They are data for code of hundreds of families, so any exception may come of them. limited: in
    little memory, on Linux. Weights are not: a GPU's driver takes address space as it starts.
    """
    limit: AbstractContextManager[None] = nullcontext()
    if limited:
        limit = memory_of_settings(model)
    try:
        with limit:
            yield
    except UsageError:
        raise
    except MemoryError:
        raise UsageError(
            f"model.path: {part} of {model.path!r} needs more memory than any model's; look for a "
            "huge number in its JSON files"
        ) from None
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UsageError(f"model.path: cannot read {part} of {model.path!r}: {reason}") from error


def dequantisation(path: str, stored: Any) -> Mxfp4Config:
    """Return the setting with which transformers dequantises the weights while it loads them.

    stored: quantization_config of the model's config. MXFP4 (gpt-oss) is dequantised: otherwise it
    depends on an installed package whether the experts are loaded packed, which no gradient
    reaches. Raises UsageError for other formats, whose layers do not train.
    """
    fields = stored
    if not isinstance(stored, dict):
        fields = stored.to_dict()
    method = str(fields.get("quant_method"))
    if method != "mxfp4":
        raise UsageError(
            f"model.path: the weights of {path} are stored in {method}, which cannot be trained; "
            "give a copy in bfloat16"
        )
    return Mxfp4Config(dequantize=True)


def check_reachable(path: str) -> None:
    """Raise UsageError if the model `org/name` is not cached and the hub cannot be reached.

    This takes one attempt. transformers would make five more with growing pauses, 40 s in all, and
    print each.
    """
    from httpx2 import TransportError  # of huggingface_hub 2, which brings it

    if is_offline_mode():
        return
    if isinstance(try_to_load_from_cache(path, CONFIG_NAME), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, CONFIG_NAME))
    except TransportError as error:
        raise UsageError(
            f"model.path: there is no folder {path}, and {ENDPOINT} cannot be reached for a model "
            f"of that name ({error}); give a folder, or run `hf download {path}` where there is a "
            "network"
        ) from None
    except (HfHubHTTPError, HFValidationError):  # transformers explains these
        return
