"""The seal: what is opened is what was sealed, to the bit, or nothing is opened at all."""

import base64
import hashlib
import json
import resource
import secrets
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyrage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import archive, blocks, custody, sealing
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

VECTORS = Path(__file__).parents[1] / "vectors"
ROUND = "digits-spring-0123456789abcdef0123456789abcdef"
PEOPLE = [pyrage.x25519.Identity.generate() for _ in range(3)]
RECIPIENTS = [
    sealing.Recipient(name, str(identity.to_public()))
    for name, identity in zip(("ada", "bob", "eve"), PEOPLE, strict=True)
]
MIB = 1 << 20


def table(name, count, *, size=0):
    return pa.table(
        {
            "example": [f"{name}-{i}" for i in range(count)],
            "input": [f"question {i} " + secrets.token_hex(size) for i in range(count)],
            "target": [str(i % 10) for i in range(count)],
        }
    )


def holdout(folder, *, size=0, count=20):
    files = {}
    for name in ("parity", "digit"):
        files[f"{name}.parquet"] = folder / f"{name}.source.parquet"
        pq.write_table(table(name, count, size=size), files[f"{name}.parquet"], compression="none")
    return files


def sealed(folder, files=None, **changes):
    files = holdout(folder) if files is None else files
    return sealing.seal(files, folder / "holdout.sealed", round_id=ROUND, recipients=RECIPIENTS, k=2, **changes)


def secret_of(result, *, rehearsal=False):
    of = custody.Split(ROUND, result.fields["seal"], 2, len(PEOPLE), rehearsal)
    shares = [
        of.read(custody.open_envelope(envelope, str(identity), share=share, of=of))
        for envelope, identity, share in zip(result.envelopes, PEOPLE, result.fields["shares"], strict=True)
    ]
    return custody.recover(shares[1:])


def open_(folder, result, **changes):
    arguments = {"round_id": ROUND, "fields": result.fields} | changes
    secret = arguments.pop("secret", None) or secret_of(result)
    return sealing.open_(folder / "holdout.sealed", secret, folder / "out", **arguments)


def refused(folder, result, *, match, code="seal_mismatch", **changes):
    """The opening is refused, and leaves nothing behind."""
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(Refusal, match=match) as caught:
        open_(folder, result, **changes)
    assert caught.value.code == code
    assert sorted(path.name for path in folder.iterdir()) == before


# ---- the whole way -------------------------------------------------------------------------------------------------


def test_what_is_opened_is_what_was_sealed(tmp_path):
    files = holdout(tmp_path)
    result = sealed(tmp_path, files)
    opened = open_(tmp_path, result)
    assert opened.files == {name: digests.of_file(path) for name, path in sorted(files.items())}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        name: path.read_bytes() for name, path in files.items()
    }
    assert opened.row_root == result.fields["row_root"] == sealing.row_root(files, opened.row_key)
    assert opened.fields == {"key": opened.key, "plaintext": opened.plaintext, "row_root": opened.row_root}
    assert opened.plaintext == digests.of_bytes(b"".join(archive.write(files, opened.row_key)))


def test_the_fields_are_those_of_the_record_and_hold_what_the_ciphertext_measures(tmp_path):
    result = sealed(tmp_path)
    data = (tmp_path / "holdout.sealed").read_bytes()
    fields = result.fields
    assert set(fields) == {"seal", "format", "size", "ciphertext", "block_root", "rows", "row_root", "shares"}
    assert (fields["size"], fields["ciphertext"], fields["rows"]) == (len(data), digests.of_bytes(data), 40)
    assert [(share["index"], share["to"]) for share in fields["shares"]] == [(1, "ada"), (2, "bob"), (3, "eve")]
    assert sealing.check_ciphertext(tmp_path / "holdout.sealed", fields).block_root == fields["block_root"]
    records.check_fields("HoldoutSealed", fields, signed=True)


