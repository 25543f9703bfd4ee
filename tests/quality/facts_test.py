"""Limits on what compression costs, measured by `anchorkv eval documents`.

    facts_test.py ANCHORKV facts    SmolLM2, ten documents of 6,500 tokens with three facts each, agnostic
    facts_test.py ANCHORKV needle   Qwen2.5-Coder-1.5B, five documents of 16,000 tokens with one needle each,
                                    question-aware, `paper` at 20x

Prints the table of the evaluation; fails when a limit is missed. The documents' seeds are fixed here.
"""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def tool(name, *arguments):
    return subprocess.run([ROOT / "tools" / name, *map(str, arguments)], check=True, stdout=subprocess.PIPE,
                          text=True).stdout.strip()


def measure(binary, model, methods, ratios, protocol, folder, seeds, *document_arguments):
    """Result rows by "PROFILE:RATIO" ("full" for the exact cache), in the order of documents and questions."""
    documents = []
    for seed in seeds:
        document = folder / f"{seed}.txt"
        tool("make-document", "--seed", seed, "-o", document, "--questions", document.with_suffix(".json"),
             *document_arguments)
        documents.append(document)
    results = folder / "results.jsonl"
    subprocess.run([binary, "eval", "documents", "-m", tool("get-model", model), "-f", *documents, "--kv",
                    ",".join(["full", *methods]), "--kv-ratio", ",".join(map(str, ratios)), "--protocol", protocol,
                    "-n", "32", "-o", results], check=True)
    rows = collections.defaultdict(list)
    for line in results.read_text().splitlines():
        row = json.loads(line)
        rows["full" if row["method"] == "full" else f"{row['profile']}:{row['ratio']:g}"].append(row)
    return rows


class Limits:
    def __init__(self):
        self.missed = []

    def check(self, holds, text):
        print(("ok      " if holds else "MISSED  ") + text)
        if not holds:
            self.missed.append(text)


def mean_kl(questions):
    return sum(q["kl"] for q in questions) / len(questions)


def kept(questions, baseline):
    """(facts right here among those the baseline answers, facts the baseline answers)"""
    both = [q["score"] > 0 for q, full in zip(questions, baseline) if full["score"] > 0]
    return sum(both), len(both)


def facts(binary, folder, limits):
    rows = measure(binary, "smollm2-135m", ("anchorkv:paper@8", "anchorkv:blend", "anchorkv:adaptive"), (8, 6, 4, 3), "agnostic",
                   folder, range(31, 41), "--tokens", 6500, "--facts", 3)
    full = rows["full"]
    answered = sum(q["score"] > 0 for q in full)
    limits.check(answered >= 16, f"the full cache answers {answered} of {len(full)} facts (>= 16, or the test says little)")
    for config, ratio in (("paper:8", 8), ("blend:8", 8), ("blend:6", 6), ("blend:4", 4), ("blend:3", 3)):
        least = min(q["achieved_ratio"] for q in rows[config])
        limits.check(least >= ratio, f"{config} reaches {least:.2f}x (>= {ratio})")
    paper, blend = mean_kl(rows["paper:8"]), mean_kl(rows["blend:8"])
    limits.check(blend <= paper / 3, f"8x: KL of blend {blend:.4f} <= a third of paper's {paper:.4f}")
    # Two-sided: an exact answer from an eighth of the bytes would mean that nothing was compressed.
    limits.check(blend >= 1e-3, f"8x: KL of blend {blend:.4f} >= 0.001")
    for config, share, limit in (("blend:8", .35, None), ("blend:6", .8, .06), ("blend:4", .8, .03), ("blend:3", .9, .01),
                                 ("adaptive:8", .75, .03), ("adaptive:4", .9, .01)):
        right, of = kept(rows[config], full)
        limits.check(right >= share * of, f"{config} keeps {right} of {of} facts (>= {share:.0%})")
        if limit is not None:
            limits.check(mean_kl(rows[config]) <= limit, f"{config}: KL {mean_kl(rows[config]):.4f} <= {limit}")


def needle(binary, folder, limits):
    rows = measure(binary, "qwen2.5-coder-1.5b", ("anchorkv:paper",), (20,), "aware", folder, range(1, 6),
                   "--tokens", 16000, "--needle")
    full = rows["full"]
    answered = sum(q["score"] > 0 for q in full)
    right, of = kept(rows["paper:20"], full)
    least = min(q["achieved_ratio"] for q in rows["paper:20"])
    limits.check(answered == len(full), f"the full cache answers {answered} of {len(full)} needles")
    limits.check(least >= 20, f"paper:20 reaches {least:.2f}x (>= 20)")
    limits.check(right >= 4, f"paper:20 answers {right} of the {of} needles that the full cache answers (>= 4)")


def main():
    suites = {"facts": facts, "needle": needle}
    if len(sys.argv) != 3 or sys.argv[2] not in suites:
        sys.exit(__doc__)
    limits = Limits()
    with tempfile.TemporaryDirectory() as folder:
        suites[sys.argv[2]](pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(folder), limits)
    sys.exit(1 if limits.missed else 0)


if __name__ == "__main__":
    main()
