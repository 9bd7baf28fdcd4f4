"""`qkv eval`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu
import torch
from generate.tiny import CONTEXT, byte_tokenizer, network
from media_files import WORDS, WRITE, media_config

from qkv import Config, Transformer
from qkv.checkpoint.store import save_checkpoint
from qkv.cli import main
from qkv.data import prepare
from qkv.evaluate import classification_scores, error_rate, exact_match, pronunciation_scores
from qkv.model import Model
from qkv.tokenizer.tokenizer import Tokenizer

TEXT = "to be or not to be, that is the question. 我爱你\n" * 4


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def make_model(folder: Path, *overrides: str, tokenizer: Tokenizer | None, state: dict[str, Any] | None = None) -> Path:
    small = ("model.d_model=16", "model.num_layers=1", "model.max_seq_len=32", "model.vocab_size=300")
    config = Config.load("decoder-tiny", *small, "model.feed_forward.d_ff=24", *overrides)
    network = Transformer(config.model, generator=torch.Generator().manual_seed(0))
    save_checkpoint(folder, network, config, tokenizer, state=state)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("eval") / "model", tokenizer=Tokenizer.train([], kind="byte"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_json_has_the_promised_keys_and_they_agree(model, text, capsys) -> None:
    code, out, err = run(capsys, "eval", model, "--data", text, "--json")
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert figures["tokens"] == len(TEXT.encode())
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    bits = figures["loss"] * figures["tokens"] / math.log(2)
    assert figures["bits_per_byte"] == pytest.approx(bits / len(TEXT.encode()))


def test_the_same_figures_are_told_to_people(model, text, capsys) -> None:
    figures = json.loads(run(capsys, "eval", model, "--data", text, "--json")[1])
    code, out, _ = run(capsys, "eval", model, "--data", text)
    assert code == 0
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert f"{figures[name]:.4f}" in out
    assert f"tokens          {figures['tokens']}\nbytes of text   {figures['bytes']}\n" in out


def test_of_a_run_the_checkpoint_that_is_read_is_told_and_why(tmp_path, text, capsys) -> None:
    tokenizer = Tokenizer.train([], kind="byte")
    folders = [tmp_path / "run/checkpoints" / f"step-{number:06d}" for number in (1, 2, 3)]
    options = ("--data", text, "--max-windows", "1", "--json")

    def told(val_losses: list[float | None]) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        for folder, loss in zip(folders, val_losses, strict=False):
            make_model(folder, tokenizer=tokenizer, state={"val_loss": loss})
        code, out, err = run(capsys, "eval", tmp_path / "run", *options)
        assert (code, out.count("\n")) == (0, 1)
        return err

    assert told([3.0, 2.0, 2.5]) == f"reading {folders[1]}, the best of 3 by validation\n"
    assert told([None, None]) == f"reading {folders[1]}, the newest of 2, none of which was validated\n"
    assert told([2.0]) == f"reading {folders[0]}, the only one\n"
    assert run(capsys, "eval", folders[0], *options)[2] == ""


def test_the_batch_size_does_not_change_the_figures_and_the_stride_does(model, text, capsys) -> None:
    def loss(*options: str) -> float:
        return float(json.loads(run(capsys, "eval", model, "--data", text, "--json", *options)[1])["loss"])

    assert loss("--batch-size", "1") == pytest.approx(loss("--batch-size", "7"), rel=1e-6)
    assert loss("--window", "32", "--stride", "32") == pytest.approx(loss(), rel=1e-6)
    assert abs(loss("--window", "8", "--stride", "9") - loss("--window", "8")) > 1e-6
    assert abs(loss("--stride", "5") - loss()) > 1e-6


def test_max_windows_limits_the_tokens(model, text, capsys) -> None:
    options = ("--window", "20", "--stride", "10", "--max-windows", "3", "--json")
    assert json.loads(run(capsys, "eval", model, "--data", text, *options)[1])["tokens"] == 20 + 10 + 10


@pytest.mark.parametrize(
    ("asked", "loaded"), [((), "fp32"), (("--dtype", "fp32"), "fp32"), (("--dtype", "bf16"), "bf16")]
)
def test_figures_are_float32_unless_asked_otherwise(model, text, capsys, monkeypatch, asked, loaded: str) -> None:
    import qkv.model

    seen: dict[str, object] = {}
    load = qkv.model.load
    monkeypatch.setattr(qkv.model, "load", lambda path, **options: load(path, **(seen.update(options) or options)))
    code, _, err = run(capsys, "eval", model, "--data", text, *asked, "--allow-package", "mine")
    assert code == 0, err
    assert seen == {"device": "auto", "dtype": loaded, "torch_bin": False, "allow": ("mine",)}


def test_without_data_the_run_s_validation_data_are_scored(tmp_path, text, capsys, monkeypatch) -> None:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    tokenizer = Tokenizer.train([], kind="byte")
    model = make_model(tmp_path / "m", f"data.validation=[{text}]", "data.train=[gone.txt]", tokenizer=tokenizer)
    figures = json.loads(run(capsys, "eval", model, "--json")[1])
    assert figures["tokens"] == len(TEXT.encode()) + 1  # and the end
    assert figures["bytes"] == len(TEXT.encode())


def test_an_encoder_is_scored_on_masked_tokens(tmp_path, text, capsys) -> None:
    tokenizer = Tokenizer.train([], kind="byte")
    overrides = ("model.family=encoder", "model.position.kind=learned", "objective={kind: masked, rate: 0.5}")
    model = make_model(tmp_path / "m", *overrides, tokenizer=tokenizer)
    code, out, _ = run(capsys, "eval", model, "--data", text, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["tokens"] == pytest.approx(len(TEXT.encode()) / 2, rel=0.05)
    assert figures["bits_per_byte"] is None
    code, _, err = run(capsys, "eval", model, "--data", text, "--stride", "2")
    assert (code, "--stride" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--window", "0"), 2, "window must be at least 1"),
        (("--window", "-4"), 2, "window must be at least 1"),
        (("--window", "33"), 2, "at most 32"),
        (("--window", "8", "--stride", "10"), 2, "stride 10"),
        (("--stride", "0"), 2, "stride must be at least 1"),
        (("--max-windows", "0"), 2, "max_windows"),
        (("--batch-size", "-1"), 2, "batch_size"),
        (("--task", "bleu"), 2, "`bleu`"),
        (("--task", "classify"), 2, "classification"),
        (("--task", "masked"), 2, "the task masked is not for a model of family decoder"),
        (("--task", "translation"), 2, "--task language-model"),
        (("--stride", "4", "--task", "prefix"), 2, "the task prefix is not for a model of family decoder"),
        (("--beam-size", "4"), 2, "captioning and transcription, and the task is language-model"),
        (("--lowercase",), 2, "--lowercase is for translation"),
        (("--device", "gpu"), 2, "device"),
        (("--dtype", "int4"), 2, "int4"),
    ],
)
def test_a_wrong_option_exits_with_its_code(model, text, capsys, options, code: int, said: str) -> None:
    actual, out, err = run(capsys, "eval", model, "--data", text, *options)
    assert (actual, out) == (code, "")
    assert said in err


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, 3, "no such file"),
        (b"", 1, "no text"),
        (b" \n", 1, "no text"),
        (b"ab\xffc", 1, "--bad-bytes"),
        (b"\x89PNG\r\n\x1a\n", 1, "a PNG image, not a text"),
        (b"\x89PNG\r\n\x1a\n", 1, "try plain text, or JSONL"),
        ("ab".encode("utf-16"), 1, "UTF-16"),
    ],
)
def test_a_file_that_cannot_be_scored_is_one_message(model, tmp_path, capsys, content, code: int, said: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    actual, out, err = run(capsys, "eval", model, "--data", path, "--json")
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_bad_bytes_are_dropped_on_request(model, tmp_path, capsys) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\xffc")
    code, out, _ = run(capsys, "eval", model, "--data", path, "--bad-bytes", "drop", "--json")
    assert (code, json.loads(out)["tokens"]) == (0, 3)


def test_text_of_a_single_token_is_refused_where_nothing_stands_before_it(tmp_path, capsys) -> None:
    model = make_model(tmp_path / "m", tokenizer=Tokenizer.train([], kind="byte", special={"eos": "<eos>"}))
    path = tmp_path / "a.txt"
    path.write_text("a", encoding="utf-8")
    code, _, err = run(capsys, "eval", model, "--data", path)
    assert code == 1
    assert "1 token" in err


def test_a_model_that_is_missing_or_cannot_be_scored_is_refused(tmp_path, text, capsys) -> None:
    code, _, err = run(capsys, "eval", tmp_path / "gone", "--data", text)
    assert (code, "gone" in err) == (3, True)
    silent = make_model(tmp_path / "silent", tokenizer=None)
    code, _, err = run(capsys, "eval", silent, "--data", text)
    assert (code, "no tokenizer" in err) == (2, True)
    dataless = make_model(tmp_path / "dataless", tokenizer=Tokenizer.train([], kind="byte"))
    code, _, err = run(capsys, "eval", dataless)
    assert (code, "--data" in err) == (2, True)


@pytest.mark.parametrize("options", [(), ("--task", "language-model")])
def test_a_model_that_gives_vectors_is_judged_by_no_task(tmp_path, text, capsys, options) -> None:
    head = ("model.head={kind: embedding, width: 8}", "model.tie_embeddings=none")
    vectors = make_model(tmp_path / "vectors", *head, tokenizer=Tokenizer.train([], kind="byte"))
    code, out, err = run(capsys, "eval", vectors, "--data", text, *options)
    assert (code, out) == (2, "")
    assert "no task here judges it" in err
    assert "--task" not in err
    assert "qkv embed" in err


def test_a_figure_that_json_cannot_hold_is_null(model, text, capsys, monkeypatch) -> None:
    import qkv.evaluate.perplexity as module

    monkeypatch.setattr(module, "perplexity", lambda *_, **__: module.Scores(900.0, math.inf, 0.0, 5))
    out = run(capsys, "eval", model, "--data", text, "--json")[1]
    assert json.loads(out, parse_constant=pytest.fail)["perplexity"] is None


# --- pairs ------------------------------------------------------------------------------------------------------------

SOURCES = ["one", "a longer line", "one", "ein\u2028Hund", ""]
TARGETS = ["x y", "A  line\u2028of it", "z", "一只狗", ""]


def translator(**data: object) -> Model:
    made = network(family="encoder-decoder")
    return Model(made, byte_tokenizer(), Config.model_validate({"model": made.config, "data": data or {}}))


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "a.source", tmp_path / "a.target"
    for file, lines in zip(files, (SOURCES, TARGETS), strict=True):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


@pytest.fixture
def translating(tmp_path: Path) -> Path:
    translator().save(tmp_path / "translator")
    return tmp_path / "translator"


def test_translations_are_scored_against_the_raw_lines_as_sacrebleu_does(translating, pairs, tmp_path, capsys) -> None:
    kept = tmp_path / "kept.txt"
    sides = ("--source", pairs[0], "--target", pairs[1])
    options = ("--beam-size", "2", "--batch-size", "2", "--tokenize", "char", "--lowercase", "-o", kept, "--json")
    code, out, err = run(capsys, "eval", translating, *sides, *options)
    figures, lines = json.loads(out), kept.read_text(encoding="utf-8").split("\n")[:-1]
    assert (code, err, len(lines)) == (0, "", len(SOURCES))
    bleu = sacrebleu.BLEU(tokenize="char", lowercase=True)
    assert figures["bleu"] == pytest.approx(bleu.corpus_score(lines, [TARGETS]).score)
    assert figures["signature"] == str(bleu.get_signature())
    chrf = sacrebleu.CHRF(lowercase=True)
    assert figures["chrf"] == pytest.approx(chrf.corpus_score(lines, [TARGETS]).score)
    assert figures["chrf_signature"] == str(chrf.get_signature())
    found = [one.text for one in translator().translate(list(dict.fromkeys(SOURCES)), beam_size=2)]
    wanted = [["x y", "z"], *([target] for target in (TARGETS[1], *TARGETS[3:]))]
    assert figures["exact_match"] == exact_match(found, wanted)
    assert figures["word_error_rate"] == error_rate(found, wanted, "word")
    assert figures["character_error_rate"] == error_rate(found, wanted, "character")
    assert [figures[name] for name in ("sentences", "sources", "untranslated", "beam_size")] == [5, 4, 0, 2]
    assert figures["sentences_per_second"] == pytest.approx(4 / figures["seconds"])


def test_the_same_figures_of_translations_are_told_to_people(translating, pairs, capsys) -> None:
    sides = ("--source", pairs[0], "--target", pairs[1])
    figures = json.loads(run(capsys, "eval", translating, *sides, "--json")[1])
    code, out, _ = run(capsys, "eval", translating, *sides)
    assert code == 0
    assert out.startswith("BLEU")
    assert f"{figures['bleu']:.2f}" in out.splitlines()[0]
    assert figures["signature"] in out.splitlines()[0]
    assert f"{figures['chrf']:.2f}  {figures['chrf_signature']}" in out
    assert f"{figures['character_error_rate']:.2%}" in out
    assert "5, 1 of them repeat a source" in out
    assert "beam size 4" in out


def test_pairs_may_be_one_file_and_are_by_default_what_the_run_held_out(pairs, tmp_path, capsys) -> None:
    table = tmp_path / "pairs.tsv"
    rows = [f"{a}\t{b}" for a, b in zip(SOURCES, TARGETS, strict=True) if a]  # a line of nothing else is no pair
    table.write_text("\n".join(rows), encoding="utf-8")
    for side, lines in zip(pairs, (SOURCES, TARGETS), strict=True):
        side.write_text("\n".join(filter(None, lines)), encoding="utf-8")
    held = {"source": [str(pairs[0])], "target": [str(pairs[1])]}
    translator(kind="parallel", train=["gone.tsv"], validation=held).save(tmp_path / "m")
    seen = [
        json.loads(run(capsys, "eval", tmp_path / "m", *given, "--json")[1])
        for given in ((), ("--data", table), ("--source", pairs[0], "--target", pairs[1]))
    ]
    for figures in seen:
        del figures["seconds"], figures["sentences_per_second"]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(("written", "short"), [("two words", True), ("four words and more", False)])
def test_the_measure_of_training_comes_first_and_a_bleu_without_four_words_says_so(
    pairs, tmp_path, capsys, monkeypatch, written: str, short: bool
) -> None:
    model = translator()
    objective = {"kind": "translate", "measure": "exact-match"}
    tree = {"model": model.network.config, "data": {"kind": "parallel"}, "objective": objective}
    Model(model.network, model.tokenizer, Config.model_validate(tree)).save(tmp_path / "m")
    sides = ("--source", pairs[0], "--target", pairs[1])
    answers = [SimpleNamespace(text=written if source else "") for source in dict.fromkeys(SOURCES)]
    monkeypatch.setattr(Model, "translate_stream", lambda *_, **__: iter(answers))
    lines = run(capsys, "eval", tmp_path / "m", *sides)[1].splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["exact match", "BLEU", "chrF"]
    assert ("none of the texts written has four words" in lines[1]) == short
    figures = json.loads(run(capsys, "eval", tmp_path / "m", *sides, "--json")[1])
    assert figures["four_grams"] == (0 if short else 4)


def test_a_source_that_the_context_does_not_hold_counts_as_untranslated(translating, tmp_path, capsys) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text(f"{'x' * CONTEXT}\tabc\none\tabc\n", encoding="utf-8")
    kept = tmp_path / "kept.txt"
    code, out, _ = run(capsys, "eval", translating, "--data", table, "-o", kept)
    assert code == 0
    assert "1, longer than the model's context" in out
    assert kept.read_text(encoding="utf-8").split("\n")[0] == ""


def test_pronunciations_are_scored_by_word(translating, tmp_path, capsys) -> None:
    table = tmp_path / "words.tsv"
    words, answers = ["cat", "read", "read"], ["K AE1 T", "R IY1 D", "R EH1 D"]
    table.write_text("".join(f"{a}\t{b}\n" for a, b in zip(words, answers, strict=True)), encoding="utf-8")
    code, out, _ = run(capsys, "eval", translating, "--task", "pronunciation", "--data", table, "--json")
    found = [one.text for one in translator().translate(words)]
    expected = vars(pronunciation_scores(words, found, answers))
    assert code == 0
    assert {name: json.loads(out)[name] for name in expected} == expected
    out = run(capsys, "eval", translating, "--task", "pronunciation", "--data", table)[1]
    assert f"{expected['phoneme_error_rate']:.2%}, without stress" in out


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--source", "a.source"), 2, "--source FILE --target FILE"),
        (("--source", "a.source", "--target", "a.target", "--data", "a.source"), 2, "in one file, or in two"),
        (("--source", "a.source", "--target", "short"), 1, "a.source has 5 lines and short has 1"),
        (("--source", "a.source", "--target", "gone"), 3, "gone"),
        (("--data", "short"), 1, "short:1"),
        (("--data", "bad.tsv"), 1, "--bad-bytes replace"),
        (("--data", "keys.jsonl"), 1, "no key `source`"),
        ((), 2, "--data FILE"),
        (("--data", "ok.tsv", "--tokenize", "zhh"), 2, "zhh"),
        (("--data", "ok.tsv", "--beam-size", "0"), 2, "beam_size"),
        (("--data", "ok.tsv", "--batch-size", "0"), 2, "batch_size"),
        (("--data", "ok.tsv", "-o", "no/such/folder"), 3, "no/such/folder"),
        (("--data", "ok.tsv", "-o", "ok.tsv"), 2, "replace the lines"),
        (("--data", "ok.tsv", "--stride", "3"), 2, "--stride is for language-model"),
        (("--data", "ok.tsv", "--task", "classification"), 2, "--task translation"),
        (("--data", "ok.tsv", "--task", "pronunciation", "--tokenize", "zh"), 2, "--tokenize is for translation"),
    ],
)
def test_pairs_that_cannot_be_scored_are_one_error(
    translating, pairs, tmp_path, capsys, monkeypatch, options, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("x\n", encoding="utf-8")
    Path("ok.tsv").write_text("a\tb\n", encoding="utf-8")
    Path("bad.tsv").write_bytes(b"a\t\xff\n")
    Path("keys.jsonl").write_text('{"sourze": "a", "target": "b"}\n', encoding="utf-8")
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: pytest.fail("the model ran"))
    actual, out, err = run(capsys, "eval", translating, *options)
    assert (actual, out) == (code, "")
    assert said in err
    assert "data." not in err
    assert "Traceback" not in err


# --- classes ----------------------------------------------------------------------------------------------------------

LABELS = ("bad", "good", "一般")
TEXTS = ["so good", "not so good", "", "x" * 99, "我"]
TRUE = ["good", "bad", "bad", "good", "bad"]


def classifier(**data: object) -> Model:
    head = {"kind": "classifier", "num_classes": 3, "pooling": "mean"}
    made = network(1, family="encoder", head=head)
    objective = {"kind": "classify", "labels": LABELS}
    tree = {"model": made.config, "objective": objective, "data": data or {}}
    return Model(made, byte_tokenizer(), Config.model_validate(tree))


def test_a_classifier_is_scored_and_what_it_takes_for_what_is_shown(tmp_path, capsys) -> None:
    table = tmp_path / "a.csv"
    rows = "".join(f"{label},{text}\n" for label, text in zip(TRUE, TEXTS, strict=True))
    table.write_text(f"label,text\n{rows}", encoding="utf-8")
    classifier(kind="labelled", train=["gone.tsv"], validation=[str(table)]).save(tmp_path / "m")
    code, out, err = run(capsys, "eval", tmp_path / "m", "--data", table, "--json")
    figures = json.loads(out)
    found = [one.label for one in classifier().classify(TEXTS)]
    expected = classification_scores(found, TRUE, LABELS)
    assert (code, err) == (0, "")
    assert (figures["accuracy"], figures["f1"]) == (expected.accuracy, expected.f1)
    assert (figures["confusion"], figures["labels"]) == (expected.confusion, list(LABELS))
    assert figures["classes"][0] == vars(expected.classes[0])
    assert json.loads(run(capsys, "eval", tmp_path / "m", "--batch-size", "1", "--json")[1]) == figures
    code, out, _ = run(capsys, "eval", tmp_path / "m")
    assert code == 0
    assert f"accuracy        {expected.accuracy:.2%}" in out
    assert f"{expected.classes[1].recall:.2%}" in out
    assert "true \\ predicted" in out


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("label\ttext\ngood\ta\ngod\tb\n", 1, "a.tsv:3"),
        ("label\tsentence\ngood\ta\n", 1, "no column `text`"),
        ("label\ttext\n", 1, "no example"),
        (None, 3, "no such file"),
    ],
)
def test_labels_that_cannot_be_scored_are_one_error(tmp_path, capsys, content, code: int, said: str) -> None:
    classifier().save(tmp_path / "m")
    if content is not None:
        (tmp_path / "a.tsv").write_text(content, encoding="utf-8")
    actual, out, err = run(capsys, "eval", tmp_path / "m", "--data", tmp_path / "a.tsv")
    assert (actual, out) == (code, "")
    assert said in err
    assert "data." not in err
    code, _, err = run(capsys, "eval", tmp_path / "m")
    assert (code, "--data FILE" in err) == (2, True)


# --- images and sound -------------------------------------------------------------------------------------------------


def of_files(kind: str, task: str, table: Path, **data: object) -> Model:
    """A random model of the files of a table."""
    settings = media_config(kind, task, table, data=data, objective={"kind": task})
    tokenizer = byte_tokenizer() if task == "translate" else None
    model = settings.model.with_vocab_size(260)
    if task == "classify":
        model = model.model_copy(update={"head": model.head.model_copy(update={"num_classes": 2})})
        objective = settings.objective.model_copy(update={"labels": WORDS[::-1]})
        settings = settings.model_copy(update={"objective": objective})
    made = Transformer(model, generator=torch.Generator().manual_seed(1)).eval()
    return Model(made, tokenizer, settings.model_copy(update={"model": model}))


@pytest.fixture(params=["images", "audio"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITE[request.param](tmp_path, 5)


def kind_of(table: Path) -> str:
    return "images" if table.name == "images.tsv" else "audio"


def test_a_classifier_of_files_is_scored_without_a_tokenizer(table: Path, tmp_path: Path, capsys) -> None:
    model = of_files(kind_of(table), "classify", table)
    model.save(tmp_path / "m")
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    found = [one.label for one in model.classify([str(tmp_path / row[0]) for row in rows])]
    expected = classification_scores(found, [row[2] for row in rows], WORDS[::-1])
    code, out, err = run(capsys, "eval", tmp_path / "m", "--data", table, "--batch-size", "2", "--json")
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert (figures["accuracy"], figures["f1"], figures["examples"]) == (expected.accuracy, expected.f1, 5)
    out = run(capsys, "eval", tmp_path / "m", "--data", table)[1]
    assert f"{'recordings' if kind_of(table) == 'audio' else 'images':<16}5" in out


def test_what_is_written_of_files_is_scored_against_their_texts(table: Path, tmp_path: Path, capsys) -> None:
    model = of_files(kind_of(table), "translate", table)
    model.save(tmp_path / "m")
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    files, wanted = [str(tmp_path / row[0]) for row in rows], [row[1] for row in rows]
    if kind_of(table) == "images":
        found = [model.caption(file, beam_size=2).text for file in files]
    else:
        found = [model.transcribe(file, beam_size=2).text for file in files]
    kept = tmp_path / "kept.txt"
    options = ("--beam-size", "2", "--batch-size", "2", "-o", kept, "--json")
    code, out, err = run(capsys, "eval", tmp_path / "m", "--data", table, *options)
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert kept.read_text(encoding="utf-8") == "".join(text.replace("\n", " ") + "\n" for text in found)
    assert figures["word_error_rate"] == error_rate(found, wanted, "word")
    assert figures["character_error_rate"] == error_rate(found, wanted, "character")
    assert figures["exact_match"] == exact_match(found, wanted)
    assert ("bleu" in figures) == (kind_of(table) == "images")
    assert (figures["sources"], figures["beam_size"]) == (5, 2)
    out = run(capsys, "eval", tmp_path / "m", "--data", table)[1]
    assert "word error rate" in out
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    err = run(capsys, "eval", tmp_path / "m", "--data", tmp_path / "a.png")[2]
    assert "try a table (TSV, CSV or JSONL) that names" in err
    assert "beam size 4" in out if kind_of(table) == "images" else "beam size 1" in out


@pytest.mark.parametrize("kind", ["images", "audio"])
def test_without_data_what_training_holds_out_of_files_is_scored(
    kind: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    model = of_files(kind, "classify", WRITE[kind](tmp_path))
    model.save(tmp_path / "m")
    held = prepare(model.config, None, tmp_path / "cache" / "data").validation
    assert held is not None
    figures = json.loads(run(capsys, "eval", tmp_path / "m", "--json")[1])
    assert figures["examples"] == held.num_documents
    assert [one["support"] for one in figures["classes"]] == [int((held.labels_D == n).sum()) for n in range(2)]


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (["image\tlabel", "0.png\tlow", "gone.png\tlow"], 3, "bad.tsv:3"),
        (["image\tclass", "0.png\tlow"], 1, "no column `label`"),
        (["image\tlabel", "0.png\tlo"], 1, "bad.tsv:2"),
        (["image\tlabel", "bad.tsv\tlow"], 1, "no image of PNG"),
        (["image\tlabel"], 1, "no example"),
    ],
)
def test_files_that_cannot_be_scored_are_one_error(
    lines: list[str], code: int, said: str, tmp_path: Path, capsys
) -> None:
    of_files("images", "classify", WRITE["images"](tmp_path, 2)).save(tmp_path / "m")
    (tmp_path / "bad.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    actual, out, err = run(capsys, "eval", tmp_path / "m", "--data", tmp_path / "bad.tsv")
    assert (actual, out) == (code, "")
    assert said in err
    assert "data." not in err


def test_a_prefix_lm_is_scored_on_what_follows_a_prefix(tmp_path: Path, text: Path, capsys) -> None:
    model = make_model(tmp_path / "m", "objective.kind=prefix", tokenizer=Tokenizer.train([], kind="byte"))
    code, out, err = run(capsys, "eval", model, "--data", text, "--json")
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert 0 < figures["tokens"] < len(TEXT.encode())
    assert figures["bits_per_byte"] is None
    code, _, err = run(capsys, "eval", model, "--data", text, "--stride", "4")
    assert (code, "--stride is for language-model, and the task is prefix" in err) == (2, True)
