"""The half of a tier that does its I/O, in a process beside the engine. ``tiers.tier`` is the engine's half."""
