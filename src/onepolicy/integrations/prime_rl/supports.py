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

ASKED = "sampling_replay_mask"
"""prime-rl's function that says which masks can be replayed. Modules import it by name."""


def refuse_wrong_supports() -> None:
    """Make prime-rl raise SupportError for a mask that lacks its own token.

    A version without sampling masks is left alone. Calling this twice does nothing more.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("prime_rl."):
            theirs = vars(module).get(ASKED)
            if theirs is not None and not hasattr(theirs, "onepolicy"):
                setattr(module, ASKED, _checked(theirs))


def _checked(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def checked(sampling_mask: Tensor, labels: Tensor) -> Any:
        replayable: Tensor = theirs(sampling_mask, labels)
        wrong = (sampling_mask >= 0).any(-1) & ~replayable
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
