"""The Python client: a connection (`Client`), and what each actor does with it. Core dependencies only."""

from acclimate.client.connection import Client
from acclimate.client.custodian import acknowledge, answer, inspect, release, send
from acclimate.client.entrant import enter_round, submission_status, submit, withdraw
from acclimate.client.folder import Account, load_account, register_account
from acclimate.client.organizer import (
    create_round,
    enter_baseline,
    extend,
    publish,
    seal_round,
    submitted_baselines,
    void,
)
from acclimate.client.public_files import download as download_public_files
from acclimate.client.voiding import approve_void, void_together

__all__ = [
    "Account",
    "Client",
    "acknowledge",
    "answer",
    "approve_void",
    "create_round",
    "download_public_files",
    "enter_baseline",
    "enter_round",
    "extend",
    "inspect",
    "load_account",
    "publish",
    "register_account",
    "release",
    "seal_round",
    "send",
    "submission_status",
    "submit",
    "submitted_baselines",
    "void",
    "void_together",
    "withdraw",
]
