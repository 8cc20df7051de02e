"""The warm-up learns the responses, and planted mistakes begin at the step of `mistakes_from`."""

import random

import pytest

from onepolicy.config import ModelConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.models.load import load_tokenizer
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy, warm_up

SMALL = {
    **{"hidden_size": 16, "layers": 1, "experts": 2, "top_k": 1, "expert_size": 8, "heads": 1},
    **{"kv_heads": 1, "head_dim": 8, "max_len": 32, "tokens_per_step": 64, "threads": 1},
}
SEEN = {
    0.0: [{"wrong"}] * 4,
    0.5: [{"right"}] * 2 + [{"wrong"}] * 2,
    0.7: [{"right"}] * 3 + [{"wrong"}],  # 0.7 of 4 steps is nearest to 3
    0.1: [{"wrong"}] * 4,  # nearest to no step
}


@pytest.mark.parametrize("mistakes_from", SEEN)
def test_no_mistakes_before_the_switch_and_mistakes_after(mistakes_from):
    config = PolicyConfig(**SMALL, steps=4, mistakes=0.25, mistakes_from=mistakes_from)
    tokenizer = make_tokenizer("adeghilnorstw: ")
    drawn, steps = set(), []

    def examples(mistakes):
        response = {0.0: "right", 0.25: "wrong"}[mistakes]
        while True:
            drawn.add(response)
            yield "as told: ", response

    def progress(step, loss, accuracy):
        steps.append(set(drawn))
        drawn.clear()

    warm_up(make_model(config, len(tokenizer)), tokenizer, examples, config, progress=progress)
    assert steps == SEEN[mistakes_from]


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"recurrent": 1, "layers": 2}, marks=pytest.mark.full)],
    ids=["attention", "hybrid"],
)
def test_it_learns_the_response_and_not_the_prompt(more):
    """No model knows the random letters of the prompts: their loss would stay at log 10."""
    shape = SMALL | more
    config = PolicyConfig(**shape, steps=60, lr=2e-2, warmup_steps=5, mistakes=0.0)
    tokenizer, draw, seen = make_tokenizer("abcdefghij: "), random.Random(0), []

    def examples(mistakes):
        while True:
            yield "".join(draw.choices("abcdefghij", k=12)) + ":", "face"

    progress = lambda *measured: seen.append(measured)  # noqa: E731
    model = make_model(config, len(tokenizer))
    warm_up(model, tokenizer, examples, config, progress=progress)
    (first, loss, _), (last, end, accuracy) = seen[0], seen[-1]
    assert (first, last, accuracy) == (1, 60, 1.0)
    assert loss > 2
    assert end < 0.2


def test_recurrent_layers_stand_before_each_of_attention():
    config = PolicyConfig(**SMALL | {"layers": 6}, recurrent=2)
    kinds = make_model(config, 20).config.layer_types
    assert kinds == [*["linear_attention"] * 2, "full_attention"] * 2


def test_words_are_tokens_of_their_own_the_longest_first():
    tokenizer = make_tokenizer("ab<>", ["<a>", "<a>b", "a"])
    ids = tokenizer.encode("a<a><a>b<b", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<a>", "<a>b", "<", "b"]
    assert tokenizer.decode(ids) == "a<a><a>b<b"


def test_a_hybrid_is_loaded_with_its_own_tokenizer(tmp_path):
    """transformers gives every Qwen3.5 its family's rules, under which spaces are unknown."""
    config = PolicyConfig(**(SMALL | {"recurrent": 1, "layers": 2}))
    tokenizer = make_tokenizer("ab \n", ["<a> "])
    save_policy(make_model(config, len(tokenizer)), tokenizer, config, tmp_path / "policy")
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "policy")))
    text = "a b\n<a> b"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
