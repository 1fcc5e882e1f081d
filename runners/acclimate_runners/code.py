"""Which code this process runs: the sources of competitions and runners, which are all that can change a number."""

import functools
import importlib.util
from pathlib import Path

from acclimate_competitions import digests

_PACKAGES = ("acclimate_competitions", "acclimate_runners")


@functools.cache
def code_digest() -> str:
    """Digest of the code that can change a number: the sources of competitions and runners, by name."""
    sources: dict[str, Path] = {}
    for package in _PACKAGES:
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations
        root = Path(found.submodule_search_locations[0])
        sources |= {f"{package}/{path.relative_to(root).as_posix()}": path for path in sorted(root.rglob("*.py"))}
    # A wheel carries the shipped competitions inside the package, a checkout beside it: their data are in the definition's digest.
    return digests.of_tree((name, path) for name, path in sources.items() if "/shipped/" not in name)
