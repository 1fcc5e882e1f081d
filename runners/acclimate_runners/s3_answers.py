"""What an S3 server's errors mean: which pass by themselves, and which refusal, with its cause, the others become."""

import asyncio
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from botocore import exceptions as boto  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

from acclimate_competitions.errors import Refusal

NO_KEY = "NoSuchKey"
BARE = "404"
"""What a HEAD says of a missing object, of a missing bucket, and of an address that is no S3: its answer has no body."""
MISSING = frozenset({NO_KEY, "NoSuchUpload", BARE})
THERE_ALREADY = frozenset({"PreconditionFailed", "412"})
NOT_OFFERED = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest"})
_PASSING = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "RequestTimeTooEarly",
        "InternalError",
        "ServiceUnavailable",
        "TooManyRequests",
        "Throttling",
        "BadDigest",
        "IncompleteBody",
        "XAmzContentSHA256Mismatch",
        "ConditionalRequestConflict",
        "OperationAborted",
    }
)
_LOGIN = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "ExpiredToken",
        "TokenRefreshRequired",
        "NotSignedUp",
        "AccountProblem",
        "InvalidSecurity",
    }
)
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "AccessForbidden", "MethodNotAllowed", "403"})
_REGION = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "507", "EntityTooLarge"})
_LOST = (
    boto.ConnectionError,
    boto.HTTPClientError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    TimeoutError,
    ConnectionError,
    EOFError,
)


def _answered(error: BaseException) -> Any:
    return next((found for found in (error, error.__cause__) if isinstance(found, boto.ClientError)), None)


def _response(error: BaseException) -> dict[str, Any]:
    answered = _answered(error)
    return dict(answered.response) if answered is not None else {}


def code_of(error: BaseException) -> str:
    """The server's code for an error; its HTTP status where the answer had no body; empty where there was no answer."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def time_of(answer: dict[str, Any]) -> datetime:
    """The server's time, as its answer's Date says."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


def passing(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    response = _response(error)
    if response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        # 501: never, on this server.
        return code_of(error) in _PASSING or (status >= 500 and status not in (501, 507)) or status == 429
    if isinstance(error, boto.SSLError):
        return False
    return isinstance(error, (*_LOST, ResponseParserError))


def refusal(error: BaseException, *, place: str, bucket: str, doing: str = "", reads: bool = False) -> Refusal:
    """What to say of an error.

    Args:
        error: what s3fs raised.
        place: the store, in words.
        bucket: its name.
        doing: what was tried: write, read or delete; empty where it does not matter.
        reads: whether reading was seen to work.

    Returns:
        blobs_unreachable with the cause, or no_space. Never a key, a token or a signature.
    """
    if isinstance(error, Refusal):
        return error
    code = code_of(error)
    if code in _FULL:
        return Refusal(
            "no_space", f"{place} takes no more ({code}); nothing was lost", hint="give the bucket more room"
        )
    sentence, hint = _cause(error, code, bucket=bucket, doing=doing, reads=reads)
    return Refusal("blobs_unreachable", f"{place}: {sentence}", hint=hint)


def _cause(error: BaseException, code: str, *, bucket: str, doing: str, reads: bool) -> tuple[str, str]:
    if code == "NoSuchBucket":
        return f"the bucket {bucket} does not exist there", "create it, or correct the setting blobs"
    if code in _LOGIN:
        return (
            f"the login is refused ({code})",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of this process to a login that the server knows",
        )
    if code in DENIED:
        said = {"write": "written", "read": "read", "delete": "deleted"}.get(doing)
        what = f"nothing may be {said} with this login" if said else "the login may not do this"
        what += ", it may only read" if reads and doing == "write" else ""
        return (
            f"{what} ({code}, {_answered(error).operation_name})",
            "allow the login to list, read, write and delete in this bucket",
        )
    if code == "RequestTimeTooSkewed":
        return (
            f"this machine's clock, {datetime.now(UTC):%Y-%m-%dT%H:%MZ}, is too far from the server's",
            "set the clock of this machine or of the server, best by NTP",
        )
    if code in _REGION:
        return f"the bucket {bucket} is in another region ({code})", "set AWS_DEFAULT_REGION to the bucket's region"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ProfileNotFound):
        return (
            "there are no credentials on this machine",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another of the standard AWS ways",
        )
    if isinstance(error, boto.SSLError):
        return f"no trusted connection: {error}", "check the certificate; AWS_CA_BUNDLE names your own authority's"
    if code.isdecimal() or isinstance(error, ResponseParserError):
        return (
            f"what answers is no S3 server{f' (HTTP {code})' if code else ''}",
            "correct the setting blobs_endpoint: the address of the S3 service, not of its pages",
        )
    if isinstance(error, _LOST):
        return f"no answer ({type(error).__name__})", "check that the server runs and the setting blobs_endpoint"
    return f"{code or type(error).__name__}: {error}"[:500], "see the server's log"
