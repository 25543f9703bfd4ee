"""What the fetching tools share: the cache directory, progress, locks, checksums and pip downloads.

Standard library only. Progress goes to standard error; standard output belongs to the caller.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys


class ToolError(Exception):
    """A failure that one line explains."""


def log(message):
    print(message, file=sys.stderr, flush=True)


def run_tool(main):
    """Runs main(); a ToolError becomes one line on standard error and exit code 1."""
    name = os.path.basename(sys.argv[0])
    try:
        main()
    except ToolError as error:
        log(f"{name}: {error}")
        sys.exit(1)
    except OSError as error:
        log(f"{name}: {error.filename or 'system call'}: {error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        log(f"{name}: interrupted")
        sys.exit(130)


def cache_dir(*parts):
    """${ANCHORKV_CACHE:-~/.cache/anchorkv}/parts..., created."""
    base = os.environ.get("ANCHORKV_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "anchorkv")
    path = pathlib.Path(base).absolute().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(path):
    """Holds an exclusive lock on `path`, so that concurrent runs wait for each other."""
    with open(path, "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another run that fetches the same thing ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def require_space(path, needed_bytes, what):
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        raise ToolError(f"{what} needs {needed_bytes >> 20} MiB in {path}, only {free >> 20} MiB are free")


def pip_command():
    """A pip that runs: this interpreter's own, else the first on the PATH."""
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        try:
            if subprocess.run(command + ["--version"], capture_output=True, check=False).returncode == 0:
                return command
        except OSError:
            continue
    return None


def pip_download(package, version, directory, source=False):
    """Downloads one exact release (its source archive when `source`) into `directory`; returns the file.

    A file that is already there is kept, so that an interrupted run goes on where it stopped.
    """
    stem = package.replace("-", "_")
    pattern = f"{stem}-{version}.tar.gz" if source else f"{stem}-{version}-*.whl"
    present = sorted(directory.glob(pattern))
    if present:
        return present[0]
    pip = pip_command()
    if pip is None:
        raise ToolError("no working pip found; install it (Debian: apt install python3-pip)")
    binary = ["--no-binary", package] if source else ["--only-binary", ":all:"]
    command = pip + ["download", "--no-deps", "--quiet", "--disable-pip-version-check", *binary,
                     "--dest", str(directory), f"{package}=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    present = sorted(directory.glob(pattern))
    if result.returncode != 0 or not present:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
        raise ToolError(f"pip could not download {package} {version}: {reason.strip() or 'no file arrived'}")
    return present[0]
