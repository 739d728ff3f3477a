"""From a document to a scheduler: injection, checks, ports, order, origins."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision, DecisionRecord, DecisionSampler, untimed
from proxy.core.endpoint import Endpoint, update
from proxy.core.errors import ConfigError
from proxy.core.params import param
from proxy.core.plugin import DataProducer, Plugin, ProfileHandler, Scorer, plugin
from proxy.core.ports import InstanceName, ProfileNames
from proxy.core.registry import Registry
from proxy.core.request import DataKey, InferenceRequest
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from tests.helpers.scheduling.situations import REGISTRY, counted, pod, ports, ranking, request, scheduling

HEAT: DataKey[float] = DataKey("Heat")
LIGHT: DataKey[float] = DataKey("Light")
SHARED: DataKey[float] = DataKey("Shared")
WARMTH: DataKey[Any] = DataKey("Warmth", value_type=float)


@dataclass(frozen=True, slots=True)
class Producer(DataProducer):
    waits: ClassVar[bool] = False
    gives: ClassVar[DataKey[float]] = HEAT
    name: InstanceName

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self.gives.of(self.name),)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        request.state.write(self.provides[0], 1.0)


@plugin("heat-producer")
@dataclass(frozen=True, slots=True)
class HeatProducer(Producer):
    """Makes heat."""


@plugin("distant-producer")
@dataclass(frozen=True, slots=True)
class DistantProducer(Producer):
    """Has to wait for its light."""

    waits: ClassVar[bool] = True
    gives: ClassVar[DataKey[float]] = LIGHT


@plugin("light-producer")
@dataclass(frozen=True, slots=True)
class LightProducer(Producer):
    """Makes light of heat."""

    gives: ClassVar[DataKey[float]] = LIGHT
    heat_producer_name: str = param("", "where the heat comes from")

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (HEAT.of(self.heat_producer_name),)


@plugin("fire-producer")
@dataclass(frozen=True, slots=True)
class FireProducer(Producer):
    """Makes heat of light."""

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (LIGHT,)


@plugin("heat-scorer")
@dataclass(frozen=True, slots=True)
class HeatScorer(Scorer):
    """Needs heat."""

    heat_producer_name: str = param("", "where the heat comes from")

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (HEAT.of(self.heat_producer_name),)

    def score(self, run: Any, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [0.0 for _ in endpoints]


@plugin("shared-producer")
@dataclass(frozen=True, slots=True)
class SharedProducer(Producer):
    """Does not bind its key to its name."""

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (SHARED,)


@plugin("secret-scorer")
@dataclass(frozen=True, slots=True)
class SecretScorer(Scorer):
    """Reads what it does not declare."""

    def score(self, run: Any, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [request.state.read(HEAT) or 0.0 for _ in endpoints]


@plugin("wordy-producer")
@dataclass(frozen=True, slots=True)
class WordyProducer(Producer):
    """Says a number in words."""

    @property
    def provides(self) -> tuple[DataKey[str], ...]:
        return (WARMTH.of(self.name),)


@plugin("naming-scorer")
@dataclass(frozen=True, slots=True)
class NamingScorer(Scorer):
    """Knows its name and the profiles."""

    name: InstanceName
    profiles: ProfileNames

    def score(self, run: Any, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [0.0 for _ in endpoints]


def with_mine(*plugins: Any, **sections: Any) -> Scheduling:
    mine: list[type[Plugin]] = [HeatProducer, DistantProducer, LightProducer, FireProducer, HeatScorer, NamingScorer]
    mine += [SharedProducer, WordyProducer, SecretScorer]
    registry = Registry([*REGISTRY, *mine])
    return build(read({"plugins": list(plugins), **sections}), registry, ports())


def complaints(document: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        scheduling(document)
    return [str(problem) for problem in caught.value.problems]


def complaints_of_mine(*plugins: Any, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        with_mine(*plugins, **sections)
    return [str(problem) for problem in caught.value.problems]


def types(*kinds: str) -> list[dict[str, str]]:
    return [{"type": kind} for kind in kinds]


def profile(name: str, *refs: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "plugins": [{"pluginRef": ref} for ref in refs], **options}


def uses(built: Scheduling, index: int = 0) -> list[tuple[str, float, str]]:
    return [(use.ref, use.weight, use.origin.value) for use in built.effective.profiles[index].uses]


class TestWhatIsInjected:
    def test_without_a_section_the_default_profile_decides(self) -> None:
        built = scheduling(None)
        assert uses(built) == [
            ("candidate-sampling-filter", 1.0, "injected"),
            ("latency-scorer", 1.0, "injected"),
            ("max-score-picker", 1.0, "injected"),
        ]
        assert {"approx-prefix-cache-producer", "predicted-latency-producer"} <= set(built.instances)
        assert {plugin.origin.value for plugin in built.effective.plugins} == {"injected"}

    def test_without_profiles_every_filter_scorer_and_picker_makes_one_in_the_order_of_the_file(self) -> None:
        plugins = [{"type": kind} for kind in ("queue-scorer", "decode-filter", "token-producer", "random-picker")]
        built = scheduling({"plugins": plugins})
        assert [ref for ref, _, _ in uses(built)] == ["queue-scorer", "decode-filter", "random-picker"]
        assert "token-producer" in built.instances

    def test_a_profile_without_a_picker_takes_the_only_one_that_is_defined(self) -> None:
        plugins = [{"type": "queue-scorer"}, {"name": "any", "type": "random-picker"}]
        built = scheduling({"plugins": plugins, "schedulingProfiles": [profile("p", "queue-scorer")]})
        assert uses(built)[-1] == ("any", 1.0, "injected")

    def test_with_no_picker_or_several_it_takes_the_best_score(self) -> None:
        several = [{"type": "random-picker"}, {"type": "weighted-random-picker"}]
        for pickers in ([], several):
            document = {"plugins": [{"type": "queue-scorer"}, *pickers]}
            built = scheduling({**document, "schedulingProfiles": [profile("p", "queue-scorer")]})
            assert uses(built)[-1] == ("max-score-picker", 1.0, "injected")

    def test_a_picker_before_a_scorer_without_weight_works(self) -> None:
        plugins = [{"type": "max-score-picker"}, {"type": "queue-scorer"}]
        profiles = [profile("p", "max-score-picker", "queue-scorer")]
        built = scheduling({"plugins": plugins, "schedulingProfiles": profiles})
        assert ranking(built.scheduler.schedule(request(), [pod("a", waiting=3), pod("b")])) == ["b", "a"]

    def test_one_profile_needs_no_handler(self) -> None:
        assert scheduling({"plugins": [{"type": "queue-scorer"}]}).effective.handler == "single-profile-handler"

    def test_a_shadow_does_not_count_as_a_second_profile(self) -> None:
        profiles = [profile("p", "queue-scorer"), profile("trial", "queue-scorer", shadow=True)]
        built = scheduling({"plugins": [{"type": "queue-scorer"}], "schedulingProfiles": profiles})
        assert built.effective.handler == "single-profile-handler"
        assert built.effective.as_dict()["schedulingProfiles"][1]["shadow"] is True

    def test_a_missing_datum_gets_its_default_producer(self) -> None:
        affinity = {"strategy": "session_id", "sessionIdConfig": {"sources": [{"attribute": "SessionID"}]}}
        built = scheduling({"plugins": [{"type": "session-affinity-scorer", "parameters": affinity}]})
        assert [producer.plugin_type for producer in built.producers] == ["session-id-producer"]

    def test_a_default_producer_that_is_named_is_injected_too(self) -> None:
        parameters = {"inFlightLoadProducerName": "inflight-load-producer"}
        built = scheduling({"plugins": [{"type": "token-load-scorer", "parameters": parameters}]})
        assert "inflight-load-producer" in built.instances


class TestOrigins:
    def test_every_value_has_its_origin(self) -> None:
        plugins = [{"type": "active-request-scorer", "parameters": {"idleThreshold": 2}}]
        profiles = [{"name": "p", "plugins": [{"pluginRef": "active-request-scorer", "weight": 2}]}]
        described = scheduling({"plugins": plugins, "schedulingProfiles": profiles}).effective.as_dict()
        scorer, picker, handler = described["plugins"]
        assert scorer["parameters"]["idleThreshold"] == {"value": 2, "origin": "file"}
        assert scorer["parameters"]["maxBusyScore"] == {"value": 1.0, "origin": "default"}
        assert (scorer["origin"], picker["origin"], handler["origin"]) == ("file", "injected", "injected")
        first, second = described["schedulingProfiles"][0]["plugins"]
        assert first["weight"] == {"value": 2.0, "origin": "file"}
        assert second["origin"] == "injected"


class TestWhatIsRefused:
    def test_two_pickers_in_a_profile_are_an_error(self) -> None:
        plugins = [{"type": "random-picker"}, {"type": "max-score-picker"}]
        profiles = [profile("p", "random-picker", "max-score-picker")]
        assert complaints({"plugins": plugins, "schedulingProfiles": profiles}) == [
            "schedulingProfiles.p: has the pickers 'random-picker' and 'max-score-picker'; a profile has one"
        ]

    def test_two_handlers_are_an_error(self) -> None:
        plugins = [{"type": "single-profile-handler"}, {"type": "header-profile-handler"}]
        assert complaints({"plugins": [*plugins, {"type": "queue-scorer"}]}) == [
            "plugins: there are the profile handlers 'single-profile-handler' and 'header-profile-handler'; "
            "there can be one"
        ]

    def test_several_profiles_without_a_handler_are_an_error(self) -> None:
        profiles = [profile("a"), profile("b")]
        (fault,) = complaints({"plugins": [{"type": "queue-scorer"}], "schedulingProfiles": profiles})
        assert fault == "schedulingProfiles: several profiles (a, b) and no profile handler that chooses"

    @pytest.mark.parametrize("type_name", ["data-parallel-profile-handler", "header-profile-handlr"])
    def test_a_misspelt_or_unsupported_handler_is_not_also_reported_as_missing(self, type_name: str) -> None:
        document = {"plugins": [{"type": type_name}], "schedulingProfiles": [profile("a"), profile("b")]}
        (fault,) = complaints(document)
        assert fault.startswith(f"plugins.{type_name}: ")

    def test_invalid_profiles_are_not_also_reported_as_shadows(self) -> None:
        assert complaints({"schedulingProfiles": [{"plugins": []}]}) == ["schedulingProfiles[0].name: is required"]

    def test_several_profiles_with_the_single_profile_handler_are_an_error(self) -> None:
        profiles = [profile("a"), profile("b")]
        (fault,) = complaints({"plugins": [{"type": "single-profile-handler"}], "schedulingProfiles": profiles})
        assert fault == "plugins.single-profile-handler: runs exactly one profile, and there are a, b"

    def test_only_shadows_are_an_error(self) -> None:
        (fault,) = complaints({"plugins": [], "schedulingProfiles": [profile("a", shadow=True)]})
        assert fault == "schedulingProfiles: every profile is a shadow; one must decide"

    def test_a_producer_in_a_profile_runs_for_every_request(self) -> None:
        document = {"plugins": [{"type": "token-producer"}], "schedulingProfiles": [profile("a", "token-producer")]}
        assert [producer.plugin_type for producer in scheduling(document).producers] == ["token-producer"]

    def test_a_plugin_named_twice_in_a_profile_is_an_error(self) -> None:
        document = {
            "plugins": [{"type": "queue-scorer"}],
            "schedulingProfiles": [profile("a", "queue-scorer", "queue-scorer")],
        }
        assert complaints(document) == ["schedulingProfiles.a: refers to 'queue-scorer' twice"]

    def test_a_broken_plugin_is_not_also_reported_as_missing(self) -> None:
        document = {
            "plugins": [{"type": "queue-scorer", "parameters": {"full_at": 1}}],
            "schedulingProfiles": [profile("a", "queue-scorer")],
        }
        assert complaints(document) == ["plugins.queue-scorer.parameters: unknown field 'full_at'; it has no fields"]

    def test_parameters_of_llm_d_without_effect_are_accepted(self) -> None:
        ignored = {
            "samplingMean": 1000,
            "maxDecodeTokenSamplesForPrediction": 0,
            "useEncoderCacheFeatures": True,
            "encoderCacheMatchInfoProducerName": "mm",
        }
        scheduling({"plugins": [{"type": "predicted-latency-producer", "parameters": ignored}]})


class TestData:
    def test_producers_run_after_their_requirements_and_otherwise_in_file_order(self) -> None:
        built = with_mine(
            *({"type": kind} for kind in ("queue-scorer", "light-producer", "token-producer", "heat-producer"))
        )
        order = [producer.plugin_type for producer in built.producers]
        assert order.index("heat-producer") < order.index("light-producer")
        assert set(order) == {"light-producer", "token-producer", "heat-producer"}

    def test_a_producer_that_may_wait_runs_after_those_that_do_not(self) -> None:
        kinds = ("queue-scorer", "distant-producer", "token-producer", "heat-producer")
        built = with_mine(*({"type": kind} for kind in kinds))
        assert [producer.plugin_type for producer in built.producers] == [
            "token-producer",
            "heat-producer",
            "distant-producer",
        ]

    def test_a_datum_without_a_provider_is_an_error(self) -> None:
        assert complaints_of_mine({"type": "heat-scorer"}) == [
            "plugins.heat-scorer: nothing provides Heat; add a producer of it to plugins"
        ]

    def test_unbound_readers_use_the_first_of_two_providers(self) -> None:
        plugins = ({"name": "one", "type": "heat-producer"}, {"name": "two", "type": "heat-producer"})
        built = with_mine(*plugins, {"type": "heat-scorer"})
        assert [getattr(producer, "name", "") for producer in built.producers] == ["one", "two"]

    def test_of_two_providers_the_one_named_as_its_type_is_first(self) -> None:
        default = "approx-prefix-cache-producer"
        document = {"plugins": [{"name": "cpu", "type": default}, {"type": default}, {"type": "no-hit-lru-scorer"}]}
        producers = scheduling(document).producers
        assert [getattr(producer, "name", "") for producer in producers] == [default, "cpu"]

    def test_a_bound_reader_may_choose_one_of_two(self) -> None:
        scorer = {"type": "heat-scorer", "parameters": {"heatProducerName": "two"}}
        with_mine({"name": "one", "type": "heat-producer"}, {"name": "two", "type": "heat-producer"}, scorer)

    def test_a_bound_name_that_does_not_exist_gets_a_suggestion(self) -> None:
        scorer = {"type": "heat-scorer", "parameters": {"heatProducerName": "oven1"}}
        assert complaints_of_mine({"name": "oven", "type": "heat-producer"}, scorer) == [
            "plugins.heat-scorer: no producer of Heat is named 'oven1'; did you mean 'oven'?"
        ]

    def test_reading_an_undeclared_datum_is_an_error(self) -> None:
        assert complaints_of_mine(*types("secret-scorer")) == [
            "plugins.secret-scorer: reads Heat without declaring it in its `requires` or `uses`"
        ]

    def test_two_producers_of_one_key_are_an_error_that_names_both(self) -> None:
        plugins = ({"name": "one", "type": "shared-producer"}, {"name": "two", "type": "shared-producer"})
        assert complaints_of_mine(*plugins) == [
            "plugins.two: 'one' and 'two' both provide Shared without a name of their own; remove one, or provide "
            "Shared.of(name) in both"
        ]

    def test_a_producer_whose_values_have_another_type_than_its_key_is_an_error(self) -> None:
        assert complaints_of_mine({"type": "wordy-producer"}) == [
            "plugins.wordy-producer: provides Warmth/wordy-producer as str, but the values of this key are float"
        ]

    def test_a_reader_that_expects_another_type_than_its_producer_provides_is_an_error(self) -> None:
        source = {"sessionIdConfig": {"sources": [{"attribute": "TokenizedPrompt"}]}, "strategy": "session_id"}
        document = {"plugins": [{"type": "session-affinity-scorer", "parameters": source}, *types("token-producer")]}
        (fault,) = complaints(document)
        assert fault.endswith(
            "session-affinity-scorer: reads TokenizedPrompt as str, but 'token-producer' provides Prompt"
        )

    def test_producers_that_need_each_other_are_an_error(self) -> None:
        (fault,) = complaints_of_mine(*types("queue-scorer", "light-producer", "fire-producer"))
        assert fault.startswith("plugins: producers need each other's data: ")
        assert "'light-producer'" in fault
        assert "'fire-producer'" in fault


class TestAssembly:
    def test_instances_get_their_name_and_the_deciding_profiles(self) -> None:
        built = with_mine(
            {"name": "mine", "type": "naming-scorer"},
            {"type": "header-profile-handler"},
            schedulingProfiles=[profile("a", "mine"), profile("b", "mine"), profile("s", "mine", shadow=True)],
        )
        made = built.instances["mine"]
        assert isinstance(made, NamingScorer)
        assert (made.name, made.profiles) == ("mine", ("a", "b"))

    def test_one_type_under_two_names_is_two_instances(self) -> None:
        plugins = [{"name": name, "type": "load-aware-scorer"} for name in ("x", "y")]
        built = scheduling({"plugins": plugins})
        assert built.instances["x"] is not built.instances["y"]

    def test_a_record_has_the_result_and_time_of_each_plugin(self) -> None:
        took: list[tuple[str, str, str]] = []
        record = DecisionRecord(lambda point, kind, name, seconds: took.append((point, kind, name)))
        plugins = [{"name": "q", "type": "queue-scorer"}, {"type": "decode-filter"}, {"type": "max-score-picker"}]
        profiles = [profile("p", "decode-filter", "q", "max-score-picker")]
        built = scheduling({"plugins": plugins, "schedulingProfiles": profiles})
        a, b, prefill = pod("a", waiting=9), pod("b"), pod("prefill")
        update(prefill, role="prefill")
        decision = built.scheduler.schedule(request(), [a, b, prefill], record)
        assert ranking(decision) == ["b", "a"]
        (run,) = record.runs
        assert (run.profile, run.filters, run.scored) == ("p", {"decode-filter": ["prefill"]}, (a, b))
        assert (list(run.scores["q"]), list(run.totals), run.ranked) == ([0.0, 1.0], [0.0, 1.0], (b, a))
        assert took == [
            ("Filter", "decode-filter", "decode-filter"),
            ("Scorer", "queue-scorer", "q"),
            ("Picker", "max-score-picker", "max-score-picker"),
        ]

    def test_sampled_and_requested_decisions_are_recorded_and_only_sampled_ones_timed(self) -> None:
        sampler = DecisionSampler(lambda *timed: None, wants=lambda request: request.id == "wanted", every=3)
        found = [sampler.record(request(), next(sampler.timed)) for _ in range(7)]
        assert [record is not None for record in found] == [True, False, False, True, False, False, True]
        assert not any(record.is_wanted for record in found if record is not None)
        wanted = sampler.record(replace(request(), id="wanted"), next(sampler.timed))
        assert wanted is not None
        assert wanted.is_wanted
        assert wanted.timer is untimed
        assert found[0] is not None
        assert found[0].timer is not untimed

    def test_hooks_of_a_recorded_attempt_are_timed(self) -> None:
        took: list[tuple[str, str, str]] = []
        built = scheduling({"plugins": types("approx-prefix-cache-producer", "queue-scorer")})
        endpoint = pod("a")
        attempt = Attempt(request(), Decision(endpoint), endpoint, 0, 0.0)
        attempt.record = DecisionRecord(lambda point, kind, name, seconds: took.append((point, kind, name)))
        for hook in (*built.pre_request_hooks, *built.post_response_hooks):
            built.call_recorded(hook, attempt)
        name = "approx-prefix-cache-producer"
        assert took == [("PreRequest", name, name), ("PostResponse", name, name)]

    def test_a_fault_is_reported_and_logged_the_same_in_a_recorded_decision(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        reported: list[tuple[str, str]] = []
        document = {"plugins": types("kv-cache-utilization-scorer")}
        built = scheduling(document, faults=counted(reported))
        for record in (None, DecisionRecord(), None, DecisionRecord()):
            built.scheduler.schedule(request(), [pod("a", kv_usage=2.0)], record)
        assert reported == [("kv-cache-utilization-scorer", "out-of-range")] * 4
        assert len([record for record in caplog.records if "outside [0, 1]" in record.message]) == 1

    def test_a_class_with_several_points_is_registered_at_all(self) -> None:
        parameters = {"enableFiltering": True}
        built = scheduling({"plugins": [{"type": "context-length-aware", "parameters": parameters}]})
        short, long = pod("short"), pod("long")
        update(short, labels={"llm-d.ai/context-length-range": "0-10"})
        update(long, labels={"llm-d.ai/context-length-range": "11-99"})
        assert ranking(built.scheduler.schedule(request(tokens=50), [short, long])) == ["long"]

    def test_faults_of_scorers_are_reported_by_instance_name(self) -> None:
        reported: list[tuple[str, str]] = []
        document = {"plugins": [{"name": "kv", "type": "kv-cache-utilization-scorer"}]}
        built = scheduling(document, faults=counted(reported))
        built.scheduler.schedule(request(), [pod("a", kv_usage=2.0)])
        assert reported == [("kv", "out-of-range")]

    def test_the_handler_is_one_of_the_instances(self) -> None:
        built = scheduling({"plugins": [{"type": "queue-scorer"}]})
        assert ProfileHandler in type(built.instances[built.effective.handler]).__mro__
