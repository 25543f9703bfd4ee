#!/usr/bin/env python3
"""Decode attention on a GPU: torch's dense kernels beside ours, in one run.

    bench/dense_attention.py PATH/TO/cuda_attention_bench [TOKENS KV_HEADS GQA_RATIO HEAD_DIM]...

Dense f16 keys and values of one layer and sequence, one query token. Both sides: a CUDA graph of many layers with
memory of their own (nothing is in the cache), median of 9 replays, microseconds per layer.
"""

import json
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

COLD_BYTES = 300 << 20
DEFAULT_SHAPES = [(s, 8, 4, 128) for s in (4096, 16384, 65536, 131072)] + [(65536, 8, 8, 128)]


def time_graph(layers, attend):
    """Median microseconds of attend(layer)."""
    for layer in range(layers):
        attend(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            attend(layer)
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000 * statistics.median(times[2:]) / layers


def dense(tokens, kv_heads, gqa_ratio, head_dim):
    """Microseconds of every dense kernel that takes the shape."""
    layers = max(4, min(64, COLD_BYTES // (4 * tokens * kv_heads * head_dim)))
    make = lambda heads, length: torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.float16)
    query = make(kv_heads * gqa_ratio, 1)
    keys = [make(kv_heads, tokens) for _ in range(layers)]
    values = [make(kv_heads, tokens) for _ in range(layers)]
    result = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def attend(layer, backend=backend):
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(query, keys[layer], values[layer], enable_gqa=True)

        try:
            result[name] = time_graph(layers, attend)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return result


def main():
    if len(sys.argv) < 2 or len(sys.argv) % 4 != 2:
        sys.exit(__doc__)
    numbers = [int(a) for a in sys.argv[2:]]
    shapes = [tuple(numbers[i : i + 4]) for i in range(0, len(numbers), 4)] or DEFAULT_SHAPES
    print("| tokens | kv heads x queries | D | ratio | ours us | tiles us | flash us | cudnn us | over best dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in shapes:
        ours = json.loads(subprocess.run([sys.argv[1], *map(str, shape)], check=True, capture_output=True, text=True).stdout)
        other = dense(*shape)
        torch.cuda.empty_cache()
        best = min(other.values())
        print(
            f"| {shape[0]} | {shape[1]} x {shape[2]} | {shape[3]} | {ours['ratio']} | {ours['us']} ({ours['us_without_tail']}) |"
            f" {ours['us_tiles']} | {other.get('flash', 0):.1f} | {other.get('cudnn', 0):.1f} | {best / ours['us']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
