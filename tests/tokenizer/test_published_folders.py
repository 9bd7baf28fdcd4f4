"""Folders without a tokenizer.json give the ids that `transformers` makes of the same files."""

from __future__ import annotations

import io
import json
import os
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import ByteLevelBPETokenizer

from qkv.config.errors import DamagedError, QkvError
from qkv.tokenizer import Tokenizer

from .samples import CHINESE

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    " ",
    "Hello world, this is a test of 42 words.",
    "  two  spaces,\n a line\tand a tab ",
    "满纸荒唐言，一把辛酸泪！",
    "a book 都云作者痴 and 谁解",
    "unknown: ☃☃ 🦊ж é ﬁ Ａ ½",
    "it's </s> and <unk> and <pad> in a text",
]
PLAIN = [text for text in TEXTS if "</s>" not in text]
"""What `transformers` does not read special tokens in."""


@pytest.fixture(scope="module")
def spm(english: str) -> dict[str, bytes]:
    """Models of two languages, and of both."""
    chinese = [CHINESE] * 20

    def train(lines: list[str], size: int) -> bytes:
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            minloglevel=2,
        )
        return written.getvalue()

    lines = english[:20_000].splitlines()
    return {"en": train(lines, 300), "zh": train(chinese, 120), "both": train(lines + chinese, 400)}


# --- Marian -----------------------------------------------------------------------------------------------------------


def pieces_of(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]


