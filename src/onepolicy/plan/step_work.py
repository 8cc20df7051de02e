"""The work of one step: sequences, tokens, micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import RunConfig, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.config.task import EpisodeTask
from onepolicy.train.dry_run import MicroBatchShape

DEFAULT_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StepWork:
    """One RL step in which all sequences have the same length."""

    prompts: int
    group: int  # completions of each
    prompt: int  # tokens
    response: int  # tokens
    shared: bool  # a group's prompt is prefilled once

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def slots(self) -> int:
        """Slots of one sequence. Its last token is never fed."""
        return self.length - 1

    @property
    def all_slots(self) -> int:
        return self.sequences * self.slots

    @property
    def prefilled(self) -> int:
        """Prompt tokens that the engines compute."""
        if self.shared:
            return self.prompt * self.prompts
        return self.prompt * self.sequences

    def micro_batches(self, budget: int, ranks: int) -> int:
        """Return the micro-batches of each rank: as few as `budget` slots each allow.

        Every rank takes part in all of them.
        """
        samples = max(1, budget // self.slots)
        return math.ceil(math.ceil(self.sequences / samples) / ranks)

    def fullest_micro_batch(self, budget: int, ranks: int) -> MicroBatchShape:
        """Return the fullest micro-batch. Samples are spread evenly over the micro-batches."""
        micro_batches = self.micro_batches(budget, ranks) * ranks
        samples = min(max(1, budget // self.slots), math.ceil(self.sequences / micro_batches))
        return MicroBatchShape((self.slots,) * samples, (self.response,) * samples)


def step_work(
    config: RunConfig, context: int, *, prompt: int | None, response: int | None
) -> StepWork:
    """Compute the work of one step of a recipe.

    prompt: tokens (None: 512, or as many as the context leaves). response: tokens (None: the most,
    rollout.sampling.max_tokens in every turn). Raises UsageError if they exceed the longest
    sequence.
    """
    rollout, typed = config.rollout, response is not None
    longest = rollout.engine.max_len or context
    response_field = "--response-tokens"
    if response is None:
        response_field, response = "rollout.sampling.max_tokens", rollout.sampling.max_tokens
    if response >= longest:
        raise UsageError(
            f"{response_field}: {response} leaves no room for a prompt in sequences of at most "
            f"{longest} tokens"
        )
    if isinstance(config.task, EpisodeTask) and not typed:  # which ends where no room is left
        response = max(1, min(config.longest_episode[0], longest - (prompt or 1)))
    if prompt is None:
        prompt = min(DEFAULT_PROMPT_TOKENS, longest - response)
    if prompt + response > longest:
        raise UsageError(
            f"--prompt-tokens: {prompt} and {response} of the response are more than the "
            f"{longest} tokens a sequence may have; give fewer, or raise rollout.engine.max_len"
        )
    shared = getattr(rollout.engine, "enable_prefix_caching", True)
    return StepWork(rollout.prompts_per_step, rollout.group_size, prompt, response, shared)


def sequences_per_engine(config: RunConfig, work: StepWork, engines: int) -> int:
    """Return the sequences that one engine decodes at once: rollout.engine.max_num_seqs at most."""
    return max(1, min(config.rollout.engine.max_num_seqs, -(-work.sequences // engines)))


def num_servers(config: RunConfig) -> int:
    """Return the servers that a recipe names; 1 if it leaves that to a file or a name server."""
    urls = getattr(config.rollout.engine, "url", ())
    if isinstance(urls, tuple):
        return max(1, len(urls))
    return 1


def in_process(config: RunConfig) -> bool:
    """Return whether the engine is in the learner's process, on its device."""
    return config.rollout.engine.kind in ("hf", "vllm") and not replicated(config)


def replicated(config: RunConfig) -> bool:
    """Return whether Ray gives engines processes of their own."""
    return isinstance(config.cluster, RayCluster)


def devices_per_replica(config: RunConfig, *, cpu: bool) -> float:
    """Return the devices that Ray reserves for one replica: GPUs, a part of one, or cores."""
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    if cpu:
        return cluster.cpus_per_replica
    if cluster.gpus_per_replica is None:
        return tensor_parallel_size(config)
    return cluster.gpus_per_replica


def tensor_parallel_size(config: RunConfig) -> int:
    """Return the devices of an engine that the run starts itself."""
    return getattr(config.rollout.engine, "tensor_parallel_size", 1)
