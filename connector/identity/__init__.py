"""Decides which of an engine's options and files belong to its namespace. Knows no engine: the tables are handed in.

- ``options``: walks an engine's config objects, and converts values to plain ones that are equal in every process.
- ``model_files``: digests of a model's files, of a hub commit, and of values.
- ``weight_files``: where a file of weights has its headers and tensors.

``connector.vllm.identity`` and ``connector.vllm.weights`` have vLLM's tables, and facts that vLLM keeps outside its
config objects.
"""