@pytest.fixture(scope="module")
def marian(spm: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English to Chinese, with the joint vocabulary in an order of its own; some English pieces are not in it."""
    folder = tmp_path_factory.mktemp("marian")
    (folder / "source.spm").write_bytes(spm["en"])
    (folder / "target.spm").write_bytes(spm["zh"])
    joint = sorted({*pieces_of(spm["zh"]), *pieces_of(spm["en"])[:-20]}, reverse=True)
    tokens = ["</s>", "<unk>", ">>cmn<<", *joint, "☃☃", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "zh"}')
    return folder


@pytest.fixture(scope="module")
def theirs(marian: Path) -> Any:
    return transformers.MarianTokenizer.from_pretrained(str(marian))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", [*PLAIN, ">>cmn<< Hello"])
def test_the_ids_of_marian_are_those_of_transformers(text: str, marian: Path, theirs: Any) -> None:
    source, target = Tokenizer.load(marian), Tokenizer.load(marian / "target.spm")
    assert source.encode(text, add_special=True) == theirs(text)["input_ids"]
    assert source.encode_batch([text], add_special=True) == [theirs(text)["input_ids"]]
    assert target.encode(text, add_special=True) == theirs(text_target=text)["input_ids"]


def test_marian_knows_special_tokens_but_not_in_ordinary_text(marian: Path) -> None:
    tokenizer = Tokenizer.load(marian)
    last = tokenizer.vocab_size - 1
    assert (tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id) == (0, 1, last, None)
    assert tokenizer.around == ([], [0])
    assert not {0, last} & {*tokenizer.encode("</s> <pad>")}
    assert tokenizer.encode("</s><pad>", parse_special=True) == [0, last]
    assert tokenizer.token_to_id("☃☃") == last - 1 == tokenizer.encode("☃☃")[-1]


def test_what_marian_writes_is_read_with_the_pieces_of_either_side(marian: Path) -> None:
    target = Tokenizer.load(marian / "target.spm")
    text = "满纸荒唐言一把辛酸泪"
    assert target.decode(target.encode(text, add_special=True)) == text
    assert target.decode(Tokenizer.load(marian).encode("a test")) == "a test"


def test_the_ids_of_marian_are_kept(marian: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(marian)
    tokenizer.save(tmp_path)
    for other in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert [other.encode(text, add_special=True) for text in TEXTS] == [
            tokenizer.encode(text, add_special=True) for text in TEXTS
        ]
        assert (other.vocab_size, other.fingerprint) == (tokenizer.vocab_size, tokenizer.fingerprint)
    explained = [token_id for piece in tokenizer.explain("Hello ☃☃").pieces for token_id in piece.ids]
    assert explained == tokenizer.encode("Hello ☃☃")
    assert tokenizer.stats("жж Hello").unknown == 1


@pytest.mark.parametrize(
    "vocab",
    [None, "[]", '{"a": 0}', '{"</s>": 0, "<unk>": 0}', '{"</s>": 0, "<unk>": "1"}', '{"</s>": 0, "<unk>": -1}'],
)
def test_a_marian_folder_without_a_vocabulary_is_damaged(
    vocab: str | None, spm: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "source.spm").write_bytes(spm["en"])
    if vocab is not None:
        (tmp_path / "vocab.json").write_text(vocab)
    with pytest.raises(QkvError, match=r"damaged|not a tokenizer"):
        Tokenizer.load(tmp_path)


# --- GPT-2 and RoBERTa ------------------------------------------------------------------------------------------------

SPECIAL = {"gpt2": ["<|endoftext|>"], "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]}
CLASSES = {"gpt2": "GPT2Tokenizer", "roberta": "RobertaTokenizer", "bart": "BartTokenizer"}


@pytest.fixture(scope="module")
def merges(english: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """vocab.json and merges.txt with the special tokens of each."""
    found = {}
    for kind, special in SPECIAL.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        trainer = ByteLevelBPETokenizer()
        trainer.train_from_iterator([english[:50_000]], vocab_size=500, special_tokens=special, show_progress=False)
        trainer.save_model(str(found[kind]))
    return found


def copied(folder: Path, to: Path, **config: Any) -> Path:
    for name in ("vocab.json", "merges.txt"):
        (to / name).write_bytes((folder / name).read_bytes())
    if config:
        (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "roberta", "bart"])
def test_the_ids_of_merges_txt_are_those_of_transformers(
    kind: str, prefix: bool, merges: dict[str, Path], tmp_path: Path
) -> None:
    config = {"add_prefix_space": True} if prefix else {}
    folder = copied(merges["gpt2" if kind == "gpt2" else "roberta"], tmp_path, **config)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    ours, theirs = Tokenizer.load(folder), getattr(transformers, CLASSES[kind]).from_pretrained(str(folder))
    for text in PLAIN:
        assert ours.encode(text, add_special=True) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)).removeprefix(" " * prefix) == text.removeprefix(" " * prefix)
    for role in ("bos", "eos", "unk"):
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_token_id")


def test_the_mask_of_roberta_takes_the_space_before_it(merges: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(merges["roberta"])
    assert tokenizer.around == ([0], [2])
    ids = tokenizer.encode("the <mask>.", parse_special=True)
    assert ids == [*tokenizer.encode("the"), 4, *tokenizer.encode(".")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("merges.txt", "#version: 0.2\na b c\n"),
        ("merges.txt", "zz qq\n"),
        ("vocab.json", '{"a": 1.5}'),
        ("vocab.json", ""),
    ],
)
def test_damaged_merges_are_called_so(name: str, content: str, merges: dict[str, Path], tmp_path: Path) -> None:
    (copied(merges["gpt2"], tmp_path) / name).write_text(content)
    with pytest.raises(DamagedError, match="damaged"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [{"tokenizer_class": "CLIPTokenizer"}, {"tokenizer_class": "WhisperTokenizer"}])
def test_merges_that_others_cut_text_for_are_refused_by_name(
    config: dict[str, str], merges: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(QkvError, match=r"merges.txt of a \w+ tokenizer is not supported") as error:
        Tokenizer.load(copied(merges["gpt2"], tmp_path, **config))
    assert not isinstance(error.value, DamagedError)


# --- XLM-R and mBART --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def xlm_r(spm: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xlm-r")
    (folder / "sentencepiece.bpe.model").write_bytes(spm["both"])
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    return folder


@pytest.mark.parametrize("text", PLAIN)
def test_the_ids_of_xlm_r_are_those_of_transformers(text: str, xlm_r: Path) -> None:
    ours, theirs = Tokenizer.load(xlm_r), transformers.XLMRobertaTokenizer.from_pretrained(str(xlm_r))
    assert ours.encode(text, add_special=True) == theirs(text)["input_ids"]
    assert (ours.pad_id, ours.mask_id, ours.vocab_size) == (1, theirs.mask_token_id, len(theirs))


@pytest.mark.parametrize("text", PLAIN)
def test_the_ids_of_mbart_are_those_of_its_file_and_a_language(
    text: str, spm: dict[str, bytes], tmp_path: Path
) -> None:
    """transformers 5.24 leaves out how the file normalises a text, so that its ids are those of plain texts only."""
    (tmp_path / "sentencepiece.bpe.model").write_bytes(spm["both"])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MBartTokenizer", "src_lang": "zh_CN"}')
    ours, theirs = Tokenizer.load(tmp_path), transformers.MBartTokenizer.from_pretrained(str(tmp_path))
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm["both"])
    pieces = [number + 1 if number else 3 for number in processor.encode(text)]
    around = [2, theirs.convert_tokens_to_ids("zh_CN")]
    assert ours.encode(text, add_special=True) == [*pieces, *around]
    assert (ours.mask_id, ours.vocab_size) == (theirs.mask_token_id, len(theirs))
    if unicodedata.is_normalized("NFKC", text):
        assert theirs(text)["input_ids"] == [*pieces, *around]


def test_the_model_type_tells_whose_a_fairseq_file_is(spm: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(spm["zh"])
    assert Tokenizer.load(tmp_path).around == ([0], [2])
    (tmp_path / "config.json").write_text('{"model_type": "mbart"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.around == ([], [2, tokenizer.token_to_id("en_XX")])
    (tmp_path / "config.json").write_text('{"model_type": "camembert"}')
    with pytest.raises(QkvError, match="of a camembert tokenizer is not supported"):
        Tokenizer.load(tmp_path)
