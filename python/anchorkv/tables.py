"""Tables of a report, as HTML and as Markdown."""

import html
import math
import re
from dataclasses import dataclass, field

import numpy as np

from .results import FULL, NOISE_TASKS, weights_type
from .summary import GATE, gated_tasks

MINUS = "\u2212"
DASH = "\u2013"
INTERVAL = re.compile(r"\[.*\]")


@dataclass
class Table:
    title: str
    header: list
    rows: list  # lists of texts; the first column is a name, the others are numbers
    context: str = ""  # what was measured on what
    notes: list = field(default_factory=list)
    strong: set = field(default_factory=set)  # rows to emphasise

    def html(self):
        head = "".join(f"<th scope=col>{html.escape(h)}</th>" for h in self.header)
        body = "".join(self._html_row(i, row) for i, row in enumerate(self.rows))
        notes = "".join(f"<p class=note>{html.escape(n)}</p>" for n in [self.context, *self.notes] if n)
        return (f"<div class=table><h4>{html.escape(self.title)}</h4><div class=scroll><table><thead><tr>{head}</tr></thead>"
                f"<tbody>{body}</tbody></table></div>{notes}</div>\n")

    def _html_row(self, index, row):
        cells = "".join(f"<td>{INTERVAL.sub(_small, html.escape(cell))}</td>" for cell in row[1:])
        return f"<tr{' class=ours' if index in self.strong else ''}><th scope=row>{html.escape(row[0])}</th>{cells}</tr>"

    def markdown(self):
        lines = [f"**{self.title}**", ""] + ([self.context, ""] if self.context else [])
        lines += ["| " + " | ".join(map(_cell, self.header)) + " |", "|---" + "|--:" * (len(self.header) - 1) + "|"]
        for index, row in enumerate(self.rows):
            first = f"**{_cell(row[0])}**" if index in self.strong else _cell(row[0])
            lines.append("| " + " | ".join([first, *map(_cell, row[1:])]) + " |")
        return "\n".join(lines + [f"\n{note}" for note in self.notes]) + "\n"


def _small(match):
    return f"<small>{match.group()}</small>"


def _cell(text):
    return text.replace("|", "\\|")


# Numbers

def points(estimate, signed=False):
    """A share in [0, 1] in points of 100."""
    return interval(estimate, lambda x: plain(100 * x, 1, signed))


def nats(estimate, signed=False):
    """A divergence: two significant digits of the mean; its interval has the same decimals."""
    decimals = digits(estimate.mean)
    return interval(estimate, lambda x: plain(x, decimals, signed))


def digits(value):
    if not value or math.isnan(value):
        return 2
    return min(max(1 - math.floor(math.log10(abs(value))), 0), 6)


def plain(value, decimals, signed=False):
    if math.isnan(value):
        return DASH
    if value == 0:
        return "0"
    text = f"{value:+.{decimals}f}" if signed else f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def interval(estimate, form):
    if math.isnan(estimate.mean):
        return DASH
    if math.isnan(estimate.low):
        return form(estimate.mean)
    return f"{form(estimate.mean)} [{form(estimate.low)}, {form(estimate.high)}]"


def times(value):
    return DASH if math.isnan(value) else f"{value:.2f}x"


def probability(p):
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


# What a table is about

def listed(numbers):
    """'512', '512 and 2,048', '3 lengths from 512 to 8,192'."""
    texts = [f"{n:,}" for n in numbers]
    return " and ".join(texts) if len(texts) < 3 else f"{len(texts)} lengths from {texts[0]} to {texts[-1]}"


def model_line(panel):
    key = panel.key
    weights = weights_type(key.model)
    name = key.model or "model not named"
    return f"{name}, weights {weights or 'of unknown type'}" + (f", file {key.model_hash[:12]}" if key.model_hash else "")


def context_line(panel):
    """Model, weights, protocol, lengths, n and seed."""
    sizes = sorted({len(samples) for samples in panel.cells.values()})
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    total = sum(len(samples) for samples in panel.cells.values())
    parts = [model_line(panel)]
    if panel.key.protocol:
        parts.append(f"question-{panel.key.protocol}")
    if panel.lengths:
        parts.append(f"prompts of {listed(panel.lengths)} tokens")
    groups = "tasks" if len(panel.tasks) == len(panel.strata) else "tasks and lengths"
    parts.append(f"n = {total}" if len(panel.strata) == 1 else f"n = {total}: {each} in each of {len(panel.strata)} {groups}")
    parts.append("seed " + ", ".join(map(str, panel.seeds)))
    return "; ".join(parts)


