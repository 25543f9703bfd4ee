"""Result rows as `anchorkv eval` writes them (one JSON object per line), and their grouping. docs/reports.md, "Input"."""

import functools
import json
import math
import re
from dataclasses import dataclass, field

import numpy as np

METHOD_NAMES = {
    "full": "Full cache", "anchorkv": "AnchorKV", "kvzip": "KVzip", "keydiff": "KeyDiff", "adakv": "AdaKV",
    "snapkv": "SnapKV", "pyramidkv": "PyramidKV", "h2o": "H2O", "tova": "TOVA", "knorm": "Knorm",
    "expected": "Expected Attention", "ada-expected": "Ada-Expected Attention", "observed": "Observed Attention",
    "streamingllm": "StreamingLLM", "kivi-2": "KIVI 2-bit", "turboquant-2": "TurboQuant 2-bit",
    "turboquant-3": "TurboQuant 3-bit", "turboquant-3.5": "TurboQuant 3.5-bit", "turboquant-4": "TurboQuant 4-bit",
}
SUITE_NAMES = {"ruler": "RULER", "niah": "64-digit needles", "longbench": "LongBench", "ablation": "Ablations", "documents": "Documents",
               "ppl": "Perplexity", "distort": "Attention error by layer", "cosine": "Cosine before and after RoPE"}
NUMBERS = {  # key: allowed range
    "score": (0, 1), "score_nospace": (0, 1), "exact": (0, 1), "top1": (0, 1), "kl": (-1e-3, math.inf),
    "gold_nll": (-1e-3, math.inf), "ppl": (0, math.inf),
    "ppl_full": (0, math.inf), "kl_p50": (-1e-3, math.inf), "kl_p90": (-1e-3, math.inf), "kl_p99": (-1e-3, math.inf),
    "kl_max": (-1e-3, math.inf), "ratio": (0, math.inf), "achieved_ratio": (0, math.inf), "depth": (0, 1),
    "length": (0, math.inf), "resident_bytes": (0, math.inf), "pre_rope": (-1.001, 1.001), "post_rope": (-1.001, 1.001),
    "error_output": (0, math.inf), "layer": (0, math.inf), "band": (0, math.inf),
}
SCORED_EXCEPT = ("ppl", "distort", "cosine")  # suites whose rows have no score
# Near chance at every ratio for small models (docs/reports.md): listed by task, left out of means.
NOISE_TASKS = frozenset({"passage_count"})


class ReportError(Exception):
    """One line for the user."""


@functools.total_ordering
@dataclass(frozen=True)
class Variant:
    """What is compared: a method with its profile, asked ratio (None where it has none) and changed options."""

    method: str
    profile: str = ""
    ratio: float | None = None
    options: str = ""

    @property
    def family(self):
        """The name without the ratio."""
        name = METHOD_NAMES.get(self.method, self.method)
        return name + (f" {self.profile}" if self.profile else "") + (f" ({self.options})" if self.options else "")

    @property
    def label(self):
        return self.family + (f" {self.ratio:g}x" if self.ratio else "")

    def _order(self):
        known = list(METHOD_NAMES)
        rank = known.index(self.method) if self.method in known else len(known)
        return rank, self.method, self.profile, self.options, self.ratio or 0.0

    def __lt__(self, other):
        return self._order() < other._order()


FULL = Variant("full")


@dataclass(frozen=True, order=True)
class Key:
    """What one table is about. length is 0 where a suite's lengths share a table."""

    model: str
    model_hash: str
    suite: str
    length: int
    protocol: str


@dataclass
class Panel:
    """The rows of one table. A sample counts for a variant when all of its questions were answered."""

    key: Key
    cells: dict = field(default_factory=dict)  # (task, length) -> (seed, sample) -> question -> variant -> row

    def add(self, row):
        """False when the row replaces an earlier one."""
        stratum = self.cells.setdefault((row["task"], row["length"]), {})
        question = stratum.setdefault((row["seed"], row["sample"]), {}).setdefault((row["question"], row["depth"] or 0), {})
        new = row["variant"] not in question
        question[row["variant"]] = row
        return new

    def rows(self):
        for samples in self.cells.values():
            for questions in samples.values():
                for by_variant in questions.values():
                    yield from by_variant.values()

    @functools.cached_property
    def variants(self):
        return sorted({row["variant"] for row in self.rows()})

    @functools.cached_property
    def strata(self):
        return sorted(self.cells)

    @property
    def tasks(self):
        return sorted({task for task, _ in self.cells})

    @property
    def lengths(self):
        return sorted({length for _, length in self.cells if length})

    @property
    def seeds(self):
        return sorted({seed for samples in self.cells.values() for seed, _ in samples})

    def matrix(self, stratum, metric):
        """[samples, variants]: means over a sample's questions; NaN where the metric or an answer is missing."""
        samples = self.cells[stratum]
        values = np.full((len(samples), len(self.variants)), np.nan)
        for i, sample in enumerate(sorted(samples)):
            questions = samples[sample].values()
            for j, variant in enumerate(self.variants):
                got = [q[variant][metric] for q in questions if variant in q and not q[variant]["error"]]
                if len(got) == len(questions) and None not in got:
                    values[i, j] = sum(got) / len(got)
        return values

    def has(self, metric):
        return any(row[metric] is not None for row in self.rows() if not row["error"])

    def mean(self, variant, key):
        values = [row[key] for row in self.rows() if row["variant"] == variant and not row["error"] and row[key] is not None]
        return sum(values) / len(values) if values else math.nan

    def gaps(self, variant):
        """Questions that failed, and questions that others have and this variant does not."""
        failed = missing = 0
        for samples in self.cells.values():
            for questions in samples.values():
                for by_variant in questions.values():
                    row = by_variant.get(variant)
                    failed += row is not None and bool(row["error"])
                    missing += row is None
        return failed, missing


