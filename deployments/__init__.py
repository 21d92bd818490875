"""What runs in Ray actors: engine replicas, router, vLLM's scheduler hook. Decisions live in `policies`."""
