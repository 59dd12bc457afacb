"""The engine's side: the CPU region, the copies between it and KV tensors, the ways into vLLM, and the commands."""

if __name__ != "kvtiers.connector":  # as a package of its own, each of its modules could be loaded twice
    raise ImportError("import kvtiers.connector")
