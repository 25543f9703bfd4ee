"""Runs kvpress's own evaluation with AnchorKVPress among the presses.

    git clone https://github.com/NVIDIA/kvpress
    python kvpress_evaluate.py kvpress/evaluation --dataset ruler --data_dir 4096 --model Qwen/Qwen3-0.6B \
        --press_name anchorkv --compression_ratio 0.9
    python kvpress_evaluate.py kvpress/evaluation --haystack TEXT --dataset needle_in_haystack --max_context_length 2000 \
        --needle_depth 50 --model MODEL --press_name anchorkv --compression_ratio 0.9

Everything behind the folder is for their runner. --haystack: for machines without access to Hugging Face's data sets, a
text file that takes the place of the essays; needle, question and scoring stay what they are there.
"""

import os
import sys

evaluation = os.path.abspath(sys.argv.pop(1))
haystack = None
if "--haystack" in sys.argv:
    at = sys.argv.index("--haystack")
    haystack = open(sys.argv[at + 1], encoding="utf-8").read()
    del sys.argv[at:at + 2]
sys.path.insert(0, evaluation)

import evaluate  # noqa: E402
from evaluate_registry import PRESS_REGISTRY  # noqa: E402

from anchorkv.kvpress import AnchorKVPress  # noqa: E402

for profile in ("adaptive", "blend", "paper"):
    PRESS_REGISTRY["anchorkv" if profile == "adaptive" else f"anchorkv_{profile}"] = AnchorKVPress(profile=profile)

if haystack is not None:
    import datasets

    def own_text(*_, **__):
        return datasets.Dataset.from_dict({
            "context": [haystack],
            "needle": ["The best thing to do in San Francisco is to eat a sandwich and sit in Dolores Park on a sunny day."],
            "question": ["\nWhat is the best thing to do in San Francisco?"],
            "answer_prefix": ["The best thing to do in San Francisco is to"],
            "max_new_tokens": [32],
        })

    evaluate.load_dataset = own_text

if __name__ == "__main__":
    evaluate.Fire(evaluate.CliEntryPoint)
