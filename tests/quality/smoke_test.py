"""What compression does to a small model on short documents: the tier that every change runs.

    smoke_test.py ANCHORKV

SmolLM2, two documents of 2,048 tokens with six facts each, question-agnostic, 64 anchors. Limits are what was measured
plus slack; rankings are compared at 8x, where residuals are scarce (at 4x every vector has one). The model answers few of
these questions: divergence and the likelihood of the right answer say more than the answers.
"""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGURATIONS = ("full,anchorkv:blend@4,anchorkv:blend@8,anchorkv:paper:rank=random@8,anchorkv:paper:bits=0@8,"
                  "snapkv@4,snapkv@8")


def tool(name, *arguments):
    return subprocess.run([ROOT / "tools" / name, *map(str, arguments)], check=True, stdout=subprocess.PIPE,
                          text=True).stdout.strip()


def name_of(row):
    options = "".join(f":{key}={value}" for key, value in sorted(row["options"].items()) if key != "anchors")
    ratio = f"@{row['ratio']:g}" if row["ratio"] else ""
    return row["method"] + (":" + row["profile"] if row["profile"] else "") + options + ratio


class Checks:
    def __init__(self):
        self.failed = 0

    def __call__(self, holds, text):
        print(("ok      " if holds else "FAILED  ") + text)
        self.failed += not holds


def mean(rows, column):
    return sum(row[column] for row in rows) / len(rows)


def main():
    binary = pathlib.Path(sys.argv[1]).resolve()
    model = tool("get-model", "smollm2-135m")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        documents = [folder / "a.txt", folder / "b.txt"]
        for seed, document in enumerate(documents, 1):
            tool("make-document", "--tokens", 2048, "--seed", seed, "--facts", 6, "-o", document, "--questions",
                 document.with_suffix(".json"))
        common = ["-m", model, "--kv", CONFIGURATIONS, "--kv-anchors", "64", "-f", *documents]
        subprocess.run([binary, "eval", "documents", *common, "--protocol", "agnostic", "-n", "24", "-o",
                        folder / "answers.jsonl"], check=True)
        rows = collections.defaultdict(list)
        for line in (folder / "answers.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows[name_of(row)].append(row)

    check = Checks()
    full = rows["full"]
    of = sum(row["score"] == 1 for row in full)
    check(of >= 4, f"the full cache answers {of} of {len(full)} facts (>= 4, or the test says little)")
    for name, own in rows.items():
        if name == "full":
            continue
        ratio = own[0]["ratio"]
        check(all(row["achieved_ratio"] >= ratio for row in own), f"{name}: achieves {own[0]['achieved_ratio']:.2f}x")
        worse = mean(own, "gold_nll") - mean(full, "gold_nll")
        print(f"        {name}: score {mean(own, 'score'):.3f}, gold NLL {worse:+.3f}, KL {mean(own, 'kl'):.4f}, "
              f"top-1 {mean(own, 'top1'):.3f}")
    nll = {name: mean(own, "gold_nll") for name, own in rows.items()}
    kl = {name: mean(own, "kl") for name, own in rows.items()}
    four, eight = "anchorkv:blend@4", "anchorkv:blend@8"
    check(nll[four] - nll["full"] <= LIMITS["nll4"], f"4x: gold NLL grows by at most {LIMITS['nll4']}")
    check(nll[eight] - nll["full"] <= LIMITS["nll8"], f"8x: gold NLL grows by at most {LIMITS['nll8']}")
    check(1e-5 <= kl[four] <= LIMITS["kl4"], f"4x: KL at most {LIMITS['kl4']}, and not nothing")
    check(1e-4 <= kl[eight] <= LIMITS["kl8"], f"8x: KL at most {LIMITS['kl8']}, and not nothing")
    check(mean(rows[four], "top1") >= LIMITS["top4"], f"4x: top-1 at least {LIMITS['top4']}")
    for other in ("anchorkv:paper:rank=random@8", "anchorkv:paper:bits=0@8", "snapkv@8"):
        check(nll[eight] < nll[other], f"8x: gold NLL below {other}'s")
    check(nll[four] < nll["snapkv@4"], "4x: gold NLL below snapkv's")
    kept = sum(a["score"] for a, b in zip(rows[four], full) if b["score"] == 1)
    check(kept >= .5 * of, f"4x: keeps {kept:g} of the {of} facts that the full cache answers (>= 50%)")
    sys.exit(1 if check.failed else 0)


# Measured: gold NLL +.033 and +.55, KL .011 and .195, top-1 .971.
LIMITS = {"nll4": 0.07, "nll8": 0.8, "kl4": 0.02, "kl8": 0.3, "top4": 0.94}

if __name__ == "__main__":
    main()
