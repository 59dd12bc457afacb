"""The engine side: the CPU region, copies between it and KV tensors, the vLLM integrations, and the commands."""

if __name__ != "kvtiers.connector":  # imported as a top-level package, each of its modules could be loaded twice
    raise ImportError("import kvtiers.connector")
