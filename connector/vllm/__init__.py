"""The ways into vLLM. Besides ``kvtiers.vllm``, which names them for vLLM, the only place that imports vllm.

``connector`` is the door for two of them: ``spec`` is a spec of kvtiers' own, and ``tier`` puts tiers behind vLLM's own
TieringOffloadingSpec. ``prefixes.connector`` is a connector of its own.

Importing any of them checks first that vLLM has what they use: another release may lack the very names they import.
"""

from kvtiers.connector.vllm.contract import check_contract

check_contract()
