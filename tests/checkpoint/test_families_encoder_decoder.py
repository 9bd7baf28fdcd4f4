"""Encoder-decoders of text and sound as published: the same values and the same text from the same files, and back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizer.templates import byte_tokenizer
from torch import Tensor
from transformers import GenerationMixin

import qkv
from qkv import Model
from qkv.checkpoint.families import named
from qkv.checkpoint.published import Published
from qkv.config import QkvError
from qkv.config.errors import DamagedError
from qkv.config.run import GenerationConfig
from qkv.data.audio import log_mel, read_audio
from qkv.evaluate.error_rates import error_rate, exact_match

from .family_cases import VOCAB, Case, Pair, assert_close, make_pair, mask_of, random_ids, values, written

LENGTH, SOURCE, SHORT, NEW = 10, 14, 6, 12
"""Tokens: of a target, of a source and a shorter one, and of what is generated."""

BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 30,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}
OTHER = {"scale_embedding": True, "activation_function": "swish", "forced_bos_token_id": 4}
TWO = {"share_encoder_decoder_embeddings": False, "vocab_size": 99, "decoder_vocab_size": VOCAB}
NEVER_PADS = {"bad_words_ids": [[1]]}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
}
T5_NEW = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
WHISPER = {
    **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": SOURCE,
    "max_target_positions": 30,
    "begin_suppress_tokens": [7, 8],
    "suppress_tokens": [9, 10],
}

CASES = {
    "bart": Case("BartForConditionalGeneration", BART),
    "bart-other": Case("BartForConditionalGeneration", {**BART, **OTHER}),
    "bart-untied": Case("BartForConditionalGeneration", {**BART, "tie_word_embeddings": False}),
    "bart-bare": Case("BartModel", BART),
    "mbart": Case("MBartForConditionalGeneration", {**BART, "scale_embedding": True}),
    "mbart-untied": Case("MBartForConditionalGeneration", {**BART, "tie_word_embeddings": False}),
    "mbart-bare": Case("MBartModel", {**BART, "activation_function": "relu"}),
    "marian": Case("MarianMTModel", {**BART, **OTHER}, NEVER_PADS),
    "marian-untied": Case("MarianMTModel", {**BART, "tie_word_embeddings": False}, NEVER_PADS),
    "marian-two-vocabularies": Case("MarianMTModel", {**BART, **TWO}, NEVER_PADS),
    "marian-two-untied": Case("MarianMTModel", {**BART, **TWO, "tie_word_embeddings": False}, NEVER_PADS),
    "marian-bare": Case("MarianModel", BART),
    "m2m-100": Case("M2M100ForConditionalGeneration", BART),
    "m2m-100-other": Case(
        "M2M100ForConditionalGeneration", {**BART, **OTHER, "scale_embedding": False, "pad_token_id": 3}
    ),
    "m2m-100-untied": Case("M2M100ForConditionalGeneration", {**BART, "tie_word_embeddings": False}),
    "m2m-100-bare": Case("M2M100Model", BART),
    "t5": Case("T5ForConditionalGeneration", T5),
    "t5-one-one": Case("T5ForConditionalGeneration", T5_NEW, {"own_head": True}),
    "t5-one-one-tied": Case("T5ForConditionalGeneration", {**T5_NEW, "layer_norm_epsilon": 1e-3}),
    "t5-bare": Case("T5Model", T5),
    "whisper": Case("WhisperForConditionalGeneration", WHISPER),
    "whisper-untied": Case("WhisperForConditionalGeneration", {**WHISPER, "tie_word_embeddings": False}),
    "whisper-bare": Case("WhisperModel", WHISPER),
}


COPIES = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
READERS = [name for name in CASES if not name.startswith("whisper")]
WRITERS = [name for name in CASES if not name.endswith("bare")]


def only(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [CASES[name] for name in names], ids=names, indirect=True)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("published"))


def sources(pair: Pair) -> tuple[Tensor, dict[str, Tensor]]:
    """Two texts or recordings, as we and as they take them."""
    if not hears(pair):
        ids = random_ids(2, SOURCE)
        return ids, {"input_ids": ids}
    frames = torch.randn(2, 2 * SOURCE, WHISPER["num_mel_bins"], generator=torch.Generator().manual_seed(2))
    return frames, {"input_features": frames.transpose(1, 2)}


def hears(pair: Pair) -> bool:
    return pair.theirs.main_input_name == "input_features"


def test_the_values_are_those_of_transformers(pair: Pair) -> None:
    (ours, theirs), targets = sources(pair), random_ids(2, LENGTH)
    with torch.no_grad():
        assert_close(pair.ours.network(targets, source=ours), values(pair.theirs, decoder_input_ids=targets, **theirs))


@only(READERS)
def test_a_padded_source_is_the_source_alone(pair: Pair) -> None:
    network, targets, ids = pair.ours.network, random_ids(2, LENGTH), random_ids(2, SOURCE)
    lengths = torch.tensor([SOURCE, SHORT])
    mask = mask_of(lengths, SOURCE)
    theirs = values(pair.theirs, input_ids=ids, attention_mask=mask, decoder_input_ids=targets)
    with torch.no_grad():
        assert_close(network(targets, source=ids, source_lengths=lengths), theirs)
        assert_close(network(targets[1:], source=ids[1:, :SHORT]), theirs[1:])


@only(WRITERS)
def test_greedy_text_is_that_of_transformers(pair: Pair) -> None:
    ours, theirs = sources(pair)
    start = len(pair.ours.config.generation.start_ids or ())
    # Whisper's own `generate` prepares sound for what its tokenizer knows
    told = GenerationMixin.generate(
        pair.theirs,
        **{name: source[:1] for name, source in theirs.items()},
        max_new_tokens=NEW + start - 1,
        do_sample=False,
        num_beams=1,
        bad_words_ids=pair.case.options.get("bad_words_ids"),
    )
    found = pair.ours.generate(ours[:1] if hears(pair) else ours[0].tolist(), max_new_tokens=NEW, temperature=0.0)
    assert (found[0] if hears(pair) else found).token_ids == told[0, start:].tolist()


def test_transformers_opens_what_is_written(pair: Pair, tmp_path: Path) -> None:
    again = written(pair.ours, tmp_path / "written")
    (_, theirs), targets = sources(pair), random_ids(2, LENGTH)
    given = {"decoder_input_ids": targets, **theirs}
    assert_close(values(again, **given), values(pair.theirs, **given))


def rewritten(folder: Path, changed: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The same folder, after its tensors were changed."""
    save_file(changed(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("names", [COPIES[:1], COPIES[2:], COPIES])
def test_a_shared_matrix_is_found_under_any_of_its_names(names: list[str], tmp_path: Path) -> None:
    pair = make_pair(CASES["bart"], tmp_path / "published")

    def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        shared = tensors.pop("model.shared.weight")
        return {**tensors, **{name: shared.clone() for name in names}}

    again = qkv.load(rewritten(tmp_path / "published", copied), device="cpu")
    for (name, one), other in zip(again.network.named_parameters(), pair.ours.network.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_copies_of_a_shared_matrix_that_differ_are_damage(tmp_path: Path) -> None:
    make_pair(CASES["t5"], tmp_path / "published")
    other = {"lm_head.weight": torch.zeros(VOCAB, T5["d_model"])}
    with pytest.raises(DamagedError, match=r"lm_head\.weight"):
        qkv.load(rewritten(tmp_path / "published", lambda tensors: tensors | other), device="cpu")


def test_a_table_of_sines_in_the_file_may_be_rounded_but_no_other(tmp_path: Path) -> None:
    config = make_pair(CASES["marian"], tmp_path / "published").ours.network.config
    (name, table), _ = ((fixed.theirs, fixed.value()) for fixed in named("marian").fixed(config))
    qkv.load(rewritten(tmp_path / "published", lambda tensors: {**tensors, name: table.half()}), device="cpu")
    with pytest.raises(DamagedError, match=name):
        qkv.load(rewritten(tmp_path / "published", lambda tensors: {**tensors, name: table.flip(1)}), device="cpu")


@pytest.mark.parametrize(
    ("model_type", "keys", "told"),
    [
        ("bart", {"activation_function": "mish"}, "`activation_function: mish`"),
        ("m2m_100", {"activation_function": "mish"}, "`activation_function: mish`"),
        ("marian", {"decoder_vocab_size": 50}, "`decoder_vocab_size: 50`"),
        ("t5", {**T5, "feed_forward_proj": "gated-relu"}, "`feed_forward_proj: gated-relu`"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(model_type: str, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(QkvError, match="is not supported") as refused:
        named(model_type).read(Published({**BART, **keys}, "config.json"), "language-model")
    assert refused.value.what.startswith(told)


def test_a_multilingual_whisper_starts_with_language_task_and_no_timestamps() -> None:
    told = {
        "decoder_start_token_id": 50258,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": 50259, "<|zh|>": 50260},
        "task_to_id": {"translate": 50358, "transcribe": 50359},
        "no_timestamps_token_id": 50363,
        "forced_decoder_ids": [[1, None], [2, 50359]],
    }
    section = named("whisper").generation(Published({}, "config.json"), Published(told, "generation_config.json"))
    assert section["start_ids"] == [50258, 50259, 50359, 50363]


@pytest.mark.parametrize("several", [False, True])
def test_what_a_transcript_begins_with_comes_back(several: bool, tmp_path: Path) -> None:
    tokens = ["<|start|>", "<|en|>", "<|zh|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer = byte_tokenizer(tokens)
    start = [256, 257, 260, 261] if several else [256, 261]
    case = Case("WhisperForConditionalGeneration", {**WHISPER, "vocab_size": 262})
    made = make_pair(case, tmp_path / "made").ours
    config = made.config.model_copy(update={"generation": GenerationConfig(start_ids=tuple(start))})
    Model(made.network, tokenizer, config).save_hf(tmp_path / "saved")
    told = json.loads((tmp_path / "saved" / "generation_config.json").read_text(encoding="utf-8"))
    assert told["no_timestamps_token_id"] == 261
    assert told.get("lang_to_id") == ({"<|en|>": 257, "<|zh|>": 258} if several else None)
    assert told.get("task_to_id") == ({"transcribe": 260, "translate": 259} if several else None)
    assert list(qkv.load(tmp_path / "saved", device="cpu").config.generation.start_ids or ()) == start


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_g2p(data_file: Callable[[str], Path]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(data_file("golden/bart_g2p_us.json").read_text(encoding="utf-8"))
    return told


@pytest.fixture(scope="module")
def g2p(data_file: Callable[[str], Path]) -> Model:
    """A BART that pronounces English, letter by letter."""
    return qkv.load(data_file("weights-bart-g2p-us/config.json").parent, device="cpu", dtype="fp32")


def letters(data_file: Callable[[str], Path], side: str) -> str:
    """What its ids mean: this model's config.json says it itself."""
    told: str = json.loads(data_file("weights-bart-g2p-us/config.json").read_text(encoding="utf-8"))[f"{side}_chars"]
    return told


def test_a_real_bart_pronounces_as_in_transformers(g2p: Model, golden_g2p: dict[str, Any]) -> None:
    cases = golden_g2p["cases"]
    found = g2p.generate([case["input_ids"] for case in cases], temperature=0.0)
    assert [(1, *one.token_ids) for one in found] == [tuple(case["output_ids"]) for case in cases]


def test_a_real_bart_is_as_sure_as_in_transformers(
    g2p: Model, golden_g2p: dict[str, Any], data_file: Callable[[str], Path]
) -> None:
    spelled = letters(data_file, "grapheme")
    source = torch.tensor([[1, *(spelled.index(letter) for letter in "transformer"), 2]])
    with torch.no_grad():
        logits = g2p.network(torch.tensor([[1]]), source=source)[0, 0]
    for token_id, logit, *_ in golden_g2p["first_step_logits_top5_transformer"]:
        assert logits[token_id].item() == pytest.approx(logit, abs=2e-3)


@pytest.mark.slow
def test_a_real_bart_makes_the_golden_number_of_errors(
    g2p: Model, golden_g2p: dict[str, Any], data_file: Callable[[str], Path]
) -> None:
    spelled, spoken = (letters(data_file, side) for side in ("grapheme", "phoneme"))
    with gzip.open(data_file("weights-bart-g2p-us/gold-2000.tsv.gz"), "rt", encoding="utf-8") as file:
        words, gold = zip(*(line.rstrip("\n").split("\t") for line in file), strict=True)
    found = g2p.generate([[1, *(spelled.index(letter) for letter in word), 2] for word in words], temperature=0.0)
    said = ["".join(spoken[token_id] for token_id in one.token_ids if token_id > 3) for one in found]
    assert exact_match(said, gold) == golden_g2p["exact_match_gold2000"]
    assert error_rate(said, gold, "character") == pytest.approx(golden_g2p["phoneme_error_rate_gold2000"], abs=5e-6)


def test_whisper_hears_what_it_hears_in_transformers(
    data_file: Callable[[str], Path], published_model: Callable[[str], Path]
) -> None:
    golden = json.loads(data_file("golden/whisper_tiny_en.json").read_text(encoding="utf-8"))
    model = qkv.load(published_model("whisper-tiny.en"), device="cpu", dtype="fp32")
    features = log_mel(read_audio(data_file("speech-jfk/jfk.wav")), seconds=30)[None]
    start = list(model.config.generation.start_ids or ())
    assert start == golden["prompt_ids"]
    with torch.no_grad():
        hidden = model.network.encode(features)
        logits = model.network(torch.tensor([start]), source=features)[0, -1]
    first = golden["encoder"]["first_frame_first8"]
    assert hidden[0, 0, : len(first)].tolist() == pytest.approx(first, abs=2e-3)
    for token_id, logit, *_ in golden["first_step_logits_top5"]:
        assert logits[token_id].item() == pytest.approx(logit, abs=2e-3)
    assert model.generate(features, temperature=0.0)[0].token_ids == golden["output_ids"]
