"""Questions about a long document, answered from a compressed cache: python long_document.py MODEL DOCUMENT QUESTION..."""

import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorkv.hf import AnchorKVCache

model_path, document, *questions = sys.argv[1:]
path = pathlib.Path(model_path)  # a folder of transformers' own, or a GGUF file, whose weights are expanded
where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
tokenizer = AutoTokenizer.from_pretrained(path.parent if where else path, **where)
model = AutoModelForCausalLM.from_pretrained(path.parent if where else path, dtype="float32", **where)

text = pathlib.Path(document).read_text()
chat = tokenizer.apply_chat_template([{"role": "user", "content": text + "\n\n<question>"}], tokenize=False, add_generation_prompt=True)
before, after = chat.split("\n\n<question>")
context = tokenizer(before, return_tensors="pt", add_special_tokens=False).input_ids
cache = AnchorKVCache(model, ratio=8)
model(context, past_key_values=cache, logits_to_keep=1)  # reads the document once; the cache is compressed at the end
print(cache.report())
for question in questions:
    asked = tokenizer("\n\n" + question + after, return_tensors="pt", add_special_tokens=False).input_ids
    ids = model.generate(torch.cat([context, asked], dim=1), past_key_values=cache, max_new_tokens=64, do_sample=False)
    print(question, "->", tokenizer.decode(ids[0, context.shape[1] + asked.shape[1]:], skip_special_tokens=True))
    cache.rewind()  # to the end of the document, for the next question
