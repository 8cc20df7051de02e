"""The start of adapter truth in a run with train.lora: the check that its base needs."""

from __future__ import annotations

from collections.abc import Callable

from onepolicy.build.components import Components
from onepolicy.run.adapter_check import AdapterCheck


async def start_adapter(components: Components, note: Callable[[str], None]) -> None:
    """Give the engine its first weights, and start the checks of every sync."""
    settings = components.config.train.lora
    assert settings is not None
    kind = AdapterCheck
    if settings.base == "nf4":
        from onepolicy.run.nf4_check import Nf4Check

        kind = Nf4Check
    check = kind(components, note)
    check.adapter.check = check
    await check.start()
