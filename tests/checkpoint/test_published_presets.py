"""Presets of published models: what their config.json says, and as many parameters as in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from qkv import Config, Transformer
from qkv.checkpoint.families import MODULES, family_of
from qkv.checkpoint.published import Published
from qkv.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Where a config.json is published, its class, and what it says of the network."""

    repository: str
    architecture: str
    keys: dict[str, Any]


def gpt2(n_embd: int, n_layer: int, n_head: int) -> dict[str, Any]:
    return {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    }


def t5(d_model: int, d_ff: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 32128,
        "n_positions": 512,
        "d_model": d_model,
        "d_kv": 64,
        "d_ff": d_ff,
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": 32,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
    }


def whisper(d_model: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "d_model": d_model,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": ffn for side in ("encoder", "decoder")},
        "activation_function": "gelu",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "scale_embedding": False,
    }


BERT = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
QWEN3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
}

SOURCES = {
    "gpt2": Source("openai-community/gpt2", "GPT2LMHeadModel", gpt2(768, 12, 12)),
    "gpt2-medium": Source("openai-community/gpt2-medium", "GPT2LMHeadModel", gpt2(1024, 24, 16)),
    "gpt2-large": Source("openai-community/gpt2-large", "GPT2LMHeadModel", gpt2(1280, 36, 20)),
    "gpt2-xl": Source("openai-community/gpt2-xl", "GPT2LMHeadModel", gpt2(1600, 48, 25)),
    "bert-base": Source("google-bert/bert-base-uncased", "BertModel", {**BERT, **BASE}),
    "bert-large": Source("google-bert/bert-large-uncased", "BertModel", {**BERT, **LARGE}),
    "roberta-base": Source(
        "FacebookAI/roberta-base",
        "RobertaModel",
        {
            **BERT,
            **BASE,
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
        },
    ),
    "t5-small": Source("google-t5/t5-small", "T5ForConditionalGeneration", t5(512, 2048, 6, 8)),
    "t5-base": Source("google-t5/t5-base", "T5ForConditionalGeneration", t5(768, 3072, 12, 12)),
    "bart-base": Source(
        "facebook/bart-base",
        "BartForConditionalGeneration",
        {
            "vocab_size": 50265,
            "max_position_embeddings": 1024,
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "activation_function": "gelu",
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
            "scale_embedding": False,
        },
    ),
    "whisper-tiny": Source("openai/whisper-tiny", "WhisperForConditionalGeneration", whisper(384, 4, 6, 1536)),
    "whisper-base": Source("openai/whisper-base", "WhisperForConditionalGeneration", whisper(512, 6, 8, 2048)),
    "whisper-small": Source("openai/whisper-small", "WhisperForConditionalGeneration", whisper(768, 12, 12, 3072)),
    "whisper-medium": Source("openai/whisper-medium", "WhisperForConditionalGeneration", whisper(1024, 24, 16, 4096)),
    "whisper-large": Source("openai/whisper-large", "WhisperForConditionalGeneration", whisper(1280, 32, 20, 5120)),
    "vit-b16": Source(
        "google/vit-base-patch16-224",
        "ViTForImageClassification",
        {
            **BASE,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "qkv_bias": True,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "num_labels": 1000,  # the length of its id2label
        },
    ),
    "llama2-7b": Source(
        "meta-llama/Llama-2-7b-hf",
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "llama3-8b": Source(
        "meta-llama/Meta-Llama-3-8B",
        "LlamaForCausalLM",
        {
            **LLAMA3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "llama3-70b": Source(
        "meta-llama/Meta-Llama-3-70B",
        "LlamaForCausalLM",
        {
            **LLAMA3,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "mistral-7b": Source(
        "mistralai/Mistral-7B-v0.1",
        "MistralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": Source(
        "Qwen/Qwen3-0.6B",
        "Qwen3ForCausalLM",
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": Source(
        "Qwen/Qwen3-8B",
        "Qwen3ForCausalLM",
        {
            **QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-2b": Source(
        "google/gemma-2-2b",
        "Gemma2ForCausalLM",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3-1b": Source(
        "google/gemma-3-1b-pt",
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32768,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "gpt-neox-20b": Source(
        "EleutherAI/gpt-neox-20b",
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu_fast",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2-7b": Source(
        "allenai/OLMo-2-1124-7B",
        "Olmo2ForCausalLM",
        {
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rope_theta": 500000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
        },
    ),
    "mixtral-8x7b": Source(
        "mistralai/Mixtral-8x7B-v0.1",
        "MixtralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": Source(
        "openai/gpt-oss-20b",
        "GptOssForCausalLM",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "max_position_embeddings": 131072,
            "rope_theta": 150000,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v3": Source(
        "deepseek-ai/DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
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
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
}
READ = [
    name
    for name, source in SOURCES.items()
    if getattr(transformers, source.architecture).config_class.model_type in MODULES
]
"""Those whose config.json is read here."""


@pytest.fixture(scope="module", params=SOURCES)
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(preset: str) -> PreTrainedModel:
    """The published model, without memory."""
    source = SOURCES[preset]
    kind = getattr(transformers, source.architecture)
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = kind(kind.config_class(**source.keys))
    model.tie_weights()
    return model


def trained(model: nn.Module) -> int:
    """The number of parameters; tables that are never trained are none."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_a_preset_has_as_many_parameters_as_the_published_model(preset: str, theirs: PreTrainedModel) -> None:
    assert trained(Transformer(Config.load(preset).model, device="meta")) == trained(theirs)


@pytest.mark.parametrize("preset", READ, indirect=True)
def test_a_preset_is_what_the_published_configuration_says(preset: str, theirs: PreTrainedModel) -> None:
    source, ours = SOURCES[preset], Config.load(preset).model
    keys = {"model_type": theirs.config.model_type, **source.keys}
    published = Published(keys, source.repository, [name for name, _ in theirs.named_parameters()])
    family = family_of(published)
    told = ModelConfig.model_validate(family.read(published, family.architectures[source.architecture]))
    assert made_of(ours) == made_of(told)


def made_of(model: ModelConfig) -> dict[str, Any]:
    """All that makes the network, dropout too; how its weights start is not published."""
    found: dict[str, Any] = {"head": model.head, "tie_embeddings": model.tie_embeddings}
    for side, stack in model.stacks.items():
        for key in ("vocab_size", "max_seq_len", "d_model", "dropout", "input", "norm", "layers"):
            found[f"{side}.{key}"] = getattr(stack, key)
        dropout = stack.dropout if stack.embedding.dropout is None else stack.embedding.dropout
        found[f"{side}.embedding"] = stack.embedding.model_copy(update={"dropout": dropout})
        if stack.position.absolute:
            found[f"{side}.position"] = stack.position
    return found
