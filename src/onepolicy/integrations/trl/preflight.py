"""Checks of a TRL trainer's settings, before anything of it is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onepolicy.config import CorrectionConfig
from onepolicy.integrations.core.advantages import needs_whole_step
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.sampling import (
    LISTED,
    Sampled,
    check_sampling,
    cuts,
    settings_of,
)
from onepolicy.integrations.trl.correction import has_one_weight_a_sequence
from onepolicy.integrations.trl.settings import TrlSettings
from onepolicy.integrations.trl.supports import SUPPORTS, why_not
from onepolicy.integrations.trl.vllm_routes import returns_routes

METHODS = (
    "_generate",
    "_generate_single_turn",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_calculate_rewards",
    "_compute_loss",
)
ROUTER_LOSS = ("router_aux_loss_coef", "aux_loss_enabled")
"""Attributes without which nobody knows whether the routers' loss is on. TRL up to 1.5.1 has none.
"""
TESTED = "1.16.0"
MARK = "_onepolicy"
"""Attribute of a trainer that has onepolicy attached."""
IS_DEFAULTS = ("sequence_mask", None, 3.0)  # TRL 1.16: mode, lower and upper bound
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
PG = ("grpo", "bnpo", "dr_grpo", "dapo")


def check_trainer(trainer: Any, settings: TrlSettings) -> Preflight:
    """Return the report of a trainer that can run so.

    Raises:
        UsageError: some settings do not go together. Each is named, with the change to make.
    """
    report = Preflight("TRL")
    _check_kind(trainer, settings, report)
    report.finish()  # the rest reads what these trainers have
    if settings.replay == "r3":
        _check_replay(trainer, report)
        _check_engine(trainer, report)
    if settings.correction is not None:
        _check_correction(trainer, settings, settings.correction, report)
    sampled, no_supports = list(sampling_of(trainer)), ""
    cut = cuts(sampled)
    if cut:
        no_supports = why_not(trainer, top_k_of(sampled))
    check_sampling(
        report,
        sampled,
        settings.correction,
        scored_at=getattr(trainer, "temperature", None),
        recorded=samples_itself(trainer),
        over_supports=cut and not no_supports,
        no_supports=no_supports,
        leave_out="`correction`",
    )
    if cut and not no_supports:
        where = "the tokens that they left"
        if getattr(trainer, "rollout_func", None) is not None:
            where = f'those of rollout_func, under the key "{SUPPORTS}"'
        report.note(f"top_p, top_k or min_p cut the sampling: TRL's softmax is over {where}")
    _check_scoring(trainer, settings, report)
    report.finish()
    return report


def kind_of(trainer: Any) -> str:
    """Return "grpo", "gmpo", "rloo", or "other" for a trainer that is not supported."""
    names = [parent.__name__ for parent in type(trainer).__mro__]
    for name, kind in (("GMPOTrainer", "gmpo"), ("GRPOTrainer", "grpo"), ("RLOOTrainer", "rloo")):
        if name in names:
            return kind
    return "other"


def trl_scores(trainer: Any) -> bool:
    """Return whether TRL itself scores every generation before the update."""
    if kind_of(trainer) == "rloo":
        return True
    args = trainer.args
    every = args.steps_per_generation * trainer.num_iterations
    return bool(args.gradient_accumulation_steps % every) or corrects_itself(trainer)


def corrects_itself(trainer: Any) -> bool:
    """Return whether TRL's own importance sampling correction is on."""
    return bool(trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False))


