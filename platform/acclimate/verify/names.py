"""Names of a bundle's files that more than one check reads."""

from acclimate_competitions.phases import EvaluationKey


def predictions_name(entrant: str, key: EvaluationKey) -> str:
    """The bundle's file with the predictions of one evaluation."""
    _, task, seed, protocol = key
    return f"predictions/{entrant}/{protocol}-{task}-{'none' if seed is None else seed}.parquet"
