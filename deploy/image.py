"""Build the root file system of the container image.

    python3 deploy/image.py packages       # install the pinned packages into /opt/batch-dispatcher (slow)
    python3 deploy/image.py root TARGET    # copy the dispatcher and everything it needs to run into TARGET

Both are steps of the Dockerfile and run in a checkout, on a Debian with python3, python3-venv, binutils and
ca-certificates. The root contains only files that are needed at run time: the interpreter with its library,
the packages, the shared libraries that these need, and certificates. It has no shell, no package manager and
no pip. For each Debian package with a file in the root, it has the copyright file and the entry of dpkg's
status, which vulnerability scanners read. `sbom.py` creates the bill of materials.
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

from sbom import build_bill_of_materials, normalize_name

HOME = Path("/opt/batch-dispatcher")
TOOLS = Path("/opt/build")
"""Environment of pip and the build backend, which is not part of the image."""
REPORT = TOOLS / "installed.json"
"""Report of pip: the installed packages with the hashes of their files."""
EXTRAS = ("embedded", "otel")
"""Extras in the image. `plots` would double its size for one option of `simulate`."""
SYSTEM_FILES = {
    "etc/passwd": "root:x:0:0:root:/nonexistent:/nonexistent\n"
    "nonroot:x:65532:65532:nonroot:/nonexistent:/nonexistent\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
COPIED_PATHS = (
    f"{HOME}/pyvenv.cfg",
    f"{HOME}/bin/python*",
    f"{HOME}/bin/batch-dispatcher",
    "/bin",  # Links if /usr is merged; the path of the loader contains one.
    "/lib",
    "/lib64",
    "/usr/bin/python3",
    "/etc/os-release",
    "/etc/ssl/certs/ca-certificates.crt",
    "/usr/share/common-licenses/*",  # The copyright files refer to these.
    "/usr/lib/*/libgcc_s.so.1",  # The C library loads it when a thread ends; no file names it.
)
BILL_OF_MATERIALS = "usr/share/doc/batch-dispatcher/sbom.cdx.json"

UNUSED_STDLIB = (
    *("__pycache__", "config-*", "dist-packages", "site-packages", "sitecustomize.py"),
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtle*", "venv"),
    # These need libraries for terminals and old databases.
    *("curses", "dbm", "_curses*.so", "_dbm*.so", "_gdbm*.so", "_tkinter*.so"),
    *("nis*.so", "readline*.so", "_test*.so", "_ctypes_test*.so", "_xx*.so", "xx*.so"),
)
UNUSED_PACKAGES = (
    *("__pycache__", "tests", "_test*.so", "*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.c", "*.h"),
    # API classes that the dispatcher does not use (signals/kubernetes/api.py).
    *("kubernetes/*client/api/[!_]*.py", "kubernetes/*client/models/[!_]*.py"),
)
"""Names, or ends of paths, of files that are not imported or only read by a compiler."""


@dataclass(frozen=True)
class Pin:
    """Entry of constraints.txt: its text with all hashes, and the packages that require it."""

    text: str
    via: frozenset[str]


def parse_pins(constraints: str) -> dict[str, Pin]:
    """Return each pin in constraints.txt by package name."""
    found = {}
    for entry in re.finditer(
        r"^([A-Za-z0-9._-]+)(?:\[[a-z,-]+\])?==.*\n(?: {4}.*\n)*", constraints, re.MULTILINE
    ):
        lines = entry[0].splitlines()
        via = {line.split()[-1] for line in lines if line.lstrip().startswith("#")} - {"via"}
        text = "".join(f"{line}\n" for line in lines if not line.lstrip().startswith("#"))
        found[entry[1]] = Pin(text, frozenset(via))
    return found


def select_with_dependencies(names: Iterable[str], pins: Mapping[str, Pin]) -> list[str]:
    """Return these packages and all their dependencies on any platform. Raise KeyError if one has no pin."""
    selected = {name.lower().replace("_", "-") for name in names}
    while added := {name for name, pin in pins.items() if name not in selected and pin.via & selected}:
        selected |= added
    if missing := selected - pins.keys():
        raise KeyError(f"constraints.txt has no pin of {', '.join(sorted(missing))}: run `make constraints`")
    return sorted(selected)


def list_direct_dependencies(project: Mapping[str, Any]) -> list[str]:
    """Return the direct dependencies of the dispatcher in the image."""
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    return [re.sub(r"[^\w.-].*", "", each) for each in requirements]


def install_packages() -> None:
    """Install the pinned packages into one environment, and the build tools into another."""
    pins = parse_pins(Path("constraints.txt").read_text())
    runtime_names = list_direct_dependencies(_project())
    venv.create(HOME, symlinks=True)
    venv.create(TOOLS, symlinks=True, with_pip=True)
    for environment, names in ((TOOLS, ["hatchling"]), (HOME, runtime_names)):  # The last report is kept.
        requirements_file = TOOLS / "requirements.txt"
        requirements_file.write_text(
            "".join(pins[name].text for name in select_with_dependencies(names, pins))
        )
        _install(environment, "--require-hashes", "--report", REPORT, "--requirement", requirements_file)


def build_root(target: Path) -> None:
    """Create the root file system of the image in a new directory."""
    os.umask(0o022)
    _install_dispatcher()
    paths = set(_list_files(HOME / "lib", UNUSED_PACKAGES))
    paths |= set(_list_files(Path(sysconfig.get_path("stdlib")), UNUSED_STDLIB))
    for pattern in COPIED_PATHS:
        paths |= set(Path("/").glob(pattern[1:]))
    paths |= set(_find_libraries(paths | {Path(sys.executable).resolve()}))
    for path in _resolve_links(paths):
        _copy(path, target)
    _strip(target / HOME.relative_to("/"))
    for name, text in SYSTEM_FILES.items():
        _write(target / name, text)
    # Programs that name no certificate file find this one. OpenSSL's default is a directory of hashed names.
    (target / "usr/lib/ssl").mkdir(parents=True)
    (target / "usr/lib/ssl/cert.pem").symlink_to("/etc/ssl/certs/ca-certificates.crt")
    (target / "tmp").mkdir()
    (target / "tmp").chmod(0o1777)
    _compile(target)
    system = [_add_package_metadata(name, target) for name in sorted(_owners(_resolve_links(paths)))]
    via = {name: pin.via for name, pin in parse_pins(Path("constraints.txt").read_text()).items()}
    document = build_bill_of_materials(next(HOME.glob("lib/python3*/site-packages")), _hashes(), system, via)
    _write(target / BILL_OF_MATERIALS, json.dumps(document, indent=1) + "\n")


def _hashes() -> dict[str, str]:
    """Return the sha256 of the installed wheel of each Python package."""
    return {
        normalize_name(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in json.loads(REPORT.read_text())["install"]
    }


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return project


def _install(environment: Path, *arguments: str | Path) -> None:
    """Install only the named wheels, without dependencies and without compiled modules."""
    _pip(
        *("--python", environment / "bin/python", "install"),
        *("--quiet", "--no-deps", "--only-binary=:all:", "--no-compile", *arguments),
    )


def _pip(*arguments: str | Path) -> None:
    options = ("--disable-pip-version-check", "--no-cache-dir")
    subprocess.run([TOOLS / "bin/python", "-m", "pip", *options, *arguments], check=True)


def _install_dispatcher() -> None:
    wheel_directory = TOOLS / "dist"
    _pip(
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        wheel_directory,
        ".",
    )
    _install(HOME, "--no-index", "--find-links", wheel_directory, _project()["name"])
    _pip("--python", HOME / "bin/python", "check")


def _list_files(top: Path, unused: Iterable[str]) -> Iterator[Path]:
    """Yield each file and link below a directory unless a pattern matches its name or the end of its path."""
    for path in sorted(top.iterdir()):
        if any(fnmatch(path.name, pattern) or fnmatch(str(path), f"*/{pattern}") for pattern in unused):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _list_files(path, unused)
        else:
            yield path


def _find_libraries(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the shared libraries of the system that the programs and libraries among these files need."""
    elf = [path for path in files if path.is_file() and _starts_with(path, b"\x7fELF")]
    output = subprocess.run(["ldd", *elf], check=False, capture_output=True, text=True).stdout
    if missing := re.findall(r"^\t(\S+) => not found", output, re.MULTILINE):
        raise FileNotFoundError(f"shared libraries that the system lacks: {', '.join(sorted(set(missing)))}")
    for name in set(re.findall(r"(/\S+) \(0x", output)):
        if not Path(name).is_relative_to(HOME):
            yield Path(name)


