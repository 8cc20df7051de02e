"""A character tokenizer, with or without a chat template, and scripted engines, for the environment
tests."""

import asyncio
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onepolicy.types import Completion

PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"
TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}<eos>{% endfor %}{% if "
    "add_generation_prompt %}<bot>{% endif %}"
)
HERMES = (
    "{% if tools %}<sys>{% for t in tools %}{{ t['function'] | tojson }}{% endfor %}<eos>{% "
    "endif %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}<eos>"
    "{% elif m['role'] == 'tool' %}<tool>{{ m['content'] }}<eos>"
    "{% else %}<bot>{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<call>\n"
    '{"name": "{{ c["function"]["name"] }}", "arguments": '
    '{{ c["function"]["arguments"] | tojson }}}\n</call>'
    "{% endfor %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
# drops the thoughts of turns that are not the last, as reasoning models' templates do
FORGETFUL = HERMES.replace(
    "<bot>{{ m['content'] }}",
    "<bot>{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}",
)


def make_tokenizer(characters=PRINTABLE, template=None):
    tokens = ["<pad>", "<eos>", "<unk>", *sorted(characters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
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
    """Return a SampleFn that answers every prompt with `text` (and eos if it stops)."""

    async def sample(prompt_ids, **how):
        if seen is not None:
            seen.append(list(prompt_ids))
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids += [tokenizer.eos_token_id] * (finish == "stop")
        tokens, logp = torch.tensor(ids, dtype=torch.int32), -torch.arange(1.0, len(ids) + 1)
        return Completion(tokens, logp, torch.full_like(tokens, 3), finish)

    return sample


def tokenizer_of(template=None):
    return make_tokenizer(PRINTABLE, template)


class Script:
    """An engine that answers each turn with the next text and remembers its requests.

    late: number of the turn, from 0, that does not come within an hour. The event loop's clock is
    put forward by that.
    """

    def __init__(self, tokenizer, turns, finish="stop", late=None):
        self.tokenizer, self.turns, self.finish, self.late = tokenizer, list(turns), finish, late
        self.prompts, self.limits = [], []

    async def __call__(self, tokens, *, max_tokens=None, routes_from=0):
        if len(self.prompts) == self.late:
            loop = asyncio.get_running_loop()
            clock = loop.time
            loop.time = lambda: clock() + 3600
            await asyncio.sleep(3600)
        self.prompts.append(list(tokens))
        self.limits.append(max_tokens)
        ids = self.tokenizer.encode(self.turns.pop(0), add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id] if self.finish == "stop" else ids
        tokens, turn = torch.tensor(ids, dtype=torch.int32), len(self.prompts)
        logp = torch.full(tokens.shape, -float(turn))
        return Completion(tokens, logp, torch.full_like(tokens, turn), self.finish)


def play(env, turns, problem=None, **how):
    script = Script(env.tokenizer, turns, **how)
    samples = asyncio.run(env.episode(problem or env.train_problem(0), script, 1.0))
    return samples, script


def sampled(env, *turns):
    """Return the tokens of each turn, with its end."""
    encode, end = env.tokenizer.encode, env.tokenizer.eos_token_id
    return [[*encode(turn, add_special_tokens=False), end] for turn in turns]
