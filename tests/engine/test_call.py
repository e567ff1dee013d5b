from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gspo_agent.engine.call import Call, escaped

ids = st.text(alphabet="a1~-/.", min_size=1, max_size=6)


@given(st.lists(ids, min_size=2, max_size=6, unique=True))
def test_no_name_of_a_try_is_the_beginning_of_another_whatever_the_ids_are(several: list[str]) -> None:
    calls = [Call(id, None) for id in several]
    names = [call.next_rid() for _ in range(12) for call in calls]
    assert not any(other.startswith(name) for name, other in itertools.permutations(names, 2))


@given(ids, ids)
def test_the_names_of_the_ids_with_a_prefix_begin_with_it_escaped_and_no_other_does(id: str, prefix: str) -> None:
    assert Call(id, None).next_rid().startswith(escaped(prefix)) is id.startswith(prefix)


def test_the_requests_of_an_episode_are_of_one_session() -> None:
    assert {Call(f"run.7.0.1-{n}/", None).session for n in (3, 44)} == {"run.7.0.1"}
    assert Call("-5.0.0-12/", None).session == "-5.0.0"
    assert Call("alone", None).session == "alone"
