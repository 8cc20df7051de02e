"""Record and replay the experts of Megatron-core models (docs/other_trainers.md).

    import onepolicy.integrations.megatron as op_megatron

    with op_megatron.record(model) as tape:
        model(tokens, position_ids, None)
    with op_megatron.replay(model, tape.trace(), batch=2):
        loss = model(tokens, position_ids, None, labels=labels).mean()
    loss.backward()

Megatron-core is imported when a model is bound, not here.
"""

from onepolicy.integrations.megatron.model import record, replay, routers_of
from onepolicy.integrations.megatron.routers import MegatronRouters

__all__ = ["MegatronRouters", "record", "replay", "routers_of"]
