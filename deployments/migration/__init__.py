"""Live migration on a replica: the engine's KV blocks, the two executors of the hand-shake, the drain.

The rules are in policies/migration/; here is what carries them out.
"""
