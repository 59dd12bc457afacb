"""Commands that look at the storage of a configuration without an engine."""
