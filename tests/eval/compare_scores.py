#!/usr/bin/env python3
"""Compares our scores with those of other implementations on the same seeded random predictions.

    compare_scores.py SCORE_LINES [--kvpress calculate_metrics.py]

SCORE_LINES is the test program score_lines. RULER's string matches are compared with kvpress's file (its
evaluation/benchmarks/ruler/calculate_metrics.py; needs pandas), ROUGE-L with the package `rouge`, the edit similarity
with `rapidfuzz`; what is not there is left out. Exit code 77 when there is nothing to compare with.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys

SAMPLES = 300
SKIPPED = 77


def load(path):
    spec = importlib.util.spec_from_file_location("kvpress_metrics", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ruler_cases(draw):
    """Answers and predictions with right, wrong, partial, differently cased and rambling parts."""
    for i in range(SAMPLES):
        answers = ["".join(draw.choices("0123456789abXY", k=draw.randint(1, 7))) for _ in range(draw.choice((1, 1, 4, 10)))]
        parts = [draw.choice((answer, answer.upper(), answer[:-1], "word", "7", answer + "5")) for answer in answers]
        draw.shuffle(parts)
        prediction = draw.choice((", ", " ", "\n", ". ")).join(parts[:draw.randint(0, len(parts))])
        yield {"metric": draw.choice(("match_all", "match_any")), "answers": answers,
               "prediction": draw.choice(("", " ", "\n", "\x01")) + prediction + draw.choice(("", "\n", "."))}


def kvpress_scores(metrics, cases):
    import pandas
    rows = [{"task": ("qa" if case["metric"] == "match_any" else "niah") + f"_{i}", "answer": case["answers"],
             "predicted_answer": case["prediction"]} for i, case in enumerate(cases)]
    scores = metrics.calculate_metrics(pandas.DataFrame(rows))
    return [scores[row["task"]]["string_match"] / 100 for row in rows]


def text(draw):
    words = draw.choices("a b c d e f g the river town".split(), k=draw.randint(1, 25))
    return "".join(word + draw.choice((" ", " ", " ", ". ", "\n", "...", ".")) for word in words)


def text_cases(draw, metric):
    for _ in range(SAMPLES):
        yield {"metric": metric, "answers": [text(draw)], "prediction": text(draw)}


def rouge_scores(rouge, cases):
    scorer, scores = rouge.Rouge(), []
    for case in cases:
        try:
            scores.append(scorer.get_scores([case["prediction"]], case["answers"], avg=True)["rouge-l"]["f"])
        except ValueError:  # nothing but full stops
            scores.append(0.0)
    return scores


def edit_scores(rapidfuzz, cases):
    return [rapidfuzz.fuzz.ratio(case["prediction"].lstrip("\n").split("\n")[0], case["answers"][0]) / 100 for case in cases]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--kvpress")
    arguments = parser.parse_args()
    draw = random.Random(1)
    comparisons = []
    if arguments.kvpress:
        cases = list(ruler_cases(draw))
        comparisons.append(("kvpress string_match", 5e-5 + 1e-9, cases, kvpress_scores(load(arguments.kvpress), cases)))
    for name, metric, scores in (("rouge", "rouge_l", rouge_scores), ("rapidfuzz", "edit", edit_scores)):
        if importlib.util.find_spec(name):
            module = __import__(name + ".fuzz" if name == "rapidfuzz" else name)
            cases = list(text_cases(draw, metric))
            comparisons.append((name, 1e-9, cases, scores(module, cases)))
    if not comparisons:
        print("nothing to compare with")
        return SKIPPED
    failures = 0
    for name, tolerance, cases, expected in comparisons:
        lines = "".join(json.dumps(case) + "\n" for case in cases)
        ours = subprocess.run([arguments.program], input=lines, capture_output=True, text=True, check=True).stdout.split()
        different = [(case, float(a), b) for case, a, b in zip(cases, ours, expected, strict=True) if abs(float(a) - b) > tolerance]
        print(f"{name}: {len(cases)} predictions, mean {sum(expected) / len(expected):.3f}, {len(different)} differ")
        for case, a, b in different[:3]:
            print(f"  ours {a} theirs {b}: {case}")
        failures += len(different)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
