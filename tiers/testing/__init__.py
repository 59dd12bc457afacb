"""What a store's author tests with, here and in other projects. Needs ``kvtiers[testing]``, so nothing else imports it.

- ``contract``: every rule of ``tiers.store``; subclass ``StoreContract``.
- ``machine``: random sequences of a store's calls next to a dict.
- ``faults``: a store layer and a system-call seam that fail on purpose.
"""
