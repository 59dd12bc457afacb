"""The subcommands of ``kvtiers``, which work on a deployment's storage without an engine."""
