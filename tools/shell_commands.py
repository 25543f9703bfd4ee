"""Commands in shell text of the documentation, and whether the options they name exist. For tools/check-docs."""

import re
import shlex

HELP_SECTION = re.compile(r"^## anchorkv ([\w-]+)\n+```text\n(.*?)```", re.DOTALL | re.MULTILINE)
OPTION_LINE = re.compile(r"^ {2,}(-[\w-]+(?:,-[\w-]+)*)", re.MULTILINE)
SHORT_FORM = re.compile(r"\((-\w+)[,)]")  # llama.cpp's short forms of several letters, in the text of an option
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENDS = set("();<>|&\n")


def options_of_program(page):
    """{command: options} from docs/cli.md, which is made from the program's own help."""
    found = {}
    for name, text in HELP_SECTION.findall(page):
        options = {option for group in OPTION_LINE.findall(text) for option in group.split(",")}
        found[name] = options | set(SHORT_FORM.findall(text))
    return found


def commands(text):
    """Lists of words, one for each simple command; text that is not shell is skipped."""
    text = text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        words = []
        try:
            for token in reader:
                if set(token) <= ENDS:
                    found.append(words)
                    words = []
                else:
                    words.append(token)
        except ValueError:  # a quotation that goes on in the next line
            continue
        found.append(words)
    return [words for words in found if words]


def blocks(page):
    """(line number, text) of the ```sh blocks of a page, and of indented ones."""
    for block in BLOCK.finditer(page):
        yield page.count("\n", 0, block.start()) + 2, block.group(1)
    fenced, start, lines = False, 0, []
    for number, line in enumerate(page.splitlines() + [""], start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if not fenced and line.startswith("    ") and not line.lstrip().startswith(("-", "*", "|")):
            if not lines:
                start = number
            lines.append(line[4:])
        elif lines:
            yield start, "\n".join(lines) + "\n"
            lines = []


def problem_of(words, program, script_text):
    """What is wrong with a command, or None. `script_text(path)`: the source of a script of the tree, or None."""
    while words and (re.match(r"^\w+=", words[0]) or words[0] in ("/usr/bin/time", "time", "nice", "-v")):
        words = words[1:]
    if not words:
        return None
    name, arguments = words[0], words[1:]
    if name in ("anchorkv", "build/bin/anchorkv", "./build/bin/anchorkv"):
        if not program or not arguments:
            return None
        command = arguments[0]
        if command in ("--help", "--version"):
            return None
        if command not in program:
            return f"there is no anchorkv {command}"
        known = program[command]
        wrong = [word for word in named_options(arguments[1:]) if word not in known]
        return f"anchorkv {command} has no option {wrong[0]}" if wrong else None
    if not name.startswith(("./", "tools/", "eval/", ".ci/", "bench/")):
        return None
    text = script_text(name)
    if text is None:
        return f"{name} does not exist"
    wrong = [word for word in named_options(arguments) if word not in ("-h", "--help") and word not in text]
    return f"{name} has no option {wrong[0]}" if wrong else None


def named_options(words):
    """Words that are options: not -, not numbers; what follows -- belongs to somebody else."""
    found = []
    for word in words:
        if word == "--":
            break
        if re.match(r"^--?[A-Za-z]", word):
            found.append(word.partition("=")[0])
    return found
