"""`Model` and `load`: text in, text out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from generate.tiny import CONTEXT, byte_tokenizer, decode, model, network, same

from qkv.config.errors import ConflictError, DamagedError, NotFoundError, PermissionNeededError, UsageError
from qkv.config.run import Config
from qkv.generate import Beams, Sampling, beam_search
from qkv.model import Model, load
from qkv.tokenizer import Tokenizer


def test_generate_returns_the_promised_fields() -> None:
    found = model().generate("hello", max_new_tokens=6, temperature=0.8, seed=2)
    assert (found.prompt_tokens, found.completion_tokens, found.finish_reason) == (6, 6, "length")
    assert len(found.token_ids) == 6
    assert found.text == byte_tokenizer().decode(found.token_ids)
    assert found.tokens_per_second == pytest.approx(6 / found.seconds)
    assert found.logprobs is None


def test_the_options_reach_the_decoding() -> None:
    made = model()
    sampling = Sampling(0.7, 30, 0.9, 0.01, 1.3, 0.2, 0.1)
    options = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    expected = decode(made.network, [[257, *b"hello"]], sampling=sampling, seeds=[9], eos_ids=[258]).generated[0]
    assert made.generate("hello", max_new_tokens=20, seed=9, **options).token_ids == expected
    assert made.generate("hello", max_new_tokens=20, seed=9, use_cache=False, **options).token_ids == expected


@pytest.mark.parametrize(
    ("option", "said", "hint"),
    [
        ("temprature", "no option 'temprature'", "temperature"),
        ("max_tokens", "no option 'max_tokens'", "max_new_tokens"),
        ("zzz", "no option 'zzz'", "max_new_tokens, temperature"),
        ("num_beams", "no option 'num_beams'", "beam_size"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_one(option: str, said: str, hint: str) -> None:
    made = model()
    for use in (made.generate, made.stream):
        with pytest.raises(UsageError, match=said) as caught:
            use("hello", **{option: 3})
        assert hint in (caught.value.hint or "")
    with pytest.raises(UsageError, match="one text is streamed"):
        made.stream("hello", num_samples=2)
    with pytest.raises(UsageError, match="only at the end"):
        made.stream("hello", beam_size=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", None),
        ("stop", 5),
        ("stop", b"x"),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", True),
        ("top_p", "0.5"),
        ("logprobs", True),
        ("max_new_tokens", True),
        ("max_new_tokens", "7"),
        ("num_samples", 1.5),
        ("num_samples", True),
        ("num_samples", None),
        ("seed", True),
        ("seed", "7"),
        ("use_cache", "no"),
        ("parse_special", 1),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        model().generate("hello", **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        *({"frequency_penalty": value} for value in (1e39, -1e39, 1e300, -3e38)),
        {"presence_penalty": 1e39},
        {"repetition_penalty": 1e-45, "temperature": 1.0},
    ],
)
def test_a_huge_penalty_is_refused_rather_than_writing_nonsense(options: dict[str, float]) -> None:
    name = next(iter(options))
    with pytest.raises(UsageError, match=name):
        model().generate("the cat", **{"temperature": 0, **options})


def test_a_penalty_passes_over_prompt_ids_that_only_pad_the_embedding() -> None:
    made = model(vocab_size=300)
    assert made.generate([257, 290], repetition_penalty=2.0, max_new_tokens=3, seed=0).prompt_tokens == 2


# --- prompts ----------------------------------------------------------------------------------------------------------


def read_by(made: Model) -> list[list[int]]:
    """What the network is given to read, from now on."""
    read: list[list[int]] = []
    made.network.register_forward_pre_hook(lambda module, args: read.append(args[0][0].tolist()))
    return read


@pytest.mark.parametrize("prompt", ["hi", "<bos>hi", [*b"hi"], [257, *b"hi"], torch.tensor([257, *b"hi"])])
def test_exactly_one_bos_whoever_writes_it(prompt) -> None:
    made = model()
    read = read_by(made)
    assert made.generate(prompt, max_new_tokens=1, parse_special=True).prompt_tokens == 3
    assert read == [[257, *b"hi"]]


def test_a_prompt_is_read_by_the_rule_of_training_text() -> None:
    made = model()
    read = read_by(made)
    made.generate("\ufeffa\r\nb", max_new_tokens=1)
    assert read == [[257, *b"a\nb"]]


def test_a_spelled_special_token_is_ordinary_text_unless_asked_for() -> None:
    made = model()
    read = read_by(made)
    made.generate("<eos>", max_new_tokens=1)
    made.generate("<eos>", max_new_tokens=1, parse_special=True)
    assert read == [[257, *b"<eos>"], [257, 258]]


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), memoryview(b"abc"), [b"abc"], ["a", b"abc"]])
def test_bytes_are_no_prompt(prompt) -> None:
    with pytest.raises(UsageError, match="bytes are neither a text nor ids"):
        model().generate(prompt)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([True, False], "whole number, not True"),
        ([[1], [2, True]], "whole number, not True"),
        ([1.0, 2.0], "whole number, not 1.0"),
        ([1, "a"], "whole number, not 'a'"),
        (["a", 1], "prompt 1 is neither"),
        (["a", None], "prompt 1 is neither"),
        (None, "not None"),
        (5, "not 5"),
        ({"a": 1}, "not a dict"),
        ({1, 2}, "not a set"),
        (torch.tensor([1.0, 2.0]), "torch.float32 is no prompt"),
        (torch.tensor([True, False]), "whole number, not True"),
        (torch.tensor(3), "not 3"),
        (np.array([0.5]), "whole number, not 0.5"),
    ],
)
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_what_is_no_prompt_is_refused_by_name(prompt, said: str, family: str) -> None:
    if family == "encoder-decoder":
        said = said.replace("prompt 1", "source 1").replace("torch.float32 is no prompt", "encoder reads ids")
    with pytest.raises(UsageError, match=said):
        model(family=family).generate(prompt)


def test_ids_may_be_arrays_and_tensors() -> None:
    made = model()
    expected = made.generate([1, 2, 3], seed=1)
    for ids in (np.array([1, 2, 3]), (1, 2, 3), torch.tensor([1, 2, 3]), [np.int64(1), 2, 3]):
        assert same(made.generate(ids, seed=1), expected)
    assert "".join(made.stream(torch.tensor([1, 2, 3]), seed=1)) == expected.text
    assert same(made.generate([torch.tensor([1, 2, 3])], seed=1)[0], expected)


def test_no_prompts_give_no_generations() -> None:
    assert model().generate([]) == []
    with pytest.raises(UsageError, match="temperature"):
        model().generate([], temperature=-1)


def test_scoring_and_filling_read_texts_only() -> None:
    for prompt, continuation in ((None, "a"), ("a", None), (b"a", "b")):
        with pytest.raises(UsageError, match="a text"):
            model().score(prompt, continuation)
    for text in (5, None, [1], b"a"):
        with pytest.raises(UsageError, match="a text or a list of texts"):
            model(family="encoder").fill_mask(text)


def test_an_empty_prompt_starts_from_bos_or_is_a_clean_error() -> None:
    made = model()
    read = read_by(made)
    assert made.generate("", max_new_tokens=1).prompt_tokens == 1
    assert read == [[257]]
    tokenizer = Tokenizer.train(["ab ab"], kind="bpe", special={"eos": "<eos>"})
    bare = model(tokenizer, vocab_size=300)
    with pytest.raises(UsageError, match="empty"):
        bare.generate("")
    assert bare.generate("ab", max_new_tokens=2).completion_tokens == 2  # still alive


def test_a_prompt_longer_than_the_context_names_both_numbers() -> None:
    made = model()
    with pytest.raises(UsageError, match=f"{CONTEXT + 1} tokens.*{CONTEXT}"):
        made.generate("x" * CONTEXT)
    assert made.generate("x" * (CONTEXT - 1)).finish_reason == "length"


def test_without_a_tokenizer_ids_still_work() -> None:
    made = Model(network(), None, Config(model=network().config))
    found = made.generate([1, 2, 3], max_new_tokens=4, logprobs=1)
    assert (found.text, len(found.token_ids), found.prompt_tokens) == ("", 4, 3)
    with pytest.raises(UsageError, match="no tokenizer"):
        made.generate("text")
    with pytest.raises(UsageError, match="no tokenizer"):
        made.generate([1], stop="x")


def test_an_encoder_does_not_generate() -> None:
    with pytest.raises(UsageError, match="family encoder"):
        model(family="encoder").generate("text")


# --- counts -----------------------------------------------------------------------------------------------------------


def test_no_new_token_can_still_score_the_prompt() -> None:
    made = model()
    found = made.generate("abc", max_new_tokens=0, logprobs=2)
    assert (found.text, found.token_ids, found.completion_tokens, found.finish_reason) == ("", [], 0, "length")
    assert [entry.token for entry in found.prompt_logprobs] == ["a", "b", "c"]
    assert sum(entry.logprob for entry in found.prompt_logprobs) == pytest.approx(made.score("", "abc"), abs=1e-4)
    assert all(len(entry.top) == 2 for entry in found.prompt_logprobs)
    assert made.generate("", max_new_tokens=0, logprobs=2).prompt_logprobs == []


def test_a_negative_count_is_refused_and_a_huge_one_ends_at_the_context() -> None:
    made = model()
    with pytest.raises(UsageError, match="max_new_tokens"):
        made.generate("abc", max_new_tokens=-1)
    with pytest.raises(UsageError, match="num_samples"):
        made.generate("abc", num_samples=0)
    found = made.generate("abc", max_new_tokens=10**12, seed=0)
    assert (found.finish_reason, found.prompt_tokens + found.completion_tokens) == ("length", CONTEXT)


# --- batches, seeds, samples ------------------------------------------------------------------------------------------


def test_a_list_gives_a_list_in_which_each_is_what_it_would_be_alone() -> None:
    made = model()
    prompts = ["a", "", "some longer prompt", "a"]
    together = made.generate(prompts, seed=[1, 2, 3, 4], stop=["a", "!"])
    for prompt, seed, found in zip(prompts, [1, 2, 3, 4], together, strict=True):
        assert same(found, made.generate(prompt, seed=seed, stop=["a", "!"]))
    assert together[0].token_ids != together[3].token_ids
    assert made.generate([]) == []
    one_seed = made.generate(["a", "b"], seed=7, max_new_tokens=5)
    assert same(one_seed[1], made.generate("b", seed=7, max_new_tokens=5))


def test_sample_i_is_what_seed_plus_i_gives() -> None:
    made = model()
    samples = made.generate("a", seed=5, num_samples=3, max_new_tokens=8)
    assert all(same(found, made.generate("a", seed=5 + i, max_new_tokens=8)) for i, found in enumerate(samples))
    assert len({tuple(found.token_ids) for found in samples}) == 3
    nested = made.generate(["b", "a"], seed=5, num_samples=3, max_new_tokens=8)
    assert all(same(found, other) for found, other in zip(nested[1], samples, strict=True))


def test_without_a_seed_every_call_is_new() -> None:
    made = model()
    torch.manual_seed(0)
    first = made.generate("a", max_new_tokens=12)
    torch.manual_seed(0)
    assert made.generate("a", max_new_tokens=12).token_ids != first.token_ids


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, [1], [1, 2, 3], ["a", "b"]])
def test_a_seed_that_cannot_be_meant_is_refused(seed) -> None:
    with pytest.raises(UsageError, match="seed"):
        model().generate(["a", "b"], seed=seed)


# --- encoder-decoder --------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_decodes_from_the_source() -> None:
    made = model(family="encoder-decoder")
    alone = made.generate("abc", max_new_tokens=7, seed=1)
    assert len(alone.token_ids) == 7
    assert alone.prompt_tokens == 5  # bos, a, b, c, eos
    source = torch.tensor([[257, *b"abc", 258]])
    expected = decode(made.network, [[257]], sampling=Sampling(), seeds=[1], max_new_tokens=7, source=source)
    assert alone.token_ids == expected.generated[0]
    batch = made.generate(["something longer", "abc"], max_new_tokens=7, seed=1, num_samples=2)
    assert same(batch[1][0], alone)
    assert same(batch[1][1], made.generate("abc", max_new_tokens=7, seed=2))


def test_features_give_one_generation_per_row() -> None:
    made = model(family="encoder-decoder", encoder={"input": {"kind": "features", "width": 5}})
    source = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    first, second = made.generate(source, max_new_tokens=4, temperature=0)
    assert first.token_ids != second.token_ids
    assert first.prompt_tokens == 6
    for wrong in (source[0], "text", [1, 2]):
        with pytest.raises(UsageError, match="the encoder reads features"):
            made.generate(wrong)


def test_sources_that_cannot_be_read_are_refused() -> None:
    made = model(family="encoder-decoder")
    with pytest.raises(UsageError, match="260"):
        made.generate([260])
    with pytest.raises(UsageError, match="source 0 is empty"):
        made.generate([[]])
    with pytest.raises(UsageError, match=f"context of {CONTEXT}"):
        made.generate("x" * CONTEXT)
    bare = Model(made.network, None, made.config)
    with pytest.raises(UsageError, match="BOS"):
        bare.generate([1, 2])


# --- beams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_beams_give_the_generation_of_the_best_hypothesis(family: str) -> None:
    made = model(family=family)
    together = made.generate(["abc", "", "longer"], beam_size=3, length_penalty=1.0, max_new_tokens=8)
    for text, found in zip(["abc", "", "longer"], together, strict=True):
        assert same(found, made.generate(text, beam_size=3, length_penalty=1.0, max_new_tokens=8, use_cache=False))
        assert found.text == byte_tokenizer().decode(found.token_ids)
        assert found.completion_tokens == len(found.token_ids)
        assert found.tokens_per_second == pytest.approx(len(found.token_ids) / found.seconds)
    assert [found.prompt_tokens for found in together] == ([4, 1, 7] if family == "decoder" else [5, 2, 8])
    if family == "decoder":
        (best,) = beam_search(made.network, [[257, *b"abc"]], Beams(3, 1, 1.0), max_new_tokens=8, eos_ids=[258])[0]
        assert together[0].token_ids == best.token_ids
    assert made.generate([], beam_size=2) == []


def test_the_length_penalty_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(network, prompts, beams, **options):
        seen.append(beams)
        return beam_search(network, prompts, beams, **options)

    monkeypatch.setattr("qkv.generate.write.beam_search", watched)
    model().generate("a", beam_size=3, length_penalty=1.5, length_penalty_kind="power", max_new_tokens=1)
    model().generate("a", beam_size=2, max_new_tokens=1)
    assert seen == [Beams(3, 1, 1.5, "power"), Beams(2, 1, 0.6, "gnmt")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("num_samples", 2),
        ("logprobs", 3),
        ("stop", "x"),
        ("stop", ["x"]),
    ],
)
def test_beams_refuse_what_is_said_of_single_tokens(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name}=.* beams"):
        model().generate("hello", beam_size=2, **{name: value})


def test_beams_accept_defaults_greedy_and_a_seed() -> None:
    made = model()
    expected = made.generate("hello", beam_size=2, max_new_tokens=5)
    for options in ({"temperature": 0}, {"temperature": 1.0, "top_k": 0, "stop": (), "num_samples": 1}, {"seed": 3}):
        assert same(made.generate("hello", beam_size=2, max_new_tokens=5, **options), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_size", 0), ("beam_size", 1.5), ("length_penalty", -1), ("length_penalty_kind", "x"), ("seed", "7")],
)
def test_a_search_that_cannot_be_meant_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        model().generate("hello", **{"beam_size": 2, name: value})


# --- saving and loading -----------------------------------------------------------------------------------------------


def test_a_saved_model_loads_and_says_the_same(tmp_path: Path) -> None:
    made = model()
    made.save(tmp_path / "folder")
    loaded = load(tmp_path / "folder", device="cpu")
    assert same(loaded.generate("hello", seed=3), made.generate("hello", seed=3))
    assert loaded.config.model == made.config.model
    assert not loaded.network.training
    with pytest.raises(ConflictError):
        made.save(tmp_path / "folder")


def test_the_vocabulary_taken_from_the_tokenizer_is_saved(tmp_path: Path) -> None:
    made = model()
    unknown = Config(model=made.config.model.model_copy(update={"vocab_size": None}))
    Model(made.network, byte_tokenizer(), unknown).save(tmp_path / "folder")
    assert load(tmp_path / "folder").config.model.vocab_size == 260


def test_a_run_folder_loads_and_a_folder_without_tokenizer_too(tmp_path: Path) -> None:
    made = model()
    Model(made.network, None, made.config).save(tmp_path / "run/checkpoints/step-000010")
    loaded = load(str(tmp_path / "run"))
    assert loaded.tokenizer is None
    assert loaded.generate([257], max_new_tokens=2).completion_tokens == 2


def test_precision_on_a_cpu_is_float32_unless_asked(tmp_path: Path) -> None:
    model().save(tmp_path / "folder")
    assert next(load(tmp_path / "folder", device="cpu").network.parameters()).dtype == torch.float32
    half = load(tmp_path / "folder", device="cpu", dtype="bf16")
    assert next(half.network.parameters()).dtype == torch.bfloat16
    assert half.generate("a", max_new_tokens=3).completion_tokens == 3


def test_what_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NotFoundError):
        load(tmp_path / "nothing")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(DamagedError, match="GGUF file is damaged"):
        load(tmp_path / "model.gguf")
    (tmp_path / "model.bin").write_bytes(b"no model")
    with pytest.raises(UsageError, match="no model"):
        load(tmp_path / "model.bin")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(NotFoundError, match="weights are missing"):
        load(tmp_path / "hf")
    with pytest.raises(PermissionNeededError, match="`smollm2` is not on this machine yet"):
        load("smollm2")
    model().save(tmp_path / "folder")
    for options, said in (
        ({"quantize": "int8"}, "int8"),
        ({"dtype": "fp8"}, "fp8"),
        ({"device": "abacus"}, "abacus"),
    ):
        with pytest.raises(UsageError, match=said):
            load(tmp_path / "folder", **options)


def test_a_model_prints_in_one_line() -> None:
    text = repr(model())
    assert "\n" not in text
    assert len(text) < 160
    assert all(word in text for word in ("decoder", "parameters", "float32", "byte"))
