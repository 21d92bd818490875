"""Every decision of the fleet, pure: no Ray, no vLLM, no clock, no random numbers of its own, no I/O."""
