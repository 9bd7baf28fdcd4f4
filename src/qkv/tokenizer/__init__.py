"""Text <-> ids: train, encode, decode, stream, explain. Importing it never imports torch."""

from qkv.tokenizer.bpe import ByteBPE
from qkv.tokenizer.stream import StreamDecoder
from qkv.tokenizer.tokenizer import Tokenizer

__all__ = ["ByteBPE", "StreamDecoder", "Tokenizer"]
