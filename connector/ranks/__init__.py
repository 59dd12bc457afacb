"""Tiers of an engine whose workers may be on several hosts: each rank has its own tier, on its own host.

- ``place``: the options that name the tier.
- ``blocks``: the scheduler's knowledge about blocks of which every rank keeps its own part.
- ``transfers``: moves blocks between a rank's KV tensors and its tier, through slots of its own.
"""
