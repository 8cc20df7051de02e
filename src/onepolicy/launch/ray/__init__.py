"""Ranks and engine replicas as Ray actors. The only place that imports ray."""
