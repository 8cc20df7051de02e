"""Planted slips have the right kind and the right rate."""

import numpy as np

from onepolicy.envs.warmup.noise import add_character_noise


def noisy(text, rate):
    return add_character_noise(text, np.random.default_rng(0), rate)


def test_kinds_are_kept_and_the_rest_is_untouched():
    def kind(c):
        return c.islower(), c.isupper(), c.isdigit()

    text = "aZ9 -<>" * 50
    out = noisy(text, 1.0)
    for old, new in zip(text, out, strict=True):
        assert kind(old) == kind(new)
        assert old == new or old.isalnum()
    assert out != text


def test_rate():
    text = "5" * 20_000
    assert noisy(text, 0.0) == text
    changed = sum(c != "5" for c in noisy(text, 0.2)) / len(text)
    assert abs(changed - 0.2 * 0.9) < 0.01  # one slip in ten draws the digit itself
