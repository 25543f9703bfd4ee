"""A serde for LMCache: chunks of keys and values are compressed on their way to a disk or to Redis. docs/python.md.

Importing this module registers the type `anchorkv`:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "anchorkv", "ratio": 4, "head_dim": 128}}

Limits: storage only, the engine gets exact-sized tensors back. No queries are known here, so every token counts alike
but for its novelty; a chunk is compressed alone, and keys come after RoPE (rope_theta lets the codec turn them back).
"""

import struct

import numpy as np
import torch
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer, register_serde_factory

import anchorkv

NAME = "anchorkv"
# In front of a chunk's bytes: magic, kind, length of what follows.
HEADER = struct.Struct("<4sIQ")
MAGIC = b"AKVL"
RAW, COMPRESSED = 1, 2
# Of a file of segments: the header's and the description's pages, and what fills a layer's last page.
PAGE = 4096
QUERIES_PER_HEAD = 16
# Spread of the logits that made-up queries give: attention that is neither uniform nor a spike.
LOGIT_SPREAD = 2.0


class Codec:
    """How chunks [2, layers, tokens, kv_heads * head_dim] become bytes."""

    def __init__(self, head_dim, ratio=4.0, profile="adaptive", rope_theta=None, **options):
        self.head_dim, self.ratio, self.profile = int(head_dim), float(ratio), str(profile)
        # One exact position at the end instead of 32, which would take half the bytes of a chunk of 256.
        self.options = {"window": 1, "prior_phi": 8.0, **options}
        self.rope = anchorkv.Rope(self.head_dim) if rope_theta is None else anchorkv.Rope(self.head_dim, float(rope_theta))
        self.rotated = rope_theta is not None
        if not self.rotated:  # a table that turns nothing: keys are coded as they come
            self.rope = anchorkv.Rope(self.head_dim, rotary_dim=0)
        # Errors of the configuration belong here, not into the first request.
        anchorkv.estimate(1, 1, self.head_dim, 1 << 20, ratio=self.ratio, profile=self.profile, **self.options)

    def layout(self, shape):
        """(layers, tokens, kv_heads) of a chunk."""
        if len(shape) != 4 or shape[0] != 2 or shape[3] % self.head_dim != 0:
            raise ValueError(f"a chunk of shape {list(shape)}; the anchorkv serde takes [2, layers, tokens, kv_heads x {self.head_dim}]")
        return int(shape[1]), int(shape[2]), int(shape[3]) // self.head_dim

    def compressed_bytes(self, shape):
        """An upper bound of a chunk's compressed bytes, or None where chunks of that length stay as they are."""
        layers, tokens, heads = self.layout(shape)
        try:
            plan = anchorkv.estimate(1, heads, self.head_dim, tokens, ratio=self.ratio, profile=self.profile, **self.options)
        except ValueError:
            return None
        description = -(-(1024 + 1024 * layers) // PAGE) * PAGE
        return HEADER.size + PAGE * -(-64 * (layers + 2) // PAGE) + description + layers * -(-plan["bytes"] // PAGE) * PAGE

    def raw_bytes(self, shape, dtype):
        return HEADER.size + int(np.prod(shape)) * dtype.itemsize

    def bound(self, shape, dtype):
        bytes_ = self.compressed_bytes(shape)
        raw = self.raw_bytes(shape, dtype)
        return raw if bytes_ is None else min(bytes_, raw)

    def encode(self, chunk):
        """The bytes of a tensor, at most bound() of them."""
        chunk = chunk.detach().cpu()
        layers, tokens, heads = self.layout(chunk.shape)
        if self.compressed_bytes(chunk.shape) is not None:
            body = self.compress(chunk, layers, tokens, heads)
            if HEADER.size + len(body) <= self.bound(chunk.shape, chunk.dtype):
                return HEADER.pack(MAGIC, COMPRESSED, len(body)) + body
        body = chunk.contiguous().view(torch.uint8).numpy().tobytes()
        return HEADER.pack(MAGIC, RAW, len(body)) + body

    def compress(self, chunk, layers, tokens, heads):
        segments = []
        for layer in range(layers):
            keys, values = (chunk[side, layer].reshape(tokens, heads, self.head_dim).transpose(0, 1) for side in (0, 1))
            segments.append(anchorkv.compress(keys, values, self.queries(keys), self.rope, ratio=self.ratio, profile=self.profile,
                                              rotated=self.rotated, layer=layer, **self.options))
        return anchorkv.to_bytes(segments)

    def queries(self, keys):
        """Made-up queries in directions of their own, the same ones every time, as long as spreads logits like real
        ones."""
        heads = keys.shape[0]
        spread = float(keys.float().std(dim=1).pow(2).sum(dim=-1).mean().sqrt())
        directions = np.random.default_rng(0).standard_normal((heads * QUERIES_PER_HEAD, self.options["window"], self.head_dim))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        return (directions * (LOGIT_SPREAD * self.head_dim / max(spread, 1e-6))).astype(np.float32)

    def decode(self, data, chunk):
        """Writes the bytes of encode() into a tensor of the chunk's shape."""
        magic, kind, length = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0, 0)
        if magic != MAGIC or kind not in (RAW, COMPRESSED) or HEADER.size + length > len(data):
            raise ValueError(f"{len(data)} bytes that are no chunk of the anchorkv serde")
        body = memoryview(data)[HEADER.size:HEADER.size + length]
        layers, tokens, heads = self.layout(chunk.shape)
        if kind == RAW:
            if length != chunk.numel() * chunk.element_size():
                raise ValueError(f"a chunk of {length} bytes for a tensor of {chunk.numel() * chunk.element_size()}")
            chunk.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8).view(chunk.dtype).reshape(chunk.shape))
            return
        segments = anchorkv.from_bytes(body)
        expected = [(tokens, heads, self.head_dim)] * layers
        found = [(s.tokens, s.kv_heads, s.head_dim) for s in segments]
        if found != expected:
            raise ValueError(f"a chunk of {len(found)} layers of (tokens, kv heads, head dim) {found[0]}; expected {layers} of {expected[0]}")
        for layer, segment in enumerate(segments):
            for side, rows in enumerate(segment.dequantize()):
                chunk[side, layer].copy_(torch.from_numpy(rows).transpose(0, 1).reshape(tokens, heads * self.head_dim))


