"""Signed steps: what a key did not sign does not count, whatever its checksums say."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest

from megajax.checkpoint import offline, trust
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.steps import METADATA, StepFolder
from megajax.checkpoint.trust import RECORD, CheckpointError, DamagedError, Keys

X = {"x": np.arange(40_000, dtype=np.float32), "y": np.ones(3, np.int8)}
ONE, TWO = "1" * 64, "2" * 64


def key_file(place, *lines, mode=0o600):
    path = place / f"key{len(list(place.glob('key*')))}"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(a folder with a signed step 1 and a signed step 2, the key)."""
    place = tmp_path_factory.mktemp("signed")
    key = key_file(place, ONE)
    manager = CheckpointManager(place / "c", key_file=key)
    for step in (1, 2):
        manager.save(step, X, data_state={"rows": step})
    manager.close()
    return place / "c", key


@pytest.fixture
def folder(stored, tmp_path):
    shutil.copytree(stored[0], tmp_path / "c")
    return tmp_path / "c"


def mend(folder, keys=None):
    """Makes a record that fits the files of step 2, as one who can write there would."""
    old = trust.read_record(folder / "2")
    names = trust.list_files(folder / "2")
    files = trust.sum_files(folder / "2", names, None, names)
    record = dataclasses.replace(old, files=files)
    signature = keys.sign(record.text().encode()) if keys else old.signature
    (folder / "2" / RECORD).write_text(trust.seal_text(record.text(), signature))


def payload(folder):
    return max((folder / "2").rglob("d/*"), key=lambda p: p.stat().st_size)


def edit(path, place=-4):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def test_what_was_signed_comes_back_with_the_key_and_without(folder, stored, caplog):
    manager = CheckpointManager(folder, key_file=stored[1])
    assert manager.latest() == 2 and manager.data_state(2) == {"rows": 2}
    np.testing.assert_array_equal(manager.restore(like=X)["x"], X["x"])
    manager.verify(2)
    assert not caplog.records
    other = CheckpointManager(folder)
    np.testing.assert_array_equal(other.restore(2, like=X)["x"], X["x"])
    other.restore(1, like=X)
    assert caplog.text.count("are signed, and not checked without (--checkpoint.key_file)") == 1


def forge_leaf(folder, stored):
    edit(payload(folder))
    mend(folder)
    assert trust.find_damage(folder / "2", trust.read_record(folder / "2")) == []


def forge_data(folder, stored):
    path = folder / "2" / METADATA
    path.write_text(path.read_text().replace('"rows": 2', '"rows": 7'))
    mend(folder)


def forge_with_another_key(folder, stored):
    edit(payload(folder))
    mend(folder, Keys(key_file(folder.parent, TWO)))


def strip(folder, stored):
    record = trust.read_record(folder / "2")
    (folder / "2" / RECORD).write_text(trust.seal_text(record.text()))


def put_back_an_older_step(folder, stored):
    shutil.rmtree(folder / "2")
    shutil.copytree(folder / "1", folder / "2")


def leave_orbax_alone(folder, stored):
    (folder / "2" / RECORD).unlink()
    path = folder / "2" / METADATA
    path.write_text(path.read_text().replace("megajax.integrity", "other"))


def sign_no_sums(folder, stored):
    record = trust.read_record(folder / "2")
    files = {n: dataclasses.replace(f, sha256="") for n, f in record.files.items()}
    record = dataclasses.replace(record, files=files)
    trust.write_record(folder / "2", record, Keys(stored[1]))


def keep_the_checksums(folder, stored):
    """CRC-32 is linear: who changes bytes can find others that keep it. Here the sum is stubbed."""
    edit(payload(folder))
    record = trust.read_record(folder / "2")
    name = os.path.relpath(payload(folder), folder / "2")
    crc = trust.sum_files(folder / "2", [name])[name].crc32
    files = record.files | {name: dataclasses.replace(record.files[name], crc32=crc)}
    trust.write_record(folder / "2", dataclasses.replace(record, files=files), Keys(stored[1]))


