"""SGLang's HiCache: its only importer. ``kvtiers.sglang`` names the class for SGLang's options.

- ``storage``: the storage that SGLang calls.
- ``identity``: which of SGLang's options belong to the namespace.
"""
