"""Text <-> token ids, and the length check every prompt passes before anything is sampled."""

from __future__ import annotations

import string
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.interfaces import Problem

ASCII = "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " \n"))


def render(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The prompt as one user message of the tokenizer's chat template; without a template, its plain ids."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt, add_special_tokens=False)
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)  # the template has written them


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, outside: bool = False) -> list[int]:
    """outside: text we did not write, in which special tokens are plain characters."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=outside)
    return ids


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of these ids as it is, special tokens left out."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class TooLong(UsageError):
    """What does not fit into the tokens there are. fact: how much of what, without the settings of a run."""

    def __init__(self, fact: str, mend: str) -> None:
        super().__init__(f"{fact}; {mend}")
        self.fact = fact


def check_length(
    prompt_ids: Sequence[int], max_tokens: int, max_len: int, problem: Problem
) -> None:
    if len(prompt_ids) + max_tokens > max_len:
        raise TooLong(
            f"problem {problem.id}{source(problem)}: its prompt has {len(prompt_ids)} tokens, which with "
            f"{max_tokens} for the response is more than the {max_len} that fit",
            "lower rollout.sampling.max_tokens or eval.max_tokens, raise rollout.engine.max_len (up to the model's "
            "context), or shorten the prompt",
        )


def check_known(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], problem: Problem, text: str
) -> None:
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return
    raise UsageError(
        f"problem {problem.id}{source(problem)}: the tokenizer does not know all of {text[:60]!r} and would feed "
        f"{tokenizer.unk_token}; use a policy made for this task (make-policy with the same task) or another model.path"
    )


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Those for which the tokenizer feeds its unknown token."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in encode(tokenizer, text, outside=True):
        return ""
    return "".join(
        each for each in sorted(set(text)) if unknown in encode(tokenizer, each, outside=True)
    )


def source(problem: Problem) -> str:
    """Where a problem stands, for messages: ` (data.jsonl:12)`, or nothing for a generated one."""
    where = (problem.entry or {}).get("source")
    return f" ({where})" if where else ""
