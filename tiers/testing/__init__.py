"""Test tools for authors of stores, here and in other projects. Only tests import it: it needs the extra ``testing``.

- ``contract``: tests of every rule of ``tiers.store``; subclass ``StoreContract``.
- ``machine``: random sequences of calls, compared with a dict.
- ``faults``: a store layer and system calls that fail on purpose.
"""
