"""Who goes with whom when many come at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint
from proxy.prefix.burst import ANY_NUMBER, BurstRequest, Rules, assign

ANYWHERE = Rules()
PODS = [Endpoint(name) for name in "abc"]


def burst(*prompts: str, pods: Sequence[Endpoint] = PODS, rules: Rules = ANYWHERE) -> str:
    """The pod of each prompt, `-` for none; a letter is a block."""
    samples = [BurstRequest([_chain(prompt)] if prompt else [], pods) for prompt in prompts]
    assign(samples, rules)
    return "".join("-" if sample.assigned is None else sample.assigned.name for sample in samples)


def _chain(prompt: str) -> list[int]:
    return [hash(prompt[: end + 1]) for end in range(len(prompt))]


def test_equal_prompts_are_placed_together_and_groups_apart() -> None:
    assert burst("xx", "yy", "xx", "yy", "zz", "zz") == "ababcc"


def test_a_single_prompt_may_go_anywhere() -> None:
    assert burst("xx", "y", "", "") == "----"
    assert burst("xx", "y", "xx") == "a-a"


def test_a_group_may_be_limited_per_pod_and_the_rest_is_spread() -> None:
    assert burst(*["x"] * 4, rules=Rules(most_per_pod=2)) == "aabb"
    assert Counter(burst(*["x"] * 8, rules=Rules(most_per_pod=2))) == {"a": 3, "b": 3, "c": 2}


def test_prompts_with_a_common_prefix_are_placed_together_if_configured() -> None:
    prompts = ("xxa", "xxb", "yya", "yyb")
    assert burst(*prompts) == "----"
    assert burst(*prompts, rules=Rules(least_shared=2)) == "aabb"
    assert burst(*prompts, rules=Rules(least_shared=3)) == "----"


def test_common_prefixes_do_not_overload_a_pod() -> None:
    pods = burst(*[f"xx{letter}" for letter in "abcdef"], rules=Rules(least_shared=2))
    assert Counter(pods) == {"a": 2, "b": 2, "c": 2}


def test_groups_are_placed_before_common_prefixes() -> None:
    assert burst("xxxxx", "xx", "xx", rules=Rules(least_shared=2)) == "baa", (
        "a has its share: two of three for three pods"
    )


def test_tokens_may_be_balanced_instead_of_requests() -> None:
    prompts = ("xxxxxxxx", "xxxxxxxx", "y", "y", "z", "z", "w", "w")
    assert burst(*prompts, pods=PODS[:2]) == "aabbaabb"
    assert burst(*prompts, pods=PODS[:2], rules=Rules(by_tokens=True)) == "aabbbbbb"


def test_of_equal_pods_the_one_with_fewer_requests_is_first() -> None:
    busy, idle = Endpoint("a"), Endpoint("b")
    busy.charge(3, 0)
    assert burst("x", "x", pods=[busy, idle]) == "bb"


def test_the_first_one_on_each_pod_computes_the_prompt() -> None:
    samples = [BurstRequest([_chain("xx")], PODS) for _ in range(4)]
    assign(samples, Rules(most_per_pod=2))
    assert [sample.must_compute for sample in samples] == [True, False, True, False]


@given(
    st.lists(st.text("xy", max_size=4), max_size=20),
    st.sampled_from([ANY_NUMBER, 1, 3]),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_prompt_with_an_equal_has_a_pod(prompts: list[str], most: int, least: int, by_tokens: bool) -> None:
    pods = burst(*prompts, rules=Rules(most, least, by_tokens))
    count = Counter(prompts)
    for prompt, pod in zip(prompts, pods, strict=True):
        assert pod != "-" or not prompt or count[prompt] == 1
    if most == ANY_NUMBER:
        assert all(
            len({pod for prompt, pod in zip(prompts, pods, strict=True) if prompt == one}) == 1 for one in count if one
        )
