"""The second process that computes a ranking before a round publishes it: an auditor's, on this machine.

    python -m acclimate.recomputing BUNDLE LOG_KEY PARENT

has the bundle and nothing else: no database, no keys, no settings. It verifies the bundle as any auditor would, scores the predictions
again, ranks the scores, and says {"round", "ranking", "summary", "failed"} as JSON: the digest of the ranking that it computed, null where
it could not, and the checks that FAILED; or {"refused"}, where this machine lacks what it takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from acclimate_competitions.errors import Refusal
from acclimate_runners import isolation

_AT_MOST = 6 * 3600.0
"""Seconds after which a second process is taken for stuck."""
_TAIL = 2000


def ranking(bundle: Path, *, log_key: str) -> dict[str, Any]:
    """What a second process finds in a bundle: {round, ranking, summary, failed}.

    Args:
        bundle: the whole bundle, a folder in one of the process's own, which also takes its temporary files.
        log_key: of the log, as RoundDefined names it.

    Raises:
        Refusal: runner_failed, where it ended otherwise than with an answer; what it lacked to verify the bundle: no_space, …
    """
    # -P keeps the current folder off the module path, where a folder named `platform` would hide the standard library's.
    command = [sys.executable, "-P", "-m", "acclimate.recomputing", str(bundle), log_key, str(os.getpid())]
    try:
        done = subprocess.run(
            command,
            cwd=bundle.parent,
            env=isolation.environment(bundle.parent, threads=1),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_AT_MOST,
            start_new_session=True,
        )
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        raise Refusal("runner_failed", f"the second process that computes the ranking: {error}") from error
    if not isinstance(found, dict):
        sentence = f"the second process that computes the ranking ended with status {done.returncode}"
        raise Refusal("runner_failed", f"{sentence}: {done.stderr[-_TAIL:].strip()}")
    if "refused" in found:
        code, sentence = (str(found["refused"][name]) for name in ("code", "sentence"))
        raise Refusal(code, f"the second process that computes the ranking: {sentence}")
    return found


def main(bundle: str, log_key: str, parent: str) -> None:
    """The second process."""
    isolation.die_with(int(parent))
    # Not before: whoever reads this module to start the process needs neither.
    from acclimate import verify
    from acclimate_competitions import digests

    try:
        report = verify.verify(Path(bundle), log_key=log_key)
    except Refusal as refusal:
        # What this machine lacks says nothing of the bundle.
        sys.stdout.write(json.dumps({"refused": {"code": refusal.code, "sentence": refusal.sentence}}))
        return
    # ok means that what was recomputed is ranking.json, digit for digit.
    same = any(check.name == "ranking" and check.status == "ok" for check in report.checks)
    ranked = digests.of_bytes((Path(bundle) / "ranking.json").read_bytes()) if same and not report.failed else None
    failed = [f"{check.name}, {check.where}: {check.meaning}" for check in report.failed]
    found = {"round": report.round, "ranking": ranked, "summary": report.summary, "failed": failed}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
