"""How far a prompt's text is what a session had, at a place where no tokenizer merges: up to there its ids are kept.

Clients send an answer back as they understood it, and a template writes it as it likes: other white space in a call's
arguments, no thoughts. That changes the end of what the session had, and must not make other tokens of all before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.sessions import History
from gateway.chat.boundaries import AddedTokens

Encode = Callable[[str], Sequence[int]]


def kept(history: History | None, text: str, added: AddedTokens, encode: Encode) -> History | None:
    """The branch that the text shares most with: whole where the text goes on from it at a special token, else cut in
    front of the last special token that both have.
    """
    history = as_far_as(history, text)
    if history is None:
        return None
    _, branch = max(((_shared(each.text, text), each) for each in history.branches()), key=_first)
    if text.startswith(branch.text) and _is_seam(branch, text, added):
        return branch
    if branch.ends and (whole := _completed(branch, text, added, encode)) is not None:
        return whole
    return _cut(branch, _shared(branch.text, text), added)


def as_far_as(history: History | None, text: str) -> History | None:
    """What may end with ids that are nobody's ends with the last one that the text shares."""
    if history is None or not any(each.ends for each in history.branches()):
        return history
    first, *others = (_trimmed(each, text) for each in history.branches())
    return replace(first, others=tuple(others))


def _trimmed(history: History, text: str) -> History:
    if not history.ends:
        return replace(history, others=())
    # Of several ids that end there, all but the first are parts of a character that follows.
    count = bisect_right(history.ends, _shared(history.text, text))
    count = bisect_left(history.ends, history.ends[count - 1]) + 1 if count else 0
    end = history.ends[count - 1] if count else 0
    return History(history.text[:end], history.token_ids[:count], ends=history.ends[:count])


def _completed(history: History, text: str, added: AddedTokens, encode: Encode) -> History | None:
    """An answer that was cut lacks its last token in the lane: what is left of it is encoded by itself. Only where a
    tokenizer would have made other tokens than the lane's, which is how generated text is told from a client's.
    """
    begin, ids = _since_special(history, added)
    end = len(history.text)
    if ids == tuple(encode(history.text[begin:])):
        return None
    until = next((place for place, _ in added.places(text[end:])), len(text) - end)
    rest = tuple(encode(text[end : end + until]))
    return History(text[: end + until], history.token_ids + rest)


def _since_special(history: History, added: AddedTokens) -> tuple[int, tuple[int, ...]]:
    """Where the text behind the last special token begins, and its ids."""
    specials = (
        n for n in reversed(range(len(history.ends))) if history.token_ids[n] in added.special_ids
    )
    count = 1 + next(specials, -1)
    return (history.ends[count - 1] if count else 0), history.token_ids[count:]


def _is_seam(history: History, text: str, added: AddedTokens) -> bool:
    """An answer that was cut goes on in the middle of what a tokenizer may merge."""
    end = len(history.text)
    if end == len(text) or history.token_ids[-1:] and history.token_ids[-1] in added.special_ids:
        return True
    hit = added.pattern.match(text, end)
    return hit is not None and hit.group() in added.special


def _first(pair: tuple[int, History]) -> int:
    return pair[0]


def _shared(one: str, other: str) -> int:
    """How many characters both begin with, found by halves: texts are long, and comparing slices is quick."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(history: History, shared: int, added: AddedTokens) -> History | None:
    inside = list(added.places(history.text[:shared]))
    in_text = list(added.places(history.text))
    in_ids = [(i, token) for i, token in enumerate(history.token_ids) if token in added.special_ids]
    # A text may spell a special token with others; then nobody knows which token stands where.
    if [token for _, token in in_text] != [token for _, token in in_ids]:
        return None
    if not inside or in_text[: len(inside)] != inside:
        return None
    (at, _), (index, _) = inside[-1], in_ids[len(inside) - 1]
    return History(history.text[:at], history.token_ids[:index])
