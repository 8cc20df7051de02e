"""Pushing the learner's weights to engines, and a check that a push leaves an engine with them.

The check runs on every engine, once, at the start of a run. One that has just loaded the learner's
checkpoint already holds its weights, so the first push must change no log-probability of a canary.
vLLM 0.30.0 on the CPU fails without rollout/vllm/weights.py: its experts are wrong after a reload.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import cached_property
from inspect import GEN_RUNNING, getgeneratorstate

from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import TrainingError
from onepolicy.interfaces import (
    AdapterEngine,
    AdapterLearner,
    NamedEngine,
    NamedWeights,
    RolloutEngine,
    WeightSource,
    WeightTarget,
)
from onepolicy.models.load import DTYPES
from onepolicy.replay.layers import find_routers, is_moe
from onepolicy.sync.canary import ask_each

ENGINES_KEEP = ("A_log",)
"""Names of tensors that engines hold in float32 though transformers does not: decays of Mamba."""


class SentTensors:
    """The tensors of a model as engines take them: cast before they are gathered or sent.

    The trainer holds float32 and most engines bfloat16, so a cast at the source halves what
    travels.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def cast(self, dtype: str | None) -> Generator[tuple[str, Tensor]]:
        """Yield the model's tensors, cast to `dtype` where that is narrower. None: as they are.

        Of a model with adapters they are base + adapter. Yielded as they are: routers, biases and
        norms, and everything that the family wants in float32 (`cast_model`). Some engines hold
        them in float32, and they are small. A shard stays a shard.
        """
        model = self._model
        tensors: Iterable[tuple[str, Tensor]] = model.state_dict().items()
        if getattr(model, "peft_config", None):
            from onepolicy.models.lora import merged_tensors  # with train.lora only

            tensors = merged_tensors(model)
        if dtype is None:
            yield from tensors
            return
        kept = {*(model._keep_in_fp32_modules_strict or ()), *ENGINES_KEEP}
        for name, tensor in tensors:
            whole = tensor.dim() < 2 or name.startswith(self._routers)
            if whole or not kept.isdisjoint(name.split(".")):
                yield name, tensor
            elif tensor.is_floating_point() and tensor.itemsize > DTYPES[dtype].itemsize:
                yield name, tensor.to(DTYPES[dtype])
            else:
                yield name, tensor

    @cached_property
    def _routers(self) -> tuple[str, ...]:
        """Prefixes of the names of the routers' tensors."""
        if not is_moe(self._model.config):
            return ()
        paths = [router.path for router in find_routers(self._model)]
        return tuple(f"{path.removesuffix('.base_layer')}." for path in paths)


async def push_weights(learner: WeightSource, *engines: WeightTarget) -> int:
    """Load the learner's version into every engine, which then drops its caches.

    Return the bytes of the tensors that one of them was given, in the dtype that it takes.
    """
    adapter = None
    if isinstance(learner, AdapterLearner):
        adapter = learner.adapter
    given = 0
    for engine in engines:
        if adapter is not None and engine.caps.takes_adapter:
            assert isinstance(engine, AdapterEngine)
            if await engine.lacks_base():
                with adapter.off():
                    await _push_whole(learner, engine)
            await engine.load_adapter(adapter, learner.version)
            given = sum(a.nbytes + b.nbytes for a, b in adapter.factors().values())
        else:
            given = await _push_whole(learner, engine)
        if engine.version != learner.version:
            raise RuntimeError(
                f"engine holds version {engine.version} after loading version {learner.version}"
            )
        if adapter is not None and isinstance(engine, NamedEngine):
            engine.adapter = adapter.name
    return given


async def _push_whole(learner: WeightSource, engine: WeightTarget) -> int:
    weights = learner.named_weights(engine.caps.weights_dtype)
    sizes: list[int] = []

    def measured() -> NamedWeights:
        for name, tensor in weights:
            sizes.append(tensor.nbytes)
            yield name, tensor

    try:
        await engine.load_weights(measured(), learner.version)
        return sum(sizes)
    finally:
        # A sharded learner gathers what a lost engine left, so that its ranks stay in step.
        if getgeneratorstate(weights) != GEN_RUNNING:  # in a thread that was given up
            weights.close()


async def checked_push(learner: WeightSource, engine: RolloutEngine, *, vocab: int) -> None:
    """Push the learner's weights to an engine that already holds them, and check its canary.

    Each engine of a fleet is asked itself. Raises TrainingError if a log-probability changes.
    """
    require_same = await ask_each(engine, vocab)
    await push_weights(learner, engine)
    done = "weight sync: giving {} the weights it already holds"
    await require_same(done, "sync", TrainingError)
    await engine.reset_cache()
