"""`vllm bench serve` and our client on the same server: the same names, and figures that agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.run import results
from tests.loadgen.run.fake_server import FakeServer

# The command `vllm` needs a package of that name; the module does not.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PAUSE = 0.1  # s before each token
AGREE = 0.2  # share by which medians may differ: other work on the machine comes and goes


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of a few words, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[UNK]", *(f"w{i}" for i in range(200))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_figures_agree_with_bench_serve(tokenizer: Path, tmp_path: Path) -> None:
    """Both see the server's pace: medians of TTFT, TPOT, ITL and E2E agree, and none of its keys is missing in ours."""
    server = FakeServer(lambda body, headers: {"pause": PAUSE})
    with server.in_thread() as url:
        options = [
            *("--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", "fake"),
            *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "20"),
            *("--random-output-len", "8", "--num-prompts", "40", "--request-rate", "8", "--save-result"),
            *("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "bench.json"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--ready-check-timeout-sec", "0"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", BENCH, *options], capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        model = ["--requests", "40", "--arrivals", "poisson:rate=8", "--lengths", "fixed:prompt=20,answer=8"]
        assert main(["run", url, *model, "--save-detailed", "--out", str(tmp_path / "ours")]) == 0
    theirs = json.loads((tmp_path / "bench.json").read_text())
    ours = json.loads((tmp_path / "ours" / results.RUN).read_text())
    assert theirs.keys() - ours.keys() == set()
    assert (ours["completed"], ours["total_output_tokens"]) == (theirs["completed"], theirs["total_output_tokens"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        key = f"median_{name}_ms"
        assert ours[key] == pytest.approx(theirs[key], rel=AGREE), key
