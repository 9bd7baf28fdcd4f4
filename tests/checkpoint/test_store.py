"""Our own format: what is saved comes back; what is damaged, hostile or not allowed is refused by name, quickly."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import qkv
from qkv.checkpoint.store import (
    FORMAT_VERSION,
    DamagedError,
    load_checkpoint,
    read_state,
    save_checkpoint,
    sha256_of,
)
from qkv.config.errors import ConflictError, NotFoundError, PermissionNeededError, QkvError
from qkv.config.run import Config
from qkv.nn.transformer import Transformer
from qkv.tokenizer import Tokenizer

WEIGHT = "decoder.blocks.1.feed_forward.function.up.weight"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([], kind="byte")


def configure(**changes: Any) -> Config:
    model = {
        "vocab_size": 260,
        "max_seq_len": 16,
        "d_model": 32,
        "num_layers": 2,
        "attention": {"num_heads": 2},
        "feed_forward": {"d_ff": 48},
        **changes,
    }
    return Config.model_validate({"model": model, "tokenizer": {"kind": "byte"}}, context={"allow": ("*",)})


def build(config: Config) -> Transformer:
    return Transformer(config.model, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint as training leaves it."""
    config = configure()
    training = {"optimizer/x/step": torch.tensor(3.0), "generator/cpu": torch.get_rng_state()}
    save_checkpoint(tmp_path / "saved", build(config), config, tokenizer, training=training, state={"step": 3})
    return tmp_path / "saved"


