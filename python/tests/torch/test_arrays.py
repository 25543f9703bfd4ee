"""anchorkv._core on arrays: against attention written out, on awkward shapes, and what it refuses."""

import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import numpy as np
import torch

import anchorkv

HEADS, RATIO, DIM = 2, 3, 64


def layer(tokens, seed=0, dim=DIM):
    rng = np.random.default_rng(seed)
    shape = (HEADS, tokens, dim)
    mean = rng.standard_normal((HEADS, 1, dim))
    keys, values = ((rng.standard_normal(shape) + 2 * mean).astype(np.float32) for _ in range(2))
    return keys, values, rng.standard_normal((HEADS * RATIO, 40, dim)).astype(np.float32)


def attention(queries, keys, values, scale=None, causal_rows=0):
    """Attention written out in double; the last causal_rows keys belong to the queries' own tokens. (out, lse)"""
    q_heads, n, dim = queries.shape
    out, lse = np.zeros(queries.shape), np.zeros((q_heads, n))
    for h in range(q_heads):
        k, v = keys[h // RATIO].astype(np.float64), values[h // RATIO].astype(np.float64)
        logits = queries[h].astype(np.float64) @ k.T * (dim ** -0.5 if scale is None else scale)
        for i in range(n if causal_rows else 0):
            logits[i, len(k) - n + i + 1:] = -np.inf
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - top)
        lse[h] = (top[:, 0] + np.log(weights.sum(axis=1)))
        out[h] = weights @ v / weights.sum(axis=1, keepdims=True)
    return out, lse


