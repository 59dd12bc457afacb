"""A small reference engine, and the demo that uses it: ``kvtiers demo``."""
