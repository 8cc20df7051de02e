"""Sampling settings under which tokens are not drawn from the distribution that the trainer scores.

The trainer's softmax is over all tokens, of the policy's own logits, at one temperature. The list
here is the only one: every adapter hands over the settings that will generate, in its caller's
spelling.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from onepolicy.config import CorrectionConfig
from onepolicy.integrations.core.preflight import Preflight

ONE, ZERO = (1, None), (0, None)
CHANGING: dict[str, tuple[Any, ...]] = {
    # tokens are drawn from a part of the vocabulary
    "top_p": ONE,
    "top_k": (-1, 0, None),
    "min_p": ZERO,
    "top_h": (None,),
    "typical_p": ONE,
    "epsilon_cutoff": ZERO,
    "eta_cutoff": ZERO,
    "do_sample": (True, None),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "structured_outputs_regex": (None,),
    "regex": (None,),
    "json_schema": (None,),
    "ebnf": (None,),
    # logits are changed by what was said before, or for some tokens
    "repetition_penalty": ONE,
    "encoder_repetition_penalty": ONE,
    "presence_penalty": ZERO,
    "frequency_penalty": ZERO,
    "no_repeat_ngram_size": ZERO,
    "encoder_no_repeat_ngram_size": ZERO,
    "logit_bias": (None,),
    "sequence_bias": (None,),
    "bad_words": (None,),
    "bad_words_ids": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": ONE,
    "watermarking_config": (None,),
    "thinking_token_budget": (None,),
    "logits_processors": (None,),
    # the end is forbidden for some tokens. An engine's usual 1 concerns one token
    "min_length": (0, 1, None),
    "min_new_tokens": (0, 1, None),
    "min_tokens": (0, 1, None),
    # the log-probabilities are of logits before temperature, cuts and penalties
    "logprobs_mode": ("processed_logprobs", None),
}
"""Setting that changes the distribution -> its values that do not, the one to set first."""
WARPERS = {"temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "do_sample"}
WARPERS |= {"epsilon_cutoff", "eta_cutoff"}
"""Those that act after the log-probabilities that onepolicy records in generate()."""
CUTTING = {"top_p", "top_k", "min_p"}
"""Those that do not change a ratio where the trainer scores over the tokens that they leave."""
SEARCHING: dict[str, tuple[Any, ...]] = {
    "num_beams": ONE,
    "num_beam_groups": ONE,
    "use_beam_search": (False, None),
    "beam_width": ONE,
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
}
"""The same, of settings with which paths are searched and not sampled."""
DRAFTING: dict[str, tuple[Any, ...]] = {
    "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (False, None),
    "num_return_sequences": ONE,
}
"""The same, of settings with which transformers' generate() does not feed one row a token."""
LISTED = (*CHANGING, *SEARCHING, *DRAFTING, "temperature")


class Sampled(NamedTuple):
    """One setting of the sampler that will generate."""

    name: str  # of LISTED
    value: Any
    spelling: str  # as the caller sets it, with {} for the value: `GRPOConfig(top_p={})`

    def shown(self, value: Any) -> str:
        """Return the setting with this value, as the caller writes it."""
        text = repr(value)
        if isinstance(value, numbers.Real) and not isinstance(value, int):
            text = f"{value:g}"
        return self.spelling.replace("{}", text)


def settings_of(source: Any, spelling: str) -> Iterator[Sampled]:
    """Yield the listed settings that a mapping or an object has.

    spelling: of the caller, `{name}` for the setting and `{}` for its value.
    """
    for name in LISTED:
        if isinstance(source, Mapping):
            value = source.get(name)
        else:
            value = getattr(source, name, None)
        if value is not None:
            yield Sampled(name, value, spelling.replace("{name}", name))


def cuts(sampled: Iterable[Sampled]) -> bool:
    """Return whether top_p, top_k or min_p leave tokens out."""
    known = {one.name: one for one in sampled if one.name in CUTTING}
    return bool(_that_act(known, CHANGING))


def check_sampling(
    report: Preflight,
    sampled: Iterable[Sampled],
    correction: CorrectionConfig | None,
    *,
    scored_at: float | None = None,
    recorded: bool = False,
    over_supports: bool = False,
    no_supports: str = "",
    leave_out: str = "the correction",
) -> None:
    """Refuse sampling beside which a correction's ratios are wrong; note it without one.

    Beam search is refused in any case.

    Args:
        report: to add to.
        sampled: settings that will generate.
        correction: None measures only.
        scored_at: temperature of the trainer's softmax; None: the sampler's, whatever it is.
        recorded: onepolicy records routes and log-probabilities while generate() of transformers
            samples.
        over_supports: the trainer scores over the tokens that each token was drawn from.
        no_supports: the reason why it cannot, for the message.
        leave_out: the caller's name of the correction.
    """
    known = {one.name: one for one in sampled}
    searched = _that_act(known, SEARCHING)
    if recorded:
        searched += _that_act(known, DRAFTING)
    if searched:
        report.require(
            "tokens drawn one by one",
            False,
            found=_found(searched),
            fix="a path that was searched or drafted has no log-probability of sampling a token "
            f"at a time; {_fix(searched)}",
        )
    changed = _that_act(known, CHANGING)
    if over_supports:
        changed = [(one, value) for one, value in changed if one.name not in CUTTING]
    reason = ""
    if no_supports and any(one.name in CUTTING for one, _ in changed):
        reason = f" ({no_supports})"
    if recorded:  # transformers takes no -1
        changed = [(one, 0 if one.name == "top_k" else value) for one, value in changed]
    temperature = known.get("temperature")
    if temperature is not None and scored_at is not None and temperature.value != scored_at:
        changed.append((temperature, scored_at))
    if correction is not None:
        report.require(
            "whole distribution sampled",
            not changed,
            found=_found(changed),
            fix="the trainer's softmax is over all tokens, of unchanged logits, at its own "
            f"temperature, so every ratio would be wrong{reason}; {_fix(changed)}, or leave "
            f"{leave_out} out",
        )
    elif changed:
        effect = "mismatch/* compare two distributions, and so does a ratio of the trainer's own"
        if recorded and all(one.name in WARPERS for one, _ in changed):
            effect = (
                "the recorded log-probabilities are not either, so mismatch/* do not show that "
                "tokens come from another distribution"
            )
        report.note(
            f"sampling is cut or changed ({_found(changed)}) and the trainer's softmax is not: "
            f"{effect}; {_fix(changed)}"
        )


def _that_act(
    known: Mapping[str, Sampled], listed: Mapping[str, tuple[Any, ...]]
) -> list[tuple[Sampled, Any]]:
    """Return the settings that have an effect, each with the value to set in its place."""
    found = []
    for name, idle in listed.items():
        one = known.get(name)
        if one is not None and one.value not in idle and not _is_empty(one.value):
            found.append((one, idle[0]))
    return found


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | Mapping | list | tuple) and not value


def _found(settings: Iterable[tuple[Sampled, Any]]) -> str:
    return ", ".join(one.shown(one.value) for one, _ in settings)


def _fix(settings: Iterable[tuple[Sampled, Any]]) -> str:
    return "set " + ", ".join(one.shown(value) for one, value in settings)
