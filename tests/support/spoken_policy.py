"""A small random policy whose words are given; and a conversation of a program, played again by our
own episode code.

What a program does with random text says little. So the texts of the turns are given. Everything
else is the policy's: the log-probability of each token, its experts, and the version of the weights
that computed them, which change before every request.
"""

import asyncio
import itertools
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from onepolicy.config import HFEngineConfig, ReActTask
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.multiturn.dialogue import TurnFormat
from onepolicy.envs.multiturn.episode import MultiTurnEnvironment
from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.envs.multiturn.tool_formats import TemplateCallFormat
from onepolicy.rollout.hf import sampler
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.tiny.model import make_model
from support.paths import ROOT

TEMPLATE = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}<eos>{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    '{% for c in m[\'tool_calls\'] or [] %}<call>\n{"name": "{{ c["function"]["name"] }}", '
    '"arguments": {{ c["function"]["arguments"] | tojson }}}\n</call>{% endfor %}<eos>'
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TITLE = "Generate a title"
"""Words of a request for a title, which programs send beside the conversation."""


def make_tokenizer(vocabulary=4096):
    """Return a byte-level BPE of our pages' text: a program's prompt has thousands of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer.train_from_iterator(pages, trainer)
    names = {"pad_token": "<pad>", "eos_token": "<eos>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.add_special_tokens({"additional_special_tokens": ["<assistant>"]})
    made.chat_template = TEMPLATE
    return made


class SpokenPolicy:
    """The engine. versions: of the weights for each request, 1, 2, 3 ... if not given."""

    def __init__(self, tokenizer, texts, *, max_len, versions=None):
        settings = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
        experts = {"experts": 8, "top_k": 2, "expert_size": 32, "max_len": max_len}
        model = make_model(PolicyConfig(**settings, **experts), len(tokenizer)).eval()
        self._base = {name: value.clone() for name, value in model.state_dict().items()}
        config = HFEngineConfig(dtype="float32", max_num_seqs=1)
        # Fast numerics may round another way after a cached prefix.
        self.engine = HFEngine(
            model, config, return_routes=True, max_len=max_len, numerics="on-policy"
        )
        self.tokenizer, self._texts = tokenizer, iter(texts)
        self._versions = iter(versions or itertools.count(1))
        self._turn = asyncio.Lock()

    @property
    def caps(self):
        return self.engine.caps

    @property
    def version(self):
        return self.engine.version

    async def generate(self, prompt_ids, sampling, *, seed):
        async with self._turn:
            version = next(self._versions)
            moved = {name: value * (1 + version / 64) for name, value in self._base.items()}
            await self.engine.load_weights(moved.items(), version)
            await self.engine.reset_cache()
            text = "sums"
            if TITLE not in self.tokenizer.decode(prompt_ids):
                text = next(self._texts)
            ids = encode_text(self.tokenizer, text, untrusted=True)
            left = iter([*ids, self.tokenizer.eos_token_id])

            def speak(probability, uniform):
                (row,) = probability
                return torch.full((len(row[None]), 1), next(left))

            with patch.object(sampler, "_invert_cdf", speak):
                return await self.engine.generate(prompt_ids, sampling, seed=seed)


class PlayedAgain(MultiTurnEnvironment):
    """An environment of our own that has a program's conversation.

    turns: of the program's path, in their order. Its first prompt, tools and replies are theirs.
    """

    def __init__(self, tokenizer, turns, *, max_len):
        first, *later = (turn.request.messages for turn in turns)
        count = next(i for i, each in enumerate(first) if each.role != "system")
        system = "\n\n".join(message.text for message in first[:count])  # a template has one
        self.prompt = [("system", system)] * bool(count)
        self.prompt += [(message.role, message.text) for message in first[count:]]
        tails = [after[len(before) + 1 :] for before, after in itertools.pairwise([first, *later])]
        self.replies = [[message.text for message in tail] for tail in tails]
        (form,) = {message.role for tail in tails for message in tail}
        form = {"tool": Tools, "user": TurnFormat}[form]()
        form.schemas = list(turns[0].request.tools)
        config = ReActTask(
            problems={"kind": "gym", "name": "products"}, tools=[{"kind": "calculator"}]
        )
        super().__init__(config, None, tokenizer, form, max_len=max_len)

    def initial_prompt(self, problem):
        return self.prompt

    async def play_episode(self, problem, episode):
        await episode.sample_turn()
        for replies in self.replies:
            episode.add_replies(replies)
            await episode.sample_turn()
        return 1.0


class Tools(TurnFormat):
    turn_message = TemplateCallFormat.turn_message
    reply_message = TemplateCallFormat.reply_message