def _check_kind(trainer: Any, settings: TrlSettings, report: Preflight) -> None:
    name = type(trainer).__name__
    fix = "use GRPOTrainer or RLOOTrainer"
    if "Async" in name:
        fix = (
            "its batches pack the completions of a prompt as a tree, where the prompt's tokens "
            "have one row for the routes of many requests; use GRPOTrainer"
        )
    report.require("a supported trainer", kind_of(trainer) != "other", found=name, fix=fix)
    read: tuple[str, ...] = METHODS
    if settings.replay == "r3":
        read += ROUTER_LOSS
    missing = [name for name in read if not hasattr(trainer, name)]
    if missing and kind_of(trainer) != "other":
        fix = f"this TRL has other methods than 1.16; install trl {TESTED}"
        report.require("methods of TRL 1.16", False, found=f"no {', '.join(missing)}", fix=fix)
    installed = _installed_version()
    if installed not in (None, TESTED):
        report.note(f"TRL {installed} is untested; {TESTED} is tested")
    if getattr(trainer, MARK, False):
        fix = "make another trainer; attach is called once for each"
        report.require("attached once", False, found="attached already", fix=fix)


def _installed_version() -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version("trl")
    return None


def _check_replay(trainer: Any, report: Preflight) -> None:
    coefficient = trainer.router_aux_loss_coef
    report.require(
        "router loss off",
        not trainer.aux_loss_enabled,
        found=f"router_aux_loss_coef = {coefficient:g}",
        fix=(
            "it counts experts that replay does not use and pulls the routers away from those it "
            f"does; build the trainer with {config_of(trainer)}(router_aux_loss_coef=0.0), the "
            "model's config is read only then"
        ),
    )
    report.require(
        "model not compiled",
        not trainer.args.torch_compile,
        found=f"torch_compile = {trainer.args.torch_compile}",
        fix="TRL compiles the whole model, hooks included; set torch_compile=False",
    )
    report.note("the reference model, evaluations and other models route natively")


def _check_engine(trainer: Any, report: Preflight) -> None:
    """Require a sampler whose routes can be had."""
    if getattr(trainer, "rollout_func", None) is not None:
        report.note('routes: those of rollout_func, under the key "routed_experts"')
    elif trainer.use_vllm and trainer.vllm_mode == "colocate":
        report.require(
            "vLLM returns routes",
            returns_routes(trainer.vllm_generation.llm),
            found="colocated LLM",
            fix="build the trainer inside `with op_trl.routed_vllm():`",
        )
    elif trainer.use_vllm:
        report.note("routes: of the server; start it with --enable-return-routed-experts")
    else:
        report.require(
            "samples of model.generate",
            not trainer.use_transformers_continuous_batching,
            found=f"continuous batching {trainer.use_transformers_continuous_batching}",
            fix="its batches do not show whose rows they are; set "
            "use_transformers_continuous_batching=False",
        )
        report.note("routes: recorded while the trainer's own model samples")


def _check_correction(
    trainer: Any, settings: TrlSettings, config: CorrectionConfig, report: Preflight
) -> None:
    kind = kind_of(trainer)
    loss = getattr(trainer, "loss_type", kind)
    report.require(
        f"correction {config.name}",
        config.centering == "none",
        found=f"centering {config.centering}",
        fix="it needs the sampler's likeliest tokens, which TRL does not carry; choose another",
    )
    processes = trainer.accelerator.num_processes
    report.require(
        "all samples of the step",
        processes == 1 or not needs_whole_step(config),
        found=f"{processes} processes",
        fix="this correction counts over the whole step, and each process has its own samples "
        "alone; choose another",
    )
    args = trainer.args
    generations = args.gradient_accumulation_steps / args.steps_per_generation
    report.require(
        "one generation a step",
        generations <= 1 or not needs_whole_step(config),
        found=f"gradient_accumulation_steps {args.gradient_accumulation_steps}, "
        f"steps_per_generation {args.steps_per_generation}",
        fix="this correction counts over the whole step, and each generation is corrected alone; "
        "let steps_per_generation be gradient_accumulation_steps",
    )
    report.require(
        f"{config.name} in loss {loss}",
        _loss_takes(trainer, config),
        found=f"{kind}, loss_type {loss}",
        fix=_loss_fix(kind, loss, config),
    )
    _check_own_correction(trainer, config, report)


