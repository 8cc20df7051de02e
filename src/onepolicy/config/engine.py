"""The engines that completions come from."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from onepolicy.config.address import check_urls
from onepolicy.config.base import (
    LARGEST_FLOAT,
    LARGEST_INT,
    Frozen,
    PositiveFloat,
    SmallCount,
    Tokens,
)

Dtype = Literal["float32", "bfloat16"]
FILE, DNS = "file:", "dns:"  # marks of a url that names a list of servers
LmHead = Literal["same", "float32"]


class Abilities(NamedTuple):
    """Abilities of every engine of a kind, whatever its settings. Rules ask them, not the kind."""

    embedded: bool = False  # the trainer's own model: its kernels, its routers, unrounded weights
    in_process: bool = False  # runs in the process that builds it, which Ray can place
    combine_weights: bool = False  # returns the weights of the experts it chose
    any_support: bool = False  # returns the tokens that top_p or min_p left without a top_k, too
    support_logp: bool = False  # returns the log-probabilities of the tokens that were left
    updates_while_sampling: bool = True  # takes weights between two tokens of a request
    shares_process_groups: bool = True  # stands torch's process groups of train.ranks
    adapters_under_ray: bool = False  # was run with train.lora under Ray
    adapters: tuple[str, ...] = ("attention", "dense")  # targets whose A and B it computes with
    quant: tuple[str, ...] = ()  # formats of rollout.quant


ALL_ADAPTERS = ("attention", "dense", "experts", "routers")
ALL_FORMATS = ("int8", "fp8", "fp8-weight", "simulated")
VLLM_FORMATS = ("int8", "fp8")


class HFEngineConfig(Frozen):
    """The embedded engine: the unmodified transformers model with a cache of our own."""

    can: ClassVar = Abilities(
        embedded=True,
        in_process=True,
        combine_weights=True,
        any_support=True,
        support_logp=True,
        adapters_under_ray=True,
        adapters=ALL_ADAPTERS,
        quant=ALL_FORMATS,
    )

    kind: Literal["hf"] = "hf"
    """The embedded engine: the unmodified transformers model, in this process."""
    dtype: Dtype = "bfloat16"
    """Dtype of the engine's own copy of the weights."""
    lm_head: LmHead = "same"
    """Dtype of the vocabulary projection: that of the layers, or float32 (docs/engines.md)."""
    max_num_seqs: SmallCount = 64
    """Most sequences decoded at once. A finished one makes room for the next."""
    max_len: Tokens | None = None
    """Most tokens of a sequence. Unset: the model's context length, less what a server reserves."""
    enable_prefix_caching: bool = True
    """Keep keys, values and routes of shared prefixes."""


class VLLMEngineConfig(Frozen):
    """vLLM in this process: the package for CUDA, or `make vllm` for the CPU."""

    can: ClassVar = Abilities(
        in_process=True,
        support_logp=True,
        updates_while_sampling=False,
        shares_process_groups=False,
        quant=VLLM_FORMATS,
    )

    kind: Literal["vllm"] = "vllm"
    """vLLM in this process: the package for CUDA, or `make vllm` for the CPU."""
    dtype: Dtype = "bfloat16"
    """Dtype of the engine's own copy of the weights."""
    lm_head: LmHead = "same"
    """Dtype of the vocabulary projection: that of the layers, or float32 (docs/engines.md)."""
    max_num_seqs: SmallCount = 64
    """Most sequences decoded at once. A finished one makes room for the next."""
    max_len: Tokens | None = None
    """Most tokens of a sequence. Unset: the model's context length, less what a server reserves."""
    enable_prefix_caching: bool = True
    """Keep keys, values and routes of shared prefixes."""
    block_size: Tokens | None = None
    """Tokens of a block of the KV cache. Unset: vLLM's own choice (128 on the CPU)."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory for keys and values [GiB]. Unset: 1 on a CPU; on a GPU what weights leave of
    gpu_memory_utilization."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory for weights, cache and activations. Unset: 0.92, or what a learner on
    the same GPU leaves."""
    tensor_parallel_size: SmallCount = 1
    """Devices that share the weights of one engine: of a server, or of a replica of Ray."""
    enable_sleep_mode: bool = True
    """Beside a learner on the same GPU: keep weights in host memory and drop the cache while it
    learns, unless both work at once."""


