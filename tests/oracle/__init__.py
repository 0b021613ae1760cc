"""Parity with transformers, the oracle."""
