"""Prompt texts of a workload: about one token a word, equal leading blocks give equal leading text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loadgen.lengths import words
from loadgen.workloads.workload import Workload

FRESH = 1  # random streams of text that is a request's own, and of shared blocks
SHARED = 2


def texts(workload: Workload, seed: int = 0, less: int = 0) -> Iterator[str | None]:
    """The text of each request in turn; None where its body brings its own prompt.

    `less` tokens are left out of each (at least one word stays): what the server's chat template adds.
    """
    known: dict[int, str] = {}
    for i, request in enumerate(workload.requests):
        if request.text is not None:
            yield request.text
        elif "messages" in request.body or "prompt" in request.body:
            yield None
        else:
            count = max(1, request.prompt_tokens - less)
            parts = []
            for block in request.blocks:
                if block not in known:
                    known[block] = words(workload.block_tokens, np.random.default_rng([SHARED, seed, block]))
                parts.append(known[block])
            have = len(request.blocks) * workload.block_tokens
            if have < count:
                parts.append(words(count - have, np.random.default_rng([FRESH, seed, i])))
            text = " ".join(parts)
            yield text if have <= count else " ".join(text.split(" ", count)[:count])
