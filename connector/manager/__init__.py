"""The region's slots, the tiers behind them, and the requests that wait for both. How a lookup becomes a load:

1. ``tiering``: ``lookup`` asks the region (``primary``), then the tiers in order (``guard``). The request waits if a
   tier has the key or owes an answer. ``request`` defines its states. ``waiting`` keeps all requests, and takes the
   tiers' answers for them.
2. ``promotion``, at the end of the step: hits get slots while the region has room and their tier has not used up its
   share.
3. ``jobs``: the loads of these slots are submitted. A later step's end takes the results; late loads are given up.
4. ``promotion``, ``request``: the blocks are ready, and held for the request until ``prepare_load`` ends its wait.
5. ``cascade``: the blocks are also stored to the tiers before the one that had them, as new blocks are to all tiers.
"""