class SegmentTest(unittest.TestCase):
    def test_attend_is_attention_over_what_dequantize_gives(self):
        for tokens in (33, 64, 65, 700):
            for profile in ("adaptive", "blend", "paper"):
                with self.subTest(tokens=tokens, profile=profile):
                    keys, values, queries = layer(tokens)
                    segment = anchorkv.compress(keys, values, queries[:, -32:], anchorkv.Rope(DIM), ratio=0.5 if tokens < 100 else 5, profile=profile)
                    self.assertLessEqual(segment.bytes, segment.dense_bytes / (0.5 if tokens < 100 else 5))
                    out, lse = segment.attend(queries)
                    expected, expected_lse = attention(queries, *segment.dequantize())
                    np.testing.assert_allclose(out, expected, atol=2e-5)
                    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)

    def test_cpu_and_reference_agree(self):
        keys, values, queries = layer(300)
        for profile in ("adaptive", "blend"):
            fast, plain = (anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM), ratio=3, profile=profile, backend=backend)
                           for backend in ("cpu", "reference"))
            scale = np.abs(plain.attend(queries)[0]).max()
            self.assertLess(np.abs(fast.attend(queries)[0] - plain.attend(queries)[0]).max(), 0.1 * scale)

    def test_every_token_an_anchor_is_dense_attention(self):
        keys, values, queries = layer(100)
        rope = anchorkv.Rope(DIM)
        segment = anchorkv.compress(keys, values, queries, rope, ratio=0.5, profile="blend", anchors=100)
        expected, _ = attention(queries, rope.rotate(keys), values)
        np.testing.assert_allclose(segment.attend(queries)[0], expected, atol=5e-3)

    def test_layouts_and_types_give_the_same_bytes(self):
        keys, values, queries = layer(200)
        keys, values, queries = (x.astype(np.float16).astype(np.float32) for x in (keys, values, queries))
        rope = anchorkv.Rope(DIM)
        expected = anchorkv.compress(keys, values, queries, rope).to_bytes()
        token_major = torch.from_numpy(keys).transpose(0, 1).contiguous().transpose(0, 1)
        every_other = np.repeat(values, 2, axis=2)[:, :, ::2]
        for k, v, q in ((token_major, values, queries), (keys, every_other, queries),
                        (keys.astype(np.float16), torch.from_numpy(values).half(), queries[:, -32:])):
            self.assertEqual(anchorkv.compress(k, v, q, rope).to_bytes(), expected)

    def test_keys_after_rope_are_turned_back(self):
        keys, values, queries = layer(200)
        rope = anchorkv.Rope(DIM, 500000.0, max_position=4096)
        before = anchorkv.compress(keys, values, queries, rope, first_position=77)
        after = anchorkv.compress(rope.rotate(keys, 77), values, queries, rope, rotated=True, first_position=77)
        np.testing.assert_allclose(after.dequantize()[0], before.dequantize()[0], atol=1e-2)
        np.testing.assert_allclose(rope.unrotate(rope.rotate(keys, 5), 5), keys, atol=1e-5)

    def test_outputs_go_where_the_caller_wants_them(self):
        keys, values, queries = layer(200)
        segment = anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM))
        out = torch.zeros(40, HEADS * RATIO, DIM).transpose(0, 1)  # strided
        given, _ = segment.attend(torch.from_numpy(queries), out=out)
        self.assertEqual(given.data_ptr(), out.data_ptr())
        np.testing.assert_array_equal(out.numpy(), segment.attend(queries)[0])

    def test_attend_over_segments_and_tail(self):
        keys, values, queries = layer(300)
        more_keys, more_values, _ = layer(130, seed=2)
        rope = anchorkv.Rope(DIM)
        segment = anchorkv.compress(keys, values, queries, rope)
        k, v = segment.dequantize()
        for n, rows, dtype, scale in ((1, 1, np.float32, None), (7, 7, np.float32, 0.3), (40, 130, np.float32, None), (3, 65, np.float16, None)):
            with self.subTest(n=n, rows=rows):
                tail_k, tail_v = more_keys[:, :rows].astype(dtype), more_values[:, :rows].astype(dtype)
                out = anchorkv.attend(queries[:, :n], [segment], tail_k, tail_v, scale=scale)
                expected, _ = attention(queries[:, :n], np.concatenate([k, tail_k], axis=1), np.concatenate([v, tail_v], axis=1), scale, rows)
                np.testing.assert_allclose(out, expected, atol=3e-5)
        np.testing.assert_allclose(anchorkv.attend(queries[:, :2], [], more_keys, more_values),
                                   attention(queries[:, :2], more_keys, more_values, None, 130)[0], atol=3e-5)

    def test_threads_do_not_matter(self):
        keys, values, queries = layer(5000)
        segment = anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM))
        outs = []
        for threads in (1, 3):
            anchorkv.set_threads(threads)
            outs.append(anchorkv.attend(queries, [segment], keys[:, :700], values[:, :700]))
        anchorkv.set_threads(os.cpu_count())
        np.testing.assert_array_equal(*outs)

    def test_refusals_are_one_line_that_names_the_value(self):
        keys, values, queries = layer(100)
        rope = anchorkv.Rope(DIM)
        segment = anchorkv.compress(keys, values, queries, rope, ratio=2)
        cases = (
            (ValueError, "1000", lambda: anchorkv.compress(keys, values, queries, rope, ratio=1000)),
            (ValueError, "0.1", lambda: anchorkv.compress(keys, values, queries, rope, ratio=0.1)),
            (ValueError, "'best'", lambda: anchorkv.compress(keys, values, queries, rope, profile="best")),
            (ValueError, "'windows'", lambda: anchorkv.compress(keys, values, queries, rope, windows=3)),
            (ValueError, "'three'", lambda: anchorkv.compress(keys, values, queries, rope, window="three")),
            (ValueError, "window queries", lambda: anchorkv.compress(keys, values, queries[:, :31], rope)),
            (ValueError, "[100, 64]", lambda: anchorkv.compress(keys[0], values, queries, rope)),
            (ValueError, "64 bits", lambda: anchorkv.compress(keys.astype(np.float64), values, queries, rope)),
            (ValueError, "head dim", lambda: anchorkv.compress(keys, values, queries, anchorkv.Rope(32))),
            (ValueError, "'tpu'", lambda: anchorkv.compress(keys, values, queries, rope, backend="tpu")),
            (anchorkv.Error, "not finite", lambda: anchorkv.compress(np.where(keys > 3, np.nan, keys), values, queries, rope)),
            (ValueError, "do not fit", lambda: segment.attend(queries[:5])),
            (ValueError, "nothing to attend to", lambda: anchorkv.attend(queries, [])),
            (ValueError, "at least the 40", lambda: anchorkv.attend(queries, [segment], keys[:, :39], values[:, :39])),
            (ValueError, "7", lambda: anchorkv.Rope(DIM, rotary_dim=7)),
            (ValueError, "'both'", lambda: anchorkv.Rope(DIM, pairing="both")),
            (FileNotFoundError, "/nowhere", lambda: anchorkv.Segment.load("/nowhere")),
            (ValueError, "layers", lambda: anchorkv.estimate(0, 2, DIM, 1000)),
        )
        for kind, text, call in cases:
            with self.subTest(text=text):
                with self.assertRaises(kind) as caught:
                    call()
                self.assertIn(text, str(caught.exception))
                self.assertNotIn("\n", str(caught.exception))


