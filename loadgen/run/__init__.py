"""The open-loop client: replay a workload against an OpenAI-compatible server and say how it went."""