def _starts_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _resolve_links(paths: Iterable[Path]) -> list[Path]:
    """Return the paths with resolved directories, and the targets of links unless they are directories."""
    found: set[Path] = set()
    for path in paths:
        while (path := path.parent.resolve() / path.name) not in found:
            found.add(path)
            if not path.is_symlink() or path.is_dir():
                break
            path = path.parent / path.readlink()
    return sorted(found)


def _copy(path: Path, target: Path) -> None:
    destination = target / path.relative_to("/")
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, destination, follow_symlinks=False)
    if not path.is_symlink():  # Remove setuid bits, and the executable bit of modules.
        destination.chmod(0o755 if path.stat().st_mode & 0o100 and path.suffix != ".py" else 0o644)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _strip(top: Path) -> None:
    """Remove debug symbols from the libraries of wheels, which are 25 MB."""
    subprocess.run(["strip", "--strip-debug", *top.rglob("*.so")], check=True)


def _compile(target: Path) -> None:
    """Compile each module to a .pyc that stays valid if the build tool changes the times of files."""
    options = ["-q", "-j0", "--invalidation-mode", "unchecked-hash", "-s", str(target), "-p", "/"]
    directories = [target / "opt", target / "usr/lib"]
    subprocess.run([sys.executable, "-m", "compileall", *options, *directories], check=True)


