"""What the API's answers look like in its OpenAPI description, and the few forms that routes share."""

import re
from typing import Annotated, Any

from fastapi import Depends, Path, Request, Response
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from acclimate.api.access import account_of, caller
from acclimate.api.problems import MEDIA_TYPE
from acclimate.api.state import Services, services_of
from acclimate.service.accounts import Account
from acclimate_competitions import records


async def _here(request: Request) -> Services:
    # A dependency that is no coroutine would take a thread of the pool for each request.
    return services_of(request)


def _canonical(value: object) -> object:
    # What an address says in two ways is two addresses to whoever keeps answers, and signs or counts them.
    if isinstance(value, str) and not re.fullmatch(r"0|[1-9][0-9]{0,15}", value):
        raise PydanticCustomError("whole_number", "must be a whole number in plain digits, such as 10")
    return value


WholeNumber = Annotated[int, BeforeValidator(_canonical)]
"""A number of an address: decimal digits alone, without sign, blank, underscore or a leading zero."""
Here = Annotated[Services, Depends(_here)]
Caller = Annotated[Account, Depends(caller)]
AnyCaller = Annotated[Account | None, Depends(account_of)]
RoundId = Annotated[
    str,
    Path(
        max_length=records.LONGEST_ROUND_ID,
        description="the round's id, or any unique prefix of it",
        examples=["digits-2027-1"],
    ),
]
SubmissionId = Annotated[str, Path(max_length=64, description="the submission's id")]

RECORD = {
    "index": 7,
    "record": {
        "v": 1,
        "type": "ShareAcknowledged",
        "round": "digits-2027-1-0123456789ab",
        "at": "2027-02-20T09:30:00.000000Z",
        "by": "A" * 43 + "=",
        "sig": "A" * 86 + "==",
        "seal": "sha256:" + "1" * 64,
        "index": 1,
        "commitment": "sha256:" + "2" * 64,
    },
}
PROBLEM = {
    "type": "urn:acclimate:refusal:round_closed",
    "title": "The round closed before this arrived, by the database's clock.",
    "status": 409,
    "detail": "the round closed 2027-04-01T12:00:00.000000Z, a submission (SubmissionCommitted) was received 2027-04-01T12:00:00.000000Z",
    "code": "round_closed",
    "hint": "",
    "problems": [],
    "request_id": "5b0c1b9e-3f8e-4a52-9a9c-5d6a3d0e8a11",
}


def answers(
    example: Any, *, status: int = 200, media: str = "application/json", meaning: str = ""
) -> dict[int | str, Any]:
    """The `responses` of a route: its answer with an example, and how it refuses."""
    content = {media: {"example": example}}
    return {
        status: {"description": meaning or "done, or done before by the same request", "content": content},
        "4XX": {"description": "refused: problem details (RFC 9457)", "content": {MEDIA_TYPE: {"example": PROBLEM}}},
        422: {
            "description": "malformed: problem details with all problems",
            "content": {MEDIA_TYPE: {"example": PROBLEM}},
        },
    }


def created(response: Response, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without its mark of novelty, which became the status: 201 if new, else 200."""
    response.status_code = 201 if answer.pop("new") else 200
    return answer


def logged(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of a route that logs a signed record: 200 whether it was logged now or before."""
    answer.pop("new", None)
    return answer