def _loss_takes(trainer: Any, config: CorrectionConfig) -> bool:
    """Return whether the trainer's loss gives the correction its meaning."""
    kind = kind_of(trainer)
    if kind == "rloo":
        return not config.live and has_one_weight_a_sequence(config)
    if kind == "gmpo" or trainer.loss_type not in CLIPPED:
        return False
    if config.live and config.surrogate == "pg":
        return trainer.loss_type in PG and trainer.importance_sampling_level == "token"
    return True


def _loss_fix(kind: str, loss: str, config: CorrectionConfig) -> str:
    if kind == "rloo":
        return (
            "RLOO's ratio and advantage are of whole sequences; choose seq-tis, seq-mis, geo-rs, "
            "k3-rs or another with one weight a sequence"
        )
    if kind == "gmpo" or loss == "vespo":
        return (
            "its weight of a sequence is not linear in the advantage of a token; use GRPOTrainer "
            "with another loss_type, or leave the correction out"
        )
    return (
        "it multiplies advantage * log p by the ratio new / rollout, beside which no other ratio "
        f"may stand; use loss_type {', '.join(PG)} with importance_sampling_level token, or a "
        "fixed correction such as tis"
    )


def _check_own_correction(trainer: Any, config: CorrectionConfig, report: Preflight) -> None:
    """Refuse two corrections. TRL's own is on by default, so its defaults are replaced."""
    threshold = getattr(trainer, "off_policy_mask_threshold", None)
    if threshold is not None and config.preset == "opsm":
        report.require(
            "one off-policy mask",
            False,
            found=f"off_policy_mask_threshold = {threshold:g}",
            fix="TRL's mask is opsm; leave one of the two out",
        )
    if not corrects_itself(trainer):
        return
    own = (
        trainer.vllm_importance_sampling_mode,
        trainer.vllm_importance_sampling_clip_min,
        trainer.vllm_importance_sampling_clip_max,
    )
    mode, low, high = own
    report.require(
        "one correction",
        own == IS_DEFAULTS,
        found=f"TRL's {mode} [{low}, {high}] beside {config.name}",
        fix="the ratio would count twice; set vllm_importance_sampling_correction=False, or leave "
        "`correction` out",
    )
    if own == IS_DEFAULTS:
        report.note(
            f"{config.name} replaces TRL's own correction (its default {mode}, cap {high:g}), "
            "whose ratio is set to 1"
        )


def _check_scoring(trainer: Any, settings: TrlSettings, report: Preflight) -> None:
    if trl_scores(trainer):
        report.note("TRL scores every generation before the update: nothing is added")
        return
    if settings.scoring == "always":
        report.note(
            "generation and update are aligned, so TRL does not score: one forward without "
            'gradient is added per generation; scoring="training-forward" leaves it out'
        )
        return
    config = settings.correction
    report.require(
        "weights of a micro-batch",
        config is None or not needs_whole_step(config),
        found='scoring="training-forward"',
        fix="this correction counts over the whole generation; leave `scoring` out",
    )
    report.require(
        "dump of whole generations",
        settings.dump is None,
        found='scoring="training-forward"',
        fix="a dump holds the scores of a generation before its update; leave `scoring` out",
    )


KWARGS = 'generation_kwargs["{name}"]={}'


def config_of(trainer: Any) -> str:
    """Return the class of the trainer's settings, as the caller writes it: GRPOConfig, ..."""
    return type(trainer.args).__name__


def samples_itself(trainer: Any) -> bool:
    """Return whether the trainer's own model samples."""
    return not trainer.use_vllm and getattr(trainer, "rollout_func", None) is None


def scores_over_supports(trainer: Any) -> bool:
    """Return whether tokens are drawn from a part of the vocabulary, and the trainer gets it."""
    sampled = list(sampling_of(trainer))
    return cuts(sampled) and not why_not(trainer, top_k_of(sampled))


def top_k_of(sampled: Iterable[Sampled]) -> int:
    """Return the top_k of these settings, 0 if there is none."""
    found = [one.value for one in sampled if one.name == "top_k"]
    return max([0, *found])


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
