"""A reference engine of our own, and the demo that shows it: ``kvtiers demo``."""
