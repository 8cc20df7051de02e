"""Where completions come from and how they are sampled."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from onepolicy.config.base import Frozen, UsageError
from onepolicy.config.quant import Fp8, Int8, QuantConfig, QuantFormat

Head = Literal["same", "float32"]


class HFEngineConfig(Frozen):
    """The embedded engine: the unmodified transformers model over a slab of keys, values and routes."""

    kind: Literal["hf"] = "hf"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine's own copy of the weights, whatever the trainer's."""
    lm_head: Head = "same"
    """float32: the vocabulary projection alone, with float32 weights (unrounded, another copy) and hidden states."""
    slots: PositiveInt = 64
    """Sequences decoded at once; a finished one makes room for the next."""
    max_len: PositiveInt | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length."""
    prefix_reuse: bool = True
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
    slots: PositiveInt = 64
    """Sequences decoded at once; a finished one makes room for the next."""
    max_len: PositiveInt | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length."""
    prefix_reuse: bool = True
    """vLLM's prefix caching: whole blocks of a shared prefix keep their keys, values and routes."""
    block_size: PositiveInt | None = None
    """Tokens of a cached block; unset: vLLM's own choice (128 on the CPU)."""
    cache_gib: PositiveFloat = 1.0
    """Memory for keys and values."""

    @model_validator(mode="after")
    def _head_takes_effect(self) -> Self:
        refuse_idle_head(self)
        return self


class ServeConfig(VLLMEngineConfig):
    """What `onepolicy engine serve` starts a vLLM server with."""

    quant: QuantConfig = None
    """rollout.quant of the runs that will use it."""

    @model_validator(mode="after")
    def _quant_takes_effect(self) -> Self:
        if self.quant is not None:
            refuse_unlike_vllm(self.quant, self.dtype)
        return self


class VLLMServerConfig(Frozen):
    """A vLLM server in a process of its own, started by `onepolicy engine serve`."""

    kind: Literal["vllm-server"] = "vllm-server"
    url: str = "http://127.0.0.1:8000"
    token_env: str | None = None
    """Environment variable that holds the server's bearer token; needed where the server is on another machine."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the server was started with; another is refused."""
    lm_head: Head = "same"
    """The server's vocabulary projection, likewise."""
    slots: PositiveInt = 64
    """Requests in flight at once."""
    max_len: PositiveInt | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length."""
    timeout_s: PositiveFloat = 600.0
    """Of one attempt of a request."""
    retries: int = Field(5, ge=0)
    """Attempts after the first, of a request that got no usable reply; the waits between them grow from 0.25 to 8 s."""
    patience_s: float | None = Field(None, ge=0)
    """How long a run waits for a server that was lost to come back, after the retries; it is then given the weights
    again and the rollouts of the step are repeated. 0: the run ends. Unset: 300, or 0 with rollout.max_staleness."""
    sync: Literal["gloo", "nccl", "disk"] = "gloo"
    """How weights reach the server: broadcast through the host's memory, broadcast from the trainer's GPU to others, or
    files in sync_dir."""
    sync_dir: str | None = None
    """Folder that server and trainer both see, for sync = disk; unset: the system's temporary folder."""

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        refuse_idle_head(self)
        refuse_idle_folder(self)
        refuse_secret_url(self.url)
        return self


class SGLangConfig(Frozen):
    """A SGLang server (0.5.23) in a process of its own; docs/engines.md says how to start it."""

    kind: Literal["sglang"] = "sglang"
    url: str = "http://127.0.0.1:30000"
    token_env: str | None = None
    """Environment variable that holds the server's API key; needed where the server is on another machine."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the server was started with; another is refused."""
    lm_head: Head = "same"
    """float32: the server was started with --enable-fp32-lm-head; it computes from the rounded weights."""
    slots: PositiveInt = 64
    """Requests in flight at once."""
    max_len: PositiveInt | None = None
    """Prompt + completion tokens of one sequence; unset: the model's context length less what the server reserves."""
    sync: Literal["gloo", "nccl", "disk"] = "gloo"
    """How weights reach the server: broadcast through the host's memory, broadcast from the trainer's GPU to others, or
    files in sync_dir."""
    sync_dir: str | None = None
    """Folder that server and trainer both see, for sync = disk; unset: the system's temporary folder."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Requests that run while weights are loaded: abort them and go on from their tokens; let the server compute their
    keys, values and routes again with the new weights; or keep those of the old weights."""
    timeout_s: PositiveFloat = 600.0
    """Of one attempt of a request."""
    retries: int = Field(5, ge=0)
    """Attempts after the first, of a request that got no usable reply; the waits between them grow from 0.25 to 8 s."""
    patience_s: float | None = Field(None, ge=0)
    """How long a run waits for a server that was lost to come back, after the retries; it is then given the weights
    again and the rollouts of the step are repeated. 0: the run ends. Unset: 300, or 0 with rollout.max_staleness."""

    reserved: ClassVar[int] = 6
    """Tokens of its context length that the server does not give to a request."""

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        refuse_idle_head(self)
        refuse_idle_folder(self)
        refuse_secret_url(self.url)
        return self


def refuse_idle_head(config: HFEngineConfig | VLLMEngineConfig | VLLMServerConfig | SGLangConfig) -> None:
    """ValueError if lm_head has no effect."""
    if config.lm_head == "float32" and config.dtype == "float32":
        raise ValueError("rollout.engine.lm_head: float32 has no effect with dtype = float32; leave it out")