class FileTest(unittest.TestCase):
    def setUp(self):
        keys, values, self.queries = layer(150)
        self.rope = anchorkv.Rope(DIM, 12345.0)
        self.segments = [anchorkv.compress(keys, values, self.queries, self.rope, profile=p, ratio=1.5) for p in ("adaptive", "blend")]

    def test_comes_back_bit_for_bit(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "layers.akv")
            anchorkv.save(path, self.segments)
            for before, after in zip(self.segments, anchorkv.load(path), strict=True):
                np.testing.assert_array_equal(before.attend(self.queries)[0], after.attend(self.queries)[0])
                self.assertEqual(after.bytes, before.bytes)
            self.assertEqual(pathlib.Path(path).read_bytes(), anchorkv.to_bytes(self.segments))
            self.assertEqual(os.listdir(folder), ["layers.akv"])
            with self.assertRaisesRegex(ValueError, "2 segments"):
                anchorkv.Segment.load(path)
        one = anchorkv.Segment.from_bytes(self.segments[0].to_bytes())
        np.testing.assert_array_equal(one.dequantize()[0], self.segments[0].dequantize()[0])

    def test_damage_is_found(self):
        good = anchorkv.to_bytes(self.segments)
        for length in (0, 1, 63, 64, 4095, 4096, len(good) - 4096, len(good) - 1):
            with self.assertRaises(anchorkv.Error):
                anchorkv.from_bytes(good[:length])
        for at in range(0, len(good), 509):
            bad = bytearray(good)
            bad[at] ^= 4
            with self.assertRaises(anchorkv.Error):
                anchorkv.from_bytes(bad)


class KvCacheTest(unittest.TestCase):
    def test_prompt_steps_and_truncation(self):
        keys, values, queries = layer(600)
        new_keys, new_values, _ = layer(9, seed=3)
        rope = anchorkv.Rope(DIM)
        cache = anchorkv.KvCache(2, HEADS * RATIO, HEADS, rope, ratio=4, tail="float32")
        for index in (1, 0):
            cache.add_prompt(index, keys, values, queries)
        self.assertEqual((cache.tokens, cache.compressed_tokens), (600, 600))
        cache.begin_step(9)
        outs = [cache.attend(index, new_keys, new_values, queries[:, :9]) for index in (0, 1)]
        cache.end_step()
        np.testing.assert_array_equal(*outs)
        expected = anchorkv.attend(queries[:, :9], cache.segments(0), new_keys, new_values)
        np.testing.assert_allclose(outs[0], expected, atol=1e-5)
        self.assertGreaterEqual(cache.bill()["ratio"], 3.5)
        cache.truncate(600)
        self.assertEqual(cache.tokens, 600)
        with self.assertRaisesRegex(ValueError, "599"):
            cache.truncate(599)

    def test_order_of_calls_is_checked(self):
        cache = anchorkv.KvCache(1, HEADS * RATIO, HEADS, anchorkv.Rope(DIM))
        keys, values, queries = layer(3)
        with self.assertRaisesRegex(ValueError, "begin_step"):
            cache.attend(0, keys, values, queries[:, :3])
        with self.assertRaisesRegex(ValueError, "begin_step"):
            cache.end_step()
        cache.begin_step(3)
        with self.assertRaisesRegex(ValueError, "layer 4"):
            cache.attend(4, keys, values, queries[:, :3])
        with self.assertRaisesRegex(ValueError, "this step takes"):
            cache.attend(0, keys, values, queries[:, :2])

    def test_estimate_bounds_what_compress_makes(self):
        keys, values, queries = layer(2000)
        plan = anchorkv.estimate(1, HEADS, DIM, 2000, ratio=7)
        segment = anchorkv.compress(keys, values, queries, anchorkv.Rope(DIM), ratio=7)
        self.assertLessEqual(segment.bytes, plan["bytes"])
        self.assertEqual(segment.dense_bytes, plan["dense_bytes"])


class CppTest(unittest.TestCase):
    """The same tensors through the C++ cache."""

    def test_python_gives_what_the_cpp_cache_gives(self):
        program = pathlib.Path(os.environ.get("ANCHORKV_BUILD_DIR", "build")) / "bin" / "attention_dump"
        if not program.exists():
            self.skipTest(f"{program} is not built")
        keys, values, queries = layer(1500)
        new_keys, new_values, new_queries = (np.ascontiguousarray(x[:, :5]) for x in layer(40, seed=5))
        rope = anchorkv.Rope(DIM, 10000.0, max_position=1505)
        for profile in ("adaptive", "blend", "paper"):
            with self.subTest(profile=profile), tempfile.TemporaryDirectory() as folder:
                source, target = os.path.join(folder, "in"), os.path.join(folder, "out")
                with open(source, "wb") as out:
                    out.write(struct.pack("=7id", HEADS * RATIO, HEADS, DIM, 1500, 40, 5, 0, 10000.0))
                    for x in (keys, values, queries, *(x.transpose(1, 0, 2) for x in (new_keys, new_values, new_queries))):
                        out.write(np.ascontiguousarray(x).tobytes())
                subprocess.run([program, profile, "8", source, target], check=True)
                expected = np.fromfile(target, np.float32).reshape(5, HEADS * RATIO, DIM).transpose(1, 0, 2)
                segment = anchorkv.compress(keys, values, queries, rope, ratio=8, profile=profile)
                out = anchorkv.attend(new_queries, [segment], new_keys, new_values)
                np.testing.assert_allclose(out, expected, atol=1e-6)


if __name__ == "__main__":
    unittest.main()
