"""The log's proofs and signatures against published vectors, and own judged cases for whoever writes another implementation."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from acclimate import log, notes
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

VECTORS = Path(__file__).parents[1] / "vectors"
JUDGED = json.loads((VECTORS / "merkle-judged.json").read_text("utf-8"))
SIGNATURES = json.loads((VECTORS / "ed25519.json").read_text("utf-8"))["cases"]


def raw(value: Any) -> Any:
    return [raw(item) for item in value] if isinstance(value, list) else base64.b64decode(value, validate=True)


def test_own_judged_inclusion_proofs_hold_or_not_as_judged() -> None:
    for case in JUDGED["inclusion"]:
        known = {"index": case["index"], "size": case["size"], "root": raw(case["root"])}
        held = True
        try:
            log.verify_inclusion(raw(case["leaf"]), raw(case["proof"]), **known)
        except Refusal as refusal:
            assert refusal.code == "proof_invalid"
            held = False
        assert held == case["holds"], case["what"]


def test_own_judged_consistency_proofs_hold_or_not_as_judged() -> None:
    for case in JUDGED["consistency"]:
        known = {name: case[name] for name in ("first", "second")}
        known |= {name: raw(case[name]) for name in ("first_root", "second_root")}
        held = True
        try:
            log.verify_consistency(raw(case["proof"]), **known)
        except Refusal as refusal:
            assert refusal.code in ("proof_invalid", "log_inconsistent")
            held = False
        assert held == case["holds"], case["what"]


def test_own_judged_cases_are_many_and_of_both_kinds() -> None:
    for kind in ("inclusion", "consistency"):
        held = [case["holds"] for case in JUDGED[kind]]
        assert len(held) > 150 and 10 < sum(held) < len(held) - 100


# ---- signatures ----------------------------------------------------------------------------------------------------

TEXTS = [case for case in SIGNATURES if bytes.fromhex(case["message"]).isascii()]


def test_most_messages_of_wycheproof_are_texts() -> None:
    assert len(SIGNATURES) == 151
    assert len(TEXTS) > 75 and {case["valid"] for case in TEXTS} == {True, False}


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: str(case["case"]))
def test_the_signature_vectors_of_wycheproof_hold_for_notes(case: dict[str, Any]) -> None:
    key, signature, message = (bytes.fromhex(case[name]) for name in ("key", "signature", "message"))
    verifier = notes.Verifier("vector.example", notes.ED25519, key)
    if case["valid"]:
        assert verifier.verify(message.decode(), signature) is None
    else:
        with pytest.raises(Refusal) as refused:
            verifier.verify(message.decode(), signature)
        assert refused.value.code == "proof_invalid"


@pytest.mark.parametrize("case", [case for case in TEXTS if case["valid"]][:20], ids=lambda case: str(case["case"]))
def test_a_signature_of_a_text_is_no_cosignature_of_it(case: dict[str, Any]) -> None:
    key, signature, message = (bytes.fromhex(case[name]) for name in ("key", "signature", "message"))
    witness = notes.Verifier("vector.example", notes.COSIGNATURE, key)
    for time in (bytes(8), b"\xff" * 8):
        with pytest.raises(Refusal):
            witness.verify(message.decode(), time + signature)


# ---- examples of C2SP ----------------------------------------------------------------------------------------------

# c2sp.org/signed-note, its first example; c2sp.org/tlog-cosignature, its example, which begins with that of c2sp.org/tlog-checkpoint
NOTE = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
CHECKPOINT = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
)


def test_the_key_of_gos_note_package_opens_its_note() -> None:
    """The example that every implementation of signed notes has had since Go's."""
    verifier = log.parse_vkey("PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
    assert log.open_note(NOTE, [verifier]).text.startswith("If you think")
    assert log.parse_note(NOTE).encode() == NOTE
    with pytest.raises(Refusal):
        log.open_note(NOTE.replace("think", "thank"), [verifier])


def test_the_checkpoint_of_the_specification_is_read_and_written_the_same() -> None:
    parsed = log.parse_note(CHECKPOINT)
    assert parsed.encode() == CHECKPOINT
    checkpoint = log.parse_checkpoint(parsed.text)
    assert (checkpoint.origin, checkpoint.size) == ("example.com/behind-the-sofa", 20852163)
    assert checkpoint.body() == parsed.text


def test_a_receipt_is_the_specifications_proof_with_the_entry_in_its_extra_line() -> None:
    """c2sp.org/tlog-proof: header, extra, index, hashes, an empty line, the checkpoint verbatim."""
    hashes = [base64.b64encode(digests.leaf_hash(bytes([i]))).decode() for i in range(5)]
    text = "\n".join(["c2sp.org/tlog-proof@v1", "extra e30=", "index 73894", *hashes, "", CHECKPOINT])
    receipt = log.Receipt.parse(text)
    assert (receipt.index, receipt.entry, len(receipt.proof), receipt.checkpoint) == (73894, b"{}", 5, CHECKPOINT)
    assert receipt.text() == text
