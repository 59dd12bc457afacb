"""Bounded storage: how much the writers of one root may store, and who removes what, when.

``account`` keeps the bound, ``collector`` removes blocks, ``lease`` lets one collector work at a time, ``process`` runs
it outside of the engine's process and ``link`` is the engine's end of that. All of it works on the ``Store`` interface.
"""
