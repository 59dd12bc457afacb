"""The soak: real tiers behind the real manager, under faults, hangs and kills, with every invariant checked.

    make soak                 10 minutes
    make soak SOAK_S=60       one

``ledger`` says what must hold, ``engine`` plays the engine, ``chaos`` breaks things, ``run`` puts them together.
"""
