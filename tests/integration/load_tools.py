"""Other load generators on the same traffic as ours: each returns the medians of TTFT and TPOT that it reports, in ms.

They run with their own defaults but for the traffic. Their packages would move pinned ones, so each is in a virtual
environment of its own, which is kept in pytest's cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from app.model import default_model_path

from .servers import MODEL, ROOT

# The command `vllm` needs a package of that name; the module does not.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
GUIDELLM, INFERENCE_PERF = "guidellm==0.8.1", "inference-perf==0.7.0"
INFERENCE_PERF_PYTHON = (3, 12)  # the least that it runs on
DONE_WITHIN_S, INSTALLED_WITHIN_S = 240.0, 400.0

Medians = dict[str, float]


class Traffic(NamedTuple):
    """Completions at a steady rate (1/s), all with as many prompt and answer tokens."""

    requests: int
    rate: float
    prompt: int
    answer: int
    seed: int = 0


def ours(url: str, secret: str, traffic: Traffic, folder: Path, cache: Path) -> Medians:
    """`python -m loadgen run`."""
    out = folder / "ours"
    _run(
        [
            *(sys.executable, "-m", "loadgen", "run", url, "--model", MODEL, "--api", "completions"),
            *("--requests", str(traffic.requests), "--arrivals", f"gamma:rate={traffic.rate},cv=0"),
            *("--lengths", f"fixed:prompt={traffic.prompt},answer={traffic.answer}", "--out", str(out)),
            *("--seed", str(traffic.seed)),
        ],
        OPENAI_API_KEY=secret,
    )
    found = json.loads((out / "run.json").read_text())
    assert found["completed"] == traffic.requests
    return {"ttft": found["median_ttft_ms"], "tpot": found["median_tpot_ms"]}


def bench_serve(url: str, secret: str, traffic: Traffic, folder: Path, cache: Path) -> Medians:
    """`vllm bench serve`; so large a burstiness makes its gaps equal."""
    _run(
        [
            *(sys.executable, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", url, "--model", MODEL),
            *("--endpoint", "/v1/completions", "--tokenizer", str(default_model_path()), "--dataset-name", "random"),
            *("--random-input-len", str(traffic.prompt), "--random-output-len", str(traffic.answer), "--ignore-eos"),
            *("--num-prompts", str(traffic.requests), "--request-rate", str(traffic.rate), "--burstiness", "1e6"),
            *("--seed", str(traffic.seed)),
            *("--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(folder)),
            *("--result-filename", "bench.json"),
        ],
        OPENAI_API_KEY=secret,
    )
    found = json.loads((folder / "bench.json").read_text())
    assert found["completed"] == traffic.requests
    return {"ttft": found["median_ttft_ms"], "tpot": found["median_tpot_ms"]}


def guidellm(url: str, secret: str, traffic: Traffic, folder: Path, cache: Path) -> Medians:
    """`guidellm run`; what others call TPOT, without the first token, it calls inter-token latency."""
    python = installed(cache, GUIDELLM, sys.executable, beside=Path(sysconfig.get_paths()["purelib"]))
    backend = {"kind": "openai_http", "target": url, "model": MODEL, "api_key": secret}
    out = folder / "guidellm.json"
    _run(
        [
            *(str(python), "-m", "guidellm", "run"),
            *("--backend", json.dumps({**backend, "request_format": "/v1/completions"})),
            *("--data", f"kind=synthetic_text,prompt_tokens={traffic.prompt},output_tokens={traffic.answer}"),
            *("--tokenizer", f"kind=huggingface_auto,model={default_model_path()}"),
            *("--profile", f"kind=constant,rate={traffic.rate}"),
            *("--seed", f"kind=static,value={traffic.seed}"),
            *("--constraint", f"kind=max_requests,count={traffic.requests}", "--output", f"kind=json,path={out}"),
        ],
    )
    (found,) = json.loads(out.read_text())["benchmarks"]
    metrics: dict[str, Any] = found["metrics"]
    assert metrics["request_totals"]["successful"] == traffic.requests
    names = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms"}
    return {ours: metrics[theirs]["successful"]["median"] for ours, theirs in names.items()}


def inference_perf(url: str, secret: str, traffic: Traffic, folder: Path, cache: Path) -> Medians:
    """`inference-perf`, which tells seconds."""
    python = installed(cache, INFERENCE_PERF, newer_python(INFERENCE_PERF_PYTHON))
    lengths = {
        name: {"min": n, "max": n, "mean": n, "std_dev": 0, "total_count": traffic.requests}
        for name, n in (("input_distribution", traffic.prompt), ("output_distribution", traffic.answer))
    }
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", **lengths},
        "load": {
            "type": "constant",
            "stages": [{"rate": traffic.rate, "duration": round(traffic.requests / traffic.rate)}],
            "num_workers": 1,
            "base_seed": traffic.seed,
        },
        "server": {"type": "vllm", "model_name": MODEL, "base_url": url, "ignore_eos": True, "api_key": secret},
        # Else it counts the tokens of the text, which need not be those that were sampled.
        "report": {"request_lifecycle": {"use_server_output_tokens": True}},
        "tokenizer": {"pretrained_model_name_or_path": str(default_model_path())},
        "storage": {"local_storage": {"path": str(folder / "reports")}},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    _run([str(python.with_name("inference-perf")), "--config_file", str(folder / "config.yml")])
    found = json.loads((folder / "reports" / "summary_lifecycle_metrics.json").read_text())["successes"]
    assert found["count"] == traffic.requests
    names = {"ttft": "time_to_first_token", "tpot": "time_per_output_token"}
    return {ours: found["latency"][theirs]["median"] * 1e3 for ours, theirs in names.items()}


def installed(cache: Path, package: str, python: str, beside: Path | None = None) -> Path:
    """Python of a virtual environment with that package, made if there is none yet.

    `beside`: packages of another environment that it sees where it has none of its own. Skips the test if the package
    cannot be had here.
    """
    home = cache / package
    made = home / "bin" / "python"
    whole = home / "whole"
    if not whole.exists():
        shutil.rmtree(home, ignore_errors=True)
        _run([python, "-m", "venv", "--without-pip", str(home)])
        if beside is not None:
            (site,) = home.glob("lib/python3*/site-packages")
            (site / "beside.pth").write_text(f"{beside}\n")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(made), "install", "--quiet", package],
            capture_output=True,
            text=True,
            timeout=INSTALLED_WITHIN_S,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"{package} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
        whole.touch()
    return made


def newer_python(least: tuple[int, int]) -> str:
    """A Python of at least that version: this one, one on the path, or one installed beside this one."""
    minors = range(least[1], least[1] + 4)
    found = [sys.executable, *(path for minor in minors if (path := shutil.which(f"python3.{minor}")))]
    found += map(str, sorted(Path(sys.base_prefix).parent.glob("3.*/bin/python3")))
    for python in found:
        test = f"import sys; sys.exit(sys.version_info < {least})"
        if subprocess.run([python, "-c", test], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"no Python {least[0]}.{least[1]} or newer here")


def _run(command: Sequence[str], **env: str) -> None:
    told = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **env}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=DONE_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
