"""What a request's body may hold: one model an action, nothing extra, nothing converted.

A signed request is checked for its form here, so that a malformed one is answered with all its problems; what it means is
decided by the services and by rounds.py.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from acclimate_competitions import records, vkeys

Text = Annotated[str, Field(max_length=vkeys.LONGEST)]
Long = Annotated[str, Field(max_length=2000)]
Id = Annotated[
    str, Field(max_length=records.LONGEST_ROUND_ID, examples=["digits-2027-1-0123456789abcdef0123456789abcdef"])
]
DigestText = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", examples=["sha256:" + "0" * 64])]
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$", description="Ed25519 public key, base64 of 32 bytes")]
Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{86}==$", description="Ed25519 signature, base64 of 64 bytes")]
Moment = Annotated[
    str,
    Field(
        pattern=r"^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}\.[0-9]{6}Z$", examples=["2027-03-01T00:00:00.000000Z"]
    ),
]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Base64 = Annotated[str, Field(max_length=200_000, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class Strict(BaseModel):
    """A body that takes exactly its fields, each of exactly its type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def sent(self) -> dict[str, Any]:
        """What was sent, and nothing besides."""
        return self.model_dump(exclude_unset=True)


class Registration(Strict):
    """A new account."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "team-a",
                    "role": "entrant",
                    "ed25519": "A" * 43 + "=",
                    "proof": "A" * 86 + "==",
                    "challenge": "2027-03-01T00:00:00.000000Z." + "A" * 43,
                }
            ]
        }
    )

    name: Annotated[str, Field(max_length=200, description="the account's id for good")]
    role: Literal["organizer", "entrant", "custodian", "auditor", "analyst"]
    ed25519: Key
    proof: Annotated[
        Signature,
        Field(description='over "acclimate/account/v2\\n" and canonical {name, role, ed25519, log, challenge}'),
    ]
    challenge: Annotated[Text | None, Field(description="what `GET /v1/server` gave less than five minutes ago")] = None
    invitation: Text | None = None


Fields = TypeVar("Fields")


class Signed(Strict, Generic[Fields]):
    """A signed request: the record without its receipt time, which the server sets."""

    type: str
    round: Id
    fields: Fields
    by: Key
    sig: Signature


class Custodian(Strict):
    """A custodian in RoundDefined."""

    name: Text
    age: Text
    ed25519: Key
    backup: Text | None


class Organizer(Strict):
    """The organizer in RoundDefined."""

    name: Text = ""
    ed25519: Key


class Auditor(Strict):
    """The auditor in RoundDefined."""

    name: Text
    ed25519: Key
    draw: DigestText


class RoundFields(Strict):
    """Fields of RoundDefined."""

    competition: Text
    name: Text
    definition: DigestText
    files: Annotated[dict[Text, DigestText], Field(max_length=1000)]
    recipe: DigestText
    scorer: DigestText
    policy: DigestText
    code: DigestText
    opens: Moment
    closes: Moment
    closes_latest: Moment
    grace: Count
    release_by: Moment
    k: Count
    custodians: Annotated[list[Custodian], Field(min_length=1, max_length=255)]
    log: Text
    witnesses: Annotated[list[Text], Field(max_length=100)]
    quorum: Count
    organizer: Organizer
    evaluators: Annotated[list[Key], Field(min_length=1, max_length=20)]
    predecessor: Id | None = None
    auditor: Auditor | None = None
    id_digits: Literal[32] | None = None


class RoundDefined(Signed[RoundFields]):
    """Begin a round."""

    type: Literal["RoundDefined"]


class Share(Strict):
    """A share in HoldoutSealed."""

    index: Count
    to: Text
    commitment: DigestText
    envelope: DigestText


class SealFields(Strict):
    """Fields of HoldoutSealed."""

    seal: DigestText
    format: Text
    size: Count
    ciphertext: DigestText
    block_root: DigestText
    rows: Count
    row_root: DigestText
    shares: Annotated[list[Share], Field(min_length=1, max_length=255)]


class HoldoutSealed(Signed[SealFields]):
    """Seal the holdout."""

    type: Literal["HoldoutSealed"]


class Envelope(Strict):
    """A custodian's share document as age files, base64."""

    index: Count
    to: Text
    main: Base64
    backup: Base64 | None


Envelopes = Annotated[list[Envelope], Field(min_length=1, max_length=255)]


class Sealing(Strict):
    """The signed seal and the custodians' envelopes."""

    record: HoldoutSealed
    envelopes: Envelopes


class Rehearsal(Strict):
    """A dummy seal, and its envelopes."""

    fields: SealFields
    envelopes: Envelopes


class RehearsalShare(Strict):
    """A custodian's share document of the dummy seal."""

    index: Count
    document: Base64


class AcknowledgementFields(Strict):
    """Fields of ShareAcknowledged."""

    seal: DigestText
    index: Count
    commitment: DigestText