def refuse_unlike_vllm(quant: QuantFormat, dtype: str) -> None:
    """ValueError for a format that vLLM does not have."""
    if not isinstance(quant, Fp8 | Int8):
        raise ValueError(
            f"rollout.quant: vLLM has no method of its own for {quant.format}; use fp8 or int8, or "
            "rollout.engine.kind = hf"
        )
    if quant.also:
        raise ValueError(
            f"rollout.quant.also: with vLLM {', '.join(quant.also)} cannot be quantised; leave it out, or use "
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


def refuse_secret_url(url: str) -> None:
    """UsageError, which does not repeat it, for an address that may hold a secret: config.json and errors show it."""
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            "rollout.engine.url: has a user, a password or a query in it, which files and messages of the run would "
            "show; put a token in an environment variable and name that in rollout.engine.token_env"
        )


def refuse_idle_folder(config: VLLMServerConfig | SGLangConfig) -> None:
    """ValueError if sync_dir has no effect."""
    if config.sync_dir is not None and config.sync != "disk":
        raise ValueError(
            f"rollout.engine.sync_dir: has no effect with rollout.engine.sync = {config.sync}; leave it out or set "
            "sync to disk"
        )


EngineConfig = Annotated[
    HFEngineConfig | VLLMEngineConfig | VLLMServerConfig | SGLangConfig, Field(discriminator="kind")
]
ENGINE_KINDS = tuple(config.model_fields["kind"].default for config in get_args(get_args(EngineConfig)[0]))


class SamplingConfig(Frozen):
    temperature: PositiveFloat = 1.0
    max_tokens: PositiveInt = 1024
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)


def _off(value: Any) -> Any:
    return None if value == "off" else value


class RolloutConfig(Frozen):
    engine: EngineConfig = HFEngineConfig()
    """Without a kind: hf."""
    quant: QuantConfig = None
    """Format of the engine's weights, made at every sync: int8, fp8, fp8-weight, simulated; unset or off: none. vLLM:
    int8 (weights of experts) and fp8."""
    prompts_per_step: PositiveInt = 8
    group_size: PositiveInt = 8
    """Completions per prompt (GRPO's G)."""
    sampling: SamplingConfig = SamplingConfig()
    max_staleness: Annotated[NonNegativeInt | None, BeforeValidator(_off)] = None
    """Updates that the policy may have had since any token of a step was sampled: sampling goes on while the trainer
    learns, so many steps ahead (docs/asynchronous.md). 0: it waits for the newest weights after all. Unset or off: one
    after the other."""
    episode_retries: int = Field(1, ge=0)
    """How often an episode whose tool or environment failed is played again before it is dropped."""
    min_survivors: PositiveInt | None = None
    """A group with fewer episodes left is dropped whole; unset: half of group_size, at least 2 if there are 2."""

    @property
    def overlaps(self) -> bool:
        """Whether sampling goes on while the trainer learns, so that a step's tokens may be of older weights."""
        return bool(self.max_staleness)

    @property
    def survivors(self) -> int:
        return self.min_survivors or max(min(2, self.group_size), self.group_size // 2)

    @model_validator(mode="after")
    def _quant_takes_effect(self) -> Self:
        quant, engine = self.quant, self.engine
        if quant is None:
            return self
        if isinstance(engine, SGLangConfig):
            raise ValueError(
                f"rollout.quant: {quant.format} is not available with rollout.engine.kind = sglang; use hf or vllm, or "
                "leave it out"
            )
        if not isinstance(engine, HFEngineConfig):
            refuse_unlike_vllm(quant, engine.dtype)
        if "lm_head" in quant.also and engine.lm_head == "float32":
            raise ValueError("rollout.quant.also: lm_head contradicts rollout.engine.lm_head = float32; leave one out")
        return self

    @model_validator(mode="after")
    def _patience_takes_effect(self) -> Self:
        if self.max_staleness is not None and getattr(self.engine, "patience_s", None):
            raise ValueError(
                "rollout.engine.patience_s: has no effect with rollout.max_staleness: there a lost server ends the "
                "run; leave it out (`onepolicy train --restarts N` resumes the run)"
            )
        return self

    @model_validator(mode="after")
    def _survivors_exist(self) -> Self:
        if self.min_survivors is not None and self.min_survivors > self.group_size:
            raise ValueError(
                f"rollout.min_survivors: {self.min_survivors} of rollout.group_size {self.group_size} episodes can "
                "never be left; lower it"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("engine"), dict):
            data = {**data, "engine": {"kind": "hf"} | data["engine"]}
        return data


class EvalConfig(Frozen):
    every: int = Field(10, ge=0)
    """Steps between evaluations; 0: never. The last step of a run is always evaluated unless this is 0."""
    problems: PositiveInt = 64
    """Held-out problems."""
    greedy: bool = True
    k: int = Field(0, ge=0)
    """Sampled completions per problem for avg@k and pass@k; 0: greedy only."""
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: PositiveInt | None = None
    """Unset: rollout.sampling.max_tokens."""
    quantised: bool = False
    """Evaluate with the weights of rollout.quant; else a second, embedded engine evaluates unquantised ones."""

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        if self.k:
            return self
        if not self.greedy:
            raise ValueError(
                "eval.k: 0 with eval.greedy=false leaves nothing to evaluate; set eval.k to 1 or more or "
                "eval.greedy=true (eval.every=0 turns evaluation off)"
            )
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"eval.{name}: {value} has no effect with eval.k=0, which samples nothing; set eval.k to 1 or more "
                    f"or leave eval.{name} out"
                )
        return self
