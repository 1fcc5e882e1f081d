"""A submitted model, as the rest of Acclimate sees it: `inspect` reads it strictly without any library, `check` tries it in a child.

Importing this module imports neither torch nor transformers, so the server may use `inspect`; `check`, `hardware` and `versions`
import them when called.
"""

from collections.abc import Callable
from pathlib import Path

from acclimate_runners.jobs import CheckJob, Outcome
from acclimate_runners.reading import NAMES, ModelFacts, Rules, inspect

__all__ = ["NAMES", "ModelFacts", "Rules", "check", "hardware", "inspect", "versions"]


def check(job: CheckJob, folder: Path, progress: Callable[[int, int, str], None]) -> Outcome:
    """Load a submitted model and run three preparation steps of each task on public data.

    Raises:
        Refusal: model_invalid, with a public reason.
    """
    from acclimate_runners import checking

    return checking.check(job, folder, progress)


def hardware(device: str = "cpu") -> str:
    """Hardware class of this process, such as "cpu/x86_64/avx512/intel"; `device` is the job's."""
    from acclimate_runners import computing

    return computing.hardware(device=device)


def versions() -> dict[str, str]:
    """Versions of the libraries that can change a number."""
    from acclimate_runners import computing

    return computing.versions()
