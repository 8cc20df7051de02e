"""The warm-up's curriculum: planted mistakes begin at the step of `mistakes_from`, not before."""

import pytest

from onepolicy.config.policy import PolicyConfig
from onepolicy.tiny.model import make_model, make_tokenizer, warm_up

SEEN = {
    0.0: [{"wrong"}] * 4,
    0.5: [{"right"}] * 2 + [{"wrong"}] * 2,
    0.7: [{"right"}] * 3 + [{"wrong"}],  # 0.7 of 4 steps is nearest to 3
    0.1: [{"wrong"}] * 4,  # nearest to no step
}


@pytest.mark.parametrize("mistakes_from", SEEN)
def test_no_mistakes_before_the_switch_and_mistakes_after(mistakes_from):
    config = PolicyConfig(
        hidden_size=16, layers=1, experts=2, top_k=1, expert_size=8, heads=1, kv_heads=1,
        head_dim=8, max_len=32,
        steps=4, tokens_per_step=64, mistakes=0.25, mistakes_from=mistakes_from, threads=1,
    )  # fmt: skip
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
