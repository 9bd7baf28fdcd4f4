"""What users do with real published models, against reference outputs made elsewhere."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.evaluate.perplexity import perplexity


def test_minilm_embeds_as_sentence_transformers_does(published_model, data_file: Callable[[str], Path]) -> None:
    golden = json.loads(data_file("golden/minilm.json").read_text(encoding="utf-8"))["cases"]
    found = qkv.load(published_model("minilm"), device="cpu").embed([case["text"] for case in golden])
    np.testing.assert_allclose(found, [case["embedding"] for case in golden], atol=1e-4)


def test_whisper_writes_down_what_is_said(published_model, data_file: Callable[[str], Path]) -> None:
    golden = json.loads(data_file("golden/whisper_tiny_en.json").read_text(encoding="utf-8"))
    found = qkv.load(published_model("whisper-tiny.en"), device="cpu").transcribe(data_file("speech-jfk/jfk.wav"))
    assert [segment.token_ids for segment in found.segments] == [golden["output_ids"]]
    assert found.text == golden["text"].strip()


def test_smollm2_continues_as_the_reference_does(published_model, data_file: Callable[[str], Path]) -> None:
    golden = json.loads(data_file("golden/smollm2.json").read_text(encoding="utf-8"))["cases"]
    model = qkv.load(next(published_model("smollm2").glob("*.gguf")), device="cpu")
    for case in golden:
        count = len(case["greedy_ids"])
        found = model.generate(case["prompt"], parse_special=True, temperature=0, max_new_tokens=count)
        assert (found.token_ids, found.prompt_tokens) == (case["greedy_ids"], len(case["prompt_ids"]))


@pytest.mark.slow
def test_smollm2_has_the_perplexity_of_the_reference(published_model, data_file: Callable[[str], Path]) -> None:
    golden = json.loads(data_file("golden/smollm2.json").read_text(encoding="utf-8"))["wikitext2"]
    model = qkv.load(next(published_model("smollm2").glob("*.gguf")), device="cpu")
    with gzip.open(data_file("wikitext2-test/wikitext2-test.txt.gz"), "rt", encoding="utf-8", newline="") as file:
        ids = model.tokenizer.encode(file.read(50_000))  # as it stands: the reference kept every CR
    windows = {"window": golden["window"] - 1, "stride": golden["window"], "max_windows": golden["windows"]}
    found = perplexity(model.network, ids, **windows, batch_size=2)
    assert (found.tokens, found.loss) == (golden["predicted"], pytest.approx(golden["mean_nll"], abs=1e-3))
