"""`qkv show`, `presets`, `new`, and the frame of the command line."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv.checkpoint.save_hf import save_hf
from qkv.cli import main
from qkv.config import Config
from qkv.config.load import preset_names
from qkv.inspect.summary import sized, summarise


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys\nfrom qkv.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'pydantic', 'numpy', 'yaml', 'rich') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in output


@pytest.mark.parametrize("command", ["show", "presets", "new", "demo"])
def test_help_of_a_command_imports_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom qkv.cli import main\n"
        f"try:\n    main(['{command}', '--help'])\nexcept SystemExit: pass\n"
        "print('heavy:', [m for m in ('torch', 'pydantic') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "heavy: []" in output


def test_importing_qkv_imports_no_torch() -> None:
    code = "import sys, qkv; print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_importing_the_configuration_imports_no_torch() -> None:
    code = "import sys; from qkv.config import Config; Config.load('llama-tiny'); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_show_json_has_the_promised_keys(capsys) -> None:
    code, out, _ = run(capsys, "show", "llama-tiny", "model.num_layers=2", "--json")
    shown = json.loads(out)
    assert code == 0
    assert {
        "family",
        "params",
        "params_embedding",
        "params_active",
        "flops_per_token_forward",
        "kv_cache_bytes_per_token",
        "train_state_bytes",
        "parameter_groups",
        "config",
    } <= set(shown)
    network = qkv.Transformer(Config.load("llama-tiny", "model.num_layers=2").model)
    assert shown["params"] == sum(p.numel() for p in network.parameters())
    assert shown["kv_cache_bytes_per_token"] == 2 * 2 * 2 * 64 * 2  # layers, k and v, kv heads, head_dim, bytes
    assert shown["train_state_bytes"] == 16 * shown["params"]
    groups = [line.split(" tensors, ")[1].split(" values")[0] for line in shown["parameter_groups"]]
    assert sum(int(size.replace(",", "")) for size in groups) == shown["params"]
    assert len(shown["config"]["model"]["layers"]) == 2


NO_MODEL = ("sentiment-finetune",)
"""Presets for `qkv finetune`, whose model is the trained one."""


@pytest.mark.parametrize("name", [name for name in preset_names() if name not in NO_MODEL])
def test_show_draws_every_preset_of_a_model(name: str, capsys) -> None:
    code, out, err = run(capsys, "show", name)
    assert code == 0, err
    model, _ = sized(Config.load(name))
    assert f"{summarise(model).params:,}" in out
    drawn = re.findall(r"│ (?:(\d+) x )?block ", out)  # layers that follow each other and are alike, once
    assert sum(int(count or 1) for count in drawn) == sum(stack.num_layers for stack in model.stacks.values())


@pytest.mark.parametrize(
    ("name", "assumed"),
    [
        ("vit-tiny", {"model.head.num_classes": 2}),
        ("caption-tiny", {"model.vocab_size": 100}),
        ("speech-tiny", {"model.vocab_size": 100}),
        ("sentiment", {}),
    ],
)
def test_a_size_that_the_data_decide_is_assumed_and_said(name: str, assumed: dict[str, int], capsys) -> None:
    shown = json.loads(run(capsys, "show", name, "--json")[1])
    assert shown["assumed"] == assumed
    overrides = [f"{key}={size}" for key, size in assumed.items()]
    known = json.loads(run(capsys, "show", name, *overrides, "--json")[1])
    assert (known["assumed"], known["params"]) == ({}, shown["params"])
    out = run(capsys, "show", name)[1]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("assumed")] == [f"{o}:" for o in overrides]


def test_the_labels_of_the_objective_are_counted(capsys) -> None:
    shown = json.loads(run(capsys, "show", "vit-tiny", "objective.labels=[a, b, c]", "--json")[1])
    assert shown["assumed"] == {}
    assert shown["params"] == summarise(Config.load("vit-tiny", "model.head.num_classes=3").model).params


def test_the_kernels_are_named_and_a_fallback_with_its_reason(capsys) -> None:
    model = ("model.num_layers=4", "model.layers=[{attention: {softcap: 50.0}}, {attention: {sinks: true}}]")
    out = run(capsys, "show", "llama-tiny", *model)[1]
    told = {line[:26].strip(): line[26:] for line in out.splitlines()}
    assert told["attention by"].startswith(
        "math in 2 of 4, for sdpa cannot do a soft cap on scores; sdpa in 2 of 4 on "
    )
    assert "math in 2 of 4, for sdpa cannot do the gradient of sinks" in told["in training"]
    shown = json.loads(run(capsys, "show", "llama-tiny", *model, "--json")[1])
    assert shown["kernels"][1] == {"chosen": "sdpa", "kernel": "sdpa", "lacking": "", "attentions": 2}
    assert "in training" not in run(capsys, "show", "llama-tiny")[1]


PARTS = (
    ("encoder-tiny", ("model.share_layers=true", "model.position.kind=relative")),
    ("llama-tiny", ("model.num_layers=2", "model.parallel=two-norms")),
    ("encoder-tiny", ("model.embedding.width=24", "model.parallel=one-norm")),
    ("mla-tiny", ("model.num_layers=2", "model.attention.q_rank=96")),
    ("llama-tiny", ("model.num_layers=2", "model.mtp.depth=1")),
)


@pytest.mark.parametrize(("name", "overrides"), [("encoder-decoder-tiny", ()), *PARTS])
def test_the_parameters_in_the_boxes_add_up(name: str, overrides: tuple[str, ...], capsys) -> None:
    _, out, _ = run(capsys, "show", name, *overrides)
    words = out.split("\n\n")[0].split()
    boxes = [int(before.replace(",", "")) for before, word in itertools.pairwise(words) if word == "parameters"]
    assert sum(boxes) == summarise(Config.load(name, *overrides).model).params


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("decoder-tiny", ()),
        ("llama-tiny", ("model.num_layers=2",)),
        ("encoder-tiny", ()),
        ("encoder-decoder-tiny", ()),
        ("gpt-classic", ("model.vocab_size=1000", "model.num_layers=2", "tokenizer.vocab_size=null")),
        *PARTS,
    ],
)
def test_flops_are_those_that_a_forward_performs(name: str, overrides: tuple[str, ...]) -> None:
    model = Config.load(name, *overrides).model
    network = qkv.Transformer(model, device="meta").eval()
    qkv.nn.use_kernel(network, "math")
    length = model.max_seq_len
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(ids, **({"source": ids} if model.family == "encoder-decoder" else {}))
    assert summarise(model).flops_per_token_forward * length == counter.get_total_flops()


def test_of_experts_only_those_that_a_token_goes_through_are_active_and_computed() -> None:
    mixture = "{kind: moe, num_experts: 6, top_k: 2, d_ff: 20, shared: {d_ff: 24, gated: true}}"
    model = Config.load("llama-tiny", "model.num_layers=2", "model.d_model=24", f"model.feed_forward={mixture}").model
    network = qkv.Transformer(model).eval()
    qkv.nn.use_kernel(network, "math")
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, model.max_seq_len, dtype=torch.int64))
    told = summarise(model)
    assert told.flops_per_token_forward * model.max_seq_len == counter.get_total_flops()
    assert told.params - told.params_active == 2 * (6 - 2) * 3 * 20 * 24  # layers, idle experts, matrices


@pytest.mark.parametrize("feed_forward", ["{d_ff: 40}", "{kind: moe, num_experts: 6, top_k: 2, d_ff: 20}"])
def test_what_predicts_further_tokens_counts_in_training_only(feed_forward: str) -> None:
    overrides = ("model.num_layers=2", "model.d_model=24", f"model.feed_forward={feed_forward}")
    plain, model = (Config.load("llama-tiny", *overrides, f"model.mtp.depth={depth}").model for depth in (0, 2))
    network = qkv.Transformer(model).train()
    qkv.nn.use_kernel(network, "math")
    ids = torch.zeros(1, model.max_seq_len, dtype=torch.int64)
    loss = {torch.ops.qkv.cross_entropy: lambda h_NM, weight_VM, *_, **__: 2 * math.prod(h_NM) * weight_VM[0]}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=loss) as counter:
        network(ids, labels=ids)
    told, without = summarise(model), summarise(plain)
    assert told.flops_per_token_train * model.max_seq_len == 3 * counter.get_total_flops()
    assert told.params == sum(parameter.numel() for parameter in network.parameters())
    assert told.params - told.params_training == without.params
    assert told.params_active == without.params_active
    assert told.flops_per_token_forward == without.flops_per_token_forward
    assert without.flops_per_token_train == 3 * without.flops_per_token_forward


@pytest.mark.parametrize("name", ["hyper-tiny", "mhc-tiny", "attnres-tiny"])
@pytest.mark.parametrize("overrides", [(), ("model.num_layers=3",)])
def test_flops_of_a_residual_stream_are_those_that_a_forward_performs(name: str, overrides: tuple[str, ...]) -> None:
    model = Config.load(name, *overrides).model
    network = qkv.Transformer(model).eval()
    qkv.nn.use_kernel(network, "math")
    length = model.max_seq_len
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, length, dtype=torch.int64))
    # the counter knows products of matrices only: y times its weight, and scores and mixtures of sources, are others
    others = 2 * model.num_layers * 2 * 4 * model.d_model
    if name == "attnres-tiny":
        sources = {4: [0, 2, 2, 2, 2, 3, 3, 3, 3], 3: [0, 2, 2, 2, 2, 3, 3]}[model.num_layers]
        others = 4 * model.d_model * sum(sources)
    assert summarise(model).flops_per_token_forward - others == counter.get_total_flops() / length


SPEECH = ("model.encoder.input={kind: log-mel, num_mels: 5}", "model.tie_embeddings=head")
VISION = (
    "model.input={kind: patches, image_size: [8, 12], patch_size: 4}",
    "model.max_seq_len=7",
    "model.embedding.width=24",
    "model.tie_embeddings=none",
    "model.head={kind: classifier, num_classes: 3}",
)


@pytest.mark.parametrize(
    ("name", "overrides", "lines"),
    [
        ("encoder-decoder-tiny", SPEECH, ("log-mel features [B, F, 5]", "memory [B, S, ", "two convolutions")),
        ("encoder-tiny", VISION, ("images [B, 3, 8, 12]", "class token, patches of 4 x 4", "[B, 7, ", "projection 24")),
    ],
)
def test_show_draws_what_reads_sound_and_images(name: str, overrides: tuple, lines: tuple, capsys) -> None:
    code, out, err = run(capsys, "show", name, *overrides)
    assert code == 0, err
    for line in lines:
        assert line in out


def test_flops_of_a_speech_encoder_are_those_that_a_forward_performs() -> None:
    model = Config.load("encoder-decoder-tiny", *SPEECH).model
    network = qkv.Transformer(model, device="meta").eval()
    qkv.nn.use_kernel(network, "math")
    length = model.max_seq_len
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(ids, source=torch.zeros(1, 2 * length, 5, device="meta"))
    assert summarise(model).flops_per_token_forward * length == counter.get_total_flops()


def test_flops_of_learned_queries_are_those_that_a_forward_performs() -> None:
    queries = ("model.encoder.num_queries=8", "model.encoder.position.kind=learned", "model.max_seq_len=64")
    model = Config.load("encoder-decoder-tiny", *queries).model
    network = qkv.Transformer(model, device="meta").eval()
    qkv.nn.use_kernel(network, "math")
    ids = torch.zeros(1, model.context, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(ids, source=ids)
    assert summarise(model).flops_per_token_forward * model.context == counter.get_total_flops()


def test_a_window_lowers_flops_but_not_parameters() -> None:
    plain = summarise(Config.load("llama-tiny").model)
    windowed = summarise(Config.load("llama-tiny", "model.attention.window=32").model)
    assert windowed.params == plain.params
    assert windowed.flops_per_token_forward < plain.flops_per_token_forward


def test_new_writes_the_preset_and_never_overwrites(capsys, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert run(capsys, "new", "llama-tiny", "-o", str(path))[0] == 0
    assert Config.load(path) == Config.load("llama-tiny")
    path.write_text("precious", encoding="utf-8")
    code, _, err = run(capsys, "new", "llama-tiny", "-o", str(path))
    assert code == 5
    assert "exists" in err
    assert path.read_text(encoding="utf-8") == "precious"


def test_presets_lists_every_preset_with_a_summary(capsys) -> None:
    code, out, _ = run(capsys, "presets", "--json")
    rows = json.loads(out)["presets"]
    assert code == 0
    assert [row["name"] for row in rows] == preset_names()
    assert all(len(row["summary"]) > 10 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "lama-tiny"), 3, "llama-tiny"),
        (("show", "llama-tiny", "model.d_modle=3"), 2, "d_model"),
        (("show", "llama-tiny", "model.vocab_size=null", "tokenizer.vocab_size=null"), 2, "vocab_size"),
        (("new", "gpt3"), 3, "preset"),
        (("shwo", "llama-tiny"), 2, "show"),
        (("show",), 2, "CONFIG"),
        (("show", "llama-tiny", "--jsn"), 2, "--json"),
    ],
)
def test_a_mistake_exits_with_its_code_and_no_traceback(arguments, code: int, said: str, capsys) -> None:
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "qkv", "show", "no-such-model", "--debug"]
    assert "Traceback" in subprocess.run(command, capture_output=True, text=True).stderr


def test_a_published_model_is_shown_as_it_is_read(tmp_path: Path, capsys) -> None:
    config = Config.load("llama-tiny", "model.num_layers=1", "tokenizer.vocab_size=null", "model.vocab_size=300")
    save_hf(tmp_path / "llama", qkv.Transformer(config.model), config)
    code, out, _ = run(capsys, "show", str(tmp_path / "llama"), "--json")
    told = json.loads(out)
    assert (code, told["params"]) == (0, summarise(config.model).params)
    assert told["config"]["model"]["layers"] == config.model.model_dump(mode="json")["layers"]
    code, _, err = run(capsys, "show", str(tmp_path / "llama"), "model.num_layers=2")
    assert (code, "cannot be overridden" in err) == (2, True)
