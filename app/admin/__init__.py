"""The fleet's status page and the actions on it, on a port of their own. Imports neither vLLM nor torch."""