def test_neither_the_secret_nor_a_share_nor_a_row_is_left_in_clear(tmp_path):
    files = holdout(tmp_path)
    drawn = []

    def random(count):
        drawn.append(secrets.token_bytes(count))
        return drawn[-1]

    result = sealed(tmp_path, files, random=random)
    row_key, seal_id, secret, *_ = drawn
    assert secret_of(result) == secret
    assert result.fields["seal"] == "sha256:" + seal_id.hex()
    shares = custody.split(secret, k=2, n=3, random=lambda _: drawn[3])
    left = repr(result) + json.dumps([result.fields, result.envelopes])
    public = (tmp_path / "holdout.sealed").read_bytes() + left.encode()
    for hidden in (secret, row_key, *shares, b"question 7"):
        for form in (hidden, hidden.hex().encode(), base64.b64encode(hidden), repr(hidden)[2:-1].encode()):
            assert form not in public


def test_two_seals_of_the_same_holdout_have_nothing_in_common(tmp_path):
    files = holdout(tmp_path)
    one, two = sealed(tmp_path, files), sealed(tmp_path, files)
    for name in ("seal", "ciphertext", "block_root", "row_root"):
        assert one.fields[name] != two.fields[name]


def test_opening_again_over_the_same_files_is_harmless_and_over_others_refused(tmp_path):
    result = sealed(tmp_path)
    first = open_(tmp_path, result)
    assert open_(tmp_path, result) == first
    (tmp_path / "out" / "digit.parquet").write_bytes(b"other")
    refused(tmp_path, result, match="holds something else", code="conflict")
    assert (tmp_path / "out" / "digit.parquet").read_bytes() == b"other"


def test_a_rehearsal_is_a_seal_like_any_other_but_for_the_type_of_its_shares(tmp_path):
    files = sealing.rehearsal_files(tmp_path)
    result = sealed(tmp_path, files, rehearsal=True)
    with pytest.raises(Refusal, match="is a RehearsalShare, and only a Share"):
        secret_of(result)
    secret = secret_of(result, rehearsal=True)
    assert open_(tmp_path, result, secret=secret).files == {
        "rehearsal.parquet": digests.of_file(files["rehearsal.parquet"])
    }


# ---- cheats and accidents ------------------------------------------------------------------------------------------


def test_a_key_of_other_shares_another_round_and_another_seal_open_nothing(tmp_path):
    result = sealed(tmp_path)
    refused(tmp_path, result, match="does not decrypt", secret=bytes(32))
    refused(tmp_path, result, match="does not decrypt", round_id="another-round")
    refused(tmp_path, result, match="does not decrypt", fields=result.fields | {"seal": "sha256:" + "00" * 32})
    refused(tmp_path, result, match="holds a NUL", code="record_invalid", round_id="digits\0x")
    refused(
        tmp_path, result, match="format 'acclimate/seal/v9'", fields=result.fields | {"format": "acclimate/seal/v9"}
    )