def seal(folder: Path, **changes: Any) -> Path:
    """Make state.json true of the files as they are now: what a stranger, not an accident, would do."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in folder.rglob("*")
        if path.is_file() and path.name != "state.json"
    }
    state = {"format_version": FORMAT_VERSION, "files": files, **changes}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return seal(folder)


def refused(folder: Path, kind: type[QkvError] = QkvError) -> QkvError:
    """The error of a load that must fail as one of ours, and soon."""
    began = time.monotonic()
    with pytest.raises(kind) as error:
        load_checkpoint(folder)
    assert time.monotonic() - began < 5
    assert len(str(error.value)) < 2000
    return error.value


# --- what is saved comes back -----------------------------------------------------------------------------------------


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt-2": {"position": {"kind": "learned"}, "norm": {"kind": "layernorm"}, "tie_embeddings": "head"},
    "2017": {"family": "encoder-decoder", "tie_embeddings": "all", "position": {"kind": "sinusoidal"}},
    "bert": {"family": "encoder", "embedding": {"norm": True, "num_segments": 2}, "position": {"kind": "learned"}},
    "t5": {"family": "encoder-decoder", "tie_embeddings": "source-target", "position": {"kind": "none"}},
    "no residual": {"residual": {"kind": "none"}, "attention": {"num_heads": 2, "num_kv_heads": 1, "window": 4}},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_loaded_model_computes_what_the_saved_one_did(model: dict[str, Any], tmp_path: Path, tokenizer: Any) -> None:
    config = configure(**model)
    network = build(config).eval()
    save_checkpoint(tmp_path / "model", network, config, tokenizer)
    loaded = load_checkpoint(tmp_path / "model")
    ids = torch.randint(0, 260, (2, 9), generator=torch.Generator().manual_seed(0))
    source = {"source": ids.flip(1)} if config.model.family == "encoder-decoder" else {}
    assert torch.equal(loaded.network.eval()(ids, **source), network(ids, **source))
    assert loaded.config == config
    assert loaded.path == tmp_path / "model"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert all(parameter.device.type == "cpu" for parameter in loaded.network.parameters())


@pytest.mark.parametrize("tie", ["head", "source-target", "all"])
def test_tied_weights_are_saved_once_and_come_back_tied(tie: str, tmp_path: Path) -> None:
    config = configure(family="encoder-decoder", tie_embeddings=tie)
    network = build(config)
    save_checkpoint(tmp_path / "model", network, config)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == sum(p.numel() for p in network.parameters())
    loaded = load_checkpoint(tmp_path / "model").network
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in network.parameters())
    decoder = loaded.decoder_embedding.input.weight
    assert (loaded.head.weight is decoder) == (tie in ("head", "all"))
    assert (loaded.encoder_embedding.input.weight is decoder) == (tie in ("source-target", "all"))


def test_strided_weights_can_be_saved(tmp_path: Path) -> None:
    config = configure()
    network = build(config)
    for parameter in network.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    save_checkpoint(tmp_path / "model", network, config)
    loaded = dict(load_checkpoint(tmp_path / "model").network.named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in network.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_come_back_in_the_precision_they_were_saved_in(dtype: torch.dtype, tmp_path: Path) -> None:
    config = configure()
    save_checkpoint(tmp_path / "model", build(config).to(dtype), config)
    assert {parameter.dtype for parameter in load_checkpoint(tmp_path / "model").network.parameters()} == {dtype}


def test_weights_are_put_where_torch_would_put_them(tmp_path: Path) -> None:
    """Kernels round otherwise at another alignment, and in a file a tensor follows the one before it without a gap."""
    config = configure(family="encoder", head={"kind": "classifier", "num_classes": 3}, attention={"bias": True})
    save_checkpoint(tmp_path / "model", build(config), config)
    raw = load_file(tmp_path / "model/model.safetensors")
    assert any(tensor.data_ptr() % 64 for tensor in raw.values()), "or there is nothing to hold"
    network = load_checkpoint(tmp_path / "model").network
    assert not any(parameter.data_ptr() % 64 for parameter in network.parameters())


def test_sources_keep_a_tokenizer_of_their_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = configure(family="encoder-decoder", encoder={"vocab_size": 12})
    letters = Tokenizer.train("abcde", kind="char")
    save_checkpoint(tmp_path / "model", build(config), config, tokenizer, source_tokenizer=letters)
    loaded = load_checkpoint(tmp_path / "model")
    assert loaded.tokenizer is not None
    assert loaded.source_tokenizer is not None
    assert (loaded.tokenizer.fingerprint, loaded.source_tokenizer.fingerprint) == (
        tokenizer.fingerprint,
        letters.fingerprint,
    )
    assert qkv.load(tmp_path / "model").source_tokenizer.encode("abc") == letters.encode("abc")
    shutil.rmtree(tmp_path / "model/source-tokenizer")
    assert "source-tokenizer/tokenizer.json is missing" in refused(tmp_path / "model", DamagedError).what
    save_checkpoint(tmp_path / "shared", build(config), config, letters)
    assert load_checkpoint(tmp_path / "shared").source_tokenizer is None


def test_a_tokenizer_with_more_ids_than_its_stack_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = configure(family="encoder-decoder", encoder={"vocab_size": 12})
    save_checkpoint(tmp_path / "model", build(config), config, tokenizer)
    assert "has 260 ids and the model's vocabulary 12" in refused(tmp_path / "model", DamagedError).what
    save_checkpoint(
        tmp_path / "pair", build(config), config, tokenizer, source_tokenizer=Tokenizer.train("abcdefghij", kind="char")
    )
    assert "the model's vocabulary 12" in refused(tmp_path / "pair", DamagedError).what


def test_loading_changes_no_file_and_the_model_does_not_lean_on_them(saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    network = load_checkpoint(saved).network
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1.0
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    shutil.rmtree(saved)
    assert all(torch.isfinite(parameter).all() for parameter in network.parameters())


def test_a_model_without_a_tokenizer_loads(tmp_path: Path) -> None:
    config = configure()
    save_checkpoint(tmp_path / "model", build(config), config)
    assert not (tmp_path / "model" / "tokenizer").exists()
    assert load_checkpoint(tmp_path / "model").tokenizer is None
    assert qkv.load(tmp_path / "model").tokenizer is None


def test_model_save_writes_what_load_reads(saved: Path, tmp_path: Path) -> None:
    model = qkv.load(saved)
    model.save(tmp_path / "deep" / "copy")
    again = qkv.load(tmp_path / "deep" / "copy")
    other = dict(again.network.named_parameters())
    assert all(torch.equal(parameter, other[name]) for name, parameter in model.network.named_parameters())
    assert again.config == model.config
    assert not (tmp_path / "deep" / "copy" / "training.safetensors").exists()


def test_saving_never_overwrites(saved: Path) -> None:
    model = qkv.load(saved)
    with pytest.raises(ConflictError):
        model.save(saved)
    other = saved.with_name("notes")
    other.mkdir()
    with pytest.raises(ConflictError):
        model.save(other)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["notes", "saved"]


def test_saving_where_no_folder_can_be_made_is_one_clear_error(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(QkvError, match=r"the checkpoint could not be written: Not a directory\n  at .*file/model"):
        qkv.load(saved).save(tmp_path / "file" / "model")


def test_the_state_tells_size_and_digest_of_every_other_file(saved: Path) -> None:
    state = read_state(saved)
    assert (state["format_version"], state["step"]) == (FORMAT_VERSION, 3)
    found = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert found == {*state["files"], "state.json"}
    for name, told in state["files"].items():
        assert told == {"bytes": (saved / name).stat().st_size, "sha256": sha256_of(saved / name)}


# --- damage -----------------------------------------------------------------------------------------------------------


FILES = [
    "config.yaml",
    "model.safetensors",
    "training.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
]


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_damage_and_the_file_is_named(file: str, saved: Path) -> None:
    content = bytearray((saved / file).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / file).write_bytes(content)
    error = refused(saved, DamagedError)
    assert error.what == f"{file} is not what was written"
    assert error.where == str(saved / file)


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_off_is_damage_and_is_named(file: str, saved: Path) -> None:
    content = (saved / file).read_bytes()
    (saved / file).write_bytes(content[:-1])
    assert refused(saved, DamagedError).what == f"{file} is not what was written"


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(file: str, saved: Path) -> None:
    (saved / file).unlink()
    assert refused(saved, DamagedError).what == f"the checkpoint's {file} is missing"


def test_a_missing_tokenizer_folder_is_named(saved: Path) -> None:
    shutil.rmtree(saved / "tokenizer")
    assert "tokenizer/tokenizer.json is missing" in refused(saved, DamagedError).what


def test_parts_of_two_checkpoints_are_not_mixed(saved: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = configure()
    other = Transformer(config.model, generator=torch.Generator().manual_seed(4))
    save_checkpoint(tmp_path / "other", other, config, tokenizer)
    shutil.copy(tmp_path / "other" / "model.safetensors", saved / "model.safetensors")
    assert refused(saved, DamagedError).what == "model.safetensors is not what was written"


def test_a_folder_without_a_state_is_no_checkpoint(saved: Path) -> None:
    (saved / "state.json").unlink()
    assert "state.json is missing" in refused(saved, DamagedError).what
    with pytest.raises(NotFoundError, match=r"state\.json, written last, is missing"):
        read_state(saved)


# --- tensors that do not belong ---------------------------------------------------------------------------------------


def test_every_missing_and_unexpected_tensor_is_named(saved: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[WEIGHT], tensors["head.weight"]
        tensors |= {"stranger.weight": torch.ones(2), "another.bias": torch.ones(2)}

    what = refused(change_weights(saved, change), DamagedError).what
    assert f"missing: {WEIGHT}, head.weight" in what
    assert "unexpected: another.bias, stranger.weight" in what


def test_every_tensor_of_another_shape_is_named_with_both_shapes(saved: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT][:40].clone()
        tensors["head.weight"] = tensors["head.weight"].flatten()

    what = refused(change_weights(saved, change), DamagedError).what
    assert f"{WEIGHT} has shape [40, 32], expected [48, 32]" in what
    assert "head.weight has shape [8320], expected [260, 32]" in what


def test_a_head_that_is_absent_is_the_embedding_only_when_tied(tmp_path: Path) -> None:
    for tie in ("none", "head"):
        config = configure(tie_embeddings=tie)
        save_checkpoint(tmp_path / tie, build(config), config)
    assert "head.weight" not in load_file(tmp_path / "head" / "model.safetensors")
    change_weights(tmp_path / "none", lambda tensors: tensors.pop("head.weight"))
    assert "missing: head.weight" in refused(tmp_path / "none").what


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers_are_damage(dtype: torch.dtype, saved: Path) -> None:
    change_weights(saved, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(dtype)}))
    assert f"{WEIGHT} holds {dtype}" in refused(saved, DamagedError).what


def header(text: str) -> bytes:
    """A safetensors file with this header and four bytes of weights."""
    return struct.pack("<Q", len(text)) + text.encode() + b"1234"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        header("{}"),
        header("[]"),
        header('{"head.weight": {"dtype": "F32", "shape": [9999999999, 9999], "data_offsets": [0, 4]}}'),
        header('{"head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99999999999]}}'),
        header('{"head.weight": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}'),
        header("{" * 10_000),
        pickle.dumps({"head.weight": 1}),
    ],
)
def test_hostile_weight_files_are_a_quick_clear_error(content: bytes, saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(content)
    assert "the weights" in refused(seal(saved), DamagedError).what


# --- hostile state and configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '"format_version"',
        '{"format_version": 1}',
        '{"format_version": 1, "files": null}',
        '{"format_version": 1, "files": [1]}',
        '{"format_version": 1, "files": {"config.yaml": 3}}',
        '{"format_version": 1, "files": {"config.yaml": {}}}',
        '{"format_version": 1, "files": {"config.yaml": {"bytes": 1}}}',
        '{"format_version": 1, "files": {"config.yaml": [1, 2]}}',
        "[" * 100_000,
        '{"format_version": 1, "files": {',
        "\x00\x01\xff",
    ],
)
def test_a_hostile_state_is_called_damaged(text: str, saved: Path) -> None:
    (saved / "state.json").write_bytes(text.encode("latin-1"))
    error = refused(saved, DamagedError)
    assert error.what.startswith("state.json is damaged")
    assert error.where == str(saved / "state.json")


def test_files_outside_the_folder_are_not_waited_for(saved: Path) -> None:
    seal(saved, files={"/dev/zero": {"bytes": 0, "sha256": ""}, "../../etc": {"bytes": 0, "sha256": ""}})
    assert "missing" in refused(saved, DamagedError).what


@pytest.mark.parametrize("version", [2, 99, 0, "1", None, [1]])
def test_another_format_is_told_from_damage_with_both_versions(version: Any, saved: Path) -> None:
    """Whatever else that format holds."""
    (saved / "state.json").write_text(json.dumps({"format_version": version, "parts": 3}), encoding="utf-8")
    error = refused(saved)
    assert not isinstance(error, DamagedError)
    assert f"format {version}" in error.what
    assert "reads 1" in error.what
    assert "version of qkv" in (error.hint or "")


HUGE = 10**18


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a list",
        "model: 3",
        "model: {num_layers: 1000000000}",
        "model: {num_layers: 0}",
        "model: {d_model: -1}",
        "model: {attention: {num_heads: 0}}",
        "model: {vocab_size: 1.5}",
        f"model: {{vocab_size: {HUGE}, d_model: 64, attention: {{num_heads: 1}}}}",
        f"model: {{vocab_size: 9, max_seq_len: {HUGE}, position: {{kind: learned}}}}",
        f"model: {{vocab_size: 9, d_model: {HUGE}, attention: {{num_heads: 1}}}}",
        f"model: {{vocab_size: 9, layers: [{{repeat: {HUGE}}}]}}",
        "model: {vocab_size: 300}",
        "model: {vocab_size: 260, surprise: 1}",
        "model: {vocab_size: 260, norm: {kind: no-such-norm}}",
        "model: [",
        "extends: config.yaml",
        "extends: no-such-file",
        "model: !!python/object/apply:os.system ['touch ran']",
        "\u2028",
    ],
)
def test_a_hostile_configuration_is_a_quick_clear_error(
    text: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved.parent)
    (saved / "config.yaml").write_text(text, encoding="utf-8")
    error = refused(seal(saved))
    assert error.where is not None or error.hint is not None
    assert not Path("ran").exists()


# --- no code from models ----------------------------------------------------------------------------------------------

STRANGER = """
import sys
from typing import ClassVar
from qkv.config import NormConfig

