"""Colours, markers and label placing of the figures. A method looks the same in every figure."""

from dataclasses import dataclass

from matplotlib.colors import LinearSegmentedColormap


@dataclass(frozen=True)
class Theme:
    name: str
    surface: str
    ink: str
    muted: str
    grid: str
    ours: str
    others: tuple  # one per name in METHODS, then one per unknown method in order of name
    ramp: tuple  # low to high

    def color(self, method, known):
        """known: the unknown methods of the whole report, sorted, so that each keeps its colour in every figure."""
        if method == "anchorkv":
            return self.ours
        if method in METHODS:
            return self.others[METHODS[method][0]]
        if method == "full" or is_plain_quantiser(method):
            return self.muted
        return self.others[(known.index(method) + 3) % len(self.others)] if method in known else self.muted

    @property
    def colormap(self):
        return LinearSegmentedColormap.from_list(self.name, self.ramp)


# Hues that stay apart with red-green and blue-yellow colour blindness, told apart by marker as well; blue is ours.
LIGHT = Theme("light", "#ffffff", "#1f2328", "#656d76", "#d8dee4", "#0a58ca",
              ("#d1490c", "#00805e", "#a0418a", "#a97800", "#7a5230", "#2b94a8"),
              ("#f3f6fa", "#bcd6f5", "#6aa5e8", "#1f66c1", "#0b2f66"))
DARK = Theme("dark", "#0f1419", "#e6edf3", "#9aa4af", "#30373f", "#5aa9ff",
             ("#ff8f5c", "#3fcf9f", "#e58ed2", "#e3b341", "#c79b72", "#6fd0e0"),
             ("#1a212a", "#1c3a63", "#2461ad", "#5aa0f0", "#d2e8ff"))
THEMES = (LIGHT, DARK)

METHODS = {  # method: index of the colour, marker
    "snapkv": (0, "s"), "keydiff": (1, "^"), "adakv": (2, "D"), "pyramidkv": (3, "v"), "streamingllm": (4, "X"),
    "kvzip": (5, "P"), "h2o": (3, "<"), "tova": (4, ">"), "knorm": (5, "d"), "expected": (2, "p"),
    "ada-expected": (0, "p"), "observed": (3, "8"), "kivi-2": (1, "H"),
    "turboquant-2": (5, "h"), "turboquant-3": (5, "h"), "turboquant-3.5": (5, "h"), "turboquant-4": (5, "h"),
}
LINES = {"paper": (0, (4, 2)), "adaptive": (0, (1, 1.2))}  # of our profiles; the others are solid


def is_plain_quantiser(method):
    """q8_0, q4_0, ...: element types rather than methods."""
    return method[:1] in "qf" and method[1:2].isdigit()


def marker(method):
    return "o" if method in ("anchorkv", "full") else METHODS[method][1] if method in METHODS else "*"


def line_style(variant):
    if is_plain_quantiser(variant.method) and variant.method != "q8_0":
        return (0, (1, 1.5))
    return LINES.get(variant.profile, "-") if variant.method == "anchorkv" else "-"


def luminance(color):
    red, green, blue = color[:3]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def spread(positions, gap):
    """Positions moved apart to at least `gap`, in order, each as near to its own as the others allow."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    groups = []  # [sum of wanted starts, members]
    for i in order:
        groups.append([positions[i], [i]])
        while len(groups) > 1 and _start(groups[-1], gap) < _start(groups[-2], gap) + gap * len(groups[-2][1]):
            last = groups.pop()
            groups[-1][0] += last[0] - gap * len(groups[-1][1]) * len(last[1])
            groups[-1][1] += last[1]
    moved = [0.0] * len(positions)
    for group in groups:
        for offset, i in enumerate(group[1]):
            moved[i] = _start(group, gap) + gap * offset
    return moved


def _start(group, gap):
    """Where the group's first member goes: the mean of what its members want. group[0] sums wanted position minus offset."""
    return group[0] / len(group[1])
