"""The three ways into vLLM. The only package here that imports vllm.

``connector.vllm.tier`` puts our tiers behind vLLM's own TieringOffloadingSpec, ``connector.vllm.spec`` is a spec of
our own in vLLM's OffloadingConnector, ``connector.vllm.shared_storage`` is a connector of its own.
"""
