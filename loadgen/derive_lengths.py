"""Make the length tables from the public trace files: `python -m loadgen.derive_lengths --chat CSV --code CSV`.

The CSV files (columns TIMESTAMP, ContextTokens, GeneratedTokens) are not part of this repository; only the quantiles
computed from them are, with the credit that their licence asks for.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loadgen.lengths import TABLES

CREDIT = {
    "credit": 'Azure LLM inference traces 2023; P. Patel et al., "Splitwise: Efficient Generative LLM Inference Using '
    'Phase Splitting", ISCA 2024',
    "source": "https://github.com/Azure/AzurePublicDataset",
    "licence": "CC-BY 4.0, https://creativecommons.org/licenses/by/4.0/",
    "changes": "quantiles computed from AzureLLMInferenceTrace_conv.csv (chat) and AzureLLMInferenceTrace_code.csv "
    "(code) by loadgen/derive_lengths.py; tokens, linear interpolation between the knots",
}
TAIL = (0.995, 0.998, 0.999, 0.9995)  # without them interpolation up to the maximum lifts the mean by 3 %
PERCENTILES = tuple(round(i / 100, 2) for i in range(101))
OUTPUT_KNOTS = (0.0, 0.01, 0.02, *(round(0.05 * i, 2) for i in range(1, 20)), 0.97, 0.98, 0.99, 0.995, 1.0)
CLASSES = {"chat": 20, "code": 1}  # answers to code prompts do not depend on the prompt's length


def read_trace(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(prompt, answer) lengths in tokens, in the file's order."""
    with path.open(newline="") as f:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(f)]
    data = np.asarray(rows, dtype=np.int64)
    return data[:, 0], data[:, 1]


def derive(prompts: npt.NDArray[np.int64], answers: npt.NDArray[np.int64], classes: int) -> dict[str, Any]:
    """Quantile table of one trace; answers by `classes` equally large classes of prompt length."""
    p_input = sorted({*PERCENTILES, *TAIL})
    p_output = sorted({*PERCENTILES, *TAIL}) if classes == 1 else list(OUTPUT_KNOTS)
    by_length = answers[np.argsort(prompts, kind="stable")]
    return {
        "trace": {
            "requests": len(prompts),
            "mean_input": round(float(prompts.mean()), 2),
            "mean_output": round(float(answers.mean()), 2),
        },
        "p_input": p_input,
        "q_input": [int(q) for q in np.rint(np.quantile(prompts, p_input))],
        "p_output": p_output,
        "q_output_by_input_bin": [
            [int(q) for q in np.rint(np.quantile(part, p_output))] for part in np.array_split(by_length, classes)
        ],
    }


def write(tables: dict[str, Any], path: Path = TABLES) -> None:
    """Write the tables, one array a line, so that a change shows as a small difference."""
    blocks = []
    for name, t in tables.items():
        rows = ",\n    ".join(json.dumps(row) for row in t["q_output_by_input_bin"])
        lines = [f'   "{key}": {json.dumps(t[key])}' for key in ("trace", "p_input", "q_input", "p_output")]
        lines.append(f'   "q_output_by_input_bin": [\n    {rows}]')
        blocks.append(f'  "{name}": {{\n' + ",\n".join(lines) + "}")
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in CREDIT.items())
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + head + ' "tables": {\n' + ",\n".join(blocks) + "}}\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chat", type=Path, required=True, help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--code", type=Path, required=True, help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--out", type=Path, default=TABLES)
    args = parser.parse_args()
    write({name: derive(*read_trace(getattr(args, name)), CLASSES[name]) for name in ("chat", "code")}, args.out)
    print(f"wrote {args.out} ({args.out.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
