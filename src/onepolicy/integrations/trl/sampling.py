"""The settings that a TRL trainer will sample with, as TRL and its sampler merge them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onepolicy.integrations.core.sampling import LISTED, Sampled, settings_of

KWARGS = 'generation_kwargs["{name}"]={}'


def config_of(trainer: Any) -> str:
    """Return the class of the trainer's settings, as the caller writes it: GRPOConfig, ..."""
    return type(trainer.args).__name__


def samples_itself(trainer: Any) -> bool:
    """Return whether the trainer's own model samples."""
    return not trainer.use_vllm and getattr(trainer, "rollout_func", None) is None


def sampling_of(trainer: Any) -> Iterator[Sampled]:
    """Yield the settings that will generate, each in the spelling of where it comes from.

    The trainer's own model takes TRL's GenerationConfig, and what that leaves open from the
    generation config of the model. vLLM takes TRL's settings and then generation_kwargs. A
    rollout_func may read either, so it is judged by both.
    """
    given = {
        one.name: one
        for source, spelling in (
            (trainer, f"{config_of(trainer)}({{name}}={{}})"),
            (getattr(trainer.args, "generation_kwargs", None), KWARGS),
        )
        for one in settings_of(source, spelling)
    }
    if not samples_itself(trainer):
        yield from given.values()
        pattern = getattr(trainer.args, "vllm_structured_outputs_regex", None)
        spelling = f"{config_of(trainer)}(vllm_structured_outputs_regex={{}})"
        yield Sampled("structured_outputs_regex", pattern, spelling)
        return
    taken = getattr(trainer, "generation_config", None)
    model = getattr(getattr(trainer, "model", None), "generation_config", None)
    for name in LISTED:
        value, where = getattr(taken, name, None), "trainer.generation_config"
        if value is None and name not in given:
            value, where = getattr(model, name, None), "model.generation_config"
        asked = given.get(name)
        if asked is not None and value in (None, asked.value):
            yield asked
        elif value is not None:
            yield Sampled(name, value, f"{where}.{name} = {{}}")
