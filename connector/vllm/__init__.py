"""The ways into vLLM. With ``connector.vllm_plugin``, the only place that imports vllm.

``connector.vllm.connector`` is the door for two of them: ``connector.vllm.spec`` is a spec of kvtiers' own, and
``connector.vllm.tier`` puts tiers behind vLLM's own TieringOffloadingSpec. ``connector.vllm.shared_storage`` is a
connector of its own.

Importing any of them checks first that vLLM has what they use: another release may lack the very names they import.
"""

from connector.vllm.contract import check_contract

check_contract()
