"""The region's slots, the tiers behind them, and the requests that wait for both. How a lookup becomes a load:

1. ``tiering``: ``lookup`` asks the region (``primary``), then the tiers in order (``guard``). If a tier owes an answer
   or has the key, the request waits: ``request`` has its states, ``waiting`` all requests and the tiers' answers.
2. ``promotion``, at the step's end: hits get slots, as far as the region has room and the tiers have shares of it.
3. ``jobs``: the loads of these slots are submitted. A later step's end takes the results; late loads are given up.
4. ``promotion``, ``request``: the blocks are ready, and held for the request until ``prepare_load`` ends its wait.
5. ``cascade``: the blocks are also stored to the tiers before the one that had them, as new blocks are to all tiers.
"""
