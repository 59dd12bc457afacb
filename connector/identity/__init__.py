"""Decides which options of an engine belong to its namespace. Knows no engine: the tables are handed in.

- ``options``: walks an engine's config objects, and converts values to plain ones that are equal in every process.

``connector.vllm.identity`` has vLLM's tables and what vLLM keeps outside its config objects.
"""
