"""The serde against the contract of the installed LMCache: its factory, its asynchronous wrapper, its memory objects."""

import time
import types
import unittest

import numpy as np
import torch

try:
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor, get_registered_serde_types, serialized_layout_desc
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    import anchorkv.lmcache
    missing = None
except ImportError as error:
    missing = str(error)


def memory(tensor, kind):
    data = tensor.view(torch.uint8).flatten()
    return TensorMemoryObj(data, MemoryObjMetadata(shape=tensor.shape, dtype=tensor.dtype, address=0, phy_size=data.numel(), ref_count=1,
                                                   fmt=kind, shapes=[tensor.shape], dtypes=[tensor.dtype]), None)


def result(query, task):
    for _ in range(2000):
        done = query(task)
        if done is not None:
            return done
        time.sleep(0.005)
    raise AssertionError("the task did not finish")


def chunk(tokens, dtype=torch.bfloat16, layers=3):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, layers, tokens, 4 * 64, generator=generator)
    return (noise + 2 * torch.randn(2, layers, 1, 4 * 64, generator=generator)).to(dtype)


@unittest.skipIf(missing, f"lmcache cannot be imported: {missing}")
class LmcacheTest(unittest.TestCase):
    def round_trip(self, settings, source):
        processor = create_serde_processor(SerdeConfig("anchorkv", settings))
        layout = serialized_layout_desc(MemoryLayoutDesc([source.shape], [source.dtype]), processor)
        buffer, target = torch.zeros(layout.shapes[0], dtype=torch.uint8), torch.zeros_like(source)
        objects = [memory(source, MemoryFormat.KV_2LTD), memory(buffer, MemoryFormat.BINARY_BUFFER), memory(target, MemoryFormat.KV_2LTD)]
        self.assertNotEqual(processor.get_serialize_event_fd(), processor.get_deserialize_event_fd())
        self.assertTrue(result(processor.query_serialize_result, processor.submit_serialize([objects[0]], [objects[1]], [None])))
        self.assertTrue(result(processor.query_deserialize_result, processor.submit_deserialize([objects[1]], [objects[2]], [None])))
        processor.close()
        return objects[2].tensor, buffer.numel()

    def test_registered_under_its_name(self):
        self.assertIn("anchorkv", get_registered_serde_types())

    def test_chunks_come_back_smaller_and_close(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for ratio, worst in ((2, 0.03), (4, 0.08)):
                source = chunk(256, dtype)
                back, size = self.round_trip({"ratio": ratio, "head_dim": 64, "rope_theta": 10000.0}, source)
                self.assertLess(size, 1.1 * 2 * source.numel() / ratio)
                error = (back.float() - source.float()).pow(2).sum() / (source.float() - source.float().mean(2, keepdim=True)).pow(2).sum()
                self.assertLess(error.item(), worst)

    def test_short_chunks_and_impossible_ratios_stay_exact(self):
        for tokens, ratio in ((1, 4), (2, 100), (256, 250)):
            source = chunk(tokens)
            self.assertTrue(torch.equal(self.round_trip({"ratio": ratio, "head_dim": 64}, source)[0], source))

    def test_size_is_a_bound_for_every_length(self):
        for settings in ({"ratio": 4, "head_dim": 64}, {"ratio": 3, "head_dim": 32, "profile": "blend"}):
            codec = anchorkv.lmcache.Codec(**settings)
            for tokens in (1, 33, 64, 100, 255, 257):
                source = chunk(tokens)
                self.assertLessEqual(len(codec.encode(source)), codec.bound(source.shape, source.dtype))

    def test_same_chunk_same_bytes(self):
        codec = anchorkv.lmcache.Codec(64)
        self.assertEqual(codec.encode(chunk(256)), codec.encode(chunk(256)))

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "head_dim"):
            create_serde_processor(SerdeConfig("anchorkv", {}))
        with self.assertRaisesRegex(ValueError, "'x'"):
            create_serde_processor(SerdeConfig("anchorkv", {"head_dim": 64, "profile": "x"}))
        codec = anchorkv.lmcache.Codec(64)
        with self.assertRaisesRegex(ValueError, "takes"):
            codec.encode(torch.zeros(1, 3, 100, 576))
        data = codec.encode(chunk(256))
        for bad in (b"", data[:10], data[:-1], b"x" + data[1:]):
            with self.assertRaisesRegex(ValueError, "no chunk"):
                codec.decode(bad, chunk(256))
        damaged = bytearray(data)
        damaged[-5000] ^= 1
        with self.assertRaises(anchorkv.Error):
            codec.decode(damaged, chunk(256))
        with self.assertRaisesRegex(ValueError, "expected"):
            codec.decode(data, chunk(255))
        with self.assertRaisesRegex(ValueError, "tensor"):
            anchorkv.lmcache.tensor_of(types.SimpleNamespace(tensor=None))


if __name__ == "__main__":
    unittest.main()