# The tables

def ours(variants):
    return {i for i, variant in enumerate(variants) if variant.method == "anchorkv"}


def gaps_text(failed, missing):
    return ", ".join([f"{failed} failed"] * bool(failed) + [f"{missing} not run"] * bool(missing)) or "0"


def _columns(summaries, wanted):
    """(header, text of a summary) of the columns that hold anything."""
    return [(header, text) for header, name, text in wanted if any(s.has(name) for s in summaries)]


def main_table(panel, summaries, title):
    wanted = [
        ("score", "score", lambda s: points(s["score"])),
        ("needles exact", "exact", lambda s: points(s["exact"])),
        ("needles ignoring spaces", "score_nospace", lambda s: points(s["score_nospace"])),
        ("difference to full", ("score", "full"), lambda s: points(s["score", "full"], signed=True)),
        ("retention, %", "retention", lambda s: points(s["retention"])),
        ("KL, nats", "kl", lambda s: nats(s["kl"])),
        ("gold NLL over full's", ("gold_nll", "full"), lambda s: nats(s["gold_nll", "full"], signed=True)),
        ("same top-1, %", "top1", lambda s: plain(100 * s["top1"].mean, 1)),
        ("perplexity, % over full's", "log_ppl_ratio",
         lambda s: interval(s["log_ppl_ratio"], lambda x: plain(100 * math.expm1(x), 1, signed=True))),
        ("KL p50", "kl_p50", lambda s: plain(s["kl_p50"].mean, digits(s["kl_p50"].mean))),
        ("p90", "kl_p90", lambda s: plain(s["kl_p90"].mean, digits(s["kl_p90"].mean))),
        ("p99", "kl_p99", lambda s: plain(s["kl_p99"].mean, digits(s["kl_p99"].mean))),
        ("max", "kl_max", lambda s: plain(s["kl_max"].mean, digits(s["kl_max"].mean))),
    ]
    columns = _columns(summaries, wanted)
    needles = any(s.versus_full for s in summaries)
    header = ["cache", "achieved", *[h for h, _ in columns], *["needles lost / gained, p"] * needles, "n", "gaps"]
    # The full cache's distances to itself say nothing.
    own = ("score", "needles exact", "needles ignoring spaces")
    rows = [[s.variant.label, times(s.achieved),
             *[DASH if s.variant == FULL and h not in own else text(s) for h, text in columns],
             *[needle_text(s.versus_full)] * needles, str(s.samples), gaps_text(s.failed, s.missing)] for s in summaries]
    return Table(title, header, rows, context_line(panel), main_notes(panel, summaries), ours(panel.variants))


def needle_text(test):
    return f"{test[0]} / {test[1]}, {probability(test[2])}" if test else DASH


def main_notes(panel, summaries):
    notes = []
    if any(s.has("retention") for s in summaries):
        gated = gated_tasks(panel)
        notes.append(f"Retention: score over the full cache's in the {len(gated)} of {len(panel.strata)} "
                     f"{'tasks' if len(panel.tasks) == len(panel.strata) else 'tasks and lengths'} where the full cache "
                     f"scores at least {100 * GATE:.0f}.")
    elif panel.has("score"):
        notes.append(f"No retention: no task in which the full cache scores at least {100 * GATE:.0f}."
                     if FULL in panel.variants else "No retention and no differences: the full cache was not run.")
    needles = sorted({row["task"] for row in panel.rows() if row["exact"] is not None})
    if needles and needles != panel.tasks:
        notes.append(f"Needles: the {len(needles)} of {len(panel.tasks)} tasks that ask for numbers or codes.")
    noise = sorted(NOISE_TASKS & set(panel.tasks))
    if noise:
        notes.append(f"{', '.join(noise)} is left out of the means: its scores are near chance.")
    return notes


