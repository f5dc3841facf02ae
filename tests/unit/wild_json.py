"""JSON bodies of all kinds, in the words of one dialect. For tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def wild_bodies(
    fields: str, names: str, words: str, *texts: str
) -> st.SearchStrategy[dict[str, Any]]:
    """`fields`: of the body; `names`: of the objects within it; `words`: texts that mean something somewhere."""
    atoms = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([*words.split(), *texts]),
    )
    keys = st.sampled_from(names.split())
    values = st.recursive(
        atoms,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )
    return st.dictionaries(st.sampled_from(fields.split()), values, max_size=6)
