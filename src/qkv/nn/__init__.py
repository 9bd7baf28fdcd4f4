"""The Transformer. Every file is one box of the diagram; reading the folder is reading the architecture."""

from qkv.nn.arguments import IGNORE
from qkv.nn.attention import Attention
from qkv.nn.attention_residuals import AttentionResiduals
from qkv.nn.bias import Bias
from qkv.nn.block import Block, Stack, Sublayer
from qkv.nn.build import Dims, build
from qkv.nn.cache import Cache
from qkv.nn.differential import DifferentialAttention
from qkv.nn.embedding import Embedding
from qkv.nn.experts import MixtureOfExperts
from qkv.nn.feed_forward import FeedForward
from qkv.nn.hyper_connections import HyperConnections
from qkv.nn.kernels import use_kernel
from qkv.nn.latent_attention import LatentAttention
from qkv.nn.mhc import Mhc
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.position import BiasPhases, Phases, Position
from qkv.nn.residual import ResidualStream, Site
from qkv.nn.transformer import Output, Transformer

__all__ = [
    "IGNORE",
    "Attention",
    "AttentionResiduals",
    "Bias",
    "BiasPhases",
    "Block",
    "Cache",
    "DifferentialAttention",
    "Dims",
    "Embedding",
    "FeedForward",
    "HyperConnections",
    "LatentAttention",
    "LayerNorm",
    "Mhc",
    "MixtureOfExperts",
    "Output",
    "Phases",
    "Position",
    "RMSNorm",
    "ResidualStream",
    "Site",
    "Stack",
    "Sublayer",
    "Transformer",
    "build",
    "use_kernel",
]