def against_table(panel, summaries, against):
    """Paired differences of every variant to a chosen one."""
    wanted = [("score", ("score", "against"), lambda s: points(s["score", "against"], signed=True)),
              ("KL, nats", ("kl", "against"), lambda s: nats(s["kl", "against"], signed=True)),
              ("gold NLL", ("gold_nll", "against"), lambda s: nats(s["gold_nll", "against"], signed=True))]
    others = [s for s in summaries if s.variant != against]
    columns = _columns(others, wanted)
    needles = any(s.versus_against for s in others)
    header = ["cache", "achieved", *[h for h, _ in columns], *["needles lost / gained, p"] * needles]
    rows = [[s.variant.label, times(s.achieved), *[text(s) for _, text in columns],
             *[needle_text(s.versus_against)] * needles] for s in others]
    return Table(f"Difference to {against.label}", header, rows, context_line(panel), [],
                 ours([s.variant for s in others]))


def task_table(panel):
    """n, the full cache's score and the gate, per task."""
    gated = gated_tasks(panel)
    several = len(panel.lengths) > 1
    rows = []
    for stratum in panel.strata:
        task, length = stratum
        n = len(panel.cells[stratum])
        questions = sum(len(q) for q in panel.cells[stratum].values())
        score = math.nan
        if FULL in panel.variants:
            values = panel.matrix(stratum, "score")[:, panel.variants.index(FULL)]
            score = math.nan if np.isnan(values).all() else float(np.nanmean(values))
        use = "not in means" if task in NOISE_TASKS else "yes" if stratum in gated else "no"
        rows.append([f"{task}, {length:,}" if several else task, str(n), str(questions), plain(100 * score, 1), use])
    return Table("Tasks", ["task", "n", "questions", "full cache", "in retention"], rows, context_line(panel))


def gap_table(panels):
    """Every failed row, named; questions that were not run are counted."""
    found = {}
    for panel in panels:
        for row in panel.rows():
            if row["error"]:
                key = (panel.key, row["task"], row["length"], row["variant"].label, row["error"])
                found.setdefault(key, []).append(f"{row['sample']}.{row['question']}")
        for variant in panel.variants:
            missing = panel.gaps(variant)[1]
            if missing:
                found[(panel.key, "all", 0, variant.label, "not run")] = [f"{missing} questions"]
    rows = []
    for (key, task, length, variant, reason), samples in sorted(found.items()):
        shown = ", ".join(samples[:8]) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")
        rows.append([f"{key.suite} {task}", f"{length or key.length:,}" if length or key.length else DASH,
                     key.protocol or DASH, variant, reason, shown])
    return Table("Gaps", ["suite and task", "length", "protocol", "cache", "reason", "sample.question"], rows)


def cosine_table(panel):
    rows = []
    for task in panel.tasks:
        pre, post = (_row_mean(panel, task, key) for key in ("pre_rope", "post_rope"))
        rows.append([task, plain(pre, 3), plain(post, 3), plain(post - pre, 3, signed=True)])
    return Table("Mean over bands", ["task", "before RoPE", "after RoPE", "difference"], rows, context_line(panel))


def _row_mean(panel, task, key):
    values = [row[key] for row in panel.rows() if row["task"] == task and not row["error"] and row[key] is not None]
    return sum(values) / len(values) if values else math.nan


def distort_table(panel):
    rows = []
    for variant in panel.variants:
        layers = layer_means(panel, variant)
        worst = max(layers, key=layers.get, default=None)
        rows.append([variant.label, times(panel.mean(variant, "achieved_ratio")),
                     plain(np.mean(list(layers.values())), 3) if layers else DASH,
                     f"{layers[worst]:.3f} (layer {worst})" if layers else DASH, gaps_text(*panel.gaps(variant))])
    return Table("Relative error of the attention output", ["cache", "achieved", "mean over layers", "worst layer", "gaps"],
                 rows, context_line(panel), [], ours(panel.variants))


def layer_means(panel, variant):
    values = {}
    for row in panel.rows():
        if row["variant"] == variant and not row["error"] and row["error_output"] is not None:
            values.setdefault(int(row["layer"]), []).append(row["error_output"])
    return {layer: sum(v) / len(v) for layer, v in sorted(values.items())}