def add_a_file(folder, stored):
    home = folder / "2" / "state" / "array_metadatas"
    home.mkdir(exist_ok=True)
    (home / "process_9").write_text("{}")


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (forge_leaf, "forged or damaged, or of another key, which can be added"),
        (forge_data, "forged or damaged"),
        (forge_with_another_key, "forged or damaged"),
        (strip, r"it is not signed, and only signed steps count \(--checkpoint.key_file\); if you"),
        (put_back_an_older_step, "holds step 1"),
        (leave_orbax_alone, "of plain Orbax and not signed"),
        (sign_no_sums, "it says no SHA-256 of"),
        (keep_the_checksums, "its SHA-256 is another, and its checksums agree"),
        (add_a_file, "state/array_metadatas/process_9: it is not in the signed record"),
    ],
)
def test_what_the_key_did_not_sign_does_not_count(folder, stored, attack, said):
    attack(folder, stored)
    manager = CheckpointManager(folder, key_file=stored[1])
    with pytest.raises(DamagedError, match=f"step 2 .*{said}"):
        manager.restore(2, like=X)
    with pytest.raises(CheckpointError, match="step 2 "):
        manager.verify(2)
    fresh = CheckpointManager(folder, key_file=stored[1])
    np.testing.assert_array_equal(fresh.restore(like=X)["x"], X["x"])
    assert fresh.latest() == 1


def test_no_bit_of_a_signature_can_flip(folder, stored):
    keys, path = Keys(stored[1]), folder / "2" / RECORD
    good = path.read_bytes()
    begin = good.index(b'"hmac": "') + 9
    for place in range(begin, begin + 64, 7):
        edit(path, place)
        with pytest.raises(DamagedError, match="step 2"):
            trust.read_record(folder / "2", keys)
        path.write_bytes(good)
    for odd in ("é".encode(), rb"\ud800"):  # which hmac.compare_digest takes in no string
        path.write_bytes(good[:begin] + odd + good[begin + 1 :])
        with pytest.raises(DamagedError, match="step 2"):
            trust.read_record(folder / "2", keys)
    path.write_bytes(good)
    assert trust.read_record(folder / "2", keys).signature


def test_a_key_is_replaced(folder, stored, tmp_path):
    rotated = key_file(tmp_path, TWO, "", ONE)
    manager = CheckpointManager(folder, keep=2, key_file=rotated)
    manager.save(3, X).result()
    assert manager.steps() == [2, 3]  # both keys' steps count
    for keys, good in ((Keys(rotated), [2, 3]), (Keys(stored[1]), [2])):
        steps = StepFolder(folder, keys)
        for step in (2, 3):
            if step in good:
                offline.verify(steps, step)
            else:
                with pytest.raises(DamagedError, match="signed with none of the 1 keys of"):
                    offline.verify(steps, step)


def test_an_unsigned_step_lets_no_signed_one_go(folder, stored):
    CheckpointManager(folder, keep=0).save(3, X).result()
    manager = CheckpointManager(folder, keep=1, key_file=stored[1])
    manager.save(2, X).result()
    assert manager.steps() == [2, 3] and manager.latest() == 2


@pytest.mark.parametrize(
    ("lines", "mode", "said"),
    [
        (["x" * 15], 0o600, "line 1 is shorter"),
        ([""], 0o600, "it holds none"),
        ([ONE], 0o604, "has the mode 0604: others can read or change the key; chmod 600"),
        ([ONE], 0o660, "has the mode 0660"),
        (["x" * 70_000], 0o600, "more than 65536 bytes"),
    ],
)
def test_key_files_that_do_not_do(tmp_path, lines, mode, said):
    path = key_file(tmp_path, *lines, mode=mode)
    with pytest.raises(CheckpointError, match=said) as error:
        CheckpointManager(tmp_path, key_file=path)
    assert "(--checkpoint.key_file)" in str(error.value)
    assert not lines[0] or lines[0][:15] not in str(error.value)
    for other in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="key_file"):
            Keys(other)


def test_where_a_key_is_not_seen(folder, stored, tmp_path):
    keys = Keys(key_file(tmp_path, ONE, mode=0o640))  # root's, as a service is given one
    assert ONE not in repr(keys) + str(vars(StepFolder(folder, keys)))
    assert all(ONE.encode() not in p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert json.loads((folder / "2" / RECORD).read_text())["hmac"]
    with pytest.raises(CheckpointError, match="verify=None must be full where steps are signed"):
        CheckpointManager(folder, verify=None, key_file=stored[1])
