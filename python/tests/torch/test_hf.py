"""anchorkv.hf with tiny random models: against transformers' own cache, and what the cache promises."""

import gc
import os
import subprocess
import sys
import tempfile
import unittest
import weakref

import numpy as np
import torch
import transformers

import anchorkv
import models
from anchorkv.hf import AnchorKVCache
from anchorkv.hf import attention as hf_attention

PROMPT, REST = 680, 20


def steps(model, cache, ids, *cuts):
    """Logits of ids, given to the model in the pieces between the cuts."""
    with torch.no_grad():
        return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in zip((0, *cuts), (*cuts, ids.shape[1]))], dim=1)


class IdentityTest(unittest.TestCase):
    def test_every_token_an_anchor_gives_transformers_logits(self):
        for name in models.NAMES:
            with self.subTest(model=name):
                model, ids = models.model(name), models.tokens(PROMPT + REST)
                with torch.no_grad():
                    expected = model(ids).logits
                cache = AnchorKVCache(model, ratio=0.5, profile="blend", anchors=PROMPT)
                # The prompt, a question of several tokens, then one by one.
                got = steps(model, cache, ids, PROMPT, *range(PROMPT + 8, PROMPT + REST))
                self.assertTrue(all(layer.segments for layer in cache._anchor_layers()))
                self.assertLess((got - expected).abs().max().item(), 1e-4)

    def test_without_compression_tokens_are_transformers_own(self):
        for name in ("llama", "gemma3"):
            model, ids = models.model(name), models.tokens(100)
            expected = model.generate(ids, max_new_tokens=12, do_sample=False)
            cache = AnchorKVCache(model)
            self.assertTrue(torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False), expected))
            self.assertIn("100 tokens is shorter than 512", str(cache.report()))

    def test_other_caches_still_get_sdpa(self):
        model, ids = models.model("qwen3"), models.tokens(50)
        with torch.no_grad():
            expected = model(ids).logits
            AnchorKVCache(model)
            self.assertTrue(torch.equal(model(ids).logits, expected))


