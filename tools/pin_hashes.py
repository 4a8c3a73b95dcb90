"""Write requirements-hashes.txt: the versions of constraints.txt with the sha256 of each of their files on PyPI.

    python tools/pin_hashes.py                          # asks https://pypi.org/simple
    python tools/pin_hashes.py --wheel torch-2.13.0+cpu-….whl   # this file in place of those on PyPI

`pip install --require-hashes -r requirements-hashes.txt` then installs nothing but these files, on any platform.
"""

import argparse
import hashlib
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
INDEX = "https://pypi.org/simple"
HEAD = (
    "# Made by tools/pin_hashes.py from constraints.txt; use: pip install --require-hashes -r requirements-hashes.txt\n"
)


class Links(HTMLParser):
    """The links of a page of the index."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def normalized(name: str) -> str:
    """Return the name of a package as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_of(file: str, package: str) -> str | None:
    """Return the version in the name of a wheel or source archive, without its local part."""
    stem = re.sub(r"(\.whl|\.tar\.gz|\.zip|\.tar\.bz2|\.egg)$", "", file)
    if file.endswith(".whl"):
        return stem.split("-")[1].partition("+")[0]
    prefix = re.match(rf"{package.replace('-', '[-_.]+')}-", stem, re.IGNORECASE)
    return stem[prefix.end() :] if prefix and stem != file else None


def published(package: str, version: str) -> set[str]:
    """Return the sha256 of every file of a version on PyPI."""
    with urllib.request.urlopen(f"{INDEX}/{normalized(package)}/", timeout=60) as page:  # noqa: S310 - a constant scheme
        parser = Links()
        parser.feed(page.read().decode())
    files = [(unquote(link.partition("#")[0].rpartition("/")[2]), link) for link in parser.links]
    matching = [link for file, link in files if version_of(file, normalized(package)) == version]
    return {match[1] for link in matching if (match := re.search(r"#sha256=([0-9a-f]{64})", link))}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, action="append", default=[], help="a file in place of those on PyPI")
    parser.add_argument("--output", type=Path, default=ROOT / "requirements-hashes.txt")
    options = parser.parse_args()
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").split()]
    local = {normalized(wheel.name.partition("-")[0]): wheel for wheel in options.wheel}
    with ThreadPoolExecutor(8) as pool:
        hashes = list(pool.map(lambda pin: published(*pin), pins))
    lines = [HEAD]
    for (package, version), found in zip(pins, hashes, strict=True):
        if wheel := local.get(normalized(package)):
            found = {hashlib.sha256(wheel.read_bytes()).hexdigest()}
        if not found:
            sys.exit(f"{package} {version} has no file on {INDEX}: correct constraints.txt")
        lines.append(
            " \\\n    ".join([f"{package}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(found))])
        )
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.output}: {len(pins)} packages, {sum(map(len, hashes))} files")


if __name__ == "__main__":
    main()
