"""Decode attention of anchorkv.hf beside torch's SDPA: random weights in the shape of an 8B model.

    python bench/python_decode_bench.py [--tokens 32768 65536] [--ratio 20] [--layers 4]      # on a GPU
    python bench/python_decode_bench.py --device cpu --tokens 16384                           # float32, attention only

Two measurements per length, JSON lines. `attention`: one layer's attention of one new token as the model calls it,
through transformers' attention function, over a cache of so many tokens: `sdpa` dense in bfloat16 as transformers calls it,
`packed_sdpa` with the query heads of a kv head as rows, `anchorkv` over a segment and a tail; each layer has a cache of its own, so that nothing stays in the GPU's cache. `token`: a whole step of
a model with so many layers, prompt and compression included before it. Results are checked before they are timed: the
compressed attention against dense attention over the dequantised segment, and that the segment holds every token.
Medians of alternating runs. For the GPU the package must be built with CUDA.
"""

import argparse
import json
import statistics
import time

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import anchorkv
import anchorkv.cuda
from anchorkv.hf import AnchorKVCache
from anchorkv.rotary import text_model

REPEATS = 15
SHAPE = dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
             max_position_embeddings=131072)


def timed(run, device):
    """Microseconds: on the GPU between events, on the CPU by the clock."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1000.0 * begin.elapsed_time(end)


def alternate(device, *runs):
    """Medians of runs that take turns, after a warm-up."""
    for run in runs:
        run()
    times = [[] for _ in runs]
    for _ in range(REPEATS):
        for own, run in zip(times, runs):
            own.append(timed(run, device))
    return [statistics.median(t) for t in times]


class Module(torch.nn.Module):
    num_key_value_groups = SHAPE["num_attention_heads"] // SHAPE["num_key_value_heads"]
    is_causal = True


def random_layer(tokens, seed, device, dtype):
    """Keys, values and queries with structure to code: means and a spectrum that falls."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (SHAPE["num_key_value_heads"], tokens, SHAPE["head_dim"])
    spectrum = torch.linspace(0, -3, shape[2], device=device).exp()
    make = lambda *s: torch.randn(*s, device=device, generator=generator)
    keys, values = (make(*shape) * spectrum + make(shape[0], 1, shape[2]) for _ in range(2))
    return keys.to(dtype), values.to(dtype), make(SHAPE["num_attention_heads"], 32, shape[2]).to(dtype)


def attention_bench(device, tokens, ratio, profile, layers):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    attend = anchorkv.attend if device == "cpu" else anchorkv.cuda.attend
    rope = anchorkv.Rope(SHAPE["head_dim"], 500000.0)
    module, scale = Module(), SHAPE["head_dim"] ** -0.5
    dense, packed = [], []
    for layer in range(layers):
        keys, values, queries = random_layer(tokens, layer, device, dtype)
        if layer == 0:  # the others hold a copy of its bytes
            begin = time.perf_counter()
            segment = anchorkv.compress(keys.cpu(), values.cpu(), queries.cpu(), rope, ratio=ratio, profile=profile, rotated=True, layer=layer)
            compress_s = time.perf_counter() - begin
        assert segment.tokens == tokens and segment.bytes <= 4 * keys.numel() / ratio
        tail = torch.randn(2, SHAPE["num_key_value_heads"], 64, SHAPE["head_dim"], device=device, dtype=dtype)
        there = segment if device == "cpu" else segment.cuda()
        if layer == 0:
            check(attend, segment, there, tail, scale)
        packed.append((there, tail))
        dense.append((torch.cat([keys, tail[0]], dim=1)[None], torch.cat([values, tail[1]], dim=1)[None]))
    query = torch.randn(1, SHAPE["num_attention_heads"], 1, SHAPE["head_dim"], device=device, dtype=dtype)
    out = torch.empty(1, SHAPE["num_attention_heads"], SHAPE["head_dim"], device=device, dtype=dtype).transpose(0, 1)

    def sdpa():
        for keys, values in dense:
            sdpa_attention_forward(module, query, keys, values, None, scaling=scale)

    def packed_sdpa():
        """The query heads of a kv head as rows: what dense attention can do at best."""
        for keys, values in dense:
            torch.nn.functional.scaled_dot_product_attention(query.view(1, keys.shape[1], -1, keys.shape[3]), keys, values, scale=scale)

    def ours():
        for segment, tail in packed:
            attend(query[0], [segment], tail[0], tail[1], scale=scale, out=out)

    with torch.no_grad():
        sdpa_us, packed_us, ours_us = (t / layers for t in alternate(device, sdpa, packed_sdpa, ours))
    print(json.dumps({"what": "attention", "device": device, "tokens": tokens, "ratio": ratio, "profile": profile, "sdpa_us": round(sdpa_us, 1),
                      "packed_sdpa_us": round(packed_us, 1), "anchorkv_us": round(ours_us, 1),
                      "best_dense_over_ours": round(min(sdpa_us, packed_us) / ours_us, 2), "compress_s_per_layer": round(compress_s, 2)}),
          flush=True)


def check(attend, segment, there, tail, scale):
    keys, values = (torch.from_numpy(x).to(tail.device) for x in segment.dequantize())
    keys, values = torch.cat([keys, tail[0].float()], dim=1), torch.cat([values, tail[1].float()], dim=1)
    query = torch.randn(SHAPE["num_attention_heads"], 1, SHAPE["head_dim"], device=tail.device)
    expected = torch.nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], scale=scale, enable_gqa=True)[0]
    got = torch.as_tensor(attend(query, [there], tail[0], tail[1], scale=scale))
    error = ((got - expected).norm() / expected.norm()).item()
    assert error < 0.01, f"attention over the segment differs by {error:.3g} from dense attention over what it stands for"


def token_bench(tokens, ratio, profile, layers):
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens), device="cuda")
    new = ids[:, :1]
    row = {"what": "token", "tokens": tokens, "ratio": ratio, "profile": profile, "layers": layers}
    caches = {"sdpa": transformers.DynamicCache(config=config), "anchorkv": AnchorKVCache(model, ratio=ratio, profile=profile)}
    with torch.no_grad():
        for name, cache in caches.items():
            torch.cuda.synchronize()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            text_model(model)(ids, past_key_values=cache)
            torch.cuda.synchronize()
            row[f"{name}_prompt_s"] = round(time.perf_counter() - begin, 2)
            # Segments are allocated beside torch's own allocator.
            segments = cache.report().segment_bytes if name == "anchorkv" else 0
            row[f"{name}_cache_mib"] = round((torch.cuda.memory_allocated() - before + segments) / 2**20, 1)
        assert all(layer.segments[0].tokens == tokens for layer in caches["anchorkv"].layers)

        def step(cache):
            return lambda: text_model(model)(new, past_key_values=cache)

        for name, us in zip(caches, alternate("cuda", *map(step, caches.values()))):
            row[f"{name}_ms_per_token"] = round(us / 1000, 3)
    print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--ratio", type=float, default=20.0)
    parser.add_argument("--profile", default="adaptive")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        for tokens in options.tokens:
            attention_bench("cpu", tokens, options.ratio, options.profile, options.layers)
        return
    if not anchorkv.cuda.available or not torch.cuda.is_available():
        parser.exit(1, "python_decode_bench: it needs a GPU and a package built with CUDA: pip install . -C cmake.define.ANCHORKV_ENABLE_CUDA=ON\n")
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}))
    for tokens in options.tokens:
        attention_bench("cuda", tokens, options.ratio, options.profile, options.layers)
        token_bench(tokens, options.ratio, options.profile, options.layers)


if __name__ == "__main__":
    main()
