"""The three ways into vLLM. The only package here that imports vllm.

``connector.vllm.tier`` puts our tiers behind vLLM's own TieringOffloadingSpec, ``connector.vllm.spec`` is a spec of
our own in vLLM's OffloadingConnector, ``connector.vllm.shared_storage`` is a connector of its own.

Importing any of them checks vLLM's version first: another version may lack the very names that they import.
"""

from connector.vllm.versions import check_version

check_version()
