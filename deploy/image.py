"""Makes the root of the container image, in a Debian with python3, python3-venv, binutils, ca-certificates.

    python3 deploy/image.py packages       # the pinned packages, into /opt/batch-dispatcher: slow, and cached
    python3 deploy/image.py root TARGET    # the dispatcher itself, and all that it needs to run, into TARGET

Both are steps of the Dockerfile, and run in a checkout. What is in that root is there because something needs
it to run: the interpreter with its library, the packages, the shared libraries that all these ask for,
certificates. No shell, no package manager, no pip. Every file of a Debian package brings that package's
copyright file and its entry of dpkg's status, where vulnerability scanners look; `sbom.py` writes the bill.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sbom import bill, plain

HOME = Path("/opt/batch-dispatcher")
TOOLS = Path("/opt/build")
"""pip and the build backend: never in the image."""
REPORT = TOOLS / "installed.json"
"""What pip installed, from which file with which hash."""
EXTRAS = ("embedded", "otel")
"""`plots` would double the size for one option of `simulate`."""
SYSTEM = {
    "etc/passwd": "root:x:0:0:root:/nonexistent:/nonexistent\n"
    "nonroot:x:65532:65532:nonroot:/nonexistent:/nonexistent\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
CARRIED = (
    f"{HOME}/pyvenv.cfg",
    f"{HOME}/bin/python*",
    f"{HOME}/bin/batch-dispatcher",
    "/bin",  # links where /usr is merged; the loader's own name goes through one
    "/lib",
    "/lib64",
    "/usr/bin/python3",
    "/etc/os-release",
    "/etc/ssl/certs/ca-certificates.crt",
    "/usr/share/common-licenses/*",  # what the copyright files point to
    "/usr/lib/*/libgcc_s.so.1",  # no file names it: the C library loads it when a thread ends
)
BILL = "usr/share/doc/batch-dispatcher/sbom.cdx.json"

UNUSED_STDLIB = (
    *("__pycache__", "config-*", "dist-packages", "site-packages", "sitecustomize.py"),
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtle*", "venv"),
    # With these would come libraries that serve terminals and old databases.
    *("curses", "dbm", "_curses*.so", "_dbm*.so", "_gdbm*.so", "_tkinter*.so"),
    *("nis*.so", "readline*.so", "_test*.so", "_ctypes_test*.so", "_xx*.so", "xx*.so"),
)
UNUSED_PACKAGES = (
    *("__pycache__", "tests", "_test*.so", "*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.c", "*.h"),
    # Classes for what nobody here asks of the API (signals/kubernetes/api.py).
    *("kubernetes/*client/api/[!_]*.py", "kubernetes/*client/models/[!_]*.py"),
)
"""Names, or ends of paths, of what nothing imports or a compiler alone reads."""


@dataclass(frozen=True)
class Pin:
    """One entry of constraints.txt: its text with all hashes, and who asks for it."""

    text: str
    via: frozenset[str]


def pins(constraints: str) -> dict[str, Pin]:
    """Name → pin, for each entry of constraints.txt."""
    found = {}
    for entry in re.finditer(
        r"^([A-Za-z0-9._-]+)(?:\[[a-z,-]+\])?==.*\n(?: {4}.*\n)*", constraints, re.MULTILINE
    ):
        lines = entry[0].splitlines()
        via = {line.split()[-1] for line in lines if line.lstrip().startswith("#")} - {"via"}
        text = "".join(f"{line}\n" for line in lines if not line.lstrip().startswith("#"))
        found[entry[1]] = Pin(text, frozenset(via))
    return found


def closure(wanted: Iterable[str], known: Mapping[str, Pin]) -> list[str]:
    """The packages wanted and all that they ask for, on any platform. KeyError: one that has no pin."""
    chosen = {name.lower().replace("_", "-") for name in wanted}
    while more := {name for name, pin in known.items() if name not in chosen and pin.via & chosen}:
        chosen |= more
    if missing := chosen - known.keys():
        raise KeyError(f"constraints.txt has no pin of {', '.join(sorted(missing))}: run `make constraints`")
    return sorted(chosen)


def runtime(project: Mapping[str, Any]) -> list[str]:
    """The packages that the image's dispatcher asks for itself."""
    asked = list(project["dependencies"])
    for extra in EXTRAS:
        asked += project["optional-dependencies"][extra]
    return [re.sub(r"[^\w.-].*", "", each) for each in asked]


