"""Score and train over the whole vocabulary although top-p cut it: the arms `no-support`.

onepolicy refuses to. The engine samples and reports as ever, and its supports are checked; the
trainer's forwards do not get them, as those of a trainer that does not replay supports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onepolicy.train.scorer
from onepolicy.train.forward import Scored


@contextmanager
def dropped_supports() -> Iterator[None]:
    """Leave the supports out of every forward of the trainer, until the context ends."""
    forward = onepolicy.train.scorer.forward

    def over_the_vocabulary(model: Any, batch: Any, *rest: Any, **options: Any) -> Scored:
        return forward(model, batch.replace(support=None), *rest, **options)

    onepolicy.train.scorer.forward = over_the_vocabulary
    try:
        yield
    finally:
        onepolicy.train.scorer.forward = forward
