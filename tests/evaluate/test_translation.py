"""BLEU and chrF are those of sacreBLEU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sacrebleu.metrics import BLEU, CHRF

from qkv.config.errors import UsageError
from qkv.evaluate import translation_scores

HYPOTHESES = ["The cat sat on the mat.", 'A dog, "Rex", barked loudly at me.', "It's 3.5 km away", "Nothing else"]
REFERENCES = ["The cat is on the mat.", 'A dog, "Rex", barked at me loudly.', "It's 3.5km away.", "Nothing more."]
OTHERS = ["A cat sat on the mat.", "Rex, a dog, barked at me.", "It is 3.5 km away.", "Nothing."]
CHINESE = ["我昨天在图书馆看了一本书。", "他有3只iPhone手机，很贵！"]
CHINESE_REFERENCES = ["昨天我在图书馆里看了一本书。", "他有三只iPhone手机，都很贵！"]


def test_the_figures_and_signatures_are_sacrebleus() -> None:
    bleu, chrf = BLEU(), CHRF()
    scores = translation_scores(HYPOTHESES, REFERENCES)
    assert scores.bleu == bleu.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == chrf.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert scores.signature == str(bleu.get_signature())
    assert scores.chrf_signature == str(chrf.get_signature())
    assert scores.sentences == 4
    assert 0 < scores.bleu < 100
    assert scores.four_grams == bleu.corpus_score(HYPOTHESES, [REFERENCES]).totals[3] > 0


def test_without_four_words_bleu_is_0_and_the_scores_say_why() -> None:
    scores = translation_scores(["one two three", "four"], ["one two three", "four"])
    assert (scores.bleu, scores.four_grams) == (0, 0)


def test_the_figures_are_those_of_sacrebleus_command(tmp_path) -> None:
    """Only a newline ends a line: other signs that may are content."""
    hypotheses, references = (
        [*HYPOTHESES, "one\u2028two\x0bthree four"],
        [*REFERENCES, "one two\x85three\u2028four five"],
    )
    (tmp_path / "hyp").write_bytes("".join(f"{line}\n" for line in hypotheses).encode())
    (tmp_path / "ref").write_bytes("".join(f"{line}\n" for line in references).encode())
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-m", "bleu", "chrf", "--width", "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, encoding="utf-8")
    bleu, chrf = json.loads(done.stdout)
    scores = translation_scores(hypotheses, references)
    assert (scores.bleu, scores.chrf) == pytest.approx((bleu["score"], chrf["score"]), abs=1e-9)
    assert scores.signature == bleu["signature"]
    assert scores.chrf_signature == chrf["signature"]


def test_several_references_stand_beside_their_hypothesis() -> None:
    streams = [REFERENCES, OTHERS]
    scores = translation_scores(HYPOTHESES, list(zip(*streams, strict=True)))
    assert scores.bleu == BLEU().corpus_score(HYPOTHESES, streams).score
    assert scores.chrf == CHRF().corpus_score(HYPOTHESES, streams).score
    assert "nrefs:2" in scores.signature


def test_some_hypotheses_may_have_more_references_than_others() -> None:
    scores = translation_scores(HYPOTHESES, [REFERENCES, [OTHERS[0]], [OTHERS[1], REFERENCES[1]], OTHERS])
    assert "nrefs:var" in scores.signature
    only_one = translation_scores(HYPOTHESES, [[reference] for reference in REFERENCES])
    assert only_one == translation_scores(HYPOTHESES, REFERENCES)


def test_case_counts_unless_lowercase() -> None:
    shouted = [text.upper() for text in REFERENCES]
    assert translation_scores(shouted, REFERENCES).bleu < 50
    scores = translation_scores(shouted, REFERENCES, lowercase=True)
    assert (scores.bleu, scores.chrf) == pytest.approx((100, 100))
    assert "case:lc" in scores.signature
    assert "case:lc" in scores.chrf_signature


def test_chinese_is_split_into_characters() -> None:
    bleu = BLEU(tokenize="zh")
    scores = translation_scores(CHINESE, CHINESE_REFERENCES)
    assert scores.bleu == bleu.corpus_score(CHINESE, [CHINESE_REFERENCES]).score
    assert scores.signature == str(bleu.get_signature())
    assert scores.bleu > translation_scores(CHINESE, CHINESE_REFERENCES, tokenize="13a").bleu


@pytest.mark.parametrize(
    ("references", "tokenizer"),
    [
        (["我用Word写信。"], "13a"),  # as many Latin letters as Chinese
        (["我用Word写信。", "很好"], "zh"),
        (["The character 好 means good."], "13a"),
        (["我々は東京のレストランで食べました。"], "13a"),
        (["漢字𠀀𠀁"], "zh"),
        (["3.14!"], "13a"),
        ([""], "13a"),
        ([["nothing", "什么都没有", "没有什么东西"]], "zh"),
    ],
)
def test_auto_counts_the_letters_of_the_references(references, tokenizer) -> None:
    assert f"tok:{tokenizer}|" in translation_scores(["x"] * len(references), references).signature


@pytest.mark.parametrize("tokenizer", ["13a", "intl", "zh", "char", "none"])
def test_a_tokenizer_can_be_named(tokenizer) -> None:
    scores = translation_scores(HYPOTHESES, REFERENCES, tokenize=tokenizer)
    assert scores.bleu == BLEU(tokenize=tokenizer).corpus_score(HYPOTHESES, [REFERENCES]).score


def test_a_tokenizer_that_is_unknown_or_not_installed_is_refused(monkeypatch) -> None:
    with pytest.raises(UsageError, match="no tokenizer `ja`") as caught:
        translation_scores(["x"], ["x"], tokenize="ja")  # type: ignore[arg-type]
    assert "ja-mecab" in str(caught.value)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    with pytest.raises(UsageError, match="`ja-mecab` is not installed") as caught:
        translation_scores(["x"], ["x"], tokenize="ja-mecab")
    assert 'pip install "sacrebleu[ja]"' in str(caught.value)


def test_empty_sentences_are_scored_and_empty_lists_are_not() -> None:
    assert translation_scores(["", ""], ["a", "b"]).bleu == 0
    with pytest.raises(UsageError, match="no hypotheses"):
        translation_scores([], [])


def test_unequal_counts_are_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="hypotheses and references differ in number: 4 and 3"):
        translation_scores(HYPOTHESES, REFERENCES[:3])
    with pytest.raises(UsageError, match="4 and 2"):
        translation_scores(HYPOTHESES, [REFERENCES, OTHERS])


def test_a_hypothesis_without_a_reference_is_refused() -> None:
    with pytest.raises(UsageError, match="hypothesis 2 has no reference"):
        translation_scores(["a", "b"], [["a"], []])


def test_one_text_is_not_taken_for_a_list_of_its_characters() -> None:
    with pytest.raises(UsageError, match="the hypotheses are a list"):
        translation_scores("abc", "abc")


def test_importing_the_measures_loads_neither_torch_nor_sacrebleu() -> None:
    code = (
        "import sys; from qkv.evaluate import classification_scores, error_rate, translation_scores\n"
        "print([m for m in ('torch', 'sacrebleu', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8")
    assert done.stdout.strip() == "[]"