def packages() -> None:
    """The pinned packages in an environment of their own, and in another what builds and installs."""
    known, wanted = pins(Path("constraints.txt").read_text()), runtime(_project())
    venv.create(HOME, symlinks=True)
    venv.create(TOOLS, symlinks=True, with_pip=True)
    for environment, names in ((TOOLS, ["hatchling"]), (HOME, wanted)):  # the last report is what stays
        listed = TOOLS / "requirements.txt"
        listed.write_text("".join(known[name].text for name in closure(names, known)))
        _install(environment, "--require-hashes", "--report", REPORT, "--requirement", listed)


def root(target: Path) -> None:
    """The image's root, in a directory that is not there yet."""
    os.umask(0o022)
    _install_ourselves()
    wanted = set(_tree(HOME / "lib", UNUSED_PACKAGES))
    wanted |= set(_tree(Path(sysconfig.get_path("stdlib")), UNUSED_STDLIB))
    for pattern in CARRIED:
        wanted |= set(Path("/").glob(pattern[1:]))
    wanted |= set(_libraries(wanted | {Path(sys.executable).resolve()}))
    for path in _followed(wanted):
        _copy(path, target)
    _strip(target / HOME.relative_to("/"))
    for name, text in SYSTEM.items():
        _write(target / name, text)
    # OpenSSL's own default is a directory of hashed names; a program that names no file finds this instead.
    (target / "usr/lib/ssl").mkdir(parents=True)
    (target / "usr/lib/ssl/cert.pem").symlink_to("/etc/ssl/certs/ca-certificates.crt")
    (target / "tmp").mkdir()
    (target / "tmp").chmod(0o1777)
    _compile(target)
    system = [_told(name, target) for name in sorted(_owners(_followed(wanted)))]
    via = {name: pin.via for name, pin in pins(Path("constraints.txt").read_text()).items()}
    written = bill(next(HOME.glob("lib/python3*/site-packages")), _hashes(), system, via)
    _write(target / BILL, json.dumps(written, indent=1) + "\n")