def _owners(paths: Iterable[Path]) -> set[str]:
    """Return the Debian packages that own these files."""
    system = [str(path) for path in paths if not path.is_relative_to(HOME)]
    # A package built before /usr was merged owns /lib/…, not /usr/lib/….
    older = [name.removeprefix("/usr") for name in system]
    found = subprocess.run(
        ["dpkg-query", "--search", *system, *older],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    owners = re.findall(r"^([^\s:,]+)(?::\w+)?: ", found, re.MULTILINE)
    return {*owners, "ca-certificates"}  # Its bundle is created at installation and has no owner.


def _add_package_metadata(name: str, target: Path) -> dict[str, str]:
    """Write the dpkg entry and copyright of a Debian package into the root and return both as fields."""
    entry = _dpkg("--status", name)
    _write(target / "var/lib/dpkg/status.d" / name, entry)
    copyright_text = _copyright(name)
    _write(target / f"usr/share/doc/{name}/copyright", copyright_text)
    return {**dict(re.findall(r"^(\S+): (.*)$", entry, re.MULTILINE)), "Copyright": copyright_text}


def _copyright(name: str) -> str:
    """Return the copyright of a package, or of one with the same source: a slim base may lack the link."""
    package_list = _dpkg("--show", "--showformat", "${Package} ${source:Package}\n")
    source_of = dict(line.split() for line in package_list.splitlines())
    for sibling in (name, *(each for each in source_of if source_of[each] == source_of[name])):
        file = Path("/usr/share/doc", sibling, "copyright")
        if file.exists():
            return file.read_text(errors="replace")
    raise FileNotFoundError(
        f"{name}: the base has no copyright file of it in /usr/share/doc: use another base"
    )


def _dpkg(*arguments: str) -> str:
    done = subprocess.run(["dpkg-query", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def main() -> None:
    """Run one of the two steps of the Dockerfile."""
    steps: dict[str, Callable[..., None]] = {
        "packages": install_packages,
        "root": lambda target: build_root(Path(target)),
    }
    step, *arguments = sys.argv[1:] or [""]
    if step not in steps:
        sys.exit(__doc__)
    steps[step](*arguments)


if __name__ == "__main__":
    main()
