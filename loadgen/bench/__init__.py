"""Benchmarks: each is a module that satisfies `loadgen.cli.Bench`, and is listed there.

Modules import vLLM, Ray and the like inside their functions, so that listing the names takes no time.
"""