def _hashes() -> dict[str, str]:
    """Python package → sha256 of the wheel that pip took it from."""
    return {
        plain(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in json.loads(REPORT.read_text())["install"]
    }


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return project


def _install(environment: Path, *arguments: str | Path) -> None:
    """Wheels alone, nothing that they do not name, nothing compiled."""
    _pip(
        *("--python", environment / "bin/python", "install"),
        *("--quiet", "--no-deps", "--only-binary=:all:", "--no-compile", *arguments),
    )


def _pip(*arguments: str | Path) -> None:
    options = ("--disable-pip-version-check", "--no-cache-dir")
    subprocess.run([TOOLS / "bin/python", "-m", "pip", *options, *arguments], check=True)


def _install_ourselves() -> None:
    built = TOOLS / "dist"
    _pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", built, ".")
    _install(HOME, "--no-index", "--find-links", built, _project()["name"])
    _pip("--python", HOME / "bin/python", "check")


def _tree(top: Path, unused: Iterable[str]) -> Iterator[Path]:
    """Each file and link under a directory, but what a pattern fits: its name, or the end of its path."""
    for path in sorted(top.iterdir()):
        if any(fnmatch(path.name, pattern) or fnmatch(str(path), f"*/{pattern}") for pattern in unused):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _tree(path, unused)
        else:
            yield path


def _libraries(files: Iterable[Path]) -> Iterator[Path]:
    """The system's shared libraries that programs and libraries among these files ask for."""
    elf = [path for path in files if path.is_file() and _starts_with(path, b"\x7fELF")]
    asked = subprocess.run(["ldd", *elf], check=False, capture_output=True, text=True).stdout
    if missing := re.findall(r"^\t(\S+) => not found", asked, re.MULTILINE):
        raise FileNotFoundError(f"shared libraries that the system lacks: {', '.join(sorted(set(missing)))}")
    for name in set(re.findall(r"(/\S+) \(0x", asked)):
        if not Path(name).is_relative_to(HOME):
            yield Path(name)


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _followed(paths: Iterable[Path]) -> list[Path]:
    """The paths by their real directories, and what links among them lead to, unless that is a directory."""
    found: set[Path] = set()
    for path in paths:
        while (path := path.parent.resolve() / path.name) not in found:
            found.add(path)
            if not path.is_symlink() or path.is_dir():
                break
            path = path.parent / path.readlink()
    return sorted(found)


def _copy(path: Path, target: Path) -> None:
    there = target / path.relative_to("/")
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, there, follow_symlinks=False)
    if not path.is_symlink():  # neither a set-user-id bit nor a module that can be called is of use here
        there.chmod(0o755 if path.stat().st_mode & 0o100 and path.suffix != ".py" else 0o644)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _strip(top: Path) -> None:
    """Wheels' libraries without what a debugger alone reads: 25 MB."""
    subprocess.run(["strip", "--strip-debug", *top.rglob("*.so")], check=True)


def _compile(target: Path) -> None:
    """Each module with its .pyc, which holds whatever the engine makes of the files' times."""
    options = ["-q", "-j0", "--invalidation-mode", "unchecked-hash", "-s", str(target), "-p", "/"]
    below = [target / "opt", target / "usr/lib"]
    subprocess.run([sys.executable, "-m", "compileall", *options, *below], check=True)


def _owners(paths: Iterable[Path]) -> set[str]:
    """The Debian packages that brought these files."""
    system = [str(path) for path in paths if not path.is_relative_to(HOME)]
    # A package from before /usr was merged owns /lib/…, not /usr/lib/….
    older = [name.removeprefix("/usr") for name in system]
    found = subprocess.run(
        ["dpkg-query", "--search", *system, *older],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    owners = re.findall(r"^([^\s:,]+)(?::\w+)?: ", found, re.MULTILINE)
    return {*owners, "ca-certificates"}  # whose bundle is made when it is installed


def _told(name: str, target: Path) -> dict[str, str]:
    """A Debian package's entry and copyright, put into the root; the entry's fields and `Copyright`."""
    entry = _dpkg("--status", name)
    _write(target / "var/lib/dpkg/status.d" / name, entry)
    rights = _copyright(name)
    _write(target / f"usr/share/doc/{name}/copyright", rights)
    return {**dict(re.findall(r"^(\S+): (.*)$", entry, re.MULTILINE)), "Copyright": rights}


def _copyright(name: str) -> str:
    """Its own, or another's of the same source: a slim base may lack the link from one to the other."""
    listed = _dpkg("--show", "--showformat", "${Package} ${source:Package}\n")
    source_of = dict(line.split() for line in listed.splitlines())
    for sibling in (name, *(each for each in source_of if source_of[each] == source_of[name])):
        file = Path("/usr/share/doc", sibling, "copyright")
        if file.exists():
            return file.read_text(errors="replace")
    raise FileNotFoundError(
        f"{name}: the base has no copyright file of it in /usr/share/doc: take one that has"
    )


def _dpkg(*arguments: str) -> str:
    done = subprocess.run(["dpkg-query", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def main() -> None:
    """The two steps of the Dockerfile."""
    steps: dict[str, Callable[..., None]] = {"packages": packages, "root": lambda there: root(Path(there))}
    step, *arguments = sys.argv[1:] or [""]
    if step not in steps:
        sys.exit(__doc__)
    steps[step](*arguments)


if __name__ == "__main__":
    main()
