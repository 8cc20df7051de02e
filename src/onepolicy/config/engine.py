"""The engines that completions come from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from onepolicy.config.address import check_url
from onepolicy.config.base import LARGEST, MOST, Amount, Few, Frozen, Tokens
from onepolicy.config.quant import Fp8, Int8, QuantConfig, QuantFormat
from onepolicy.config.renamed import SERVE_KEYS

Head = Literal["same", "float32"]


class HFEngineConfig(Frozen):
    """The embedded engine: the unmodified transformers model over a slab of keys, values and routes."""

    kind: Literal["hf"] = "hf"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine's own copy of the weights, whatever the trainer's."""
    lm_head: Head = "same"
    """float32: the vocabulary projection alone, with float32 weights (unrounded, another copy) and hidden states."""
    max_num_seqs: Few = 64
    """Sequences decoded at once; a finished one makes room for the next."""
    max_len: Tokens | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length."""
    enable_prefix_caching: bool = True
    """Copy keys, values and routes of a shared prefix instead of computing them again."""

    @model_validator(mode="after")
    def _head_takes_effect(self) -> Self:
        refuse_idle_head(self)
        return self


class VLLMEngineConfig(Frozen):
    """vLLM in this process: the package for CUDA, or `make vllm` for the CPU."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine's own copy of the weights, whatever the trainer's."""
    lm_head: Head = "same"
    """float32: the vocabulary projection alone, from the rounded weights (vLLM's head_dtype)."""
    max_num_seqs: Few = 64
    """Sequences decoded at once; a finished one makes room for the next."""
    max_len: Tokens | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length."""
    enable_prefix_caching: bool = True
    """vLLM's prefix caching: whole blocks of a shared prefix keep their keys, values and routes."""
    block_size: Tokens | None = None
    """Tokens of a cached block; unset: vLLM's own choice (128 on the CPU)."""
    kv_cache_gib: Amount = 1.0
    """Memory for keys and values."""

    @model_validator(mode="after")
    def _head_takes_effect(self) -> Self:
        refuse_idle_head(self)
        return self


class ServeConfig(VLLMEngineConfig):
    """What `onepolicy engine serve` starts a vLLM server with."""

    renamed: ClassVar = SERVE_KEYS

    quant: QuantConfig = None
    """rollout.quant of the runs that will use it."""

    @model_validator(mode="after")
    def _quant_takes_effect(self) -> Self:
        if self.quant is not None:
            refuse_unlike_vllm(self.quant, self.dtype)
        return self


class ServerEngineConfig(Frozen):
    """What every server in a process of its own is asked with."""

    kind: str
    url: str
    token_env: str | None = None
    """Environment variable that holds the server's token; needed where the server is on another machine."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the server was started with; another is refused."""
    lm_head: Head = "same"
    """The server's vocabulary projection, likewise."""
    max_num_seqs: Few = 64
    """Requests in flight at once."""
    max_len: Tokens | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length, less what the server reserves."""
    timeout_s: Amount = 600.0
    """Of one attempt of a request."""
    retries: int = Field(5, ge=0, le=MOST)
    """Attempts after the first, of a request that got no usable reply; the waits between them grow from 0.25 to 8 s."""
    recovery_timeout_s: float | None = Field(None, ge=0, le=LARGEST)
    """How long a run waits for a server that was lost to come back, after the retries; it is then given the weights
    again and the rollouts of the step are repeated (with rollout.max_staleness those of every step in play). 0: the
    run ends. Unset: 300. A resumed run waits as long for its server before it starts."""
    sync: Literal["gloo", "nccl", "disk"] = "gloo"
    """How weights reach the server: broadcast through the host's memory, broadcast from the trainer's GPU to others, or
    files in sync_dir."""
    sync_dir: str | None = None
    """Folder that server and trainer both see, for sync = disk; unset: the system's temporary folder."""

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        refuse_idle_head(self)
        if self.sync_dir is not None and self.sync != "disk":
            raise ValueError(
                f"rollout.engine.sync_dir: has no effect with rollout.engine.sync = {self.sync}; leave it out or set "
                "sync to disk"
            )
        check_url(self.url)
        return self


class VLLMServerConfig(ServerEngineConfig):
    """A vLLM server in a process of its own, started by `onepolicy engine serve`."""

    kind: Literal["vllm-server"] = "vllm-server"
    url: str = "http://127.0.0.1:8000"


class SGLangConfig(ServerEngineConfig):
    """A SGLang server (0.5.23) in a process of its own; docs/engines.md says how to start it."""

    kind: Literal["sglang"] = "sglang"
    url: str = "http://127.0.0.1:30000"
    lm_head: Head = "same"
    """float32: the server was started with --enable-fp32-lm-head; it computes from the rounded weights."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Requests that run while weights are loaded: abort them and go on from their tokens; let the server compute their
    keys, values and routes again with the new weights; or keep those of the old weights."""

    reserved: ClassVar[int] = 6
    """Tokens of its context length that the server does not give to a request."""


def refuse_idle_head(config: HFEngineConfig | VLLMEngineConfig | ServerEngineConfig) -> None:
    """ValueError if lm_head has no effect."""
    if config.lm_head == "float32" and config.dtype == "float32":
        raise ValueError(
            "rollout.engine.lm_head: float32 has no effect with dtype = float32; leave it out"
        )


def refuse_unlike_vllm(quant: QuantFormat, dtype: str) -> None:
    """ValueError for a format that vLLM does not have."""
    if not isinstance(quant, Fp8 | Int8):
        raise ValueError(
            f"rollout.quant: vLLM has no method of its own for {quant.format}; use fp8 or int8, or "
            "rollout.engine.kind = hf"
        )
    if quant.extra_modules:
        raise ValueError(
            f"rollout.quant.extra_modules: with vLLM {', '.join(quant.extra_modules)} cannot be quantised; leave it out, or use "
            "rollout.engine.kind = hf"
        )
    if isinstance(quant, Int8) and quant.activations == "static":
        raise ValueError(
            "rollout.quant.activations: vLLM's int8 leaves activations in bfloat16, so there is nothing to calibrate; "
            "leave it out, or use rollout.engine.kind = hf"
        )
    if dtype != "bfloat16":
        raise ValueError(
            f"rollout.engine.dtype: {dtype}, but vLLM quantises bfloat16 engines only; leave it out with rollout.quant"
        )


EngineConfig = Annotated[
    HFEngineConfig | VLLMEngineConfig | VLLMServerConfig | SGLangConfig, Field(discriminator="kind")
]
ENGINE_KINDS = tuple(
    config.model_fields["kind"].default for config in get_args(get_args(EngineConfig)[0])
)
