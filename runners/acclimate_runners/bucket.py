"""Requests to a bucket: begun on one thread, made again where they fail in passing, errors told as refusals; the only module with s3fs.

s3fs is used request by request, below its file system, whose listings are cached: what another process stores is visible at once.
Requests that time out, find nobody or end in a 5xx are made again, with growing pauses: none is begun after a minute, and none lasts longer
than five minutes after the first was begun. Connections belong to a process: a forked child makes its own.
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import s3fs

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import s3_answers
from acclimate_runners.blobs import unknown

_ATTEMPTS, _LONGEST_TRYING, _LONGEST = 5, 60.0, 300.0
_Result = TypeVar("_Result")
_clients: dict[tuple[object, ...], Any] = {}
_making = threading.Lock()
# The environment's part of a login; with another one another connection is made.
_LOGIN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
_CONFIG: dict[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 30,
    "max_pool_connections": 64,
    # Tries are made here, so that they are bounded together, and so that reading a body counts as part of the request.
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    # Servers other than Amazon's don't all know the newer checksums; the signed sha256 of each request's body is checked by all.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": True},
}


@dataclass(frozen=True)
class Bucket:
    """A bucket, or the part of it below a prefix.

    Attributes:
        name: of the bucket, which exists.
        prefix: before each key; empty, or ending in a slash.
        endpoint: address of the server; empty for what the AWS environment says.
    """

    name: str
    prefix: str
    endpoint: str

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/") + (f" at {self.endpoint}" if self.endpoint else "")

    def key(self, digest: str) -> str:
        """The key of a blob.

        Raises:
            Refusal: blob_unknown, for text that is no digest.
        """
        if not digests.is_digest(digest):
            raise Refusal("blob_unknown", f"{digest!r} is not a digest", hint="sha256: and 64 lower-case hex digits")
        return f"{self.prefix}{digest[7:9]}/{digest[9:]}"

    def ask(self, method: str, *, digest: str = "", **arguments: Any) -> Any:
        """The answer to a request.

        Args:
            method: such as put_object.
            digest: of the blob that the request is about.
            arguments: of the request, besides the bucket.

        Raises:
            Refusal: blob_unknown, where there is no such blob; no_space, blobs_unreachable.
        """
        return self.wait(self.begin(lambda: self.call(method, **arguments)), digest)

    def begin(self, make: Callable[[], Awaitable[_Result]], *, attempts: int = _ATTEMPTS) -> "Future[_Result]":
        """Begin a request, on the thread that serves all of them."""
        return asyncio.run_coroutine_threadsafe(_patiently(make, attempts), _client(self.endpoint).loop)

    def wait(self, future: "Future[_Result]", digest: str = "") -> _Result:
        """The answer to a request that was begun; as `ask`."""
        try:
            return future.result()
        except Exception as error:
            if digest and s3_answers.code_of(error) == s3_answers.NO_KEY:
                raise unknown(digest) from error
            raise self.refusal(error) from error

    def refusal(self, error: Exception, **facts: Any) -> Refusal:
        """What to say of an error; see s3_answers.refusal."""
        return s3_answers.refusal(error, place=str(self), bucket=self.name, **facts)

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request, once; errors are those of s3fs."""
        return await _client(self.endpoint)._call_s3(method, Bucket=self.name, **arguments)

    async def copy(self, source: str, target: str, *, etag: str, **arguments: str) -> None:
        """Copy an object to another key, in parts where it is large; an error in THERE_ALREADY where it has another ETag."""
        one, other = f"{self.name}/{source}", f"{self.name}/{target}"
        await _client(self.endpoint)._cp_file(one, other, CopySourceIfMatch=etag, **arguments)

    async def range(self, key: str, begin: int, count: int, *, etag: str = "") -> tuple[bytes, int, str]:
        """Up to `count` bytes from `begin`, the size of the whole object, and its ETag.

        Args:
            key: of the object.
            begin: first byte.
            count: how many.
            etag: that it must have, or the server answers with an error in THERE_ALREADY.
        """
        only: dict[str, str] = {"IfMatch": etag} if etag else {}
        try:
            answer = await self.call("get_object", Key=key, Range=f"bytes={begin}-{begin + count - 1}", **only)
        except Exception as error:
            # An empty object has no byte 0.
            if begin == 0 and s3_answers.code_of(error) in ("InvalidRange", "416"):
                answer = await self.call("head_object", Key=key)
                if answer["ContentLength"]:
                    raise EOFError("the object is another one by now") from error
                return b"", 0, str(answer.get("ETag", ""))
            raise
        async with answer["Body"] as body:
            data = await body.read()
        whole = answer.get("ContentRange", "").rpartition("/")[2]
        total = int(whole) if whole.isdecimal() else len(data)
        if not whole and begin == 0:
            data = data[:count]
        if len(data) != min(count, total - begin):
            raise EOFError(f"{len(data)} bytes of {count} came")
        return data, total, str(answer.get("ETag", ""))

    def listed(self, method: str, what: str, *markers: str, **arguments: Any) -> Iterator[tuple[dict[str, Any], Any]]:
        """(item, the server's time) over all pages of a listing.

        Args:
            method: such as list_objects_v2.
            what: the answer's list, such as Contents.
            markers: arguments that the next page takes from the answer's Next…
            arguments: of the request, besides the bucket.

        Raises:
            Refusal: blobs_unreachable.
        """
        while True:
            page = self.ask(method, **arguments)
            now = s3_answers.time_of(page)
            for item in page.get(what) or []:
                yield item, now
            following = {marker: page.get("Next" + marker) for marker in markers}
            if not page.get("IsTruncated") or not any(following.values()):
                return
            arguments |= {marker: value for marker, value in following.items() if value}


async def _patiently(make: Callable[[], Awaitable[_Result]], attempts: int) -> _Result:
    began = time.monotonic()
    for number in range(attempts):
        try:
            # aiohttp has no bound of its own on a server that stops reading.
            return await asyncio.wait_for(make(), _LONGEST - (time.monotonic() - began))
        except Exception as error:
            late = time.monotonic() - began > _LONGEST_TRYING
            if number == attempts - 1 or late or not s3_answers.passing(error):
                raise
        await asyncio.sleep(0.2 * 2.5**number * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")


def _client(endpoint: str) -> Any:
    key = (os.getpid(), endpoint, *(os.environ.get(name) for name in _LOGIN))
    client = _clients.get(key)
    if client is None:
        with _making:
            client = _clients.get(key) or s3fs.S3FileSystem(
                endpoint_url=endpoint or None, config_kwargs=_CONFIG, use_listings_cache=False, skip_instance_cache=True
            )
            client.retries = 1
            _clients[key] = client
    return client
