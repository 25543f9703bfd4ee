"""What the tables and figures say: means, paired differences and retention of each variant. docs/reports.md, "Statistics"."""

import math
from dataclasses import dataclass, field

import numpy as np

from .results import FULL, NOISE_TASKS, ReportError
from .stats import NOTHING, bootstrap, mcnemar

GATE = 0.60  # retention counts only tasks in which the full cache scores at least this
METRICS = ("score", "exact", "score_nospace", "kl", "top1", "gold_nll", "log_ppl_ratio", "kl_p50", "kl_p90", "kl_p99",
           "kl_max")
DIFFERENCES = ("score", "kl", "gold_nll")
RIGHT = 1 - 1e-9  # a score from which an answer is right, for McNemar's test


@dataclass
class Summary:
    """One variant in one panel. Estimates by name; a name is absent where nothing was measured."""

    variant: object
    achieved: float
    samples: int
    failed: int
    missing: int
    estimates: dict = field(default_factory=dict)
    # [right for the reference only, right for the variant only, p], over needle questions
    versus_full: tuple | None = None
    versus_against: tuple | None = None

    def __getitem__(self, name):
        return self.estimates.get(name, NOTHING)

    def has(self, name):
        return not math.isnan(self[name].mean)


class _Columns:
    """Columns of a bootstrap, by name."""

    def __init__(self, strata):
        self.index = {}
        self.parts = [[] for _ in range(strata)]

    def add(self, name, values):
        self.index[name] = len(self.index)
        for part, column in zip(self.parts, values):
            part.append(column)

    def run(self, seed):
        self.result = bootstrap([np.stack(part, axis=1) for part in self.parts], seed)

    def estimate(self, name):
        return self.result.estimate(self.index[name])

    def quotient(self, numerator, denominator):
        return self.result.quotient(self.index[numerator], self.index[denominator])


def parse_against(text):
    """METHOD[:PROFILE]@RATIO, or METHOD alone, as a filter on variants without changed options."""
    name, at, ratio = text.partition("@")
    method, _, profile = name.partition(":")
    try:
        number = float(ratio) if at else None
    except ValueError:
        number = math.nan
    if not method or (at and not (number > 0)):
        raise ReportError(f"--against is '{text}'; allowed is METHOD[:PROFILE]@RATIO")
    return method, profile, number


def find_against(panel, text):
    """The variant of this panel that --against names, or None."""
    method, profile, ratio = parse_against(text)
    found = [v for v in panel.variants if v.method == method and v.profile == (profile or v.profile) and
             v.ratio == ratio and not v.options]
    if len(found) > 1:
        raise ReportError(f"--against is '{text}', which fits {', '.join(v.label for v in found)}; add :PROFILE")
    return found[0] if found else None


def counted(panel):
    """The strata that means are taken over."""
    return [stratum for stratum in panel.strata if stratum[0] not in NOISE_TASKS]


def gated_tasks(panel):
    """The counted (task, length) strata in which the full cache scores at least GATE."""
    if FULL not in panel.variants or not panel.has("score"):
        return []
    column = panel.variants.index(FULL)
    means = {s: panel.matrix(s, "score")[:, column] for s in counted(panel)}
    return [s for s, values in means.items() if not np.isnan(values).all() and np.nanmean(values) >= GATE]


def summarise(panel, against=None, seed=0):
    """One Summary per variant. Every column uses only samples that the full cache has too, where there is one."""
    strata = counted(panel)
    gates = gated_tasks(panel)
    values = {metric: [_matrix(panel, s, metric) for s in strata] for metric in METRICS if _has(panel, metric)}
    full = panel.variants.index(FULL) if FULL in panel.variants else None
    other = panel.variants.index(against) if against else None
    columns = _Columns(len(strata))
    for j, variant in enumerate(panel.variants):
        for metric, matrices in values.items():
            columns.add((variant, metric), [_paired(m, j, full) for m in matrices])
            if metric in DIFFERENCES and full is not None:
                columns.add((variant, metric, "full"), [m[:, j] - m[:, full] for m in matrices])
            if metric in DIFFERENCES and other is not None:
                columns.add((variant, metric, "against"), [m[:, j] - m[:, other] for m in matrices])
        if gates and "score" in values:
            closed = [0.0 if s in gates else math.nan for s in strata]
            columns.add((variant, "kept"), [_paired(m, j, full) + c for m, c in zip(values["score"], closed)])
            columns.add((variant, "kept of"), [_paired(m, full, j) + c for m, c in zip(values["score"], closed)])
    if not columns.index or not strata:
        return [Summary(v, panel.mean(v, "achieved_ratio"), 0, *panel.gaps(v)) for v in panel.variants]
    columns.run(seed)

    summaries = []
    for j, variant in enumerate(panel.variants):
        first = next(iter(values.values()))
        samples = sum(int((~np.isnan(_paired(m, j, full))).sum()) for m in first)
        summary = Summary(variant, panel.mean(variant, "achieved_ratio"), samples, *panel.gaps(variant))
        for name in columns.index:
            if name[0] == variant and name[1] not in ("kept", "kept of"):
                summary.estimates[name[1] if len(name) == 2 else name[1:]] = columns.estimate(name)
        if (variant, "kept") in columns.index:
            summary.estimates["retention"] = columns.quotient((variant, "kept"), (variant, "kept of"))
        summary.versus_full = _needles(panel, FULL, variant)
        summary.versus_against = _needles(panel, against, variant)
        summaries.append(summary)
    return summaries


def _has(panel, metric):
    return panel.has("ppl") and panel.has("ppl_full") if metric == "log_ppl_ratio" else panel.has(metric)


def _matrix(panel, stratum, metric):
    if metric != "log_ppl_ratio":
        return panel.matrix(stratum, metric)
    with np.errstate(divide="ignore"):
        return np.log(panel.matrix(stratum, "ppl")) - np.log(panel.matrix(stratum, "ppl_full"))


def _paired(matrix, column, partner):
    """The column where the partner was measured too. A metric that the partner never has pairs with everything."""
    values = matrix[:, column]
    if partner is None or np.isnan(matrix[:, partner]).all():
        return values
    return np.where(np.isnan(matrix[:, partner]), math.nan, values)


def is_needle(suite, task):
    return suite == "niah" or task.startswith("niah")


def _needles(panel, reference, variant):
    """McNemar's test over the needle questions that both answered."""
    if reference is None or reference == variant or not panel.has("score"):
        return None
    lost = gained = asked = 0
    for (task, _), samples in panel.cells.items():
        if not is_needle(panel.key.suite, task):
            continue
        for questions in samples.values():
            for by_variant in questions.values():
                rows = [by_variant.get(reference), by_variant.get(variant)]
                if any(row is None or row["error"] or row["score"] is None for row in rows):
                    continue
                first, second = (row["score"] >= RIGHT for row in rows)
                asked += 1
                lost += first and not second
                gained += second and not first
    return (lost, gained, mcnemar(lost, gained)) if asked else None