class CompressedTest(unittest.TestCase):
    def test_attention_is_that_over_the_dequantised_cache(self):
        """The compressed step against transformers with a cache of what the segments stand for."""
        for name in ("llama", "qwen2", "qwen3", "gemma3"):
            with self.subTest(model=name):
                model, ids = models.model(name), models.tokens(PROMPT + 5)
                cache = AnchorKVCache(model, ratio=5)
                got = steps(model, cache, ids, PROMPT)[:, PROMPT:]
                plain = transformers.DynamicCache(config=model.config)
                steps(model, plain, ids[:, :PROMPT])
                for layer, compressed in zip(plain.layers, cache.layers):
                    if getattr(compressed, "segments", None):
                        layer.keys, layer.values = (torch.from_numpy(x)[None] for x in compressed.segments[0].dequantize())
                with torch.no_grad():
                    expected = model(ids[:, PROMPT:], past_key_values=plain).logits
                self.assertLess((got - expected).abs().max().item(), 2e-5)

    def test_segments_are_those_of_the_models_own_tensors(self):
        """Queries, keys and values that the cache compresses, formed again from the layers' inputs."""
        model, ids = models.model("qwen3"), models.tokens(PROMPT)
        seen = {}
        module = model.model.layers[1].self_attn
        hook = module.register_forward_pre_hook(lambda m, args, kwargs: seen.update(kwargs), with_kwargs=True)
        cache = AnchorKVCache(model, ratio=5)
        steps(model, cache, ids)
        hook.remove()
        with torch.no_grad():
            x, (cos, sin) = seen["hidden_states"], seen["position_embeddings"]
            shape = (1, PROMPT, -1, 32)
            q, k = module.q_norm(module.q_proj(x).view(shape)), module.k_norm(module.k_proj(x).view(shape))
            v = module.v_proj(x).view(shape)
        turn = lambda t: t * cos[:, :, None] + torch.cat([-t[..., 16:], t[..., :16]], -1) * sin[:, :, None]
        rope = anchorkv.Rope(32, frequencies=model.model.rotary_emb.inv_freq.tolist())
        expected = anchorkv.compress(k[0].transpose(0, 1), v[0].transpose(0, 1), turn(q)[0, -32:].transpose(0, 1), rope, ratio=5)
        found = cache.layers[1].segments[0]
        for a, b in zip(found.dequantize(), expected.dequantize()):
            self.assertLess(np.abs(a - b).max(), 0.02 * np.abs(b).max())

    def test_questions_start_from_the_same_context(self):
        for name in ("llama", "gemma3"):
            model = models.model(name)
            context, first, second = models.tokens(600), models.tokens(9, seed=2), models.tokens(7, seed=3)
            cache = AnchorKVCache(model, ratio=4)
            steps(model, cache, context)
            ask = lambda question: model.generate(torch.cat([context, question], dim=1), past_key_values=cache,
                                                  max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
            before = ask(first)
            cache.rewind()
            self.assertEqual(cache.get_seq_length(), 600)
            ask(second)
            cache.rewind()
            after = ask(first)
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True)))

    def test_saved_prompts_go_on_as_before(self):
        model, ids = models.model("qwen3"), models.tokens(615)
        cache = AnchorKVCache(model, ratio=4)
        expected = steps(model, cache, ids, 600)[:, 600:]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "prompt.akv")
            cache.save(path)
            restored = AnchorKVCache.load(model, path)
            self.assertEqual((restored.get_seq_length(), restored.report().segment_bytes), (600, cache.report().segment_bytes))
            self.assertTrue(torch.equal(steps(model, restored, ids[:, 600:]), expected))
            restored.rewind()
            self.assertEqual(restored.get_seq_length(), 600)
            for other in (models.model("qwen3", seed=5), models.model("llama")):
                with self.assertRaisesRegex(ValueError, "another model"):
                    AnchorKVCache.load(other, path)
            with self.assertRaisesRegex(ValueError, "no compressed prompt"):
                AnchorKVCache(model).save(path)
            anchorkv.save(path, [layer.segments[0] for layer in cache.layers])
            with self.assertRaisesRegex(ValueError, "not written by"):
                AnchorKVCache.load(model, path)
        gemma = models.model("gemma3")
        sliding = AnchorKVCache(gemma)
        steps(gemma, sliding, ids)
        with self.assertRaisesRegex(ValueError, "sliding"):
            sliding.save("nowhere")

    def test_batches_with_padding_are_their_sequences_alone(self):
        for name in ("llama", "gemma3"):
            for side in ("left", "right"):
                with self.subTest(model=name, side=side):
                    model = models.model(name)
                    lengths = (700, 613, 580)
                    ids = torch.zeros(3, 700, dtype=torch.long)
                    mask = torch.zeros(3, 700, dtype=torch.long)
                    for b, n in enumerate(lengths):
                        where = slice(700 - n, 700) if side == "left" else slice(0, n)
                        ids[b, where] = models.tokens(n, seed=b)[0]
                        mask[b, where] = 1
                    positions = (mask.cumsum(-1) - 1).clamp(min=0)
                    cache = AnchorKVCache(model, ratio=4)
                    new = models.tokens(2, batch=3, seed=9)
                    with torch.no_grad():
                        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
                        for i in range(2):
                            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
                            at = torch.tensor(lengths)[:, None] + i
                            got = model(new[:, i:i + 1], attention_mask=mask, position_ids=at, past_key_values=cache).logits
                    for b, n in enumerate(lengths):
                        alone = AnchorKVCache(model, ratio=4)
                        with torch.no_grad():
                            model(models.tokens(n, seed=b), past_key_values=alone)
                            for i in range(2):
                                expected = model(new[b:b + 1, i:i + 1], past_key_values=alone).logits
                        if name == "gemma3" and side == "right" and n < 700:
                            continue  # transformers' own sliding layers lose rows to padding on the right
                        self.assertEqual(cache.layers[1].segments[b].tokens, n)
                        self.assertLess((got[b] - expected[0]).abs().max().item(), 2e-3, (b, n))

    def test_masks_with_holes_in_the_tail(self):
        """Questions of different lengths, padded on the left, behind one context each."""
        model = models.model("llama")
        context = models.tokens(600, batch=2)
        question = models.tokens(6, batch=2, seed=4)
        mask = torch.ones(2, 606, dtype=torch.long)
        mask[1, 600:602] = 0
        cache = AnchorKVCache(model, ratio=4)
        with torch.no_grad():
            model(context, past_key_values=cache)
            positions = torch.arange(600, 606).repeat(2, 1)
            positions[1] -= 2
            got = model(question, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            for b, first in ((0, 0), (1, 2)):
                alone = AnchorKVCache(model, ratio=4)
                model(context[b:b + 1], past_key_values=alone)
                expected = model(question[b:b + 1, first:], past_key_values=alone).logits
                self.assertLess((got[b, first:] - expected[0]).abs().max().item(), 2e-5)

    def test_chunked_prompts(self):
        model, ids = models.model("gemma3"), models.tokens(701)
        whole, chunked = AnchorKVCache(model, ratio=4), AnchorKVCache(model, ratio=4, compress="decode")
        manual = AnchorKVCache(model, ratio=4, compress="manual")
        expected = steps(model, whole, ids, 700)[:, -1]
        got = steps(model, chunked, ids, 256, 512, 700)[:, -1]
        self.assertLess((got - expected).abs().max().item(), 1e-3)
        steps(model, manual, ids[:, :700], 256, 512)
        self.assertIn("compress() has not been called", str(manual.report()))
        manual.compress()
        with torch.no_grad():
            self.assertLess((model(ids[:, 700:], past_key_values=manual).logits[:, -1] - expected).abs().max().item(), 1e-3)
        for cache in (chunked, manual):
            cache.rewind()
            with torch.no_grad():
                self.assertLess((model(ids[:, 700:], past_key_values=cache).logits[:, -1] - expected).abs().max().item(), 1e-3)

    def test_several_answers_share_segments(self):
        model, ids = models.model("qwen2"), models.tokens(600)
        cache = AnchorKVCache(model, ratio=4)
        steps(model, cache, ids)
        once = cache.report().segment_bytes
        cache.batch_repeat_interleave(3)
        report = cache.report()
        self.assertEqual((report.sequences, report.segment_bytes), (3, once))
        with torch.no_grad():
            logits = model(models.tokens(1).repeat(3, 1), past_key_values=cache).logits
        self.assertTrue(torch.equal(logits[0], logits[2]))
        cache.batch_select_indices(torch.tensor([2]))
        self.assertEqual(cache.report().sequences, 1)


class MemoryTest(unittest.TestCase):
    def test_dense_tensors_are_freed(self):
        model = models.model("llama")
        kept = []
        original = hf_attention.sdpa_attention_forward

        def watch(module, query, key, value, *args, **kwargs):
            kept.extend((weakref.ref(key), weakref.ref(value)))
            return original(module, query, key, value, *args, **kwargs)

        cache = AnchorKVCache(model, ratio=8)
        transformers.integrations.sdpa_attention.sdpa_attention_forward = watch
        try:
            gc.disable()
            steps(model, cache, models.tokens(1000))
            self.assertEqual(len(kept), 4)
            self.assertEqual([r() for r in kept], [None] * 4)
        finally:
            gc.enable()
            transformers.integrations.sdpa_attention.sdpa_attention_forward = original

    def test_report_counts_buffers(self):
        model = models.model("llama")
        cache = AnchorKVCache(model, ratio=8)
        steps(model, cache, models.tokens(2010), 2000)
        report = cache.report()
        self.assertEqual(report.dense_bytes, 2 * 4 * 2 * 32 * 2010)
        self.assertEqual(report.segment_bytes, sum(layer.segments[0].bytes for layer in cache.layers))
        self.assertEqual(report.exact_bytes, 2 * 2 * 4 * 2 * 32 * 10)
        self.assertGreater(report.ratio, 7)
        self.assertIn(f"{report.ratio:.2f}x smaller", str(report))

    def test_resident_memory_falls(self):
        """A prompt whose dense cache is 64 MiB, eight times smaller once compressed; each in a process of its own."""
        grown = [int(subprocess.run([sys.executable, "-W", "ignore", __file__, kind], check=True, stdout=subprocess.PIPE).stdout)
                 for kind in ("anchorkv", "dense")]
        dense = 8 * 2 * 4 * 4 * 64 * 4096
        self.assertLess(grown[0], grown[1] - dense / 3)


def print_growth(kind):
    """Bytes by which reading a prompt lets this process grow for good."""
    model = models.model("llama", num_hidden_layers=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=8192)
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    make = lambda: AnchorKVCache(model, ratio=8) if kind == "anchorkv" else transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(models.tokens(600), past_key_values=make())  # whatever is loaded and kept after the first call
        before = resident()
        cache = make()
        model.model(models.tokens(4096), past_key_values=cache)
    gc.collect()
    print(resident() - before)


class RefusalTest(unittest.TestCase):
    def refused(self, kind, text, call):
        with self.assertRaises(kind) as caught:
            call()
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_one_line_that_says_what_is_allowed(self):
        model = models.model("llama")
        ids = models.tokens(600)
        self.refused(ValueError, "num_beams must be 1", lambda: model.generate(ids, past_key_values=AnchorKVCache(model), max_new_tokens=2, num_beams=2))
        self.refused(ValueError, "'later'", lambda: AnchorKVCache(model, compress="later"))
        self.refused(ValueError, "0.1", lambda: AnchorKVCache(model, ratio=0.1))
        self.refused(ValueError, "'window_size'", lambda: AnchorKVCache(model, window_size=3))
        self.refused(ValueError, "largest is", lambda: steps(model, AnchorKVCache(model, ratio=60), ids))
        cache = AnchorKVCache(model)
        self.refused(ValueError, "nothing", cache.compress)
        self.refused(ValueError, "go back to", cache.rewind)
        steps(model, cache, ids)
        self.refused(ValueError, "599", lambda: cache.crop(599))
        self.refused(ValueError, "599", lambda: cache.crop(-1))
        self.refused(ValueError, "a batch of 2", lambda: model(ids[:, :1].repeat(2, 1), past_key_values=cache))
        cache.crop(600)
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)

    def test_models_that_are_not_supported(self):
        gemma2 = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**models.COMMON))
        self.refused(ValueError, "gemma2", lambda: AnchorKVCache(gemma2))
        dynamic = models.model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
        self.refused(ValueError, "dynamic", lambda: AnchorKVCache(dynamic))
        sliding = models.model("mistral", sliding_window=64)
        self.refused(ValueError, "nothing to compress", lambda: AnchorKVCache(sliding))


if __name__ == "__main__":
    if sys.argv[1:] in (["anchorkv"], ["dense"]):
        print_growth(sys.argv[1])
    else:
        unittest.main()
