"""Tests with the real packages of SGLang and LMCache: ``make test-engines``. They skip where these are missing."""
