"""LMCache's L2: its only importer. ``kvtiers.lmcache`` names the class for LMCache's options."""