class ServerEngineConfig(Frozen):
    """Settings that every server in a process of its own has."""

    can: ClassVar = Abilities()

    kind: str
    url: str | tuple[str, ...]
    """Address of the server, or of several: a list, file:PATH with one a line, or
    dns:http://NAME:PORT."""
    token_env: str | None = None
    """Environment variable with the server's token. Unset: only for a server on this machine."""
    dtype: Dtype = "bfloat16"
    """Dtype that the server was started with; another one is refused."""
    lm_head: LmHead = "same"
    """Dtype of the vocabulary projection: that of the layers, or float32 (docs/engines.md)."""
    max_num_seqs: SmallCount = 64
    """Most requests in flight at once, at each server."""
    max_len: Tokens | None = None
    """Most tokens of a sequence. Unset: the model's context length, less what a server reserves."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for an attempt of a request, or a bucket or file of weights. While tokens are
    sampled: of silence, after which the server must answer. All attempts take at most this much
    longer than one."""
    retries: int = Field(5, ge=0, le=LARGEST_INT)
    """Attempts after the first without a usable reply, 0.25 to 8 s apart. 0: none."""
    recovery_timeout_s: float | None = Field(None, ge=0, le=LARGEST_FLOAT)
    """Seconds to wait for a lost server after the retries, or at a resume; it then gets the weights
    and the step again. 0: the run ends. Unset: 300."""
    sync: Literal["gloo", "nccl", "disk"] = "gloo"
    """Transport of weights: broadcast from host memory, from the GPU, or files in sync_dir."""
    bucket_mib: SmallCount | None = None
    """MiB of weights sent at once by gloo or nccl; the trainer holds them twice. Unset: 1024 with
    nccl, 64 with gloo; SGLang: 256."""
    sync_dir: str | None = None
    """Folder that server and trainer see, for sync = disk and native adapters of SGLang. Unset: the
    temporary folder."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        check_urls(self.url)
        return self

    @property
    def bucket_bytes(self) -> int | None:
        """`bucket_mib` in bytes."""
        return self.bucket_mib and self.bucket_mib * 2**20

    @property
    def one_url(self) -> str:
        """The address of the only server."""
        assert isinstance(self.url, str)
        return self.url

    @property
    def has_several(self) -> bool:
        """True if `url` may name several servers."""
        return isinstance(self.url, tuple) or self.url.startswith((FILE, DNS))


class VLLMServerConfig(ServerEngineConfig):
    """A vLLM server in a process of its own, started by `onepolicy engine serve`."""

    can: ClassVar = Abilities(support_logp=True, quant=VLLM_FORMATS)

    kind: Literal["vllm-server"] = "vllm-server"
    """A vLLM server in a process of its own, started by `onepolicy engine serve`."""
    url: str | tuple[str, ...] = "http://127.0.0.1:8000"
    """Address of the server, or of several: a list, file:PATH with one a line, or
    dns:http://NAME:PORT."""


class SGLangConfig(ServerEngineConfig):
    """A SGLang server (0.5.23) in a process of its own (docs/engines.md)."""

    kind: Literal["sglang"] = "sglang"
    """A SGLang server (0.5.23) in a process of its own (docs/engines.md)."""
    url: str | tuple[str, ...] = "http://127.0.0.1:30000"
    """Address of the server, or of several: a list, file:PATH with one a line, or
    dns:http://NAME:PORT."""
    lm_head: LmHead = "same"
    """Dtype of the vocabulary projection: that of the layers, or float32 (docs/engines.md)."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Requests that run while weights are loaded: abort and go on from their tokens, retract
    (compute the cache again), in_place (keep the old weights' cache)."""

    reserved: ClassVar[int] = 6
    """Tokens of its context length that the server does not give to a request."""


EngineConfig = Annotated[
    HFEngineConfig | VLLMEngineConfig | VLLMServerConfig | SGLangConfig, Field(discriminator="kind")
]
ENGINE_KINDS = tuple(
    config.model_fields["kind"].default for config in get_args(get_args(EngineConfig)[0])
)