def test_a_changed_ciphertext_is_refused_and_the_place_is_named(tmp_path):
    result = sealed(tmp_path, holdout(tmp_path, size=4096, count=180))
    path = tmp_path / "holdout.sealed"
    good = path.read_bytes()
    assert len(good) > 2 * MIB
    places = [
        (0, 0),
        (23, 0),
        (24, 0),
        (55, 0),
        (56, 0),
        (16456, 0),
        (MIB + 50_000, 1),
        (2 * MIB + 20_000, 2),
        (len(good) - 1, len(good) // MIB),
    ]
    for offset, block in places:
        changed = bytearray(good)
        changed[offset] ^= 1
        path.write_bytes(changed)
        refused(tmp_path, result, match=rf"digest .* the seal's record says .*\(block {block}\)")
        hashes = [digests.leaf_hash(good[i : i + MIB]) for i in range(0, len(good), MIB)]
        assert blocks.bad_blocks(path, hashes, block_root=result.fields["block_root"]) == [offset // MIB]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9))
def test_a_flipped_bit_anywhere_in_a_ciphertext_is_refused(shared_seal, place):
    folder, result, secret, good = shared_seal
    changed = bytearray(good)
    bit = place % (len(good) * 8)
    changed[bit // 8] ^= 1 << bit % 8
    (folder / "holdout.sealed").write_bytes(changed)
    refused(folder, result, match="digest", secret=secret)
    # and where the record was mended to agree with the change
    refused(folder, result, match="does not decrypt.*block 0", secret=secret, fields=result.fields | mended(folder))


@pytest.fixture(scope="module")
def shared_seal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seal")
    result = sealed(folder)
    return folder, result, secret_of(result), (folder / "holdout.sealed").read_bytes()


def mended(folder):
    found = blocks.measure(folder / "holdout.sealed")
    return {"size": found.size, "ciphertext": found.digest, "block_root": found.block_root}


def test_a_ciphertext_cut_off_or_grown_is_refused_at_each_boundary(tmp_path):
    result = sealed(tmp_path, holdout(tmp_path, size=1024))
    path, secret = tmp_path / "holdout.sealed", secret_of(result)
    good = path.read_bytes()
    chunk = 16400
    for cut in (
        0,
        1,
        23,
        24,
        55,
        56,
        57,
        72,
        56 + chunk - 1,
        56 + chunk,
        56 + chunk + 15,
        56 + 2 * chunk,
        len(good) - 1,
    ):
        path.write_bytes(good[:cut])
        refused(tmp_path, result, match=rf"size {cut}, the seal's record says {len(good)}", secret=secret)
        refused(tmp_path, result, match="does not decrypt", secret=secret, fields=result.fields | mended(tmp_path))
    for more in (b"\0", good[56 : 56 + chunk], good):
        path.write_bytes(good + more)
        refused(tmp_path, result, match="size", secret=secret)
        refused(tmp_path, result, match="does not decrypt", secret=secret, fields=result.fields | mended(tmp_path))
    path.write_bytes(good[:56] + good[56 + chunk : 56 + 2 * chunk] + good[56 : 56 + chunk] + good[56 + 2 * chunk :])
    refused(tmp_path, result, match="does not decrypt", secret=secret, fields=result.fields | mended(tmp_path))


def test_rows_other_than_those_committed_to_are_refused_with_what_was_found(tmp_path):
    result = sealed(tmp_path)
    other = "sha256:" + "00" * 32
    refused(
        tmp_path,
        result,
        match="40 rows with root .* 41 rows .*digit.parquet 20, parity.parquet 20",
        fields=result.fields | {"rows": 41},
    )
    refused(
        tmp_path, result, match=f"sealed were 40 rows with root {other}", fields=result.fields | {"row_root": other}
    )


def test_a_true_key_over_what_is_no_archive_is_refused(tmp_path):
    result = sealed(tmp_path)
    secret, seal = secret_of(result), result.fields["seal"]
    encryptor = sealing.Cobblestone256Encryptor(sealing.cipher_key(secret, seal), sealing._context(ROUND, seal))
    (tmp_path / "holdout.sealed").write_bytes(encryptor.update(b"PAR1" * 1000) + encryptor.finalize())
    refused(tmp_path, result, match="does not begin with row_key", fields=result.fields | mended(tmp_path))


def test_a_missing_ciphertext_is_named(tmp_path):
    result = sealed(tmp_path)
    (tmp_path / "holdout.sealed").unlink()
    refused(tmp_path, result, match="holdout.sealed", code="file_unreadable")


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    files = holdout(tmp_path, size=4096)
    result = sealed(tmp_path, files)
    secret = secret_of(result)
    before = sorted(path.name for path in tmp_path.iterdir())
    good = (tmp_path / "holdout.sealed").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # the kernel refuses longer files
    try:
        for act in (lambda: sealed(tmp_path, files), lambda: open_(tmp_path, result, secret=secret)):
            with pytest.raises(Refusal) as caught:
                act()
            assert caught.value.code == "no_space"
            assert sorted(path.name for path in tmp_path.iterdir()) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert (tmp_path / "holdout.sealed").read_bytes() == good
    open_(tmp_path, result, secret=secret)


def test_a_seal_that_is_killed_has_no_name_and_the_next_one_has(tmp_path):
    files = holdout(tmp_path, size=16_384, count=400)
    program = (
        "import pathlib, sys; from acclimate import sealing; folder = pathlib.Path(sys.argv[1]);"
        "files = {f'{n}.parquet': folder / f'{n}.source.parquet' for n in ('parity', 'digit')};"
        "print('ready', flush=True);"
        f"sealing.seal(files, folder / 'holdout.sealed', round_id='r', k=1, recipients=[sealing.Recipient('a', '{RECIPIENTS[0].age}')])"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while process.poll() is None and not list(tmp_path.glob(".*.draft")):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "holdout.sealed").exists() or process.returncode == 0
    open_(tmp_path, sealed(tmp_path, files))


def test_holdouts_that_can_not_be_sealed_are_refused_before_anything_is_written(tmp_path):
    good = holdout(tmp_path)["digit.parquet"]
    text = tmp_path / "text.source"
    text.write_text("no parquet")
    empty = tmp_path / "empty.source"
    pq.write_table(table("x", 0), empty)
    before = sorted(path.name for path in tmp_path.iterdir())
    for files, why in [
        ({}, "at least one Parquet file"),
        ({"a.parquet": empty}, "no rows"),
        ({"a.parquet": text}, "not a readable Parquet file"),
        ({"a.parquet": tmp_path / "nowhere"}, "nowhere"),
        ({"notes.txt": text, "a.parquet": good}, "neither a Parquet file nor a blob"),
        ({"../a.parquet": good}, "can't be a file of a holdout"),
        ({"row_key": good}, "can't be a file of a holdout"),
        ({"a.parquet": good, "A.parquet": good}, "same name"),
        ({"a.parquet": good, "a.parquet/b.parquet": good}, "same name"),
    ]:
        with pytest.raises(Refusal, match=why) as caught:
            sealed(tmp_path, files)
        assert caught.value.code in ("splits_invalid", "file_unreadable")
    with pytest.raises(Refusal) as caught:
        sealing.seal({"a.parquet": good}, tmp_path / "s", round_id=ROUND, recipients=RECIPIENTS, k=4)
    assert caught.value.code == "definition_invalid"
    with pytest.raises(Refusal) as caught:
        sealing.seal(
            {"a.parquet": good}, tmp_path / "s", round_id=ROUND, recipients=[sealing.Recipient("a", "age1x")], k=1
        )
    assert caught.value.code == "key_refused"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# ---- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 17])
def test_the_block_root_is_that_of_the_blocks(tmp_path, size):
    path, data = tmp_path / "x", secrets.token_bytes(size)
    path.write_bytes(data)
    assert sealing.block_root(path) == digests.root_of_leaves(data[i : i + MIB] for i in range(0, size, MIB))
    with blocks.Tally() as tally:
        for start in range(0, size, 999_999):
            tally.feed(data[start : start + 999_999])
        assert tally.result() == blocks.measure(path)


def test_hashes_of_other_blocks_are_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"data")
    with pytest.raises(Refusal) as caught:
        blocks.bad_blocks(tmp_path / "x", [bytes(32)], block_root=sealing.block_root(tmp_path / "x"))
    assert caught.value.code == "seal_mismatch"


# ---- cipher vectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", json.loads((VECTORS / "chunked-encryption.json").read_text())["cases"], ids=lambda c: str(c["case"])
)
def test_the_cipher_vectors_of_wycheproof_hold(tmp_path, case):
    path = tmp_path / "ciphertext"
    path.write_bytes(zlib.decompress(bytes.fromhex(case["ciphertext"])))
    key, context, state = bytes.fromhex(case["key"]), bytes.fromhex(case["context"]), hashlib.sha256()
    if case["valid"]:
        plain = b"".join(sealing._decrypt(path, key, context, state=state))
        assert (len(plain), hashlib.sha512(plain).hexdigest()) == (case["length"], case["sha512"])
        assert state.digest() == hashlib.sha256(plain).digest()
    else:
        with pytest.raises((Refusal, ValueError)) as caught:
            list(sealing._decrypt(path, key, context, state=state))
        # Only a key of another length is no refusal: ours has 32 bytes always.
        assert isinstance(caught.value, Refusal) == (len(key) == 32)


def test_blobs_that_rows_name_are_sealed_with_them_and_others_refused(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(b"pixels")
    digest = digests.of_file(image)
    pq.write_table(
        pa.table({"image": [{"sha256": digest, "size": 6}, None], "target": ["a", "b"]}), tmp_path / "rows.source"
    )
    name = "blobs/" + digest.removeprefix("sha256:")
    files = {"rows.parquet": tmp_path / "rows.source", name: image}
    result = sealed(tmp_path, files)
    assert open_(tmp_path, result).files[name] == digest
    for changed, why in [
        ({"rows.parquet": tmp_path / "rows.source"}, "is missing"),
        (files | {"blobs/" + "0" * 64: image}, "neither a Parquet file nor a blob"),
        (files | {name: tmp_path / "rows.source"}, "its row says 6"),
    ]:
        with pytest.raises(Refusal, match=why):
            sealed(tmp_path, changed)
