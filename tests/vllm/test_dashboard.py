"""The metrics of vLLM's own that the dashboard shows exist in the installed vLLM."""

from __future__ import annotations

import inspect

from tests.connector.commands.test_dashboards import OF_VLLM


def test_dashboard_queries_only_metrics_that_vllm_has() -> None:
    from vllm.v1.metrics import loggers
    from vllm.v1.metrics.stats import PromptTokenStats

    source = inspect.getsource(loggers)
    for name, series in OF_VLLM.items():
        plain = name.removesuffix("_total")
        assert f'name="{plain}"' in source
        assert {labels["source"] for labels in series if "source" in labels} <= set(PromptTokenStats.ALL_SOURCES)
    assert 'labelnames = ["model_name", "engine"]' in source
