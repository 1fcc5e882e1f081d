"""Fuzz one target with atheris: `python tests/fuzz/drive.py NAME FOLDER -max_total_time=600`, or `-runs=1000`.

Exits 0 if nothing but refusals came, else with libFuzzer's code and Python's traceback, and the input that did it in the folder.
Given a file instead of an option, it replays that input.
"""

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "journeys"))


def main(name: str, folder: str, how: str) -> None:
    """Fuzz, or replay an input."""
    with atheris.instrument_imports(include=["acclimate", "acclimate_competitions", "acclimate_runners"]):
        import parsers
    target, place = parsers.TARGETS[name], Path(folder)
    corpus = place / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        target.run(seed)
        (corpus / f"seed-{number}").write_bytes(seed)
    words = place / "words"
    words.write_text("".join(f'"{word}"\n' if word[0] != '"' else f'"\\{word}"\n' for word in target.words), "utf-8")
    # An input that takes seconds, or gigabytes, is a fault too.
    options = ["-max_len=16384", "-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={place}/"]
    options += [f"-dict={words}"] if target.words else []
    given = [how, "-print_final_stats=1", str(corpus)] if how.startswith("-") else [how]
    atheris.Setup([sys.argv[0], *options, *given], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
