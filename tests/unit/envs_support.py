"""A character tokenizer, with or without a chat template, and a scripted engine, for the environment tests."""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onepolicy.types import Completion

PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"
TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_tokenizer(characters=PRINTABLE, template=None):
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *sorted(characters)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
        tokenizer.chat_template = template
    return tokenizer


def scripted(tokenizer, text, finish="stop", seen=None):
    """A SampleFn that answers every prompt with `text` (and eos if it stops)."""

    async def sample(prompt_ids, **how):
        if seen is not None:
            seen.append(list(prompt_ids))
        ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * (finish == "stop")
        count = len(ids)
        logp = -torch.arange(1.0, count + 1)
        return Completion(
            torch.tensor(ids, dtype=torch.int32), logp, torch.full((count,), 3, dtype=torch.int32), finish
        )

    return sample
