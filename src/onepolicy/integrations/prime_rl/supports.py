"""Stops prime-rl where a sampling mask is not that of its token.

prime-rl scores over the tokens that its engine kept, and where a token is not among its own, over
the whole vocabulary, without a word: its ratio is wrong then, and so are those of the tokens
beside it, as a mask that lacks its token is that of another one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from onepolicy.support.checks import SupportError

READERS = ("prime_rl.trainer.models.layers.lm_head", "prime_rl.trainer.rl.loss")
"""Modules that ask which masks can be replayed."""
ASKED = "kept_replay_mask"


def refuse_wrong_supports() -> None:
    """Make prime-rl raise SupportError for a mask that lacks its own token.

    A version without sampling masks is left alone. Calling this twice does nothing more.
    """
    for module in map(sys.modules.get, READERS):
        theirs = getattr(module, ASKED, None)
        if theirs is not None and not hasattr(theirs, "onepolicy"):
            setattr(module, ASKED, _checked(theirs))


def _checked(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def checked(kept_tokens: Tensor, labels: Tensor) -> Any:
        replayable: Tensor = theirs(kept_tokens, labels)
        wrong = (kept_tokens >= 0).any(-1) & ~replayable
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise SupportError(
                f"prime-rl: {int(wrong.sum())} of {wrong.numel()} tokens are not in their own "
                f"sampling mask, the first is token {int(labels[tuple(place)])} at {place}: the "
                "masks are those of other tokens. prime-rl would score them over the whole "
                "vocabulary"
            )
        return replayable

    checked.onepolicy = True  # type: ignore[attr-defined]
    return checked