class AnchorKVSerializer(Serializer):
    def __init__(self, codec):
        self._codec = codec

    def serialize(self, src, dst, key):
        data = self._codec.encode(tensor_of(src))
        out = tensor_of(dst).view(torch.uint8).flatten()
        if len(data) > out.numel():
            raise ValueError(f"a buffer of {out.numel()} bytes for a chunk of {len(data)}")
        out[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return len(data)

    def estimate_serialized_size(self, layout_desc):
        shapes, dtypes = layout_desc.shapes, layout_desc.dtypes
        if len(shapes) != 1:
            raise ValueError(f"chunks of {len(shapes)} groups of layers; the anchorkv serde takes one")
        return self._codec.bound(shapes[0], dtypes[0])


class AnchorKVDeserializer(Deserializer):
    def __init__(self, codec):
        self._codec = codec

    def deserialize(self, src, dst, key):
        data = tensor_of(src).view(torch.uint8).flatten().cpu().numpy()
        self._codec.decode(memoryview(data), tensor_of(dst))


def tensor_of(memory):
    if memory.tensor is None:
        raise ValueError("the anchorkv serde needs memory objects that hold a tensor")
    return memory.tensor


def create(settings):
    settings = dict(settings)
    workers = int(settings.pop("max_workers", 1))
    if "head_dim" not in settings:
        raise ValueError("the anchorkv serde needs head_dim, the elements of a head")
    codec = Codec(**settings)
    return AsyncSerdeProcessor(AnchorKVSerializer(codec), AnchorKVDeserializer(codec), max_workers=workers)


register_serde_factory(NAME, create)


if __name__ == "__main__":
    # LMCache has no list of serdes to import: its own program, with ours registered.
    from lmcache.cli.main import main

    main()
