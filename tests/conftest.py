import pytest

pytest.register_assert_rewrite("tiers.testing.contract")
