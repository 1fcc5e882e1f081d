"""Fixtures that every journey may ask for; what starts a server starts it when the first test does."""

from buckets import s3_place
from commands import acclimate
from engines import database_url, postgresql, postgresql_url

__all__ = ["acclimate", "database_url", "postgresql", "postgresql_url", "s3_place"]
