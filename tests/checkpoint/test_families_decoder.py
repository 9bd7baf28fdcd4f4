"""Decoders as published: the same values and the same text from the same files, and back."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import qkv
from qkv import Config, Model, Transformer
from qkv.checkpoint.families import family_of, named
from qkv.checkpoint.published import Published
from qkv.checkpoint.save_hf import equal_family
from qkv.config import ModelConfig, QkvError

from .family_cases import NO_SPECIAL_IDS, VOCAB, Case, Pair, assert_close, make, make_pair, random_ids, values, written

TRAINED, LENGTH, PROMPT, NEW = 8, 22, 9, 12
"""Tokens: of the original context where one is stretched, of a text, and of what is generated."""

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    **NO_SPECIAL_IDS,
}
GEMMA = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
}
GEMMA2 = {key: value for key, value in GEMMA.items() if key != "sliding_window_pattern"}
QWEN3_MOE = {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GPT_OSS = {**LLAMA, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5}
DEEPSEEK = {
    **{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    **NO_SPECIAL_IDS,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, **NO_SPECIAL_IDS}
NEOX = {**{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}, "hidden_size": 64}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **keys}}


ORIGINAL = {"original_max_position_embeddings": TRAINED}
LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
# a theta at which the borders of the ramp lie within so few channels
RAMP = {"rope_theta": 10.0, "factor": 4.0, "beta_fast": 0.8, "beta_slow": 0.1, **ORIGINAL}
YARN = {"head_dim": 16, "max_position_embeddings": 4 * TRAINED, **rope("yarn", **RAMP)}
LONGROPE = rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.4], long_factor=[1.0, 1.5, 2.0, 4.0], **ORIGINAL)
DYNAMIC = {**rope("dynamic", factor=4.0), "max_position_embeddings": TRAINED}

CASES = {
    "llama": Case("LlamaForCausalLM", LLAMA),
    "llama-tied": Case("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama-bare": Case("LlamaModel", LLAMA),
    "llama-biases": Case("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-heads": Case("LlamaForCausalLM", {**LLAMA, "head_dim": 12, "num_key_value_heads": None}),
    "llama-gelu": Case("LlamaForCausalLM", {**LLAMA, "hidden_act": "gelu"}),
    "llama-linear": Case(
        "LlamaForCausalLM", {**LLAMA, **rope("linear", factor=4.0), "max_position_embeddings": TRAINED}
    ),
    "llama-dynamic": Case("LlamaForCausalLM", {**LLAMA, **DYNAMIC}, {"whole": True, "batch": (7, 4)}),
    "llama-yarn": Case("LlamaForCausalLM", {**LLAMA, **YARN}),
    "llama-yarn-mscale": Case(
        "LlamaForCausalLM", {**LLAMA, **YARN, **rope("yarn", **RAMP, mscale=0.7, mscale_all_dim=0.4, truncate=False)}
    ),
    "llama-yarn-factor": Case("LlamaForCausalLM", {**LLAMA, **YARN, **rope("yarn", **RAMP, attention_factor=1.3)}),
    "llama-llama3": Case("LlamaForCausalLM", {**LLAMA, **LLAMA3}),
    "llama-longrope": Case("LlamaForCausalLM", {**LLAMA, **LONGROPE}),
    "mistral": Case("MistralForCausalLM", {**LLAMA, "sliding_window": 5}),
    "mistral-no-window": Case(
        "MistralForCausalLM", {**LLAMA, "sliding_window": None, "head_dim": 12, "tie_word_embeddings": True}
    ),
    "qwen2": Case("Qwen2ForCausalLM", LLAMA),
    "qwen2-tied": Case("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True, **YARN}),
    "qwen2-windows": Case(
        "Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    ),
    "qwen2-layer-types": Case(
        "Qwen2ForCausalLM",
        {
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": Case("Qwen3ForCausalLM", {**LLAMA, "head_dim": 12}),
    "qwen3-tied": Case(
        "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "qwen3-windows": Case(
        "Qwen3ForCausalLM",
        {**LLAMA, "head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "olmo2": Case("Olmo2ForCausalLM", LLAMA),
    "olmo2-bare": Case("Olmo2Model", LLAMA),
    "olmo2-tied": Case(
        "Olmo2ForCausalLM",
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": None, **YARN},
    ),
    "phi3": Case("Phi3ForCausalLM", LLAMA),
    "phi3-bare": Case("Phi3Model", {**LLAMA, "num_key_value_heads": None}),
    "phi3-windows": Case(
        "Phi3ForCausalLM",
        {**LLAMA, "sliding_window": 5, "tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.75)},
    ),
    "phi3-longrope": Case(
        "Phi3ForCausalLM", {**LLAMA, **LONGROPE, "original_max_position_embeddings": TRAINED, "hidden_act": "gelu"}
    ),
    "gemma": Case("GemmaForCausalLM", {**LLAMA, "head_dim": 12}),
    "gemma-bare": Case("GemmaModel", {**LLAMA, "head_dim": 12, "hidden_act": "gelu"}),
    "gemma-untied": Case(
        "GemmaForCausalLM",
        {**LLAMA, "head_dim": 8, "tie_word_embeddings": False, "attention_bias": True, **rope("linear", factor=4.0)},
    ),
    "gemma2": Case("Gemma2ForCausalLM", {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-bare": Case("Gemma2Model", GEMMA2),
    "gemma2-no-caps": Case(
        "Gemma2ForCausalLM",
        {
            **GEMMA2,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma2-no-window": Case(
        "Gemma2ForCausalLM", {**GEMMA2, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    ),
    "gemma3": Case("Gemma3ForCausalLM", GEMMA),
    "gemma3-bare": Case("Gemma3TextModel", GEMMA),
    "gemma3-linear": Case(
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma3-layer-types": Case(
        "Gemma3ForCausalLM",
        {**GEMMA, "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma3-no-window": Case(
        "Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    ),
    "gemma3-windows-only": Case("Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 2}),
    "gemma3-with-images": Case("Gemma3ForConditionalGeneration", {"text_config": GEMMA, "vision_config": VISION}),
    "mixtral": Case("MixtralForCausalLM", {**LLAMA, "num_local_experts": 5}),
    "mixtral-window": Case(
        "MixtralForCausalLM",
        {**LLAMA, "sliding_window": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "qwen3-moe": Case("Qwen3MoeForCausalLM", QWEN3_MOE),
    "qwen3-moe-bare": Case("Qwen3MoeModel", {**QWEN3_MOE, "norm_topk_prob": True, "attention_bias": True}),
    "qwen3-moe-some-layers": Case(
        "Qwen3MoeForCausalLM",
        {**QWEN3_MOE, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5, "head_dim": 12},
    ),
    "gpt-oss": Case("GptOssForCausalLM", {**GPT_OSS, **rope("yarn", **RAMP, truncate=False)}),
    "gpt-oss-bare": Case(
        "GptOssModel",
        {**GPT_OSS, "layer_types": ["full_attention"] * 3, "attention_bias": False, **rope("default")},
    ),
    "gpt-oss-tied": Case(
        "GptOssForCausalLM", {**GPT_OSS, "tie_word_embeddings": True, "swiglu_limit": 0.5, **rope("default")}
    ),
    "deepseek-v3": Case("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek-v3-bare": Case(
        "DeepseekV3Model", {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "n_shared_experts": 2}
    ),
    "deepseek-v3-yarn": Case(
        "DeepseekV3ForCausalLM",
        {
            **DEEPSEEK,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": True,
            **rope("yarn", **RAMP, mscale=0.7, mscale_all_dim=1.3),
            "max_position_embeddings": 4 * TRAINED,
        },
    ),
    "smollm3": Case("SmolLM3ForCausalLM", {**LLAMA, "num_hidden_layers": 5}),
    "smollm3-untied": Case(
        "SmolLM3ForCausalLM",
        {
            **LLAMA,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3-every-layer": Case("SmolLM3ForCausalLM", {**LLAMA, "no_rope_layers": [1, 1, 1], **YARN}),
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "gpt2-bare": Case("GPT2Model", GPT2),
    "gpt2-untied": Case(
        "GPT2LMHeadModel",
        {
            **GPT2,
            "tie_word_embeddings": False,
            "n_inner": 40,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "gpt2-unscaled": Case("GPT2LMHeadModel", {**GPT2, "scale_attn_weights": False, "activation_function": "silu"}),
    "gpt-neox": Case("GPTNeoXForCausalLM", NEOX),
    "gpt-neox-bare": Case("GPTNeoXModel", NEOX),
    "gpt-neox-in-series": Case(
        "GPTNeoXForCausalLM",
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-neox-linear": Case(
        "GPTNeoXForCausalLM",
        {
            **NEOX,
            "max_position_embeddings": TRAINED,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("published"))


def fresh(pair: Pair) -> Any:
    """Their model, not remembering the longest text so far, as dynamic scaling does."""
    values(pair.theirs, input_ids=random_ids(1, 1))
    return pair.theirs


def test_the_values_are_those_of_transformers(pair: Pair) -> None:
    ids = random_ids(2, LENGTH)
    with torch.no_grad():
        ours = pair.ours.network(ids)
    assert_close(ours, values(fresh(pair), input_ids=ids))


def test_a_row_padded_on_the_left_is_the_row_alone(pair: Pair) -> None:
    long, short = pair.case.options.get("batch", (LENGTH, TRAINED + 3))
    ids = random_ids(2, long)
    mask = torch.ones_like(ids)
    mask[1, : long - short] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    theirs = values(fresh(pair), input_ids=ids, attention_mask=mask, position_ids=positions)
    with torch.no_grad():
        assert_close(pair.ours.network(ids[:1]), theirs[:1])
        assert_close(pair.ours.network(ids[1:, long - short :]), theirs[1:, long - short :])


def test_greedy_text_is_that_of_transformers(pair: Pair) -> None:
    ids = random_ids(1, PROMPT)
    if not pair.theirs.can_generate():
        with pytest.raises(QkvError, match="does not generate"):
            pair.ours.generate(ids[0].tolist())
        return
    # a cache keeps keys turned for a shorter text, where angles depend on its length
    cached = not pair.case.options.get("whole")
    theirs = fresh(pair).generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=cached)
    ours = pair.ours.generate(ids[0].tolist(), max_new_tokens=NEW, temperature=0.0, use_cache=cached)
    assert ours.token_ids == theirs[0, PROMPT:].tolist()


def test_transformers_opens_what_is_written(pair: Pair, tmp_path: Path) -> None:
    again = written(pair.ours, tmp_path / "written")
    ids = random_ids(1, LENGTH)
    assert_close(values(again, input_ids=ids), values(fresh(pair), input_ids=ids))


# --- keys ---------------------------------------------------------------------------------------------------------


REQUIRED = {key: LLAMA[key] for key in LLAMA if key not in NO_SPECIAL_IDS and key != "max_position_embeddings"}
HEADS = {key: value for key, value in REQUIRED.items() if key != "num_key_value_heads"}
KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama defaults": ("llama", HEADS),
    "llama 3.1": (
        "llama",
        {
            **REQUIRED,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
    ),
    "vicuna 16k": ("llama", {**REQUIRED, "rope_scaling": {"factor": 4.0, "type": "linear"}}),
    "dynamic": ("llama", {**REQUIRED, "rope_scaling": {"factor": 2.0, "type": "dynamic"}}),
    "mistral defaults": ("mistral", {**HEADS, "num_attention_heads": 8}),
    "mistral 0.2": ("mistral", {**REQUIRED, "sliding_window": None, "rope_theta": 1000000.0}),
    "qwen2 defaults": ("qwen2", {**HEADS, "hidden_size": 128, "num_attention_heads": 32}),
    "qwen2.5": (
        "qwen2",
        {
            **REQUIRED,
            "max_position_embeddings": 32768,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
    ),
    "qwen2 windows": ("qwen2", {**REQUIRED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3 defaults": ("qwen3", {**HEADS, "num_attention_heads": 32}),
    "olmo2 defaults": ("olmo2", HEADS),
    "phi3 defaults": ("phi3", HEADS),
    "phi3 128k": (
        "phi3",
        {
            **REQUIRED,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "type": "longrope"},
            "sliding_window": 262144,
        },
    ),
    "phi4 mini": ("phi3", {**REQUIRED, "partial_rotary_factor": 0.75, "rope_theta": 10000.0}),
    "gemma defaults": ("gemma", {}),
    "gemma 2b": (
        "gemma",
        {"hidden_act": "gelu", "hidden_activation": None, "num_key_value_heads": 1, "rope_theta": 10000.0},
    ),
    "gemma2 defaults": ("gemma2", {}),
    "gemma2 27b": ("gemma2", {"query_pre_attn_scalar": 144, "head_dim": 128, "num_attention_heads": 32}),
    "mixtral defaults": ("mixtral", {**HEADS, "num_attention_heads": 8}),
    "qwen3 moe defaults": ("qwen3_moe", REQUIRED),
    "gpt-oss defaults": ("gpt_oss", {}),
    "gpt-oss 20b": (
        "gpt_oss",
        {
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
        },
    ),
    "deepseek-v3 defaults": ("deepseek_v3", {}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    ),
    "gemma3 defaults": ("gemma3_text", {}),
    "gemma3 1b": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "gemma3 scaled": (
        "gemma3_text",
        {"num_attention_heads": 16, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 5e5},
    ),
    "smollm3 defaults": ("smollm3", {**HEADS, "num_hidden_layers": 9}),
    "smollm3 interval": ("smollm3", {**REQUIRED, "num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "gpt2 defaults": ("gpt2", {}),
    "gpt_neox defaults": ("gpt_neox", {}),
    "pythia": ("gpt_neox", {**HEADS, "rotary_pct": 0.5, "rotary_emb_base": 5000, "use_parallel_residual": True}),
}


def read(model_type: str, keys: dict[str, Any]) -> dict[str, Any]:
    published = Published({"model_type": model_type, **keys}, "config.json")
    return family_of(published).read(published, "language-model")


@pytest.mark.parametrize(("model_type", "keys"), KEYS.values(), ids=KEYS)
def test_older_keys_and_absent_ones_mean_what_they_mean_to_transformers(model_type: str, keys: dict[str, Any]) -> None:
    spelled_out = AutoConfig.for_model(model_type, **copy.deepcopy(keys)).to_dict()
    assert ModelConfig.model_validate(read(model_type, keys)) == ModelConfig.model_validate(
        read(model_type, spelled_out)
    )


def test_a_stretched_context_is_as_long_as_its_factor_says() -> None:
    def context(**keys: Any) -> int:
        return read("llama", {**REQUIRED, "max_position_embeddings": 4096, **keys})["max_seq_len"]

    assert context(rope_scaling={"type": "linear", "factor": 4.0}) == 16384
    assert context(rope_scaling={"type": "dynamic", "factor": 2.0}) == 8192
    assert context(**rope("yarn", factor=4.0, original_max_position_embeddings=4096)) == 16384
    assert context(**rope("llama3", factor=8.0, low_freq_factor=1, high_freq_factor=4, **ORIGINAL)) == 4096


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi3_files_call_longrope_by_its_earlier_names_too(name: str) -> None:
    def position(kind: str) -> dict[str, Any]:
        scaling = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "type": kind}
        return read("phi3", {**REQUIRED, "max_position_embeddings": 131072, "rope_scaling": scaling})["position"]

    assert position(name) == position("longrope")
    assert position(name)["scaling"]["original_max_seq_len"] == 4096


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("qwen3", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": 10**400}, "max_position_embeddings"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 10**400}}, "factor"),
    ("olmo2", {"hidden_act": "relu"}, "hidden_act"),
    ("olmo2", {"mlp_bias": True}, "mlp_bias"),
    ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
    ("phi3", {"attention_bias": True}, "attention_bias"),
    ("gemma", {"use_bidirectional_attention": True, "head_dim": 8}, "use_bidirectional_attention"),
    ("gemma", {"hidden_act": "relu"}, "hidden_act"),
    ("gemma2", {"is_causal": False}, "is_causal"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
    ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek_v3", {"num_key_value_heads": 4, "n_shared_experts": None}, "n_shared_experts"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"activation_function": "tanh"}, "activation_function"),
    ("gpt_neox", {"hidden_act": "mish"}, "hidden_act"),
]


@pytest.mark.parametrize(("model_type", "keys", "named"), UNSUPPORTED)
def test_an_option_that_is_not_supported_is_named(model_type: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(QkvError, match=f"`{named}"):
        read(model_type, {**REQUIRED, "max_position_embeddings": 40, **keys})


# --- names --------------------------------------------------------------------------------------------------------


NAMES: dict[str, tuple[str, str, str]] = {
    "a whole model without its prefix": ("gpt2", r"^transformer\.", ""),
    "the head under its new name": ("gpt-neox", r"^embed_out\.", "lm_head."),
    "the text part under its older name": ("gemma3-with-images", r"^model\.language_model\.", "language_model.model."),
    "the text part under its newer name": ("gemma3-with-images", r"^language_model\.model\.", "model.language_model."),
}


@pytest.mark.parametrize(("case", "pattern", "replacement"), NAMES.values(), ids=NAMES)
def test_names_that_files_also_have(case: str, pattern: str, replacement: str, tmp_path: Path) -> None:
    theirs = make(CASES[case])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({re.sub(pattern, replacement, name): tensor for name, tensor in load_file(file).items()}, file)
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        assert_close(qkv.load(tmp_path, device="cpu").network(ids), values(theirs, input_ids=ids))


def test_tables_that_older_files_carry_along_are_ignored(tmp_path: Path) -> None:
    for case, names in {
        "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
        "gpt2": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
        "gpt-neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    }.items():
        make(CASES[case]).save_pretrained(tmp_path / case)
        file = tmp_path / case / "model.safetensors"
        save_file({**load_file(file), **{name: torch.ones(4) for name in names}}, file)
        assert isinstance(qkv.load(tmp_path / case, device="cpu"), Model)


def test_what_predicts_several_tokens_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(CASES["deepseek-v3"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    further = {
        "model.layers.3.eh_proj.weight": torch.ones(2, 2),
        "model.layers.3.self_attn.o_proj.weight": torch.ones(2),
    }
    save_file({**load_file(file), **further}, file)
    with caplog.at_level("WARNING", "qkv"):
        qkv.load(tmp_path, device="cpu")
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "multi-token prediction (`model.layers.3`) is left out: a model here has no place for it"
    ]


# --- models of our own --------------------------------------------------------------------------------------------


def test_a_model_made_here_writes_the_same_text_in_transformers(tmp_path: Path) -> None:
    config = Config.load("llama-tiny")
    ours = Model(Transformer(config.model, generator=torch.Generator().manual_seed(3)).eval(), None, config)
    theirs = written(ours, tmp_path / "written")
    assert type(theirs).__name__ == "LlamaForCausalLM"
    ids = random_ids(1, PROMPT)
    text = theirs.generate(ids, max_new_tokens=NEW, do_sample=False)[0, PROMPT:].tolist()
    assert ours.generate(ids[0].tolist(), max_new_tokens=NEW, temperature=0.0).token_ids == text


EQUIVALENT: dict[str, tuple[list[str], str]] = {
    "a window on every layer": (["attention.window=5"], "mistral"),
    "the window said by the layers": (["layers=[{attention: {window: 5}}]"], "mistral"),
    "a width that is no multiple of the heads, which LLaMA's must be": (
        ["attention={num_heads: 7, num_kv_heads: 7, head_dim: 8}"],
        "mistral",
    ),
    "windows by a pattern": (
        ["attention.bias=qkv", "layers=[{attention: {window: 5}}, {attention: {window: null}}]"],
        "qwen2",
    ),
    "no positions on every second layer": (["layers=[{}, {position: {kind: none}}]"], "smollm3"),
    "per-head norms": (["attention.qk_norm=per-head"], "qwen3"),
    "rotary positions on part of a head": (["position.fraction=0.5"], "phi3"),
    "norms on the output alone": (
        ["norm={placement: output, rounding: after-weight}", "attention.qk_norm=full"],
        "olmo2",
    ),
}


@pytest.mark.parametrize(("changes", "model_type"), EQUIVALENT.values(), ids=EQUIVALENT)
def test_a_configuration_of_our_own_is_found_to_be_a_published_one(changes: list[str], model_type: str) -> None:
    config = Config.load("llama-tiny", *(f"model.{change}" for change in changes)).model
    family, keys = equal_family(config)
    assert family.model_types[0] == model_type
    assert read(model_type, keys)["num_layers"] == config.num_layers


PRESETS = {"gpt-oss-20b": "gpt_oss", "deepseek-v3": "deepseek_v3", "mixtral-8x7b": "mixtral"}


@pytest.mark.parametrize(("preset", "model_type"), PRESETS.items())
def test_a_preset_is_found_to_be_the_architecture_it_is_named_after(preset: str, model_type: str) -> None:
    config = Config.load(preset, "model.num_layers=4").model
    assert equal_family(config)[0].model_types[0] == model_type


DIFFERENT: dict[str, tuple[list[str], str]] = {
    "two windows": (
        ["attention.bias=qkv", "layers=[{attention: {window: 5}}, {attention: {window: 6}}]"],
        "attention.window",
    ),
    "two ropes": (["layers=[{}, {position: {theta: 7.0}}]"], "position.theta"),
    "interleaved pairs": (["position.layout=interleaved"], "position.layout"),
    "a capped head": (["head={kind: language-model, softcap: 3.0}"], "head.softcap"),
}


@pytest.mark.parametrize(("changes", "key"), DIFFERENT.values(), ids=DIFFERENT)
def test_the_first_difference_from_the_nearest_architecture_is_named(changes: list[str], key: str) -> None:
    config = Config.load("llama-tiny", *(f"model.{change}" for change in changes)).model
    with pytest.raises(QkvError, match=f"`model.{key}`"):
        equal_family(config)


FOREIGN: list[tuple[str, list[str], str]] = [
    ("llama", ["norm={kind: layernorm}"], "norm.kind: layernorm"),
    ("mistral", ["position={kind: learned}"], "position.kind: learned"),
    ("gemma2", ["norm={kind: layernorm}"], "norm.kind: layernorm"),
    ("gemma3", ["position={kind: none}"], "position.kind: none"),
    ("olmo2", ["position={kind: learned}"], "position.kind: learned"),
    ("phi3", ["position={kind: learned}"], "position.kind: learned"),
    ("gpt_oss", [], "feed_forward.kind: swiglu"),
    ("deepseek_v3", [], "attention.kind: standard"),
    ("gpt2", ["norm={kind: layernorm}"], "position.kind: rope"),
    ("gpt_neox", [], "norm.kind: rmsnorm"),
]


@pytest.mark.parametrize(("model_type", "changes", "key"), FOREIGN)
def test_a_part_that_an_architecture_does_not_have_is_refused_by_its_key(
    model_type: str, changes: list[str], key: str
) -> None:
    config = Config.load("llama-tiny", *(f"model.{change}" for change in changes)).model
    with pytest.raises(QkvError, match=f"`model.{key}`"):
        named(model_type).write(config)
