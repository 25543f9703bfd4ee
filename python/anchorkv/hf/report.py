"""What a cache holds, in bytes counted from its buffers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CacheReport:
    tokens: int  # per sequence, padding included
    sequences: int
    layers: int
    layers_compressed: int
    layers_sliding: int  # exact, of a window's tokens
    skipped_reason: str  # why layers that could be compressed are not; empty if all are
    dense_bytes: int  # 16-bit keys and values of the tokens held, padding left out where layers are compressed
    segment_bytes: int
    exact_bytes: int  # the tail, and layers that are not compressed, at their own element size
    reserved_bytes: int  # allocated rows of tails that are not in use

    @property
    def resident_bytes(self):
        return self.segment_bytes + self.exact_bytes

    @property
    def ratio(self):
        """dense_bytes / resident_bytes."""
        return self.dense_bytes / self.resident_bytes if self.resident_bytes else 0.0

    def __str__(self):
        text = (f"{self.tokens} tokens x {self.sequences} in {self.layers} layers: {mebibytes(self.dense_bytes)} in 16 bits, "
                f"{mebibytes(self.resident_bytes)} held ({mebibytes(self.segment_bytes)} compressed, "
                f"{mebibytes(self.exact_bytes)} exact), {self.ratio:.2f}x smaller; {self.layers_compressed} layers compressed")
        if self.layers_sliding:
            text += f", {self.layers_sliding} slide and stay exact"
        if self.skipped_reason:
            text += f"; not compressed: {self.skipped_reason}"
        return text


def mebibytes(count):
    return f"{count / 2**20:.1f} MiB"
