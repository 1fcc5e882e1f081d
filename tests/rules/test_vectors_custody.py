"""Splitting and recovering against another implementation of the same field: that of SLIP-39's reference."""

import itertools
import random

import pytest
from shamir_mnemonic.shamir import RawShare, _interpolate

from acclimate import custody


@pytest.mark.parametrize(("k", "n"), [(1, 1), (2, 2), (2, 3), (3, 5), (5, 8), (9, 16)])
def test_the_interpolation_of_slip_39_recovers_what_we_split(k: int, n: int) -> None:
    draw = random.Random(k * 100 + n)
    secret = draw.randbytes(32)
    shares = custody.split(secret, k=k, n=n, random=draw.randbytes)
    raw = [RawShare(x, value) for x, value in enumerate(shares, start=1)]
    for chosen in itertools.islice(itertools.combinations(raw, k), 40):
        assert _interpolate(chosen, 0) == secret
        points = {share.x: share.data for share in chosen}
        for x in (0, 1, n, 17, 254, 255):
            assert custody.interpolate(points, x) == _interpolate(chosen, x)
    if k > 1:
        assert _interpolate(raw[: k - 1], 0) != secret


def test_any_points_are_interpolated_alike() -> None:
    draw = random.Random(5)
    for _ in range(40):
        points = {x: draw.randbytes(4) for x in draw.sample(range(1, 256), draw.randrange(1, 12))}
        raw = [RawShare(x, value) for x, value in points.items()]
        x = draw.randrange(256)
        assert custody.interpolate(points, x) == _interpolate(raw, x)
