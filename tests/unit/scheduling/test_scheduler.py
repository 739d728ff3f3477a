"""The dialogue with the profile handler, and the shadows after it."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.core.decision import Decision, ProfileResult, ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints
from proxy.core.plugin import Filter, ProfileHandler, Scorer
from proxy.core.request import InferenceRequest
from proxy.scheduling.profile import Profile
from proxy.scheduling.scheduler import Scheduler
from tests.helpers.scheduling.situations import Dialogue, Fixed, Keep, counted, pod, profile, ranking, request

Talk = Generator[str, ProfileResult, Decision]
A, B = pod("a"), pod("b")


def keeps(name: str, *kept: str, shadow: bool = False) -> Profile:
    return profile(name, (f"{name}-filter", Keep(kept)), shadow=shadow)


def scheduler(talk: ProfileHandler, *profiles: Profile, **options: object) -> Scheduler:
    options.setdefault("faults", counted([]))
    return Scheduler(talk, {profile.name: profile for profile in profiles}, name="handler", **options)  # type: ignore[arg-type]


def decides_by(name: str) -> Dialogue:
    def talk(request: InferenceRequest) -> Talk:
        return Decision.from_result((yield name))

    return Dialogue(talk)


@dataclass(frozen=True)
class Silent(ProfileHandler):
    only: str

    def only_profile(self) -> str:
        return self.only

    def plan(self, request: InferenceRequest) -> Talk:
        raise AssertionError("it must not be called")


def test_the_decision_is_the_target_with_the_other_survivors_as_fallbacks() -> None:
    decision = scheduler(decides_by("all"), keeps("all", "a", "b")).schedule(request(), [A, B])
    assert (decision.target, decision.fallbacks, decision.profile) == (A, (B,), "all")


def test_a_handler_runs_one_profile_after_another_and_sees_each_result() -> None:
    def talk(request: InferenceRequest) -> Talk:
        prefill = yield "prefill"
        decode = yield "decode"
        assert prefill.best is A
        return Decision.from_result(decode)

    profiles = keeps("prefill", "a"), keeps("decode", "b")
    assert ranking(scheduler(Dialogue(talk), *profiles).schedule(request(), [A, B])) == ["b"]


def test_a_failed_profile_raises_in_the_handler() -> None:
    def talk(request: InferenceRequest) -> Talk:
        try:
            result = yield "first"
        except NoEndpoints:
            result = yield "second"
        return Decision.from_result(result)

    profiles = keeps("first"), keeps("second", "b")
    assert ranking(scheduler(Dialogue(talk), *profiles).schedule(request(), [A, B])) == ["b"]


def test_a_handler_with_one_profile_is_not_called() -> None:
    only = scheduler(Silent("all"), keeps("all", "a", "b"), keeps("other", "b"))
    discussed = scheduler(decides_by("all"), keeps("all", "a", "b"), keeps("other", "b"))
    assert only.schedule(request(), [A, B]) == discussed.schedule(request(), [A, B])
    with pytest.raises(NoEndpoints, match="all-filter"):
        only.schedule(request(), [pod("c")])


def test_a_handler_with_one_profile_runs_shadows() -> None:
    observed = scheduler(Silent("all"), keeps("all", "a"), shadows=[keeps("shadow", "b", shadow=True)])
    decision = observed.schedule(request(), [A, B])
    assert decision.target is A
    assert [result.best for result in decision.shadows] == [B]


def test_a_handler_is_called_if_the_only_profile_does_not_exist() -> None:
    faults: list[tuple[str, str]] = []
    made = scheduler(Silent("nowhere"), keeps("all", "a"), faults=counted(faults))
    assert made.schedule(request(), [A]).target is A
    assert faults == [("handler", "raised")]


def test_an_error_that_the_handler_passes_is_the_clients_error() -> None:
    with pytest.raises(NoEndpoints, match="first-filter"):
        scheduler(decides_by("first"), keeps("first")).schedule(request(), [A])


def raises(request: InferenceRequest) -> Talk:
    yield "all"
    raise ZeroDivisionError


def raises_at_once(request: InferenceRequest) -> Talk:
    raise ZeroDivisionError


def decides_alone(request: InferenceRequest) -> Talk:
    yield from ()
    return Decision(A)


def returns_none(request: InferenceRequest) -> Talk:
    yield "all"
    return None  # type: ignore[return-value]


def plans_nothing(request: InferenceRequest) -> Talk:
    return None  # type: ignore[return-value]


def asks_for_an_unknown_profile(request: InferenceRequest) -> Talk:
    return Decision.from_result((yield "nowhere"))


def chooses_no_candidate(request: InferenceRequest) -> Talk:
    yield "all"
    return Decision(pod("foreign"))


def never_decides(request: InferenceRequest) -> Talk:
    while True:
        yield "all"


def catches_every_error(request: InferenceRequest) -> Talk:
    while True:
        try:
            yield "none"
        except NoEndpoints:
            continue


def cannot_be_closed(request: InferenceRequest) -> Talk:
    while True:
        try:
            yield "all"
        except GeneratorExit:
            continue


@pytest.mark.parametrize(
    ("talk", "fault"),
    [
        (raises, "raised"),
        (raises_at_once, "raised"),
        (plans_nothing, "raised"),
        (cannot_be_closed, "raised"),
        (returns_none, "unusable"),
        (asks_for_an_unknown_profile, "unusable"),
        (chooses_no_candidate, "unusable"),
        (never_decides, "unusable"),
        (catches_every_error, "unusable"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_default_profile_decides_if_the_handler_fails(talk: Any, fault: str) -> None:
    faults: list[tuple[str, str]] = []
    profiles = keeps("all", "a"), keeps("none"), keeps("default", "b")
    decision = scheduler(Dialogue(talk), *profiles, faults=counted(faults)).schedule(request(), [A, B])
    assert (decision.target, decision.profile) == (B, "default")
    assert faults == [("handler", fault)]


def test_a_handler_may_decide_without_a_profile() -> None:
    assert scheduler(Dialogue(decides_alone), keeps("all", "b")).schedule(request(), [A, B]).target is A


@pytest.mark.parametrize(("names", "expected"), [(("prefill", "decode"), "decode"), (("x", "y"), "x")])
def test_without_a_profile_named_default_decode_or_the_first_one_decides(names: Sequence[str], expected: str) -> None:
    made = scheduler(Dialogue(raises_at_once), *(keeps(name, "a") for name in names))
    assert made.schedule(request(), [A]).profile == expected


def test_a_handler_without_a_declared_profile_is_called() -> None:
    class Unsure(Dialogue):
        def only_profile(self) -> str:
            raise ZeroDivisionError

    def talk(request: InferenceRequest) -> Talk:
        return Decision.from_result((yield "all"))

    assert scheduler(Unsure(talk), keeps("all", "a")).schedule(request(), [A]).target is A


def test_a_handler_that_is_stopped_after_16_runs_is_closed() -> None:
    candidates, closed = [], []

    def talk(request: InferenceRequest) -> Talk:
        try:
            while True:
                candidates.append((yield "all"))
        finally:
            closed.append(True)

    assert scheduler(Dialogue(talk), keeps("all", "a")).schedule(request(), [A]).target is A
    assert len(candidates) == 16
    assert closed == [True]


def test_the_sixteenth_run_may_still_decide() -> None:
    def talk(request: InferenceRequest) -> Talk:
        for _ in range(15):
            yield "all"
        return Decision.from_result((yield "all"))

    assert scheduler(Dialogue(talk), keeps("all", "a")).schedule(request(), [A]).target is A


def test_a_shadow_runs_after_the_decision_and_never_changes_it() -> None:
    built = scheduler(decides_by("all"), keeps("all", "a", "b"), shadows=[keeps("trial", "b", shadow=True)])
    decision = built.schedule(request(), [A, B])
    assert decision.target is A
    assert [(result.profile, result.best) for result in decision.shadows] == [("trial", B)]


def test_a_failing_shadow_is_isolated() -> None:
    class Broken(Filter):
        def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
            raise ZeroDivisionError

    broken = profile("broken", ("broken", Broken()), shadow=True)
    shadows = [keeps("empty", shadow=True), broken]
    assert scheduler(decides_by("all"), keeps("all", "a"), shadows=shadows).schedule(request(), [A]).target is A


def test_plugins_get_profile_and_shadow() -> None:
    runs: list[ProfileRun] = []

    class Noting(Scorer):
        def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
            runs.append(run)
            return Fixed({"a": 0.0}).score(run, request, endpoints)

    noting = [(Noting(), 1.0)]
    deciding, shadow = profile("d", scorers=noting), profile("s", scorers=noting, shadow=True)
    scheduler(decides_by("d"), deciding, shadows=[shadow]).schedule(request(), [A])
    assert runs == [ProfileRun("d"), ProfileRun("s", shadow=True)]
