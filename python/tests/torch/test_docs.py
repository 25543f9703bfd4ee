"""The Python examples of docs/quickstart.md and docs/python.md run as they stand."""

import os
import pathlib
import re
import tempfile
import unittest

import models

ROOT = pathlib.Path(__file__).resolve().parents[3]


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


class DocsTest(unittest.TestCase):
    def test_transformers_examples(self):
        found = [block for name in ("docs/quickstart.md", "docs/python.md") for block in blocks(name) if "AnchorKVCache" in block]
        self.assertEqual(len(found), 2)
        for block in found:
            for name in ("llama", "qwen2", "gemma3"):
                with self.subTest(model=name):
                    scope = {"model": models.model(name), "inputs": {"input_ids": models.tokens(600)}}
                    exec(block.replace("max_new_tokens=200", "max_new_tokens=8"), scope)
                    self.assertEqual(scope["cache"].get_seq_length(), 600)
                    self.assertEqual(scope["output"].shape[1], 608)

    def test_array_example(self):
        (block,) = [block for block in blocks("docs/python.md") if "anchorkv.compress" in block]
        here = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                exec(block, {})
            finally:
                os.chdir(here)


if __name__ == "__main__":
    unittest.main()
