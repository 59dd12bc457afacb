"""The vLLM integrations. Only this package and ``kvtiers.vllm``, which names the classes for vLLM, import vllm.

- ``connector``: KVTiersConnector. It uses ``spec`` (kvtiers' own offloading spec) or ``tier`` (kvtiers' tiers behind
  vLLM's own TieringOffloadingSpec).
- ``shared_storage``: SharedStorageConnector. It uses ``ranks`` (a tier of each rank).

Importing any of these modules first checks that the installed vLLM has everything that kvtiers uses: another release
may lack the very names that these modules import.
"""

from .contract import check_contract

check_contract()
