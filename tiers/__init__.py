"""KV blocks in local files, NFS, S3 and any fsspec URL. Imports neither vLLM nor torch. Start reading at ``store``."""

if __name__ != "kvtiers.tiers":  # as a package of its own, each of its modules could be loaded twice, with two states
    raise ImportError("import kvtiers.tiers")
