"""The checks of prompts before a run: their length, and their characters."""

from __future__ import annotations

import string
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.tokenization import encode_prompt, encode_text
from onepolicy.interfaces import Problem

ASCII = "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " \n"))


class TooManyTokens(UsageError):
    """The error of a prompt or response that is too long.

    fact: the error without the hint, which names settings that another command may not have.
    """

    def __init__(self, fact: str, hint: str) -> None:
        super().__init__(f"{fact}; {hint}")
        self.fact = fact


def check_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, max_tokens: int, max_len: int
) -> None:
    """Raise UsageError if the prompt makes no tokens, or unknown ones, or has no room."""
    prompt_ids = encode_prompt(tokenizer, problem.prompt)
    if not prompt_ids:
        raise UsageError(
            f"problem {problem.id}{source_suffix(problem)}: the tokenizer makes no tokens of "
            f"{problem.prompt[:60]!r}; fix the prompt, or the tokenizer of model.path"
        )
    check_characters(tokenizer, prompt_ids, problem, problem.prompt)
    check_prompt_length(prompt_ids, max_tokens, max_len, problem)


def check_reference(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, reference: str, max_tokens: int
) -> None:
    """Raise UsageError if the right response has unknown tokens, or more than are sampled."""
    ids = tokenizer.encode(reference, add_special_tokens=False)
    check_characters(tokenizer, ids, problem, reference)
    if len(ids) + 1 > max_tokens:
        raise TooManyTokens(
            f"problem {problem.id}{source_suffix(problem)}: the right response, "
            f"{reference[:60]!r} and the end token, has {len(ids) + 1} tokens, but "
            f"{max_tokens} are sampled at most, so its reward would always be 0",
            "raise rollout.sampling.max_tokens (or eval.max_tokens)",
        )


def check_prompt_length(
    prompt_ids: Sequence[int], max_tokens: int, max_len: int, problem: Problem
) -> None:
    """Raise TooManyTokens if the prompt and a response of max_tokens exceed max_len tokens."""
    if len(prompt_ids) + max_tokens > max_len:
        raise TooManyTokens(
            f"problem {problem.id}{source_suffix(problem)}: its prompt has {len(prompt_ids)} "
            f"tokens, which with {max_tokens} for the response is more than the {max_len} that fit",
            "lower rollout.sampling.max_tokens or eval.max_tokens, raise rollout.engine.max_len "
            "(up to the model's context), or shorten the prompt",
        )


def check_characters(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], problem: Problem, text: str
) -> None:
    """Raise UsageError if the ids of a problem's text contain the unknown token."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return
    raise UsageError(
        f"problem {problem.id}{source_suffix(problem)}: the tokenizer does not know all of "
        f"{text[:60]!r} and would feed {tokenizer.unk_token}; use a policy made for this task "
        "(make-policy with the same task) or another model.path"
    )


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the characters of a text that the tokenizer encodes as its unknown token, sorted."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in encode_text(tokenizer, text, untrusted=True):
        return ""
    return "".join(
        each
        for each in sorted(set(text))
        if unknown in encode_text(tokenizer, each, untrusted=True)
    )


def source_suffix(problem: Problem) -> str:
    """Return ` (data.jsonl:12)` for messages about a problem of a file, or an empty string."""
    source = (problem.entry or {}).get("source")
    if not source:
        return ""
    return f" ({source})"
