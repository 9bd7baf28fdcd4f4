"""`qkv data prepare` and `qkv data show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkv.cli import main

PADDED = ("model.max_seq_len=13", "train.batch_tokens=9999", "--validation")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "lines.txt"
    text.write_text("".join(f"line {number}\n" for number in range(30)), encoding="utf-8")
    path = tmp_path / "config.yaml"
    path.write_text(
        "extends: decoder-tiny\n"
        "model: {vocab_size: null, max_seq_len: 16}\n"
        f"data: {{train: ['{text.as_posix()}'], split: lines, validation: 0.2}}\n"
        "train: {batch_tokens: 64}\n",
        encoding="utf-8",
    )
    return path


def test_prepare_says_what_there_is_and_finds_it_again(config, cache, capsys) -> None:
    first = json.loads(run(capsys, "data", "prepare", config, "--json")[1])
    again = json.loads(run(capsys, "data", "prepare", config, "--json")[1])
    assert first["train"]["documents"] + first["validation"]["documents"] == 30
    assert first["validation"]["documents"] > 0
    assert (first["reused"], again["reused"]) == (False, True)
    assert first["fingerprint"] == again["fingerprint"]
    assert first["id_bits"] == 16
    assert all(cache in Path(folder).parents for folder in first["folders"])


def test_prepare_tells_people_the_same(config, capsys) -> None:
    told = json.loads(run(capsys, "data", "prepare", config, "--json")[1])
    code, out, _ = run(capsys, "data", "prepare", config)
    assert code == 0
    assert f"{told['train']['tokens']:,} tokens" in out
    assert told["folders"][0] in out


def test_prepare_warns_of_text_too_short_for_one_window(config, capsys) -> None:
    code, _, err = run(capsys, "data", "prepare", config, "model.max_seq_len=5000")
    assert (code, "5001 tokens" in err) == (0, True)


def test_show_prints_the_first_batch_that_training_takes(config, capsys) -> None:
    code, out, _ = run(capsys, "data", "show", config, "--json")
    batch = json.loads(out)
    assert code == 0
    assert list(batch) == ["inputs", "labels", "documents", "positions", "lengths"]
    assert len(batch["inputs"]) == 64 // 16
    for inputs, labels, documents in zip(batch["inputs"], batch["labels"], batch["documents"], strict=True):
        assert len(inputs) == len(labels) == 16
        for slot in range(15):
            if documents[slot] == documents[slot + 1]:
                assert labels[slot] == inputs[slot + 1]


def test_show_of_validation_has_padding_by_lengths(config, capsys) -> None:
    batch = json.loads(run(capsys, "data", "show", config, *PADDED, "--json")[1])
    assert 0 < batch["lengths"][-1] < 13
    assert set(batch["labels"][-1][batch["lengths"][-1] :]) == {-100}


def test_show_of_an_encoder_masks_tokens(config, capsys) -> None:
    overrides = ("model.family=encoder", "model.position.kind=learned", "objective=null")
    batch = json.loads(run(capsys, "data", "show", config, *overrides, "--json")[1])
    chosen = [label for row in batch["labels"] for label in row if label != -100]
    assert 0 < len(chosen) < 16


def test_show_draws_tokens_labels_and_what_each_slot_sees(config, capsys) -> None:
    code, out, err = run(capsys, "data", "show", config, *PADDED, "--rows", "99")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line[:5].strip().isdigit()]
    assert len(lines) % 13 == 0
    assert "13 slots" in err
    assert lines[0] == ["0", "257", "'<bos>'", "108", "'l'", "0", "0", "0", "to", "0"]
    assert lines[2] == ["2", "105", "'i'", "110", "'n'", "0", "2", "0", "to", "2"]
    assert lines[-1][-2:] == ["padding", "nothing"]


def test_chinese_tokens_keep_the_columns(config, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("我爱你中国\n" * 30, encoding="utf-8")
    _, out, _ = run(capsys, "data", "show", config, "tokenizer={kind: char}")
    rows = [line for line in out.splitlines() if "'我'" in line]
    assert rows
    assert {line.split()[-1].isdigit() for line in rows} == {True}
    wide = {sum(2 if character > "\u2e80" else 1 for character in line.split(" to ")[0]) for line in rows}
    assert max(wide) - min(wide) <= 1  # one or two digits of a slot at the end


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("data", "shw", "x"), 2, "show"),
        (("data", "show", "lama-tiny"), 3, "llama-tiny"),
        (("data", "show", "llama-tiny"), 2, "data.train"),
        (("data", "prepare", "decoder-tiny", "data.train=[gone.txt]"), 3, "gone.txt"),
        (("data", "prepare", "decoder-tiny"), 2, "data.train"),
        (("data", "show", "decoder-tiny", "data.trian=[a]"), 2, "try `train`"),
    ],
)
def test_a_mistake_exits_with_its_code(capsys, arguments, code: int, said: str) -> None:
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_rows_below_one_and_missing_validation_are_refused(config, capsys) -> None:
    assert run(capsys, "data", "show", config, "--rows", "0")[0] == 2
    code, _, err = run(capsys, "data", "show", config, "data.validation=0", "--validation")
    assert (code, "data.validation" in err) == (2, True)


def test_text_that_fills_no_row_is_refused_with_both_numbers(config, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("ab\n", encoding="utf-8")
    code, out, err = run(capsys, "data", "show", config, "data.validation=0", "--json")
    assert (code, out) == (1, "")
    assert "4 training tokens" in err
    assert "17" in err


# --- pairs, texts with labels, denoising ------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    lines = [f"{'a' * (1 + number % 9)}\t{'b' * (1 + number % 5)}{number}\n" for number in range(40)]
    (tmp_path / "pairs.tsv").write_text("".join([*lines, f"{'a' * 30}\tb\n", "\tb\n"]), encoding="utf-8")
    path = tmp_path / "pairs.yaml"
    path.write_text(
        "extends: encoder-decoder-tiny\n"
        "model: {vocab_size: null, tie_embeddings: none, max_seq_len: 16}\n"
        "tokenizer: {source: {kind: char}, target: {kind: byte}}\n"
        f"data: {{train: ['{(tmp_path / 'pairs.tsv').as_posix()}'], validation: 0.2}}\n"
        "train: {batch_tokens: 64}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    lines = [f"{'good' if number % 2 else 'bad'} {number}\t{number % 2}\n" for number in range(30)]
    (tmp_path / "reviews.tsv").write_text("".join(["text\tlabel\n", *lines]), encoding="utf-8")
    path = tmp_path / "reviews.yaml"
    path.write_text(
        "extends: encoder-tiny\n"
        "model: {vocab_size: null, tie_embeddings: none, max_seq_len: 8, head: {kind: classifier}}\n"
        "tokenizer: {kind: byte}\n"
        "objective: null\n"
        f"data: {{train: ['{(tmp_path / 'reviews.tsv').as_posix()}'], validation: 0}}\n",
        encoding="utf-8",
    )
    return path


def test_prepare_counts_pairs_and_says_what_is_left_out(pairs, capsys) -> None:
    told = json.loads(run(capsys, "data", "prepare", pairs, "--json")[1])
    assert told["train"]["pairs"] + told["validation"]["pairs"] == 40
    assert told["train"].keys() == {"pairs", "source_tokens", "target_tokens"}
    assert [note.partition(" ")[0] for note in told["notes"]] == ["1", "1"]
    assert (told["tokenizer"]["kind"], told["source_tokenizer"]["kind"]) == ("byte", "char")
    assert len(told["folders"]) == 2
    code, out, err = run(capsys, "data", "prepare", pairs)
    assert code == 0
    assert f"{told['train']['pairs']} pairs, {told['train']['source_tokens']:,} source tokens" in out
    assert "source tokenizer  char" in out
    assert err.splitlines() == told["notes"]
    nothing = json.loads(run(capsys, "data", "prepare", pairs, "data.validation=0", "--json")[1])["validation"]
    assert nothing == {"pairs": 0, "source_tokens": 0, "target_tokens": 0}


def test_show_draws_the_source_beside_the_target(pairs, capsys) -> None:
    code, out, err = run(capsys, "data", "show", pairs, "--rows", "99")
    assert code == 0
    assert "source and" in err
    head, *lines = out.splitlines()[1:]
    assert head.split() == ["slot", "id", "source", "id", "target", "label"]
    assert lines[0].split()[:6] == ["0", "1", "'<bos>'", "257", "'<bos>'", "98"]
    drawn = [line.split() for line in out.splitlines() if line[:5].strip().isdigit()]
    batch = json.loads(run(capsys, "data", "show", pairs, "--json")[1])
    assert list(batch)[-2:] == ["source", "source_lengths"]
    padding = sum(len(row) for row in batch["source"]) - sum(batch["source_lengths"])
    padding += sum(len(row) for row in batch["inputs"]) - sum(batch["lengths"])
    assert sum(cells.count("padding") for cells in drawn) == padding > 0
    assert all(row[0] == 257 for row in batch["inputs"])


def test_show_and_prepare_name_the_classes_of_texts(reviews, capsys) -> None:
    told = json.loads(run(capsys, "data", "prepare", reviews, "--json")[1])
    assert told["train"] == {"texts": 30, "tokens": told["train"]["tokens"], "labels": {"0": 15, "1": 15}}
    code, out, _ = run(capsys, "data", "prepare", reviews)
    assert code == 0
    assert "15 of `0`, 15 of `1`" in out
    code, out, _ = run(capsys, "data", "show", reviews, "--rows", "99")
    assert code == 0
    rows = out.split("row ")[1:]
    assert len(rows) == 30
    for row in rows:
        assert ("label '1'" in row) == ("'g'" in row)
        assert "0 to 0" not in row, "an encoder looks ahead"
    batch = json.loads(run(capsys, "data", "show", reviews, "--json")[1])
    assert sorted(batch["labels"]) == [0] * 15 + [1] * 15
    assert "source" not in batch


@pytest.mark.parametrize(("objective", "hidden"), [("denoise", "<mask>"), ("span", "<extra_id_0>")])
def test_show_of_denoising_has_the_damaged_text_as_source(config, capsys, objective: str, hidden: str) -> None:
    changes = ("model.family=encoder-decoder", f"objective.kind={objective}", "tokenizer={kind: byte}")
    code, out, err = run(capsys, "data", "show", config, *changes, "--rows", "99")
    assert code == 0
    assert objective in err
    assert hidden in out
    batch = json.loads(run(capsys, "data", "show", config, *changes, "--json")[1])
    assert max(batch["source_lengths"]) <= 16
    assert max(batch["lengths"]) <= 16


def test_a_text_too_short_for_a_window_is_long_enough_to_denoise(config, capsys) -> None:
    changes = ("model.family=encoder-decoder", "objective.kind=denoise", "model.max_seq_len=5000")
    code, _, err = run(capsys, "data", "prepare", config, *changes)
    assert (code, err) == (0, "")
