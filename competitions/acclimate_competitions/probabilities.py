"""Losses of the probabilities that log-likelihoods stand for (their softmax), the same on every machine.

Exponentials and logarithms of C libraries differ in the last place, and a ranking is recomputed by strangers to the byte. So a loss is rounded to PLACES
decimals, and where the libraries' errors could tip that, it is computed again in decimal arithmetic, whose exponentials are rounded correctly.
"""

import decimal
import math
from collections.abc import Callable, Sequence

PLACES = 10
"""Decimals of a loss."""
LARGEST_LOG_LOSS = 36.0436533891
"""Nats: −ln 2⁻⁵², as scikit-learn clips. A certainty that is wrong costs that, not infinitely much."""
_ERROR = 1e-14
"""More than what the C library's exponentials, logarithms and the sums may be off, for each choice."""
_EXACT = decimal.Context(prec=50)


def log_loss(logarithms: Sequence[float], right: int) -> float:
    """−ln of the right answer's probability, at most LARGEST_LOG_LOSS; at least two logarithms, all finite."""
    apart = _apart(logarithms)
    if -apart[right] > 2 * LARGEST_LOG_LOSS:
        return LARGEST_LOG_LOSS

    def by_floats() -> float:
        return math.log(math.fsum(map(math.exp, apart))) - apart[right]

    def exactly() -> decimal.Decimal:
        whole = sum(decimal.Decimal(one).exp() for one in apart)
        return decimal.Decimal(whole).ln() - decimal.Decimal(apart[right])

    return min(_rounded(by_floats(), exactly, count=len(apart)), LARGEST_LOG_LOSS)


def brier(logarithms: Sequence[float], right: int) -> float:
    """Squared distance of the probabilities from the right answer's certainty, from 0 to 2; at least two logarithms, all finite."""
    apart = _apart(logarithms)

    def by_floats() -> float:
        parts = [math.exp(one) for one in apart]
        whole = math.fsum(parts)
        return math.fsum((part / whole - (place == right)) ** 2 for place, part in enumerate(parts))

    def exactly() -> decimal.Decimal:
        parts = [decimal.Decimal(max(one, -1000.0)).exp() for one in apart]
        whole = sum(parts)
        squares = ((part / whole - (1 if place == right else 0)) ** 2 for place, part in enumerate(parts))
        return decimal.Decimal(sum(squares))

    return _rounded(by_floats(), exactly, count=len(apart))


def _apart(logarithms: Sequence[float]) -> list[float]:
    """Differences to the largest: each is the rounded one of two doubles, on every machine."""
    most = max(logarithms)
    return [one - most for one in logarithms]


def _rounded(value: float, exactly: Callable[[], decimal.Decimal], *, count: int) -> float:
    scaled = abs(value) * 10**PLACES
    if abs(scaled - math.floor(scaled) - 0.5) > (count + 10) * _ERROR * 10**PLACES:
        return abs(round(value, PLACES))
    with decimal.localcontext(_EXACT):
        return abs(float(exactly().quantize(decimal.Decimal(1).scaleb(-PLACES), rounding=decimal.ROUND_HALF_EVEN)))