@dataclass
class Results:
    panels: dict = field(default_factory=dict)  # Key -> Panel
    rows: int = 0
    warnings: list = field(default_factory=list)

    def by_suite(self, suite):
        return [self.panels[key] for key in sorted(self.panels) if key.suite == suite]


def weights_type(model):
    """The quantisation that a GGUF's name gives, or ''."""
    found = re.search(r"(?:^|[-_. ])((?:I?Q\d\w*|BF16|F16|F32))(?=$|[-. ])", model, re.IGNORECASE)
    return found.group(1).upper() if found else ""


def read(paths):
    """Rows of all files, grouped. Of rows about the same question and variant the last one counts."""
    results, repeated = Results(), 0
    for path in paths:
        for row in _read_file(path, results.warnings):
            length = int(row["length"]) if row["suite"] == "ruler" else 0
            key = Key(row["model"], row["model_hash"], row["suite"], length, row["protocol"])
            repeated += not results.panels.setdefault(key, Panel(key)).add(row)
            results.rows += 1
    if not results.rows:
        raise ReportError(f"{', '.join(map(str, paths))}: no result in it; expected one JSON object per line")
    if repeated:
        results.warnings.append(f"{repeated} rows repeat an earlier one; the last one counts")
    return results


def _read_file(path, warnings):
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            if number == len(lines):  # no newline behind it: the run was interrupted while writing
                warnings.append(f"{path}:{number}: half-written last line left out")
                continue
            raise ReportError(f"{path}:{number}: not a JSON object: {error}") from error
        try:
            yield _row(data)
        except ValueError as error:
            raise ReportError(f"{path}:{number}: {error}") from error


def _refuse_constant(name):
    raise ValueError(f"{name} is not a JSON number")


def _row(data):
    """The row with every key present; ValueError names what is wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"not a JSON object but {type(data).__name__}")
    row = {key: _text(data, key) for key in ("suite", "task", "method", "profile", "protocol", "model", "model_hash", "error")}
    if row["suite"] not in SUITE_NAMES:
        raise ValueError(f"suite is '{row['suite']}'; allowed are {', '.join(SUITE_NAMES)}")
    if not row["method"] and row["suite"] != "cosine":
        raise ValueError("method is missing")
    if row["protocol"] not in ("", "agnostic", "aware"):
        raise ValueError(f"protocol is '{row['protocol']}'; allowed are agnostic, aware")
    row.update({key: _number(data, key, *NUMBERS[key]) for key in NUMBERS})
    for key in ("sample", "question", "seed"):
        row[key] = int(_number(data, key, 0, math.inf) or 0)
    row["length"] = int(row["length"] or 0)
    # Layers and bands stand where other suites have questions.
    if row["suite"] in ("distort", "cosine") and not row["error"]:
        part = "layer" if row["suite"] == "distort" else "band"
        if row[part] is None:
            raise ValueError(f"{part} is missing")
        row["question"] = int(row[part])
    if row["suite"] not in SCORED_EXCEPT and row["score"] is None and not row["error"]:
        raise ValueError("score is missing; a failed sample has its reason in error")
    row["variant"] = FULL if row["method"] == "full" else Variant(row["method"], row["profile"], row["ratio"], _options(data))
    return row


def _text(data, key):
    value = data.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{key} is {json.dumps(value)}; allowed is a text")
    return value


def _number(data, key, low, high):
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{key} is {json.dumps(value)}; allowed are numbers from {max(low, 0) if low > -1 else -1:g} to {high:g}")
    return value


def _options(data):
    options = data.get("options") or {}
    if isinstance(options, str):
        return options
    if not isinstance(options, dict):
        raise ValueError(f"options is {json.dumps(options)}; allowed is an object")
    return ", ".join(f"{key}={_option(value)}" for key, value in sorted(options.items()))


def _option(value):
    return value if isinstance(value, str) else json.dumps(value)
