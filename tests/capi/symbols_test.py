"""symbols_test.py NM LIBRARY SONAME HEADER VERSION: what the shared library exports is what symbols.txt lists, what the
header declares and what every_function.c calls; the header's version is the project's."""

import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
VERSION_NODE = "ANCHORKV_0.1"


def fail(message):
    print(message)
    sys.exit(1)


def compare(what, found, listed):
    extra, missing = sorted(found - listed), sorted(listed - found)
    if extra or missing:
        fail(f"{what}: not in symbols.txt: {extra}; missing: {missing}")


def main():
    nm, library, soname, header_path, version = sys.argv[1:]
    listed = set((HERE / "symbols.txt").read_text(encoding="utf-8").split())
    lines = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in lines.splitlines()} - {VERSION_NODE}
    compare("exported", exported, {f"{name}@@{VERSION_NODE}" for name in listed})

    header = re.sub(r"/\*.*?\*/", "", pathlib.Path(header_path).read_text(encoding="utf-8"), flags=re.DOTALL)
    declared = set(re.findall(r"^(?!static|typedef|#)[\w* ]+?\b(anchorkv_\w+)\(", header, flags=re.MULTILINE))
    compare("declared", declared, listed)
    called = set(re.findall(r"\banchorkv_\w+(?=\()", (HERE / "every_function.c").read_text(encoding="utf-8")))
    if listed - called:
        fail(f"every_function.c does not call {sorted(listed - called)}")

    parts = [re.search(rf"#define ANCHORKV_VERSION_{part} (\d+)", header).group(1) for part in ("MAJOR", "MINOR", "PATCH")]
    if ".".join(parts) != version:
        fail(f"the header says version {'.'.join(parts)}; the project has {version}")
    if soname != f"libanchorkv.so.{parts[0]}":
        fail(f"the library is named {soname}")
    print(f"{len(listed)} functions")


if __name__ == "__main__":
    main()
