"""Fetches the pinned third-party browser files: `python -m console.vendor`.

Each package comes through `npm pack` (npm's own client and its configured registry), is checked against the digest
pinned here, and only the named files are kept. What is in the tree is listed in the VERSIONS.txt beside the files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVED = ROOT / "static" / "vendor"
TESTS_ONLY = ROOT / "tests" / "browser" / "vendor"


@dataclass(frozen=True, slots=True)
class Package:
    """`integrity` is npm's sha512 of the packed archive; `files` maps a path in it to our file name."""

    name: str
    version: str
    licence: str
    source: str
    integrity: str
    files: dict[str, str]
    folder: Path = SERVED


PACKAGES = (
    Package(
        "plotly.js-basic-dist-min",
        "4.1.1",
        "MIT",
        "https://github.com/plotly/plotly.js",
        "sha512-1oNF8PeQx2hv/y7tqEVWKD3JGwn/MGEMQ8mL9HUwsaqG9FGy/OU5FHUHvzqbqxN4mnwZGI9abTiE775C4kkjMQ==",
        {"plotly-basic.min.js": "plotly-basic.min.js", "LICENSE": "plotly-LICENSE.txt"},
    ),
    Package(
        "htmx.org",
        "4.0.1",
        "0BSD",
        "https://github.com/bigskysoftware/htmx",
        "sha512-oF7JgXhDW9UXCy/k1ZYFUQgzu/rm19ORWPSPNL91vPluB2PB9+MV55tyQdH/w7o2EAbTYUG5SDW1R60mdkdqGg==",
        {"dist/htmx.min.js": "htmx.min.js", "LICENSE": "htmx-LICENSE.txt"},
    ),
    Package(
        "axe-core",
        "4.14.1",
        "MPL-2.0",
        "https://github.com/dequelabs/axe-core",
        "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        {"axe.min.js": "axe.min.js", "LICENSE": "axe-LICENSE.txt"},
        folder=TESTS_ONLY,
    ),
)


class VendorError(Exception):
    """A package could not be fetched, or is not the one pinned here."""


def pack(package: Package) -> bytes:
    """The archive as npm packs it, after its digest was compared."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise VendorError(f"{' '.join(command)} failed: {ran.stderr.strip()}")
        (archive,) = Path(folder).glob("*.tgz")
        content = archive.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != package.integrity:
        raise VendorError(f"{package.name}@{package.version} is {found}, pinned is {package.integrity}")
    return content


def unpack(package: Package, content: bytes) -> list[str]:
    """Writes the wanted files; answers one line for each of them for VERSIONS.txt."""
    lines = []
    package.folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for inside, ours in package.files.items():
            member = archive.extractfile(f"package/{inside}")
            if member is None:
                raise VendorError(f"{package.name}@{package.version} has no file {inside}")
            body = member.read()
            (package.folder / ours).write_bytes(body)
            lines.append(f"  {ours}  sha256 {hashlib.sha256(body).hexdigest()}")
    return lines


def describe(package: Package, files: list[str]) -> str:
    head = f"{package.name} {package.version}  ({package.licence})\n  source {package.source}, npm pack\n"
    return head + f"  archive {package.integrity}\n" + "\n".join(files) + "\n"


def main() -> None:
    texts: dict[Path, list[str]] = {}
    for package in PACKAGES:
        texts.setdefault(package.folder, []).append(describe(package, unpack(package, pack(package))))
        print(f"{package.name} {package.version}")
    for folder, parts in texts.items():
        (folder / "VERSIONS.txt").write_text("Fetched by `python -m console.vendor`.\n\n" + "\n".join(parts))


if __name__ == "__main__":
    main()
