"""Tiers of an engine whose workers may be on several hosts: each rank has a tier of its own, on its own host.

- ``place``: the options that name the tier.
- ``blocks``: what the scheduler knows about blocks of which every rank keeps its own part.
- ``transfers``: a rank's half. It moves blocks between KV tensors and the rank's tier, through slots of its own.
"""
