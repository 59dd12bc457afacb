"""Keep KV blocks in local files, NFS, S3 or any fsspec URL. Imports neither vLLM nor torch. Read ``store`` first."""

if __name__ != "kvtiers.tiers":  # under a second name, each module could be loaded twice and have two states
    raise ImportError("import kvtiers.tiers")
