"""A real model in transformers and in the C++ program: the same weights, in 32 bits, give the same tokens."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch
import transformers

from anchorkv.hf import AnchorKVCache

CACHE = pathlib.Path(os.environ.get("ANCHORKV_CACHE") or pathlib.Path.home() / ".cache" / "anchorkv")
MODEL = CACHE / "models" / "smollm2-135m-instruct-q4_1.f32.gguf"  # tests/runtime make it from the quantised one
PROGRAM = pathlib.Path(os.environ.get("ANCHORKV_BUILD_DIR", "build")).absolute() / "bin" / "anchorkv"
DOCUMENT = "The lighthouse keeper wrote in his diary every evening. On the first of May he noted that the sea was calm and the wind came from the west."
QUESTION = "On the second of May"


@unittest.skipIf(not MODEL.exists() or not PROGRAM.exists(), f"{MODEL} or {PROGRAM} is missing")
class CppModelTest(unittest.TestCase):
    def test_tokens_without_compression_are_equal(self):
        with tempfile.TemporaryDirectory() as folder:
            document = pathlib.Path(folder) / "document.txt"
            document.write_text(DOCUMENT)
            run = subprocess.run([PROGRAM, "run", "-m", MODEL, "-f", document, "-p", QUESTION, "--chat-template", "none", "--kv", "full",
                                  "--temp", "0", "-n", "24", "--json"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        expected = json.loads(run.stdout)
        where = {"pretrained_model_name_or_path": MODEL.parent, "gguf_file": MODEL.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # The program reads both texts on their own, the question on a line of its own.
        for between in ("\n\n", "\n", " "):
            ids = torch.cat([tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in (DOCUMENT, between + QUESTION)], dim=1)
            if ids.shape[1] == expected["prompt_tokens"]:
                break
        output = model.generate(ids, past_key_values=AnchorKVCache(model), max_new_tokens=24, do_sample=False)
        self.assertEqual(ids.shape[1], expected["prompt_tokens"])
        self.assertEqual(tokenizer.decode(output[0, ids.shape[1]:]), expected["answer"])


if __name__ == "__main__":
    unittest.main()
