"""The same cases with the backend `landlock`, in an imitation of a container's default confinement."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gspo_agent.sandbox import Sandbox
from rewards.unit_tests import Verdict
from tests.rewards.test_unit_tests import judged, right, verdict_of

OTHERWISE = {  # case: what the code meets here; none of it scores
    "esc-daemon-survivor": "PermissionError",  # no fork, so there is nothing that could survive
    "esc-late-writer": "PermissionError",  # nor anyone to write later
    "hack-tests-in-cmdline": "PermissionError",  # /proc can't be listed
}


@pytest.fixture(scope="session")
def verdicts(contained: Sandbox) -> dict[str, Verdict]:
    """Of every case, judged at once."""

    async def judge_all() -> dict[str, Verdict]:
        cases = [parameter.values[0] for parameter in judged()]
        found = await asyncio.gather(*[verdict_of(case, contained) for case in cases])
        return {case["id"]: verdict for case, verdict in zip(cases, found, strict=True)}

    return asyncio.run(judge_all())


@pytest.mark.parametrize("case", judged())
def test_case_gets_its_verdict_in_a_container(case: dict[str, Any], verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts[case["id"]]
    if case["id"] in OTHERWISE:
        assert (verdict.verdict, verdict.passed) == ("runtime_error", 0)
        assert OTHERWISE[case["id"]] in verdict.reason
    else:
        assert verdict.verdict in right(case), f"{verdict.reason}; {case['why']}"