sys.stranger_ran = True

class ScaledNormConfig(NormConfig):
    factor: float = 2.0
    module: ClassVar[str] = "{name}:ScaledNorm"

def ScaledNorm(config, dims):
    import torch

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x * config.factor

    return Scaled()
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package that tells when its code runs."""
    name = f"stranger_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(STRANGER.format(name=name), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "stranger_ran", False, raising=False)
    return name


def test_a_part_of_a_third_party_is_refused_by_name_before_its_code_runs(
    stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(norm={"kind": f"{stranger}:ScaledNormConfig", "factor": 0.5})
    network = build(config).eval()
    save_checkpoint(tmp_path / "model", network, config)
    del sys.modules[stranger]
    monkeypatch.setattr(sys, "stranger_ran", False)
    for allow in ((), ("os",), ("strange",), (f"{stranger}.deeper",)):
        with pytest.raises(PermissionNeededError, match=rf"code of the package `{stranger}`, which is not allowed"):
            load_checkpoint(tmp_path / "model", allow=allow)
    with pytest.raises(PermissionNeededError, match=f"--allow-package {stranger}"):
        qkv.load(tmp_path / "model")
    assert not sys.stranger_ran  # type: ignore[attr-defined]
    assert stranger not in sys.modules
    ids = torch.arange(6)[None]
    loaded = load_checkpoint(tmp_path / "model", allow=(stranger,)).network.eval()
    assert torch.equal(loaded(ids), network(ids))
    assert torch.equal(qkv.load(tmp_path / "model", allow=[stranger]).network(ids), network(ids))


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (exec, ("import sys; sys.stranger_ran = True",))

    for name in ("pytorch_model.bin", "training.pt", "tokenizer/tokenizer.pkl", "optimizer.pkl"):
        (saved / name).write_bytes(pickle.dumps(Bomb()))
    monkeypatch.setattr(sys, "stranger_ran", False, raising=False)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    load_checkpoint(seal(saved))
    qkv.load(saved)
    assert not sys.stranger_ran  # type: ignore[attr-defined]
