"""Bytes that move in one step."""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.config import FromRollout, RunConfig
from onepolicy.plan.dims import Dims
from onepolicy.plan.engine import sent_dtype
from onepolicy.plan.memory import BYTES, FLOAT32, gather_dtype, kept_per_token
from onepolicy.plan.work import Work, in_process


@dataclass(frozen=True, slots=True)
class Traffic:
    route_bytes_per_token: int  # as the learner keeps them: MoE layers only, one byte up to 256 experts
    routes: float  # of a step, as the learner keeps them
    routes_sent: float  # of a step, as the engine sends them
    weights: float  # to each engine, in its dtype; unrounded where it quantises them
    gathered: float  # per rank: layers gathered for forward and backward, gradients summed


def traffic_of(dims: Dims, config: RunConfig, work: Work, ranks: int) -> Traffic:
    replayed = isinstance(config.replay, FromRollout)
    own = kept_per_token(dims, config) if replayed else 0
    rounds = work.micro_batches(config.train.tokens_per_micro_batch, ranks)
    size = BYTES[gather_dtype(config)]
    per_round = dims.total * (ranks - 1) / ranks * (size * (2 + config.scores_old) + FLOAT32)
    return Traffic(
        route_bytes_per_token=own,
        routes=own * work.all_slots,
        routes_sent=sent_per_token(dims, config) * work.all_slots if replayed else 0.0,
        weights=dims.total * BYTES[sent_dtype(config)],
        gathered=rounds * per_round,
    )


def sent_per_token(dims: Dims, config: RunConfig) -> float:
    """Bytes: vLLM sends a column of one or two bytes per decoder layer, SGLang of four; both as base64 over HTTP."""
    if in_process(config):
        return kept_per_token(dims, config)
    width = 4 if config.rollout.engine.kind == "sglang" else 1 if dims.experts <= 256 else 2
    return dims.layers * dims.top_k * width * 4 / 3
