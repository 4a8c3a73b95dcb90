"""Compare the pinned versions with the database of known vulnerabilities, and say what came of it.

pip-audit has to be installed (`pip install pip-audit`) and asks a database on the network. Where packages could not be
checked, this says how many and ends with code 3, which is neither a pass (0) nor a finding (1): pip-audit itself
reports "no known vulnerabilities" for packages that it could not look up.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements-hashes.txt"
UNKNOWN = 3


def main() -> int:
    """Return the exit code."""
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: nothing was checked, since pip-audit is not installed: pip install pip-audit")
        return UNKNOWN
    command = [sys.executable, "-m", "pip_audit", "-f", "json", "--require-hashes", "--disable-pip"]
    result = subprocess.run([*command, "-r", str(REQUIREMENTS)], capture_output=True, text=True)  # noqa: S603 - fixed
    try:
        packages = json.loads(result.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(result.stderr.strip()[-500:])
        print("audit: nothing was checked, since pip-audit did not finish; its last words are above")
        return UNKNOWN
    for package in packages:
        for finding in package.get("vulns", ()):
            print(f"{package['name']} {package['version']}: {finding['id']}, fixed in {finding['fix_versions']}")
    bad = sum(bool(package.get("vulns")) for package in packages)
    skipped = sum("skip_reason" in package for package in packages)
    print(f"audit: {bad} of {len(packages)} packages have known vulnerabilities, {skipped} could not be looked up")
    return 1 if bad else UNKNOWN if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
