"""Tests of `policies`: definitions, bounds and invariants; no engine, no Ray."""
