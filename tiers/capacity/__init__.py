"""Bounded storage: limits how much the writers of one root may store, and removes old blocks.

Writers publish how many bytes they put (``written``). ``collector`` removes blocks. ``process`` runs the collector in a
separate process, and the engine talks to this process through ``link``. Everything here works on any ``Store``.
"""
