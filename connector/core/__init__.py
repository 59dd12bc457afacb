"""Engine-independent core: the region's slots, the tiers behind the region, and the requests that wait for both.

Nothing here imports torch or an engine. How a lookup becomes a load:

1. ``manager``: ``lookup`` asks the region (``slots``), then the tiers in order (``guard``). The request waits if a tier
   has the key or owes an answer. ``waits`` keeps what each request waits for, and takes the tiers' answers.
2. ``decisions``: hits count as misses if the engine computes them sooner than the tier loads them. ``worth`` estimates
   both times.
3. ``loads``, at the end of the step: hits get slots while the region has room (``eviction``) and their tier has not
   used up its share. The loads are submitted (``jobs``). A later step's end takes the results; late loads are given up.
4. ``waits``: the blocks are ready, and held for the request until ``prepare_load`` ends its wait.
5. ``stores``: loaded blocks are also stored to the tiers before the tier that had them. New blocks go to all tiers.
"""
