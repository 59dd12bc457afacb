"""Other engines than vLLM, which call a storage and wait for it: SGLang's HiCache and LMCache.

- ``door``: opens a tier for one of them, from the options that its operator writes.
- ``release``: checks at the start that the installed release has all names that kvtiers uses.
- ``sglang``, ``lmcache``: each is the only importer of its engine.
"""
