"""What one step asks for: sequences, tokens, micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import RunConfig, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.plan.dry_run import MicroBatchShape

PROMPT = 512


@dataclass(frozen=True, slots=True)
class StepWork:
    """One RL step, all sequences alike."""

    prompts: int
    group: int  # completions of each
    prompt: int  # tokens
    response: int  # tokens
    shared: bool  # whether a group's prompt is prefilled once

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def slots(self) -> int:
        """Of one sequence: its last token is never fed."""
        return self.length - 1

    @property
    def all_slots(self) -> int:
        return self.sequences * self.slots

    @property
    def prefilled(self) -> int:
        """Prompt tokens the engines compute."""
        return self.prompt * (self.prompts if self.shared else self.sequences)

    def micro_batches(self, budget: int, ranks: int) -> int:
        """Of each rank: as few rounds as the budget allows, every rank takes part in all of them."""
        packed = max(1, budget // self.slots)
        return math.ceil(math.ceil(self.sequences / packed) / ranks)

    def micro(self, budget: int, ranks: int) -> MicroBatchShape:
        """The fullest micro-batch: samples are spread evenly over the rounds there must be."""
        rounds = self.micro_batches(budget, ranks) * ranks
        samples = min(max(1, budget // self.slots), math.ceil(self.sequences / rounds))
        return MicroBatchShape((self.slots,) * samples, (self.response,) * samples)


def step_work(
    config: RunConfig, context: int, *, prompt: int | None, response: int | None
) -> StepWork:
    """prompt, response: tokens; unset: 512, or what the context leaves, and rollout.sampling.max_tokens."""
    rollout = config.rollout
    most = rollout.engine.max_len or context
    given = response is not None
    response = rollout.sampling.max_tokens if response is None else response
    if response >= most:
        name = "--response-tokens" if given else "rollout.sampling.max_tokens"
        raise UsageError(
            f"{name}: {response} leaves no room for a prompt in sequences of at most {most} tokens"
        )
    if prompt is None:
        prompt = min(PROMPT, most - response)
    if prompt + response > most:
        raise UsageError(
            f"--prompt-tokens: {prompt} and {response} of the response are more than the {most} tokens a sequence may "
            "have; give fewer, or raise rollout.engine.max_len"
        )
    shared = getattr(rollout.engine, "enable_prefix_caching", True)
    return StepWork(rollout.prompts_per_step, rollout.group_size, prompt, response, shared)


def sequences_per_engine(config: RunConfig, work: StepWork, engines: int) -> int:
    """Sequences one engine decodes at once. rollout.engine.max_num_seqs are a replica's own, else those of all engines."""
    sequences, own = config.rollout.engine.max_num_seqs, -(-work.sequences // engines)
    return (
        min(sequences, own)
        if replicated(config)
        else max(1, min(sequences, work.sequences) // engines)
    )


def in_process(config: RunConfig) -> bool:
    """Whether the engine lives on the learner's device."""
    return config.rollout.engine.kind in ("hf", "vllm") and not replicated(config)


def replicated(config: RunConfig) -> bool:
    """Whether Ray gives engines processes of their own."""
    return isinstance(config.cluster, RayCluster)


def devices_per_replica(config: RunConfig, *, cpu: bool) -> float:
    """That Ray reserves for one: GPUs, or a part of one, or cores."""
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    if cpu:
        return cluster.cpus_per_replica
    return 1.0 if cluster.gpus_per_replica is None else cluster.gpus_per_replica
