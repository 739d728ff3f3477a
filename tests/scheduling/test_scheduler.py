"""The dialogue with the profile handler, and the shadows after it."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import pytest

from proxy.core.decision import Decision, ProfileResult, ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints, RequestError
from proxy.core.plugin import Filter, ProfileHandler, Scorer
from proxy.core.request import InferenceRequest
from proxy.scheduling.profile import FilterStep, Profile
from proxy.scheduling.scheduler import Scheduler
from tests.scheduling.situations import Dialogue, Fixed, Keep, pod, profile, ranking, request

Talk = Generator[str, ProfileResult, Decision]
A, B = pod("a"), pod("b")


def keeps(name: str, *kept: str, shadow: bool = False) -> Profile:
    return profile(name, FilterStep(f"{name}-filter", Keep(kept)), shadow=shadow)


def scheduler(talk: ProfileHandler, *profiles: Profile, **options: object) -> Scheduler:
    return Scheduler(talk, {profile.name: profile for profile in profiles}, **options)  # type: ignore[arg-type]


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
        raise AssertionError("there is nothing to discuss")


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


def test_a_failed_profile_is_an_exception_at_that_line() -> None:
    def talk(request: InferenceRequest) -> Talk:
        try:
            result = yield "first"
        except NoEndpoints:
            result = yield "second"
        return Decision.from_result(result)

    profiles = keeps("first"), keeps("second", "b")
    assert ranking(scheduler(Dialogue(talk), *profiles).schedule(request(), [A, B])) == ["b"]


def test_a_handler_that_leaves_nothing_to_discuss_is_not_asked() -> None:
    only = scheduler(Silent("all"), keeps("all", "a", "b"), keeps("other", "b"))
    discussed = scheduler(decides_by("all"), keeps("all", "a", "b"), keeps("other", "b"))
    assert only.schedule(request(), [A, B]) == discussed.schedule(request(), [A, B])
    with pytest.raises(NoEndpoints, match="all-filter"):
        only.schedule(request(), [pod("c")])


def test_a_handler_that_leaves_nothing_to_discuss_has_shadows_too() -> None:
    seen: list[tuple[Decision, ProfileResult]] = []
    observed = scheduler(
        Silent("all"),
        keeps("all", "a"),
        shadows=[keeps("shadow", "b", shadow=True)],
        on_shadow=lambda request, decision, result: seen.append((decision, result)),
    )
    decision = observed.schedule(request(), [A, B])
    assert [(told is decision, result.best) for told, result in seen] == [(True, B)]


def test_a_handler_is_asked_if_the_only_profile_does_not_exist() -> None:
    with pytest.raises(AssertionError, match="nothing to discuss"):
        scheduler(Silent("nowhere"), keeps("all", "a")).schedule(request(), [A])


def test_an_error_that_the_handler_lets_through_is_the_clients_answer() -> None:
    with pytest.raises(NoEndpoints, match="first-filter"):
        scheduler(decides_by("first"), keeps("first")).schedule(request(), [A])


def test_a_handler_that_asks_for_an_unknown_profile_is_told_so() -> None:
    with pytest.raises(RequestError, match="'nowhere', which does not exist"):
        scheduler(decides_by("nowhere"), keeps("all", "a")).schedule(request(), [A])


def test_a_handler_that_never_decides_is_stopped_after_16_runs() -> None:
    asked, closed = [], []

    def talk(request: InferenceRequest) -> Talk:
        try:
            while True:
                asked.append((yield "all"))
        finally:
            closed.append(True)

    with pytest.raises(RequestError, match="no decision in 16 profile runs"):
        scheduler(Dialogue(talk), keeps("all", "a")).schedule(request(), [A])
    assert len(asked) == 16
    assert closed == [True]


def test_a_handler_that_catches_every_error_is_stopped_too() -> None:
    def talk(request: InferenceRequest) -> Talk:
        while True:
            try:
                yield "none"
            except NoEndpoints:
                continue

    with pytest.raises(RequestError, match="16"):
        scheduler(Dialogue(talk), keeps("none")).schedule(request(), [A])


def test_the_sixteenth_run_may_still_decide() -> None:
    def talk(request: InferenceRequest) -> Talk:
        for _ in range(15):
            yield "all"
        return Decision.from_result((yield "all"))

    assert scheduler(Dialogue(talk), keeps("all", "a")).schedule(request(), [A]).target is A


def test_a_shadow_runs_after_the_decision_and_never_changes_it() -> None:
    seen: list[tuple[Endpoint, Endpoint]] = []
    built = scheduler(
        decides_by("all"),
        keeps("all", "a", "b"),
        shadows=[keeps("trial", "b", shadow=True)],
        on_shadow=lambda request, decision, result: seen.append((decision.target, result.best)),
    )
    assert built.schedule(request(), [A, B]).target is A
    assert seen == [(A, B)]


def test_a_shadow_that_fails_reaches_nobody() -> None:
    class Broken(Filter):
        def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
            raise ZeroDivisionError

    broken = profile("broken", FilterStep("broken", Broken()), shadow=True)
    shadows = [keeps("empty", shadow=True), broken]
    assert scheduler(decides_by("all"), keeps("all", "a"), shadows=shadows).schedule(request(), [A]).target is A


def test_plugins_are_told_profile_attempt_and_shadow() -> None:
    runs: list[ProfileRun] = []

    class Noting(Scorer):
        def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
            runs.append(run)
            return Fixed({"a": 0.0}).score(run, request, endpoints)

    noting = [(Noting(), 1.0)]
    deciding, shadow = profile("d", scorers=noting), profile("s", scorers=noting, shadow=True)
    scheduler(decides_by("d"), deciding, shadows=[shadow]).schedule(request(), [A], attempt=2)
    assert runs == [ProfileRun("d", 2), ProfileRun("s", 2, shadow=True)]
