"""Compare the pinned versions with the database of known vulnerabilities, and say what came of it.

pip-audit has to be installed (`pip install pip-audit`) and asks a database on the network; without either this says so
and ends with code 3, which is neither a pass (0) nor a finding (1).
"""

import importlib.util
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
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "-r", str(REQUIREMENTS)]
    result = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - a fixed list
    print(result.stdout + result.stderr)
    if result.returncode and any(sign in result.stderr for sign in ("ConnectionError", "Max retries", "ServiceError")):
        print("audit: nothing was checked, since the database of vulnerabilities cannot be reached from here")
        return UNKNOWN
    if result.returncode == 0:
        print(f"audit: no known vulnerability in the versions of {REQUIREMENTS.name}")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
