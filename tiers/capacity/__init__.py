"""Bounded storage: limits how much the writers of one root may store, and removes old blocks.

Writers publish what they put (``written``). ``collector`` removes blocks, ``process`` runs it outside the engine's
process, and ``link`` is the engine's end. All of it works on any ``Store``.
"""
