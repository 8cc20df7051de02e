"""prime-rl's sampling masks.

Contract: `sampling_replay_mask(sampling_mask [N, K] or [B, S, K] filled with -1, labels)` of its
pull request 3431 (August 2026, merged), which modules import by name. Not run: its trainer needs a
GPU.
"""

import sys
from types import ModuleType

import pytest
import torch

from onepolicy.integrations.prime_rl import refuse_wrong_supports
from onepolicy.integrations.prime_rl.supports import ASKED
from onepolicy.support.checks import SupportError

READERS = ("prime_rl.trainer.models.layers.lm_head", "prime_rl.trainer.rl.loss")


@pytest.fixture
def asked(monkeypatch):
    """Return what prime-rl's modules call: True where a mask has its label, else a fallback."""

    def sampling_replay_mask(sampling_mask, labels):
        return (sampling_mask == labels.unsqueeze(-1)).any(-1)

    for name in READERS:
        module = ModuleType(name)
        setattr(module, ASKED, sampling_replay_mask)
        monkeypatch.setitem(sys.modules, name, module)
    refuse_wrong_supports()
    refuse_wrong_supports()
    return [getattr(sys.modules[name], ASKED) for name in READERS]


KEPT = torch.tensor([[4, 7, -1], [2, -1, -1], [-1, -1, -1]])  # the last one: of a prompt


def test_masks_of_their_tokens_pass(asked):
    for ask in asked:
        assert ask(KEPT, torch.tensor([7, 2, 5])).tolist() == [True, True, False]
        assert ask(KEPT[None], torch.tensor([[7, 2, 5]])).tolist() == [[True, True, False]]


def test_a_mask_without_its_token_is_no_fallback(asked):
    for ask in asked:
        with pytest.raises(SupportError, match=r"1 of 3 .* token 4 at \[1\]: .* other tokens"):
            ask(KEPT, torch.tensor([7, 4, 5]))
        with pytest.raises(SupportError, match=r"2 of 3 tokens .* token 2 at \[0, 0\]"):
            ask(KEPT[None], torch.tensor([[2, 5, 7]]))


def test_a_version_without_masks_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, READERS[0], ModuleType(READERS[0]))
    refuse_wrong_supports()
    assert not hasattr(sys.modules[READERS[0]], ASKED)
