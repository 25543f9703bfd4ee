"""The package on an NVIDIA GPU: attention on the caller's stream against attention over what the segments stand for, and
the transformers cache. Skipped without a GPU or where the package was built for CPUs."""

import unittest

import numpy as np
import torch
import transformers

import anchorkv
import anchorkv.cuda
import models
from anchorkv.hf import AnchorKVCache

HEADS, RATIO, DIM = 2, 4, 128


def layer(tokens, dim=DIM):
    rng = np.random.default_rng(0)
    keys, values = ((rng.standard_normal((HEADS, tokens, dim)) + 2 * rng.standard_normal((HEADS, 1, dim))).astype(np.float32) for _ in range(2))
    return keys, values, rng.standard_normal((HEADS * RATIO, 32, dim)).astype(np.float32)


def dense(queries, keys, values, scale):
    """Causal attention, the last keys being the queries' own; double."""
    n, rows = queries.shape[1], keys.shape[1]
    mask = torch.ones(n, rows, dtype=torch.bool, device=queries.device).tril(rows - n)
    wide = lambda x: x.double().repeat_interleave(RATIO, dim=0)
    return torch.nn.functional.scaled_dot_product_attention(queries.double(), wide(keys), wide(values), attn_mask=mask, scale=scale)


@unittest.skipUnless(anchorkv.cuda.available and torch.cuda.is_available(), "there is no GPU, or the package was built without CUDA")
class CudaTest(unittest.TestCase):
    def test_attention_over_segment_and_tail(self):
        keys, values, queries = layer(1000)
        for profile in ("adaptive", "blend"):
            segment = anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM), ratio=5, profile=profile)
            there = segment.cuda()
            self.assertEqual((there.bytes, there.tokens), (segment.bytes, 1000))
            k, v = (torch.from_numpy(x).cuda() for x in segment.dequantize())
            for n, rows, dtype, scale in ((1, 1, torch.bfloat16, None), (1, 300, torch.float16, None), (7, 70, torch.float32, 0.05), (40, 64, torch.bfloat16, None)):
                with self.subTest(profile=profile, n=n, rows=rows):
                    generator = torch.Generator("cuda").manual_seed(n)
                    make = lambda *s: torch.randn(*s, device="cuda", generator=generator).to(dtype)
                    query, tail_k, tail_v = make(n, HEADS * RATIO, DIM).transpose(0, 1), make(HEADS, rows, DIM), make(HEADS, rows, DIM)
                    out = anchorkv.cuda.attend(query, [there], tail_k, tail_v, scale=scale)
                    expected = dense(query, torch.cat([k, tail_k.float()], 1), torch.cat([v, tail_v.float()], 1), scale or DIM ** -0.5)
                    self.assertLess(((out.double() - expected).norm() / expected.norm()).item(), 0.01)

    def test_runs_on_the_current_stream(self):
        keys, values, queries = layer(2000)
        there = anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM), ratio=5).cuda()
        query = torch.randn(HEADS * RATIO, 1, DIM, device="cuda")
        expected = anchorkv.cuda.attend(query, [there])
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = torch.zeros_like(query)
            torch.cuda._sleep(100_000_000)
            late.copy_(query)
            got = anchorkv.cuda.attend(late, [there])  # must wait for the copy, which only its own stream orders
        stream.synchronize()
        self.assertTrue(torch.equal(got, expected))

    def test_comes_back_from_the_gpu(self):
        keys, values, queries = layer(300)
        segment = anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM), ratio=3)
        self.assertEqual(segment.cuda().cpu().to_bytes(), segment.to_bytes())

    def test_identity_control(self):
        for name in ("llama", "qwen3", "gemma3"):
            model, ids = models.model(name, head_dim=64).cuda(), models.tokens(700).cuda()
            with torch.no_grad():
                expected = model(ids).logits
                cache = AnchorKVCache(model, ratio=0.5, profile="blend", anchors=680)
                pieces = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 680), (680, 688), (688, 689), (689, 700))]
            self.assertLess((torch.cat(pieces, 1) - expected).abs().max().item(), 1e-3)

    def test_gpu_and_cpu_agree(self):
        for name in ("llama", "gemma3"):
            model, ids = models.model(name, head_dim=64), models.tokens(690)
            logits = []
            for device in ("cpu", "cuda"):
                model.to(device)
                cache = AnchorKVCache(model, ratio=4)
                with torch.no_grad():
                    model(ids[:, :680].to(device), past_key_values=cache)
                    logits.append(model(ids[:, 680:].to(device), past_key_values=cache).logits.cpu())
            self.assertLess((logits[0] - logits[1]).abs().max().item(), 5e-3)

    def test_padding_and_holes(self):
        model = models.model("llama", head_dim=64).cuda()
        ids, mask = models.tokens(606, batch=2).cuda(), torch.ones(2, 606, dtype=torch.long, device="cuda")
        mask[1, 600:602] = 0
        with torch.no_grad():
            cache = AnchorKVCache(model, ratio=4)
            model(ids[:, :600], past_key_values=cache)
            positions = torch.arange(600, 606, device="cuda").repeat(2, 1)
            positions[1] -= 2
            got = model(ids[:, 600:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits[1, 2:]
            alone = AnchorKVCache(model, ratio=4)
            model(ids[1:, :600], past_key_values=alone)
            expected = model(ids[1:, 602:], past_key_values=alone).logits[0]
        self.assertLess((got - expected).abs().max().item(), 5e-3)

    def test_dense_memory_is_given_back(self):
        config = models.config("llama", num_hidden_layers=8, num_key_value_heads=4, head_dim=128, max_position_embeddings=32768)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        ids = models.tokens(16384).cuda()
        held = {}
        for kind in ("anchorkv", "dense"):
            cache = AnchorKVCache(model, ratio=8) if kind == "anchorkv" else transformers.DynamicCache(config=config)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with torch.no_grad():
                model.model(ids, past_key_values=cache)
            torch.cuda.synchronize()
            held[kind] = torch.cuda.memory_allocated() - before + (cache.report().segment_bytes if kind == "anchorkv" else 0)
        self.assertGreaterEqual(held["dense"], 8 * 2 * 2 * 4 * 128 * 16384)
        self.assertLess(held["anchorkv"], held["dense"] / 6)


if __name__ == "__main__":
    unittest.main()
