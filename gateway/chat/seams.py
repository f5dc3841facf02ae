"""How far a prompt's text is what a session had, at a place where no tokenizer merges: up to there its ids are kept.

Clients send an answer back as they understood it, and a template writes it as it likes: other white space in a call's
arguments, no thoughts. That changes the end of what the session had, and must not make other tokens of all before it.
"""

from __future__ import annotations

from coordinator.sessions import History
from gateway.chat.boundaries import AddedTokens


def kept(history: History | None, text: str, added: AddedTokens) -> History | None:
    """The branch that the text shares most with: whole where the text goes on from it at a special token, else cut in
    front of the last special token that both have.
    """
    if history is None:
        return None
    _, branch = max(((_shared(each.text, text), each) for each in history.branches()), key=_first)
    if text.startswith(branch.text) and _is_seam(branch, text, added):
        return branch
    return _cut(branch, _shared(branch.text, text), added)


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
