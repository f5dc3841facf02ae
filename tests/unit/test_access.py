"""API keys: what is read, what is refused, who is found, and that no plain key is shown or kept."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.errors import InvalidApiKey, InvalidSetting
from gateway.safety import keys as access
from gateway.safety.keys import Caller, Keyring, open_keyring, split_keys

_KEYS = ("alice sk-alice-0123456789", "sk-unnamed-0123456789", "bob sk-bob-0123456789")
_TEXT = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1
)


def ring(*keys: str, isolate: bool = False) -> Keyring:
    opened = open_keyring(keys or _KEYS, isolate=isolate)
    assert opened is not None
    return opened


def test_a_key_is_found_by_its_text_and_nothing_else_is() -> None:
    keys = ring()
    assert keys.find("sk-alice-0123456789") == Caller("alice")
    assert keys.find("sk-bob-0123456789") == Caller("bob")
    for wrong in ("", "alice", "sk-alice-012345678", "sk-alice-01234567890", "SK-ALICE-0123456789"):
        assert keys.find(wrong) is None
    for odd in ("\udcff", "ä" * 10_000, "\0"):
        assert keys.find(odd) is None


def test_whoever_is_not_known_is_told_whether_a_key_was_shown_and_nothing_more() -> None:
    assert ring().caller("sk-bob-0123456789") == Caller("bob")
    with pytest.raises(InvalidApiKey, match="not known here") as told:
        ring().caller("sk-wrong")
    assert "sk-" not in str(told.value)
    for nothing in (None, ""):
        with pytest.raises(InvalidApiKey, match="none was given"):
            ring().caller(nothing)


def test_all_keys_are_compared_in_constant_time_and_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ring()
    for shown in ("sk-alice-0123456789", "sk-bob-0123456789", "wrong"):
        compared.clear()
        keys.find(shown)
        assert len(compared) == len(set(compared)) == 3


def test_tenants_are_one_a_key_and_the_same_in_every_process() -> None:
    """Rows on disk are found again by whoever shows the key again, whatever he is called by then."""
    keys = ring(isolate=True)
    tenants = [keys.caller(key.split()[-1]).tenant for key in _KEYS]
    assert len({*tenants, ""}) == 4
    renamed = ring("carol sk-alice-0123456789", isolate=True).caller("sk-alice-0123456789")
    assert renamed == Caller("carol", tenants[0])
    assert tenants[0] == "071794b2dae41b9aed010c4f498b77c0", "or all of the disk is lost"
    assert {ring().caller(key.split()[-1]).tenant for key in _KEYS} == {""}


def test_nothing_shows_a_plain_key_or_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    secret = "sk-" + "never-shown"
    file.write_text(f"name {secret}\n")
    keys = open_keyring((), file, isolate=True)
    assert keys is not None
    caller = keys.caller(secret)
    shown = " ".join([repr(keys), str(keys), repr(keys._keys), repr(caller), str(vars(keys))])
    assert "never-shown" not in shown
    assert keys._keys[0].digest.hex() not in shown


def test_a_file_has_a_key_a_line_with_or_without_a_name_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(
        b"\xef\xbb\xbf# ours\r\n\r\nalice   sk-1\r\n  # indented\nsk-2#not-a-comment\n\tbob\tsk-3  \n"
    )
    keys = open_keyring(["sk-4"], file)
    assert keys is not None
    assert len(keys) == 4
    assert [keys.caller(k).name for k in ("sk-1", "sk-3")] == ["alice", "bob"]
    assert keys.find("sk-2#not-a-comment") is not None
    assert keys.find("sk-4") is not None
    unnamed = keys.caller("sk-2#not-a-comment").name
    assert unnamed.startswith("key-")
    assert "sk-2" not in unnamed


def test_the_environment_parts_keys_with_commas() -> None:
    assert split_keys(" sk-1, bob sk-2 ,,sk-3,") == ("sk-1", "bob sk-2", "sk-3")
    assert split_keys("") == ()
    assert open_keyring() is None


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        (["a b c"], "neither KEY nor NAME KEY"),
        ([" "], "neither KEY nor NAME KEY"),
        (["schlüssel-geheim"], "other characters than visible ASCII"),
        (["x" * 1025], "or over 1024"),
        (["a/b sk-geheim"], "must be letters"),
        (["same sk-geheim", "same sk-geheim2"], "two keys are named same"),
        (["one sk-geheim", "two sk-geheim"], "one key has two names"),
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(entries: list[str], match: str) -> None:
    with pytest.raises(InvalidSetting, match=match) as told:
        open_keyring(entries)
    assert "geheim" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe\x00", "cannot be read: it is no text"),
        (b"# nothing\n", "holds no key"),
        (b"sk-1\nwell this is-geheim\n", "line 2 of .* is neither"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_by_its_name(
    tmp_path: Path, content: bytes | None, match: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidSetting, match=match) as told:
        open_keyring((), file)
    assert told.value.setting == "api_key_file"
    assert "geheim" not in str(told.value)


def test_the_same_key_given_twice_is_one_key() -> None:
    assert len(ring("sk-1", "sk-1")) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(_TEXT, min_size=1, max_size=6, unique=True), _TEXT)
def test_a_key_is_found_if_and_only_if_it_was_given(given_keys: list[str], shown: str) -> None:
    """Each with a name and a tenant of its own, none of which holds it."""
    keys = ring(*given_keys, isolate=True)
    callers = [keys.caller(key) for key in given_keys]
    assert len({caller.name for caller in callers}) == len(given_keys)
    assert len({caller.tenant for caller in callers}) == len(given_keys)
    assert (keys.find(shown) is not None) == (shown in given_keys)
    assert all(access._NAME.fullmatch(caller.name) for caller in callers)
