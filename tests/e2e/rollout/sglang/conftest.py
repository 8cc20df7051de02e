"""Two random policies for SGLang's server."""

import pytest
import torch

from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy

SIZE = PolicyConfig(hidden_size=64, layers=3, experts=16, top_k=4, max_len=512)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Make two random policies of one shape, sharp enough for their tokens to differ."""
    made, tokenizer = [], make_tokenizer(task_alphabet(SIZE.task))
    for seed in (0, 1):
        settings = SIZE.model_copy(update={"seed": seed})
        model = make_model(settings, len(tokenizer))
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.15 * torch.randn_like(weight)
        made.append(tmp_path_factory.mktemp("models") / f"policy{seed}")
        save_policy(model, tokenizer, settings, made[-1])
    return made
