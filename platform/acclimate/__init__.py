"""The platform: keeps the record and serves people. Core modules (client, custody, verify) need no extra."""

__version__ = "0.1.0"
