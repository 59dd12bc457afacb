"""Bounded storage: limits how much the writers of one root may store, and removes old blocks.

``account`` enforces the limit on puts. ``collector`` removes blocks, ``lease`` lets one collector work at a time,
``process`` runs it outside the engine's process, and ``link`` is the engine's end. All of it works on any ``Store``.
"""