class ShareAcknowledged(Signed[AcknowledgementFields]):
    """A custodian could decrypt its share."""

    type: Literal["ShareAcknowledged"]


class ExtensionFields(Strict):
    """Fields of ClosingExtended."""

    closes: Moment


class ClosingExtended(Signed[ExtensionFields]):
    """Move the closing time later."""

    type: Literal["ClosingExtended"]


class EntrantFields(Strict):
    """Fields of EntrantRegistered."""

    entrant: Text
    ed25519: Key
    conflicts: Annotated[list[Text], Field(max_length=50)]


class EntrantRegistered(Signed[EntrantFields]):
    """Register for a round."""

    type: Literal["EntrantRegistered"]


class CommitmentFields(Strict):
    """Fields of the records about a submission."""

    entrant: Text
    commitment: DigestText


class SubmissionCommitted(Signed[CommitmentFields]):
    """Commit to a submission."""

    type: Literal["SubmissionCommitted"]


class SubmissionAccepted(Signed[CommitmentFields]):
    """Logged by the server once the model has passed its check."""

    type: Literal["SubmissionAccepted"]


class SubmissionWithdrawn(Signed[CommitmentFields]):
    """Withdraw a submission."""

    type: Literal["SubmissionWithdrawn"]


class Submission(Strict):
    """A submission: both signed requests, and what opens the commitment."""

    committed: SubmissionCommitted
    accepted: SubmissionAccepted
    nonce: Annotated[str, Field(max_length=44, description="base64 of 32 random bytes")]
    # The manifest is checked as a whole, so that all of its problems are told at once.
    manifest: dict[str, Any]


class ReleaseFields(Strict):
    """Fields of ShareReleased."""

    seal: DigestText
    index: Count
    document: DigestText


class ShareReleased(Signed[ReleaseFields]):
    """Release a share."""

    type: Literal["ShareReleased"]


class Release(Strict):
    """The signed release and the share document."""

    record: ShareReleased
    document: Base64


class RankingFields(Strict):
    """Fields of RankingPublished."""

    ranking: DigestText
    policy: DigestText
    reason: Long


class RankingPublished(Signed[RankingFields]):
    """Publish the ranking."""

    type: Literal["RankingPublished"]


class Publication(Strict):
    """The signed publication and the ranking it names."""

    record: RankingPublished
    ranking: dict[str, Any]


class RevisionFields(RankingFields):
    """Fields of RankingRevised."""

    correction: DigestText


class RankingRevised(Signed[RevisionFields]):
    """A new version of the ranking."""

    type: Literal["RankingRevised"]


class Revision(Strict):
    """The signed revision, the ranking and the correction that it names."""

    record: RankingRevised
    ranking: dict[str, Any]
    correction: dict[str, Any]


class Approval(Strict):
    """A custodian's signature under RoundVoided."""

    by: Key
    sig: Signature


class VoidFields(Strict):
    """Fields of RoundVoided."""

    reason: Long
    predecessor: Id | None = None
    phase: Annotated[str, Field(max_length=16, description="the phase that the round is in")] | None = None
    approvals: Annotated[list[Approval], Field(max_length=255)] = []


class RoundVoided(Signed[VoidFields]):
    """Void a round."""

    type: Literal["RoundVoided"]


class DrawFields(Strict):
    """Fields of AuditDrawn."""

    secret: Annotated[str, Field(max_length=44, description="base64 of 32 bytes; their digest is RoundDefined's draw")]


class AuditDrawn(Signed[DrawFields]):
    """Draw the preparations to make again."""

    type: Literal["AuditDrawn"]


class AuditFields(Strict):
    """Fields of PreparationAudited."""

    submission: Count
    task: Text
    seed: Count
    prepared: DigestText | None
    agrees: bool
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False, description="in nats; 0: equal bytes")]
    hardware: Text
    reason: Long


class PreparationAudited(Signed[AuditFields]):
    """What came of a drawn re-run."""

    type: Literal["PreparationAudited"]


class CheckCounts(Strict):
    """How many lines of an audit were ok, FAILED, NOT CHECKED."""

    ok: Count
    failed: Count
    not_checked: Count


class ReportFields(Strict):
    """Fields of RoundAudited."""

    bundle: DigestText
    ranking: DigestText
    checks: CheckCounts


class RoundAudited(Signed[ReportFields]):
    """What the round's auditor found in the whole bundle."""

    type: Literal["RoundAudited"]


class Retries(Strict):
    """Which blocked stages to try again; none named: all of the round."""

    stages: Annotated[list[DigestText], Field(max_length=10_000)] = []


class GivenUp(Strict):
    """Which blocked stages to try no more, and why: everybody will read it."""

    stages: Annotated[list[DigestText], Field(min_length=1, max_length=10_000)]
    reason: Annotated[
        str, Field(max_length=1000, examples=["its tokenizer crashes on the holdout's texts, on two machines"])
    ]
