"""Text <-> ids: train, load, encode, decode, stream, explain, chat. Importing it never imports torch."""

from qkv.tokenizer.bpe import ByteBPE
from qkv.tokenizer.chat import ChatTemplate
from qkv.tokenizer.stream import StreamDecoder
from qkv.tokenizer.tokenizer import Tokenizer

__all__ = ["ByteBPE", "ChatTemplate", "StreamDecoder", "Tokenizer"]
