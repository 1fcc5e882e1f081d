"""Builds the splits of `digits` from scikit-learn's copy of the UCI handwritten digits; the same bytes every time.

Self-contained: `acclimate competition build digits --out DIR` loads this file by its path and calls main(DIR).
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

SEED = 2027
SIZES = {"holdout": 800, "preparation": 800, "validation": 197}
Rules = Mapping[str, Callable[[int], str]]
"""Task -> the right answer about a digit."""

TASKS: Rules = {
    "digit": lambda label: f"d{label}",
    "parity": lambda label: "odd" if label % 2 else "even",
    "at-least-five": lambda label: "five-or-more" if label >= 5 else "below-five",
    "prime": lambda label: "is-prime" if label in (2, 3, 5, 7) else "not-prime",
}


def main(out: Path) -> None:
    """Write competition.toml, tokenizer.json and splits/<task>/<split>.parquet below out."""
    pixels, _ = pooled()
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("competition.toml"), out / "competition.toml")
    write(out, TASKS, assign(pixels, SIZES, draw=f"digits {SEED}"))


def write(out: Path, tasks: Rules, splits: Mapping[str, list[int]]) -> None:
    """Write tokenizer.json and splits/<task>/<split>.parquet below out, of these images (split -> images)."""
    pixels, labels = pooled()
    _write_tokenizer(out / "tokenizer.json", tasks)
    for split, images in splits.items():
        for task, answer in tasks.items():
            rows = {
                "example": [f"{task}-{image:04d}" for image in images],
                "input": [f"<{task}> {pixels[image]}" for image in images],
                "target": [answer(labels[image]) for image in images],
                "cluster": [f"image-{image:04d}" for image in images],
            }
            _write_parquet(rows, out / "splits" / task / f"{split}.parquet")


def pooled() -> tuple[list[str], list[int]]:
    """The 1797 images as text of 16 pixel tokens, row by row, and their labels.

    Each token is the mean of a 2 × 2 block of values 0…16, rounded half up.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(int)
    sums = images.reshape(-1, 4, 2, 4, 2).sum(axis=(2, 4))
    means = (sums + 2) // 4
    pixels = [" ".join(f"p{value}" for value in image.ravel()) for image in means]
    return pixels, [int(label) for label in digits.target]


def assign(pixels: list[str], sizes: Mapping[str, int], *, draw: str) -> dict[str, list[int]]:
    """Split -> images, ascending; another draw gives another assignment.

    Images that pool to the same tokens form one group, and a group goes to one split. Groups are drawn in the order of
    a hash of their first image, and each goes to the first split of `sizes` with room for all of it.
    """
    groups: dict[str, list[int]] = {}
    for image, text in enumerate(pixels):
        groups.setdefault(text, []).append(image)
    drawn = sorted(groups.values(), key=lambda group: hashlib.sha256(f"{draw} {group[0]}".encode()).digest())
    splits: dict[str, list[int]] = {split: [] for split in sizes}
    for group in drawn:
        split = next(name for name, size in sizes.items() if len(splits[name]) + len(group) <= size)
        splits[split] += group
    return {split: sorted(images) for split, images in splits.items()}


def _write_tokenizer(path: Path, tasks: Rules) -> None:
    """One token a word: specials, pixel values, task tokens, answers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    specials = ["<pad>", "<bos>", "<unk>"]
    answers = dict.fromkeys(answer(label) for answer in tasks.values() for label in range(10))
    words = [*specials, *(f"p{value}" for value in range(17)), *(f"<{task}>" for task in tasks), *answers]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path))


def _write_parquet(rows: dict[str, list[str]], path: Path) -> None:
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        features = datasets.Features({name: datasets.Value("string") for name in rows})
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    finally:
        if shown:
            datasets.enable_progress_bars()
